"""What the commands share: how an option is declared, and what they say before a kernel is compiled.

How far a simulation is, on standard error, once it has taken long enough to make one wonder.

What a command writes: every output checked before the work, and all of them written or none.

The cluster and the rules that a command's options, and perhaps a cluster file, describe.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.domain.cluster import Cluster
    from phasesplit.domain.machine import Machine
    from phasesplit.scheduler.rules import Rules
    from phasesplit.simulator.result import Result


_QUIET_S = 2.0


class RunProgress:
    """Shows requests ended and model time; to be called as `simulate(on_progress=...)`, and closed at the end.

    Args:
        shown: Whether to show anything at all.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._since_s = time.monotonic()
        self._status: Any = None

    def __call__(self, requests: int, model_s: float) -> None:
        """Show that so many requests have ended by that model time."""
        if not self._shown or time.monotonic() - self._since_s < _QUIET_S:
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("")
            self._status.start()
        per_s = requests / (time.monotonic() - self._since_s)
        self._status.update(f"{requests:,} requests done, {per_s:,.0f} a second; model time {model_s:,.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()


Writer = Callable[["Result", Path], None]

_FIGURE_ENDINGS = (".png", ".pdf", ".svg")


def checked_outputs(inputs: Sequence[str | Path | None], **named: Path | None) -> dict[Path, Writer]:
    """Return what writes each output, all of them checked before any work is done.

    Args:
        inputs: Files that are read, which no output may replace; None where there is none.
        named: Path by option: requests, parquet, figure, html; None where it was not given.

    Raises:
        SpecError: An output cannot be written, or two options name one file.
    """
    asked = {name: path for name, path in named.items() if path is not None}
    if not asked:
        return {}
    from phasesplit.io.results import REQUEST_ENDINGS, check_output, write_requests

    kinds: dict[str, tuple[tuple[str, ...], Writer]] = {
        "requests": (REQUEST_ENDINGS, write_requests),
        "parquet": ((".parquet",), write_requests),
        "figure": (_FIGURE_ENDINGS, partial(_draw, "write_figure")),
        "html": ((".html",), partial(_draw, "write_html")),
    }
    outputs: dict[Path, Writer] = {}
    for name, path in asked.items():
        endings, writer = kinds[name]
        check_output(path, endings, f"--{name}")
        if path.resolve() in {other.resolve() for other in (*outputs, *(Path(read) for read in inputs if read))}:
            raise SpecError.bad(f"--{name}", str(path), "a file that no other option names")
        outputs[path] = writer
    return outputs


def _draw(function: str, result: "Result", path: Path) -> None:
    from phasesplit import report

    getattr(report, function)(result, path)


def write_outputs(result: "Result", outputs: dict[Path, Writer]) -> None:
    """Write all outputs, or none of them.

    Raises:
        SpecError: One cannot be written.
    """
    if not outputs:
        return
    from phasesplit.io.results import written_whole

    with ExitStack() as files:
        for path, writer in outputs.items():
            writer(result, files.enter_context(written_whole(path)))


_RULES = ("default", "published")


def cluster_and_rules(
    file: str | None,
    model: str | None,
    pools: list[str] | None,
    rules_name: str | None,
    settings: list[str],
    *,
    profile: str | None,
    reference: str,
    times: str = "auto",
) -> tuple["Cluster", "Rules"]:
    """Return the cluster, and the rules: those in the file, then the named ones, then single settings.

    Args:
        file: Cluster file, instead of a model and pools.
        model: Model by name or path.
        pools: Each `ROLE:COUNT:MACHINE`.
        rules_name: default or published; None: what the file says.
        settings: Each `FIELD=VALUE`.
        profile: Measurements of one's own, as for `build_cluster`.
        reference: Machine that slowdowns compare with.
        times: Source of phase times, as for `build_cluster`.

    Raises:
        SpecError: Something is missing, contradictory, unknown or not allowed.
    """
    if rules_name is not None and rules_name not in _RULES:
        raise SpecError.unknown("--rules", rules_name, _RULES)
    if file is not None and (model or pools):
        raise SpecError("--cluster: names model and pools itself, leave out --model and --pool")
    if file is None and not (model and pools):
        missing = "--model" if pools else "--pool" if model else "--model and --pool"
        raise SpecError(f"{missing}: missing, say what is simulated (or give --cluster FILE.yaml)")
    from phasesplit.io.catalog import build_cluster
    from phasesplit.io.rule_settings import rules_from, rules_setting
    from phasesplit.io.specs import load_machine, load_model, read_cluster
    from phasesplit.io.text import fields_of, inside

    name, rules = None, rules_from({})
    if file is None:
        assert model is not None  # noqa: S101 - checked above
        served = load_model(model, where="--model")
        parts = [_pool(text) for text in pools or []]
    else:
        spec, where = read_cluster(file)
        name, served = spec.name, load_model(spec.model, where=where("model"))
        rules = rules_from(spec.rules, inside(where, "rules"))
        parts = [
            (str(one.role), one.count, load_machine(one.machine, where=where(f"pools[{number}].machine")))
            for number, one in enumerate(spec.pools)
        ]
    if rules_name is not None:
        rules = rules_from({"published": rules_name == "published"}, fields_of("--rules"), rules)
    rules = rules_from(dict(rules_setting(text) for text in settings), fields_of("--set"), rules)
    built = build_cluster(
        served,
        parts,
        published=rules.published,
        profile=profile,
        source=times,
        name=name,
        reference=load_machine(reference, where="--reference"),
    )
    return built, rules


def _pool(text: str) -> "tuple[str, int, Machine]":
    """Return role, count and machine of `ROLE:COUNT:MACHINE`."""
    from phasesplit.domain.cluster import Role
    from phasesplit.io.schema import MOST_MACHINES
    from phasesplit.io.specs import load_machine

    parts = text.split(":", 2)
    if len(parts) != 3:
        raise SpecError.bad("--pool", text, "ROLE:COUNT:MACHINE, such as prefill:25:dgx-h100")
    role, count, machine = parts
    purpose = Role.parse(role, f"--pool {text}, role")
    if not (count.isascii() and count.isdigit() and 1 <= int(count[:12]) <= MOST_MACHINES):
        raise SpecError.bad(f"--pool {text}, count", count, f"a whole number from 1 to {MOST_MACHINES:,}")
    return str(purpose), int(count), load_machine(machine, where=f"--pool {text}, machine")


COMPILING = "compiling the simulation kernel, once for this version (about half a minute) ..."


def option(*flags: str, text: str, metavar: str | None = None) -> Any:
    """Return an option without its default in the help: the text says it where it is of use."""
    return typer.Option(*flags, help=text, metavar=metavar, show_default=False)


Rate = Annotated[
    float | None,
    option("--rate", text="Mean requests per second; by default the workload's own.", metavar="PER_S"),
]

Duration = Annotated[
    float | None, option("--duration", text="Seconds of arrivals; by default the workload's own.", metavar="S")
]

Count = Annotated[int | None, option("--count", text="So many requests instead of a duration.", metavar="N")]

Clip = Annotated[
    str | None,
    option("--clip", text="Make longer prompts and outputs so long.", metavar="PROMPT_TOKENS:OUTPUT_TOKENS"),
]

Join = Annotated[
    str | None, option("--join", text="Gateway to join; without one the worker serves by itself.", metavar="URL")
]

WorkerName = Annotated[
    str | None,
    option("--name", text="Its name, unique in the cluster; by default of host and role.", metavar="NAME"),
]

Home = Annotated[
    str, option("--home", "--role", text="What it is for; by default unsplit.", metavar="prefill|decode|mixed|unsplit")
]
