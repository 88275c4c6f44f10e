"""`phasesplit reproduce`: the published provisioning study again, as published and set right, next to one another.

1. `run_study` loads the study's materials, runs its simulations, and says on standard error how far they are.
2. `study_text` has the outcome as text: a table for each part, and below every row where its differences come from.
3. `reproduction_summary` has it as JSON.
"""

import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasesplit._version import __version__
from phasesplit.console.options import COMPILING, option
from phasesplit.errors import SpecError
from phasesplit.io.catalog import phase_times
from phasesplit.io.specs import load_machine, load_model
from phasesplit.io.workloads import load_workload
from phasesplit.planner.plan_view import checked_plan_outputs
from phasesplit.planner.study.ablation import CONTRADICTIONS, MACHINES, REPORTED, TAGS, AblationStep, Stock, signed
from phasesplit.planner.study.parts import StudyPart, ablations, parts
from phasesplit.planner.study.reproduction import Findings
from phasesplit.planner.study.rows import StudyRow
from phasesplit.planner.study.study import BLOOM, CODING, CONVERSATION, LLAMA

if TYPE_CHECKING:
    from phasesplit.planner.study.reproduction import Findings, StudyProgress


_QUICK, _FULL = ((0,), 60.0), ((0, 1, 2), 120.0)
"""Seeds, and length of each simulated trace in seconds: a minute as in the published runs, or more and longer ones."""
_QUICK_WORK_S, _FULL_WORK_S = 75.0, 310.0
"""Processor time of the study, on a machine of 2024."""
_EVERY_S = 10.0


def run_study(quick: bool, workers: int | None) -> "Findings":
    """Run the study's simulations, saying on standard error how far they are.

    Args:
        quick: Fewer and shorter ones.
        workers: Processes that simulate; None: one for each core.
    """
    from phasesplit.planner.pool.cores import usable_cores

    many = workers or usable_cores()
    expected_s = (_QUICK_WORK_S if quick else _FULL_WORK_S) / many
    minutes = f"{expected_s / 60:.0f} minutes" if expected_s >= 90 else f"{expected_s:.0f} s"
    typer.echo(
        f"the study of the Splitwise paper, {many} worker{'' if many == 1 else 's'}: expect about {minutes}", err=True
    )
    sys.stderr.flush()
    from phasesplit import _jit
    from phasesplit.planner.pool import open_pool
    from phasesplit.planner.study.reproduction import PAPER_OPTIMUM_CASE, reproduce
    from phasesplit.planner.study.study import Bench, one_question

    seeds, duration_s = _QUICK if quick else _FULL
    bench = Bench(load_stock(), duration_s, seeds)
    if not _jit.CACHE_IS_WARM:
        typer.echo(COMPILING, err=True)
        bench(one_question(bench, PAPER_OPTIMUM_CASE))  # compiled here once, not by every worker
    with open_pool(bench, count=workers) as pool:
        return reproduce(bench, pool, _progress(), thorough=not quick)


def _progress() -> "Callable[[StudyProgress], None]":
    """Return what shows progress on standard error, a line every so many seconds."""
    last_s = [time.monotonic()]

    def show(progress: "StudyProgress") -> None:
        now_s = time.monotonic()
        if now_s - last_s[0] >= _EVERY_S:
            last_s[0] = now_s
            typer.echo(f"{progress.done} of {progress.searches} searches, {progress.questions:,} simulations", err=True)

    return show


def load_stock() -> Stock:
    """Return the models, machines, workloads and phase times of the published study, all of them shipped."""
    models = {name: load_model(name) for name in (BLOOM, LLAMA)}
    machines = {name: load_machine(name) for name in MACHINES}
    pairs = [(model, machine) for model in models for machine in machines]
    return Stock(
        models=models,
        machines=machines,
        workloads={name: load_workload(name) for name in (CODING, CONVERSATION)},
        right={(model, name): phase_times(models[model], machines[name]) for model, name in pairs},
        published={(model, name): phase_times(models[model], machines[name], published=True) for model, name in pairs},
    )


def reproduction_summary(found: Findings, elapsed_s: float) -> dict[str, Any]:
    """Return the study's outcome as something that JSON can hold; what has no value is not a number.

    Args:
        found: The outcome.
        elapsed_s: How long it took.
    """
    return {
        "version": __version__,
        "seeds": list(found.bench.seeds),
        "duration_s": found.bench.duration_s,
        "steps": {ablation_step.name.lower(): ablation_step.label for ablation_step in AblationStep},
        "sources": TAGS,
        "parts": [_part(part) for part in parts(found)],
        "contradictions": [contradiction._asdict() for contradiction in CONTRADICTIONS],
        "simulations": found.questions,
        "elapsed_s": elapsed_s,
    }


def _part(part: StudyPart) -> dict[str, Any]:
    return {"title": part.title, "unit": part.unit, "rows": [_row(row) for row in part.rows]}


