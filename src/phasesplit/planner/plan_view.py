"""A plan in the terminal: how far it is, the plan as text, and the files that it writes.

1. `checked_plan_outputs` checks the files before any work is done.
2. `opening_line` says what is planned; `PlanProgress` and `DayProgress` say on standard error how far it is.
3. `output_plan` writes all files or none, and prints the plan: as JSON, or with `print_plan` the ranking, the verdict,
   what limits the winner, where the verdict flips, the sources of phase times, and the days.
"""

import math
import shlex
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer

from phasesplit.domain.money import JOULES_PER_KWH
from phasesplit.errors import InfeasibleError, SpecError, WorkerLostError
from phasesplit.planner.capacity import TOLERANCE
from phasesplit.planner.days import day_verdict
from phasesplit.planner.designs import Design, counts_text
from phasesplit.planner.documents import policy_name, policy_setting
from phasesplit.planner.drift import Day
from phasesplit.planner.misses import refusal
from phasesplit.planner.plan import Gain, Plan, PlanStep, RankedDesign
from phasesplit.planner.problem import UNITS, Measure, Offer, Problem
from phasesplit.planner.sensitivity import Axis, Point, changes, flips
from phasesplit.planner.sources import MachineSources

if TYPE_CHECKING:
    from phasesplit.planner.days import Ahead
    from phasesplit.planner.question import Asked
    from phasesplit.simulator.result import Result

_INTERRUPTED = 130
_ENDINGS = {"write": (".yaml", ".yml"), "html": (".html",), "figure": (".png", ".pdf", ".svg"), "resume": ("",)}
_WIDEST = 120
_EVERY_S = 30.0
"""Between two lines where they cannot replace one another."""
_WORK_S = 2e-6
"""Processor time of one request of a day, on a machine of 2024."""
_SHOWN = {"prefill": (512, 2048, 8192), "decode": (1, 16, 64)}
_COLUMNS = {
    "machine hours": 7, "USD": 6, "kWh": 5, "kg": 5, "changes": 7, "missed": 7, "worst hour": 7, "SLO": 6,
}  # fmt: skip
"""Columns of the table and their least width, so that the tables of both designs line up."""


def checked_plan_outputs(read: Sequence[str | None], **named: Path | None) -> dict[str, Path]:
    """Return the files to write by option, all checked before any work is done.

    Args:
        read: Files that are read, which no output may replace.
        named: Path by option: write, html, figure, resume; None where it was not given.

    Raises:
        SpecError: One cannot be written, or two options name one file.
    """
    from phasesplit.io.results import check_output

    taken = {Path(one).resolve() for one in read if one}
    outputs = {}
    for name, path in named.items():
        if path is None:
            continue
        check_output(path, _ENDINGS[name], f"--{name}")
        if path.resolve() in taken:
            raise SpecError.bad(f"--{name}", str(path), "a file that nothing else names")
        taken.add(path.resolve())
        outputs[name] = path
    outputs.pop("resume", None)  # the journal writes itself
    return outputs


def opening_line(problem: Problem, rate_known: bool, source: str, width: str) -> str:
    """Return what is being planned in one line.

    Args:
        problem: The problem.
        rate_known: Whether its rate is asked for, not still to be found.
        source: Name of the traffic.
        width: Where simulations run.
    """
    asked = [offer for offer in problem.offers if not offer.variant_of]
    machines = [
        offer.machine.name if offer.existing is None else f"{offer.existing} {offer.machine.name}" for offer in asked
    ]
    variants = len(problem.offers) - len(asked)
    others = f" (and {variants} settings of them)" if variants else ""
    rate = f" at {problem.traffic.rate_per_s:,.4g} requests/s" if rate_known else ""
    goal = "the highest rate" if problem.objective is None else f"least {problem.objective}"
    budgets = "".join(f", within {most:,.6g} {UNITS[measure]}" for measure, most in problem.budgets.items())
    return (
        f"planning {problem.model.name} on {', '.join(machines)}{others}: {source}{rate}, SLO {problem.slo.name},"
        f" {goal}{budgets}; {_plural(len(problem.seeds), 'seed')} of {problem.traffic.duration_s:,.0f} s, {width}"
    )


