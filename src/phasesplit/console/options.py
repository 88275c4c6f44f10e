"""What the commands share: options in groups, the cluster and rules that options describe, and how results are shown.

1. A group is a dataclass whose fields are options. A command takes a group as one parameter, and `with_groups` lists
   its fields among the command's options.
2. `cluster_and_rules` reads the groups `ClusterOptions` and `RuleOptions`.
3. `RunProgress` shows on standard error how far a simulation is.
4. `checked_outputs` checks every output before the work, and `write_outputs` writes all of them or none.
"""

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

import typer

from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.domain.cluster import Cluster
    from phasesplit.domain.machine import Machine
    from phasesplit.scheduler.rules import Rules
    from phasesplit.simulator.result import Result


COMPILING = "compiling the simulation kernel, once for this version (about half a minute) ..."


def option(*flags: str, text: str, metavar: str | None = None) -> Any:
    """Return an option without its default in the help: the text says it where it is of use."""
    return typer.Option(*flags, help=text, metavar=metavar, show_default=False)


def with_groups(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a command for `typer` in which each field of a group is an option.

    Args:
        command: A function. Each parameter whose type is a dataclass is a group: its fields are annotated options with
            defaults.

    Raises:
        TypeError: Two parameters or fields have the same name.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if not dataclasses.is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group: type[Any] = parameter.annotation  # type: ignore[assignment]
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in dataclasses.fields(group)
        ]
    names = [parameter.name for parameter in parameters]
    if len(set(names)) < len(names):
        raise TypeError(f"{command.__name__}: an option is there twice: {sorted(names)}")

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        filled = {
            name: group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        return command(**values, **filled)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__
    return run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How many requests arrive, and how fast."""

    rate: Annotated[
        float | None,
        option("--rate", text="Mean requests per second; by default the workload's own.", metavar="PER_S"),
    ] = None
    duration: Annotated[
        float | None, option("--duration", text="Seconds of arrivals; by default the workload's own.", metavar="S")
    ] = None
    count: Annotated[int | None, option("--count", text="So many requests instead of a duration.", metavar="N")] = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions(LoadOptions):
    """What is sent to a live endpoint: a load, and the prompts in it."""

    clip: Annotated[
        str | None,
        option("--clip", text="Make longer prompts and outputs so long.", metavar="PROMPT_TOKENS:OUTPUT_TOKENS"),
    ] = None
    seed: Annotated[int, option("--seed", text="Of arrivals and prompts; by default 0.", metavar="N")] = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceFileOptions:
    """How a trace file is read."""

    layout: Annotated[
        str | None, option("--format", text="Layout of the trace file instead of telling it.", metavar="NAME")
    ] = None
    columns: Annotated[
        str | None, option("--columns", text="Names of your columns: arrival=ts,prompt=in,output=out.", metavar="MAP")
    ] = None
    time_unit: Annotated[
        str | None, option("--time-unit", text="Unit of numeric arrivals with --columns.", metavar="s|ms|us|ns")
    ] = None
    skip_bad: Annotated[
        bool, option("--skip-bad", text="Drop and count wrong rows of a trace file instead of stopping.")
    ] = False
    sort: Annotated[bool, option("--sort", text="Sort the trace file by arrival instead of stopping.")] = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The machines that are simulated: a cluster file, or a model and pools."""

    model: Annotated[str | None, option("--model", text="Model by name, or its file.", metavar="NAME")] = None
    pools: Annotated[
        list[str] | None,
        option(
            "--pool",
            text="Machines of one role (prefill, decode, mixed or unsplit); may be repeated.",
            metavar="ROLE:COUNT:MACHINE",
        ),
    ] = None
    cluster: Annotated[
        str | None, option("--cluster", text="Cluster file instead of --model and --pool.", metavar="YAML")
    ] = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RuleOptions:
    """By which rules requests are scheduled, and where phase times come from."""

    rules: Annotated[
        str | None, option("--rules", text="Scheduling rules to start from.", metavar="default|published")
    ] = None
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            text="A field of the rules, such as transfer=serialized or decode-placement=two-choices; may be repeated.",
            metavar="FIELD=VALUE",
        ),
    ] = None
    profile: Annotated[
        str | None,
        option(
            "--profile",
            text="Phase times you measured: what `phasesplit profile` wrote, or a table laid out as perf_model.csv.",
            metavar="JSON|CSV",
        ),
    ] = None
    times: Annotated[
        str | None,
        option(
            "--times",
            text="Where phase times come from; by default measured where there are measurements, else the roofline.",
            metavar="auto|measured|roofline|aiconfigurator[:ENGINE[:VERSION]]",
        ),
    ] = None
    reference: Annotated[
        str | None,
        option("--reference", text="Machine that slowdowns compare with; by default dgx-a100.", metavar="MACHINE"),
    ] = None

    @property
    def reference_machine(self) -> str:
        """The machine that slowdowns compare with."""
        return "dgx-a100" if self.reference is None else self.reference

    def check_rules(self) -> None:
        """Raise unless --rules names rules.

        Raises:
            SpecError: It does not.
        """
        if self.rules is not None and self.rules not in _RULES:
            raise SpecError.unknown("--rules", self.rules, _RULES)


_RULES = ("default", "published")


def cluster_and_rules(
    served_by: ClusterOptions, by: RuleOptions, *, seed: int | None = None
) -> tuple["Cluster", "Rules"]:
    """Return the cluster, and the rules: those in the file, then the named ones, then the seed and single settings.

    Args:
        served_by: The machines.
        by: The rules, and the source of phase times.
        seed: Of what the rules draw; None: what the rules say.

    Raises:
        SpecError: Something is missing, contradictory, unknown or not allowed.
    """
    by.check_rules()
    file, model, pools = served_by.cluster, served_by.model, served_by.pools
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
    if by.rules is not None:
        rules = rules_from({"published": by.rules == "published"}, fields_of("--rules"), rules)
    settings = [*([] if seed is None else [f"seed={seed}"]), *(by.settings or [])]
    rules = rules_from(dict(rules_setting(text) for text in settings), fields_of("--set"), rules)
    built = build_cluster(
        served,
        parts,
        published=rules.published,
        profile=by.profile,
        source="auto" if by.times is None else by.times,
        name=name,
        reference=load_machine(by.reference_machine, where="--reference"),
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