def _row(row: StudyRow) -> dict[str, Any]:
    published = row.published
    return {
        "what": row.what,
        "published": {"text": published.text, "number": published.number, "source": published.tag or None},
        "ours": {ablation_step.name.lower(): cell._asdict() for ablation_step, cell in row.ours.items()},
        "why": list(row.why),
        "ablation": {ablation_step.name.lower(): number for ablation_step, number in row.ablated_steps.items()},
    }


def reproduce(
    quick: Annotated[
        bool, option("--quick", text="One seed and 60 s of requests in place of three seeds and 120 s.")
    ] = False,
    workers: Annotated[
        int | None, option("--workers", text="Processes that simulate; by default one for each core.", metavar="N")
    ] = None,
    as_json: Annotated[bool, option("--json", text="Print the study as JSON, and nothing else.")] = False,
    html: Annotated[
        Path | None, option("--html", text="Write the study as one HTML file, figures inside.", metavar="FILE")
    ] = None,
) -> None:
    """Run the provisioning study of the Splitwise paper: as published, and with its errors set right.

    Every difference is explained by what was measured: one correction at a time is switched on.

    \b
    Example:
    phasesplit reproduce --quick --html study.html
    """  # noqa: D301 - \b is how click keeps these lines
    began_s = time.perf_counter()
    if workers is not None and workers < 1:
        raise SpecError.bad("--workers", workers, "1 or more")
    outputs = checked_plan_outputs([], html=html)
    found = run_study(quick, workers)
    elapsed_s = time.perf_counter() - began_s
    if "html" in outputs:
        from phasesplit.planner.study.reproduction_page import write_reproduction_html

        write_reproduction_html(found, outputs["html"])
    if as_json:
        import orjson

        typer.echo(orjson.dumps(reproduction_summary(found, elapsed_s), option=orjson.OPT_INDENT_2).decode())
        return

    typer.echo(study_text(found))
    typer.echo(f"{found.questions:,} simulations in {elapsed_s:.0f} s")
    for path in outputs.values():
        typer.echo(f"wrote {path}")


HEADINGS = ("published", "ours as published", "ours, default", "and bursty")
_WIDTH = 118
_NONE = "-"
_FIXED = "\N{NO-BREAK SPACE}"


def study_text(found: Findings) -> str:
    """Return the whole study as text."""
    bench = found.bench
    seeds = f"{len(bench.seeds)} seed{'' if len(bench.seeds) == 1 else 's'}"
    lines = [
        "The provisioning study of the Splitwise paper",
        *_wrapped(
            f"{bench.duration_s:g} s of requests, {seeds}, all of which must keep the nine slowdowns; BLOOM-176B unless"
            " a part says so. Default: right times, KV and transfers, unsplit machines with chunked prompts, joint"
            " lengths, Poisson arrivals. Bursty: the same with arrivals as bursty as the trace's."
        ),
        *(f"  {tag}: {meaning}" for tag, meaning in TAGS.items()),
    ]
    for part in parts(found):
        lines += ["", f"{part.title} ({part.unit})", *_part_lines(part)]
    lines += ["", "From published to right, one correction after the other (requests/s held)", *_ablation_lines(found)]
    lines += ["", "Where the paper contradicts itself"]
    for one in CONTRADICTIONS:
        lines += _wrapped(f"{one.what}: {one.one}; {one.other}. Here: {one.here}.", first="  ", rest="    ")
    return "\n".join(lines)


def _part_lines(part: StudyPart) -> list[str]:
    rows = [
        (
            row.what,
            str(row.published),
            *(row.ours[ablation_step].text if ablation_step in row.ours else _NONE for ablation_step in REPORTED),
        )
        for row in part.rows
    ]
    table = _table(("", *HEADINGS), rows)
    lines = table[:1]
    for text, row in zip(table[1:], part.rows, strict=True):
        lines += [text, *_wrapped("; ".join(row.why), first="      why: ", rest="           ")]
    return lines


def _ablation_lines(found: Findings) -> list[str]:
    series = ablations(found)
    rows = []
    for ablation_step in AblationStep:
        cells = []
        for ablated_steps in series.values():
            before = ablated_steps.get(AblationStep(max(ablation_step - 1, 0)), 0.0)
            change = (
                f" ({signed(ablated_steps[ablation_step] / before - 1)})"
                if before and ablated_steps[ablation_step] != before
                else ""
            )
            cells.append(f"{ablated_steps[ablation_step]:.1f}{change}")
        rows.append((ablation_step.label, *cells))
    return _table(("", *series), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return aligned lines: the first column to the left, others to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            [f"  {row[0]:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (head, *rows)
    ]


def _wrapped(text: str, first: str = "", rest: str = "") -> list[str]:
    """Return lines of the text; a figure and its per cent sign stay together."""
    lines = textwrap.wrap(
        text.replace(" %", _FIXED + "%"), _WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False
    )
    return [line.replace(_FIXED, " ") for line in lines]