class PlanProgress:
    """Shows stage, simulations done and the best so far; to be called with every `Step`, and closed at the end.

    Args:
        problem: The problem.
        shown: Whether to show every step in place, as on a terminal; else there is a line every half minute.
    """

    def __init__(self, problem: Problem, *, shown: bool) -> None:
        self._problem = problem
        self._shown = shown
        self._status: Any = None
        self._last_line_s: float | None = None

    def __call__(self, step: PlanStep) -> None:
        """Show how far the plan is."""
        if not self._shown:
            self._print_rarely(step)
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("")
            self._status.start()
        self._status.update(self._line(step))

    def _print_rarely(self, step: PlanStep) -> None:
        now_s = time.monotonic()
        if self._last_line_s is None:
            self._last_line_s = now_s  # of the first step: a plan that is soon done says nothing
        if now_s - self._last_line_s >= _EVERY_S:
            self._last_line_s = now_s
            typer.echo(self._line(step), err=True)

    def _line(self, step: PlanStep) -> str:
        best = f"; best so far {self._best(step)}" if step.best is not None else ""
        return f"{step.stage}, {step.questions:,} simulations{best}"

    def _best(self, step: PlanStep) -> str:
        assert step.best is not None  # noqa: S101 - asked by the caller
        design, counts, value = step.best
        objective = self._problem.objective
        unit = "requests/s" if objective is None else UNITS[objective]
        machines = " + ".join(str(count) for count in counts)
        return f"{abs(value):,.5g} {unit} ({design.name}, {machines})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()


class DayProgress:
    """Says on standard error how long the days will take, and each one that is done.

    Args:
        width: How many run at once; None: that is not known.
    """

    def __init__(self, width: int | None) -> None:
        self._width = width
        self._began_s = time.perf_counter()
        self._days = self._done = 0

    def begin(self, ahead: "Ahead") -> None:
        """Say what is ahead."""
        self._days = len(ahead.questions)
        if not self._days:
            return
        expected = ""
        if self._width is not None:
            expected = f": expect about {max(round(ahead.requests * _WORK_S / self._width), 1)} s"
        typer.echo(f"{self._days} days, {ahead.requests:,} requests in all{expected}", err=True)
        self._began_s = time.perf_counter()

    def __call__(self, day: Day) -> None:
        """Say that a day is done."""
        self._done += 1
        elapsed_s = time.perf_counter() - self._began_s
        typer.echo(
            f"day {self._done} of {self._days}, {elapsed_s:.0f} s: {day.design.name}, {policy_name(day)}", err=True
        )


def output_plan(asked: "Asked", made: "Plan", outputs: dict[str, Path], began_s: float, *, as_json: bool) -> int:
    """Print a plan, write its files, and return the exit code.

    Raises:
        InfeasibleError: Nothing keeps the SLO.
        WorkerLostError: Workers were lost on the way; what was known by then is printed.
    """
    from phasesplit.planner.documents import plan_summary, winner_result
    from phasesplit.planner.misses import nearest_miss
    from phasesplit.planner.sources import plan_sources

    finished = made.complete and made.best is not None
    result = winner_result(made) if (as_json or outputs) and finished else None
    sources = plan_sources(made, asked.times, ask_tables=as_json or "html" in outputs)
    if finished:
        _write(asked, made, result, sources, outputs)
    elapsed_s = time.perf_counter() - began_s
    if as_json:
        import orjson

        typer.echo(orjson.dumps(plan_summary(made, elapsed_s, result, sources), option=orjson.OPT_INDENT_2).decode())
    else:
        if asked.baseline is not None:
            typer.echo(f"the baseline holds {made.problem.traffic.rate_per_s:,.4g} requests/s, which all are sized for")
        print_plan(made, elapsed_s, sources)
        for path in outputs.values() if finished else ():
            typer.echo(f"wrote {path}")
        if finished and "write" in outputs and asked.source and asked.source != "-":
            typer.echo(f"simulate it: {simulation_command(asked, made, outputs['write'])}")
        if finished and "write" in outputs and (command := serving_command(outputs["write"])):
            typer.echo(f"serve it: {command}")
    if outputs and not finished:
        why = "no design keeps the SLO" if made.complete else "the plan is not complete"
        typer.echo(f"phasesplit: not written, as {why}: {', '.join(map(str, outputs.values()))}", err=True)
    if made.lost:
        raise WorkerLostError(made.lost)
    if not (made.complete and made.days_complete):
        return _INTERRUPTED
    if made.best is None:
        raise InfeasibleError(nearest_miss(made))
    return 0


def _write(
    asked: "Asked",
    made: "Plan",
    result: "Result | None",
    sources: "tuple[MachineSources, ...]",
    outputs: dict[str, Path],
) -> None:
    """Write all files, or none of them."""
    if not outputs:
        return
    from phasesplit.io.results import written_whole
    from phasesplit.io.specs import write_cluster
    from phasesplit.planner.documents import cluster_spec

    with ExitStack() as files:
        parts = {name: files.enter_context(written_whole(path)) for name, path in outputs.items()}
        if "write" in parts:
            write_cluster(cluster_spec(made, asked), parts["write"])
        if "html" in parts or "figure" in parts:
            from phasesplit.planner import report

            if "html" in parts:
                report.write_plan_html(made, result, parts["html"], sources=sources)
            if "figure" in parts:
                report.write_plan_figure(made, result, parts["figure"])


def serving_command(cluster: Path) -> str | None:
    """Return the command that serves a cluster file, None where its machines are no workers of this host."""
    from phasesplit.engine.fetch import is_named
    from phasesplit.io.cluster_file import load_served_cluster

    try:
        served = load_served_cluster(cluster)
    except SpecError:
        return None
    path = [] if is_named(served.model) else ["--model", "PATH"]
    return shlex.join(["phasesplit", "serve", str(cluster), *path])


def simulation_command(asked: "Asked", made: "Plan", cluster: Path) -> str:
    """Return the command that simulates the winner as the plan did, on its first seed."""
    assert made.best is not None  # noqa: S101 - asked by the caller
    problem = made.problem
    words = ["phasesplit", "simulate", "--cluster", str(cluster), "--workload", asked.source]
    words += ["--rate", repr(made.best.rate_per_s), "--duration", repr(problem.traffic.duration_s)]
    words += ["--seed", str(problem.seeds[0]), *asked.options]
    if problem.rules.seed != problem.seeds[0]:
        words += ["--set", f"seed={problem.rules.seed}"]  # the rules' own draws, which --seed sets as well
    return shlex.join(words)


def print_plan(plan: Plan, elapsed_s: float, sources: Sequence[MachineSources] = ()) -> None:
    """Print a plan to standard output, as wide as the terminal but at most 120 columns.

    Args:
        plan: The plan.
        elapsed_s: How long it took.
        sources: Phase times of the best designs' machines, by source.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    if plan.best is not None:
        _print_ranking(console, plan)
    _print_refused(console, plan)
    if plan.verdict is not None:
        console.print(Text(f"{plan.verdict.text}\n", "bold"))
    _print_binding(console, plan)
    if plan.points:
        console.print(_sensitivity(plan))
        console.print(Text("(on the first seed alone)\n", "dim"))
    print_sources(console, sources)
    print_days(console, plan)
    for source, users in _sources(plan).items():
        console.print(Text(f"phase times ({', '.join(users)}): {source}", "dim"))
    for source, users in _links(plan).items():
        console.print(Text(f"link ({', '.join(users)}): {source}", "dim"))
    seeds = ", ".join(str(seed) for seed in plan.problem.seeds)
    why = plan.lost or "interrupted"
    stopped = "" if plan.complete else f"; {why}: there may be better"
    console.print(Text(f"{plan.questions:,} simulations, seeds {seeds}, {elapsed_s:,.3g} s{stopped}", "dim"))


def _print_ranking(console: Any, plan: Plan) -> None:
    from rich.text import Text

    table = _ranking(plan)
    if table.__rich_measure__(console, console.options.update(max_width=_WIDEST)).minimum > console.width:
        table = _ranking(plan, limit_below=True)
    console.print(table)
    if any(_is_of_first_seed(plan.problem, entry) for entry in plan.entries if entry.found.holds):
        console.print(Text("~ on the first seed alone\n", "dim"))


def _ranking(plan: Plan, *, limit_below: bool = False) -> Any:
    """Return the table of the designs that keep the SLO.

    Args:
        plan: The plan.
        limit_below: Whether the nearest limit stands below the design, where there is no room for a column of it.
    """
    problem = plan.problem
    drawn = ("kW drawn",) if problem.objective == Measure.ENERGY or Measure.ENERGY in problem.budgets else ()
    heads = ("design, nearest limit",) if limit_below else ("design",)
    last = () if limit_below else ("nearest limit",)
    table = _table("", *heads, "USD/h", "kW", *drawn, "kg/h", "holds", *last)
    for column, width in ((1, 18),) if limit_below else ((1, 18), (-1, 13)):
        table.columns[column].no_wrap = False
        table.columns[column].justify = "left"
        table.columns[column].min_width = width
    for rank, entry in enumerate((entry for entry in plan.entries if entry.found.holds), start=1):
        nearest = max(entry.found.answers, key=lambda answer: answer.worst, default=None)
        limit = "" if nearest is None else f"{nearest.bottleneck} {nearest.worst:.0%}"
        what = f"{entry.design.kind}\n{counts_text(problem, entry.design, entry.found.counts)}{_servers(entry)}"
        table.add_row(
            str(rank),
            f"{what}\n{limit}".rstrip() if limit_below else what,
            f"{entry.taken[Measure.COST]:,.2f}",
            f"{entry.taken[Measure.POWER] / 1e3:,.1f}",
            *(f"{entry.taken[Measure.ENERGY] / 1e3:,.1f}" for _ in drawn),
            f"{entry.taken[Measure.CARBON]:,.1f}",
            _holds(problem, entry),
            *(() if limit_below else (limit,)),
            style="bold" if rank == 1 else "",
        )
    return table


def _servers(entry: RankedDesign) -> str:
    """Return how many whole servers the machines are, where they are slices."""
    servers = entry.taken[Measure.MACHINES]
    whole = entry.cluster is None or servers == entry.cluster.machines
    return "" if whole else f" ({_plural(round(servers), 'server')})"


def _holds(problem: Problem, entry: RankedDesign) -> str:
    if problem.objective is None:
        return f"{entry.rate_per_s:,.3g}/s"
    if entry.capacity is None:
        return f"≥{entry.rate_per_s:,.3g}/s"
    return f"{'~' if _is_of_first_seed(problem, entry) else ''}{entry.capacity.rate_per_s:,.3g}/s"


def _is_of_first_seed(problem: Problem, entry: RankedDesign) -> bool:
    """Whether the capacity was looked for on the first seed of several."""
    looked_for = problem.objective is not None and entry.capacity is not None
    return looked_for and len(problem.seeds) > 1 and not entry.per_seed


def _print_refused(console: Any, plan: Plan) -> None:
    from rich.text import Text

    problem = plan.problem
    refused = [entry for entry in plan.entries if not entry.found.holds and entry.found.complete]
    variants = [
        entry
        for entry in refused
        if plan.best is not None and any(problem.offers[number].variant_of for _, number in entry.design.slots)
    ]
    for entry in refused:
        if entry not in variants:
            console.print(Text(f"not {entry.design.name}: {refusal(problem, entry)}", "dim"))
    if variants:
        console.print(Text(f"no better: {_plural(len(variants), 'design')} with slices or power caps", "dim"))
    if refused:
        console.print()


def _print_binding(console: Any, plan: Plan) -> None:
    best = plan.best
    if best is None:
        return
    if best.capacity is not None and best.capacity.bottleneck:
        console.print(
            f"What breaks first above {best.capacity.rate_per_s:,.3g} requests/s: {best.capacity.bottleneck}."
        )
    if plan.bottlenecks:
        bottleneck = max(plan.bottlenecks, key=lambda one: one.share)
        console.print(
            f"Scarcest at the least it can need: {bottleneck.resource} of {bottleneck.where}, {bottleneck.share:.0%}."
        )
    for gain in plan.gains:
        console.print(f"With {gain.what}: {gain_text(gain)}.")
    if plan.gains:
        console.print()


def gain_text(gain: Gain) -> str:
    """Return what an addition buys; nothing where it is within what searches leave open."""
    if abs(gain.more_per_s) <= TOLERANCE * gain.base_per_s:
        return f"nothing (within {TOLERANCE:.0%})"
    more = f"{gain.more_per_s / gain.base_per_s:+.1%}" if gain.more_per_s > 0 < gain.base_per_s else "no more"
    return f"{gain.rate_per_s:,.3g} requests/s ({more})"


def _sensitivity(plan: Plan) -> Any:
    what = "rate" if plan.problem.objective is None else str(plan.problem.objective)
    table = _table("", f"split against unsplit: {what} (+ is for the split)", "flips")
    for column in table.columns:
        column.no_wrap, column.justify = False, "left"
    rate = plan.problem.traffic.rate_per_s
    for axis in Axis:
        points = [point for point in plan.points if point.axis == axis]
        if points:
            shown = "  ".join(f"{_place(axis, one.factor, rate)}: {_advantage(one)}" for one in points)
            table.add_row(str(axis), shown, "; ".join(flip_texts(axis, points, rate)) or "does not")
    return table


def flip_texts(axis: Axis, points: list[Point], rate_per_s: float) -> list[str]:
    """Return where the verdict flips along an axis, a phrase for each place.

    Args:
        axis: The axis.
        points: Its points by rising factor.
        rate_per_s: The rate that factors of the rate are of.
    """
    texts = []
    for (left, _), (low, high) in zip(changes(points), flips(points), strict=True):
        at = _place(axis, low, rate_per_s)
        if high != low:
            at = f"somewhere from {at} to {_place(axis, high, rate_per_s)}"
        side = "above" if left.lead > 0 else "below"
        texts.append(f"to unsplit {side} {at}")
    return texts


def _place(axis: Axis, factor: float, rate_per_s: float) -> str:
    return f"{factor * rate_per_s:,.3g}/s" if axis == Axis.RATE else f"x{factor:.3g}"


def _advantage(point: Point) -> str:
    if math.isinf(point.split) or math.isinf(point.unsplit):
        sides = {1: "only split", -1: "only unsplit", 0: "neither"}
        return sides[point.lead]
    return f"{point.advantage:+.0%}"


def print_sources(console: Any, sources: Sequence[MachineSources]) -> None:
    """Print the same iterations by each source where two or more cover them, and otherwise why there is only one.

    Args:
        console: A console of rich.
        sources: Sources by machine.
    """
    from rich.text import Text

    compared = [one for one in sources if one.rows]
    if compared:
        console.print(_compared(compared))
    alone = [one for one in sources if not one.rows]
    if alone:
        machines = ", ".join(one.machine for one in alone)
        # That nobody measured a pair goes without saying here.
        absent = [why for one in alone for name, why in one.absent.items() if name != "measured"]
        # Without the place of each error, which is always the source of phase times.
        reasons = dict.fromkeys(why.partition(": ")[2] or why for why in absent)
        console.print(Text("; ".join([f"only the {alone[0].used} has phase times on {machines}", *reasons]), "dim"))


def _compared(sources: Sequence[MachineSources]) -> Any:
    from rich import box
    from rich.table import Table

    names = list(dict.fromkeys(name for one in sources for row in one.rows for name in row.seconds))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for column in ("phase times, ms", "iteration"):
        table.add_column(column, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("to roofline", justify="right")
    for one in sources:
        shown = [row for row in one.rows if row.size in _SHOWN[row.phase]]
        for row in shown:
            times = [_milliseconds(row.seconds[name]) if name in row.seconds else "" for name in names]
            ratios = ", ".join(f"{ratio:.2f}" for name, ratio in row.ratios.items() if name != "roofline")
            what = f"prefill of {row.size:,}" if row.phase == "prefill" else f"decode, batch {row.size}"
            table.add_row(one.machine if row is shown[0] else "", what, *times, ratios)
    return table


def _milliseconds(time_s: float) -> str:
    return f"{time_s * 1e3:,.0f}" if time_s >= 0.1 else f"{time_s * 1e3:.3g}"


def print_days(console: Any, plan: Plan) -> None:
    """Print how each day went, and what all of them say; nothing where there is none and no note.

    Args:
        console: Where to.
        plan: The plan.
    """
    from rich.text import Text

    for design, days in groupby(plan.days, key=lambda day: day.design):
        _print_design(console, plan, design, list(days))
    for sentence in day_verdict(plan):
        console.print(Text(sentence))
    for note in plan.day_notes:
        console.print(Text(note, "dim"))
    if not plan.days_complete:
        console.print(Text("interrupted, so days are missing", "dim"))
    if plan.days or plan.day_notes or not plan.days_complete:
        console.print()


def _print_design(console: Any, plan: Plan, design: Design, days: list[Day]) -> None:
    """Print a table of one design's days, and how its policies are fitted."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    machines = counts_text(plan.problem, design, days[0].counts)
    console.print(Text(f"A day of {days[0].requests:,} requests with {machines} ({design.kind}):"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("policy", min_width=9, overflow="fold")
    for column, width in _COLUMNS.items():
        table.add_column(column, justify="right", min_width=width)
    own = [day.written for day in days if day.written]
    for day in days:
        table.add_row(
            f"{day.policy.name} ({own.index(day.written) + 1})" if day.written else day.policy.name,
            f"{day.machine_hours:,.1f}",
            f"{day.usd:,.0f}",
            f"{day.energy_j / JOULES_PER_KWH:,.0f}",
            f"{day.kg_co2e:,.0f}",
            f"{day.changes:,}",
            _share(day.missed_share),
            _share(day.worst_hour_share),
            "kept" if day.holds else "broken",
        )
    console.print(table)
    fitted = [policy_setting(day) for day in days if not day.written and policy_setting(day) != day.policy.name]
    if fitted:
        console.print(Text("fitted, as --autoscale of simulate takes them:", "dim"))
    for setting in fitted:
        console.print(Text(f"  {setting}", "dim"), soft_wrap=True)
    for number, written in enumerate(own, 1):
        console.print(Text(f"({number}) {written}", "dim"), soft_wrap=True)
    console.print()


def _share(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.2%}"


def _sources(plan: Plan) -> dict[str, list[str]]:
    """Return who uses each source of phase times."""
    problem = plan.problem
    users: dict[str, list[str]] = {}
    for offer in _offers(plan):
        users.setdefault(offer.times.source, []).append(offer.machine.name)
    if problem.reference is not None and problem.slo.needs_reference:
        users.setdefault(problem.reference.source, []).append("reference of slowdowns")
    return users


def _links(plan: Plan) -> dict[str, list[str]]:
    """Return who has each source of a link that was measured; the published rules ask for none."""
    users: dict[str, list[str]] = {}
    for offer in _offers(plan):
        if offer.machine.link_source is not None and not plan.problem.rules.published:
            users.setdefault(offer.machine.link_source, []).append(offer.machine.name)
    return users


def _offers(plan: Plan) -> list[Offer]:
    """Return the machines as asked for, and the settings of them that are compared."""
    compared = [entry.design for entry in (plan.best_split, plan.best_unsplit) if entry is not None]
    used = {number for design in compared for _, number in design.slots}
    return [offer for number, offer in enumerate(plan.problem.offers) if not offer.variant_of or number in used]


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < 2 else "right", no_wrap=True)
    return table
