"""`phasesplit profile`: how long the iterations of a machine take, measured.

1. The target is opened: the embedded engine or an endpoint.
2. Its iterations are timed, and a line shows how far the profile is (`ProfileProgress`).
3. The profile is written and printed (`print_profile`).
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

import typer

from phasesplit.console.options import option
from phasesplit.errors import GatewayError, InfeasibleError, SpecError

if TYPE_CHECKING:
    from phasesplit.io.profile_schema import ProfileSpec
    from phasesplit.profiling.endpoint_machine import EndpointMachine
    from phasesplit.profiling.engine_machine import EngineMachine
    from phasesplit.profiling.fitting import Timed
    from phasesplit.profiling.profiler import ProfileState


ENGINE = "engine"
_KEY_VARIABLE = "PHASESPLIT_API_KEY"
_INTERRUPTED = 130


class _Target(NamedTuple):
    """What is measured, and what is known of it before."""

    name: str
    machine: "EngineMachine | EndpointMachine"
    facts: dict[str, Any]
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFileOptions:
    """The machine file, and what it says beyond the measurements."""

    machine_file: Annotated[
        Path | None,
        option("--machine", text="Write a machine file that simulate and plan take, too.", metavar="FILE.yaml"),
    ] = None
    name: Annotated[
        str | None, option("--name", text="Name of the machine; by default its processor's.", metavar="NAME")
    ] = None
    price: Annotated[str | None, option("--price", text="Price for the machine file.", metavar="USD_PER_HOUR")] = None
    power: Annotated[
        str | None,
        option("--power", text="Power for the machine file, where it cannot be read.", metavar="IDLE,PREFILL,DECODE"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """What is known of an endpoint, and how it is asked."""

    concurrency: Annotated[
        int, option("--concurrency", text="endpoint: most requests at a time; by default 16.", metavar="N")
    ] = 16
    sizes: Annotated[
        str | None,
        option("--sizes", text="endpoint: the model as simulate knows it, for the machine file.", metavar="NAME|PATH"),
    ] = None
    ids: Annotated[
        str,
        option("--token-ids", text="endpoint: ids that prompts are drawn from; 1000:20000.", metavar="FROM:TO"),
    ] = "1000:20000"


def profile(
    *,
    target: Annotated[
        str, typer.Argument(help="engine (the embedded one, on this machine), or the address of an endpoint.")
    ],
    model: Annotated[
        str | None,
        option(
            "--model",
            text="engine: default, tiny, a GGUF file or a directory; an endpoint: the model's name there, by default "
            "the only one.",
            metavar="NAME|PATH",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        option("--output", "-o", text="Profile to write; by default profile-MODEL.json here.", metavar="FILE.json"),
    ] = None,
    error: Annotated[
        str, option("--error", text="Held-out error at which it stops; by default 3%.", metavar="PERCENT")
    ] = "3%",
    budget: Annotated[
        str, option("--budget", text="Time at which it stops in any case; by default 60s.", metavar="TIME")
    ] = "60s",
    resume: Annotated[
        Path | None,
        option("--resume", text="Go on from a profile of the same machine; its points are kept.", metavar="FILE"),
    ] = None,
    described: MachineFileOptions,
    kv_memory: Annotated[
        str, option("--kv-memory", text="engine: memory for KV, as of the worker; by default 512MB.", metavar="BYTES")
    ] = "512MB",
    endpoint: EndpointOptions,
    seed: Annotated[int, option("--seed", text="Of the held-out iterations; by default 0.", metavar="N")] = 0,
    as_json: Annotated[bool, option("--json", text="Print the profile as JSON, and nothing else.")] = False,
) -> int:
    """Measure how long prefill and decode iterations take, and how well that predicts iterations not measured.

    Ctrl-C keeps what there is; --resume goes on from there. A key for an endpoint is taken from PHASESPLIT_API_KEY.

    \b
    Examples:
    phasesplit profile engine --budget 60s --machine this.yaml
    phasesplit profile http://127.0.0.1:8080 --error 5% -o endpoint.json
    """  # noqa: D301 - \b makes click keep these lines
    from phasesplit.console.workload_options import check_seed
    from phasesplit.io.profiles import ENDING, read_profile_file, write_machine_file, write_profile_file
    from phasesplit.io.results import check_output
    from phasesplit.profiling.profiler import profile_machine

    check_seed(seed)
    aimed, limit_s = _share("--error", error), _quantity("--budget", budget, "s", 86_400.0)
    price_usd_per_hour = None if described.price is None else _quantity("--price", described.price, "usd_per_hour", 1e6)
    power_w = None if described.power is None else _powers(described.power)
    before = None if resume is None else read_profile_file(resume)
    if described.machine_file is not None:
        check_output(described.machine_file, (".yaml", ".yml"), "--machine")
        if target != ENGINE and endpoint.sizes is None:
            raise SpecError("--machine: an endpoint does not report the model's sizes; name the model with --sizes")
    if output is not None:
        check_output(output, (ENDING,), "--output")
    asked = _engine(model or "default", kv_memory) if target == ENGINE else _endpoint(target, model, endpoint)
    if described.machine_file is not None and asked.facts["kv"] is None:
        raise SpecError(
            f"--machine: {asked.name} does not report its KV capacity, in /facts as phasesplit or in /metrics as vLLM"
            " does, which a machine file needs; leave out --machine"
        )
    facts = asked.facts | {"machine": _machine_facts(asked, described.name, before)}
    path = output or resume or Path(f"profile-{Path(facts['model'].name).name}{ENDING}")
    check_output(path, (ENDING,), "--output")
    known = _known(before, str(resume), asked, facts)
    with ProfileProgress(shown=not as_json and sys.stderr.isatty()) as progress:
        try:
            found = profile_machine(
                asked.machine,
                error=aimed,
                budget_s=limit_s,
                clock=time.perf_counter,
                seed=seed,
                known=known,
                on_state=progress,
            )
        except GatewayError as problem:
            raise InfeasibleError(str(problem)) from None
    settings = asked.settings | {"error": aimed, "budget_s": limit_s, "seed": seed}
    whole = _profile(asked, facts, found, settings, before)
    write_profile_file(whole, path)
    if described.machine_file is not None and whole.times is not None:
        write_machine_file(whole, described.machine_file, path, price_usd_per_hour=price_usd_per_hour, power_w=power_w)
    if as_json:
        typer.echo(whole.model_dump_json(indent=1))
    else:
        print_profile(whole)
        typer.echo(
            f"wrote {path}" + (f" and {described.machine_file}" if described.machine_file and whole.times else "")
        )
    if found.ending == "interrupted":
        typer.echo(f"what there is was kept; go on with --resume {path}", err=True)
        return _INTERRUPTED
    return 0


def _engine(model: str, kv_memory: str) -> _Target:
    from phasesplit.engine.fetch import model_path
    from phasesplit.launcher.announcing import model_name
    from phasesplit.profiling.engine_machine import (
        EngineMachine,
        attempted,
        kv_facts,
        link_facts,
        model_facts,
        opened,
        power_facts,
        start_up_s,
    )
    from phasesplit.profiling.power import PowerMeter

    kv_bytes = int(_quantity("--kv-memory", kv_memory, "bytes", 1e15))
    path = model_path(model, _say)
    packed = opened(path)
    machine = EngineMachine(packed, kv_bytes)
    unknown: dict[str, str] = {}
    facts = {
        "model": model_facts(model_name(model), packed),
        "kv": kv_facts(machine),
        "link": attempted("link", unknown, lambda: link_facts(packed)),
        "start_up_s": attempted("start_up_s", unknown, lambda: start_up_s(path)),
        "power": attempted("power", unknown, lambda: power_facts(machine, PowerMeter())),
        "unknown": unknown,
        "notes": ("times are those of the forward pass: scheduling, sampling and HTTP come on top",),
    }
    return _Target(ENGINE, machine, facts, {"kv_bytes": kv_bytes, "precision": packed.precision})


def _endpoint(url: str, model: str | None, options: EndpointOptions) -> _Target:
    from phasesplit.io.profile_schema import ModelFacts
    from phasesplit.io.specs import load_model
    from phasesplit.profiling.endpoint_machine import FROM_OUTSIDE, EndpointMachine, endpoint_facts
    from phasesplit.replay.client import find_endpoint
    from phasesplit.replay.replay_command import token_ids

    if not 2 <= options.concurrency <= 1024:
        raise SpecError.bad("--concurrency", options.concurrency, "2 to 1,024 requests")
    drawn = token_ids(options.ids)
    if not url.startswith(("http://", "https://")):
        raise SpecError.bad("TARGET", url, "engine, or an address such as http://127.0.0.1:8080")
    described = None if options.sizes is None else load_model(options.sizes, where="--sizes")
    key = os.environ.get(_KEY_VARIABLE)
    endpoint = asyncio.run(find_endpoint(url, model=model, api_key=key, where="TARGET"))
    reported = asyncio.run(endpoint_facts(endpoint, key))
    kv = reported.kv
    if described is not None and kv is not None and kv.bytes_per_token is not None:
        described = described.with_kv_bytes_per_token(kv.bytes_per_token)
    machine = EndpointMachine(
        endpoint,
        most_requests=options.concurrency,
        kv_tokens=None if kv is None else kv.blocks * kv.block_tokens,
        api_key=key,
        ids=drawn,
    )
    unseen = "an endpoint does not report it"
    known = {"kv": kv, "link": reported.link, "start_up_s": reported.start_up_s}
    unknown = {name: unseen for name, fact in {**known, "power": None}.items() if fact is None}
    facts = {
        "model": ModelFacts(
            name=endpoint.model if described is None else described.name,
            sizes=None if described is None else {field: getattr(described, field) for field in _sizes()},
        ),
        **known,
        "unknown": unknown,
        "notes": FROM_OUTSIDE,
    }
    return _Target(endpoint.url, machine, facts, {"concurrency": options.concurrency})


def _sizes() -> tuple[str, ...]:
    from dataclasses import fields

    from phasesplit.domain.model import Model

    return tuple(one.name for one in fields(Model) if one.name not in ("name", "sources"))


def _machine_facts(asked: _Target, name: str | None, before: "ProfileSpec | None") -> Any:
    from phasesplit.io.profile_schema import MachineFacts
    from phasesplit.profiling.record import host_facts

    named = name or (before.machine.name if before is not None else None)
    if asked.name == ENGINE:
        return host_facts(named)
    host = asked.name.split("//", 1)[-1].split("/", 1)[0].split(":", 1)[0]
    return MachineFacts(
        name=named or f"endpoint-{host}",
        processor="",
        cores=0,
        threads=None,
        features=(),
        memory_bytes=0.0,
        system="",
    )


def _known(before: "ProfileSpec | None", where: str, asked: _Target, facts: dict[str, Any]) -> "tuple[Timed, ...]":
    from phasesplit.profiling.record import known_iterations

    if before is None:
        return ()
    return known_iterations(
        before, where, target=asked.name, machine=facts["machine"], model=facts["model"], settings=asked.settings
    )


def _profile(
    asked: _Target, facts: dict[str, Any], found: Any, settings: dict[str, Any], before: "ProfileSpec | None"
) -> "ProfileSpec":
    from phasesplit.io.profile_schema import ProfileSpec
    from phasesplit.profiling.record import errors, iterations, knots, software_versions

    return ProfileSpec(
        target=asked.name,
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=software_versions(),
        settings=settings,
        ending=found.ending,
        elapsed_s=found.elapsed_s + (before.elapsed_s if before is not None else 0.0),
        times=knots(found),
        errors=errors(found),
        iterations=iterations(found),
        interrupted_share=asked.machine.interrupted_share,
        **facts,
    )


def _share(flag: str, text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0.001 <= share <= 1:
        raise SpecError.bad(flag, text, "0.1% to 100%, such as 3%")
    return share


def _powers(text: str) -> tuple[float, float, float]:
    parts = text.split(",")
    if len(parts) != 3:
        raise SpecError.bad("--power", text, "three powers IDLE,PREFILL,DECODE, such as 20,65,50")
    idle_w, prefill_w, decode_w = (_quantity("--power", part, "w", 1e8) for part in parts)
    if min(prefill_w, decode_w) < idle_w:
        raise SpecError.bad("--power", text, "powers of the phases of at least the idle power")
    return idle_w, prefill_w, decode_w


def _quantity(flag: str, text: str, kind: str, most: float) -> float:
    from phasesplit.io.schema import quantity

    try:
        return quantity(text, kind, most=most)
    except ValueError as problem:
        raise SpecError.bad(flag, text, str(problem)) from None


def _say(line: str) -> None:
    typer.echo(line, err=True)


_ENDINGS = {
    "reached": "stopped because the error asked for was reached",
    "form": "stopped because more points and runs would not help: what is left is the form of the phase times",
    "budget": "stopped because the time was up",
    "interrupted": "interrupted",
}
_MUCH_INTERRUPTED = 0.05
_MOST_ROWS = 10


class ProfileProgress:
    """Shows the time gone of the budget, what is timed, and the error so far; to be closed at the end.

    Args:
        shown: Whether to show anything at all.
    """

    def __init__(self, *, shown: bool) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._shown = shown

    def __call__(self, state: "ProfileState") -> None:
        """Show a state."""
        if not self._shown:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            self._bar = Progress(
                TextColumn("{task.completed:3.0f} of {task.total:.0f} s"),
                BarColumn(30),
                TextColumn("{task.description}"),
                console=Console(stderr=True, highlight=False),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=state.budget_s)
        error = "" if state.error != state.error else f", held-out error {state.error:.1%}"
        self._bar.update(
            self._task, completed=state.elapsed_s, description=f"{state.timed} iterations{error}; now {state.shape}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_profile(profile: "ProfileSpec") -> None:
    """Print what a profile says, in short tables."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    machine = profile.machine
    title = f"{profile.model.name} on {machine.name}"
    if machine.processor:
        title += f" ({machine.processor}, {machine.cores} cores, {machine.threads} thread)"
    console.print(title, markup=False)
    if profile.times is not None:
        prompt, token = (
            _chosen(profile.times.prefill_knots_tokens, profile.times.prefill_knots_s),
            _chosen(profile.times.decode_knots_requests, profile.times.decode_knots_s),
        )
        table = Table("prompt tokens", "ms", "requests", "ms, no context", title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for left, right in zip_longest(prompt, token, fillvalue=("", "")):
            table.add_row(*left, *right)
        console.print(table)
        console.print(
            f"and {1e9 * profile.times.prefill_pair_s:,.1f} ns a pair of prompt tokens, "
            f"{1e6 * profile.times.decode_context_s:,.2f} us a token of context"
        )
    errors = Table("held-out error", "iterations", "mean", "worst", "where", title_justify="left")
    for phase, found in profile.errors.items():
        if found.mean is not None and found.worst is not None:
            errors.add_row(phase, str(found.count), f"{found.mean:.1%}", f"{found.worst:.1%}", found.worst_at)
    if errors.row_count:
        console.print(errors)
    for line in _lines(profile):
        console.print(line, markup=False, soft_wrap=True)


def _chosen(places: Sequence[float], seconds: Sequence[float]) -> list[tuple[str, str]]:
    """Return some of the knots, spread evenly, first and last among them."""
    count = min(len(places), _MOST_ROWS)
    chosen = [round(row * (len(places) - 1) / (count - 1)) for row in range(count)]
    return [(f"{places[index]:,.0f}", f"{1e3 * seconds[index]:,.1f}") for index in chosen]


def _lines(profile: "ProfileSpec") -> list[str]:
    runs = sum(one.runs for one in profile.iterations)
    rejected = sum(one.rejected for one in profile.iterations)
    lines = [
        f"{len(profile.iterations)} iterations, {runs:,} runs, {rejected} spikes left out, {profile.elapsed_s:.0f} s; "
        f"{_ENDINGS.get(profile.ending, profile.ending)}"
    ]
    if profile.interrupted_share is not None and profile.interrupted_share > _MUCH_INTERRUPTED:
        lines.append(
            f"Beware: during {profile.interrupted_share:.0%} of the runs another process had the core; the time of the "
            "thread counts for those, and caches and memory were shared. On a quiet core the error is smaller."
        )
    if profile.kv is not None:
        tokens = profile.kv.blocks * profile.kv.block_tokens
        lines.append(f"KV: {tokens:,} tokens ({profile.kv.blocks:,} blocks of {profile.kv.block_tokens})")
    if profile.link is not None:
        lines.append(
            f"link: {profile.link.bytes_per_s / 1e9:.2f} GB/s, latency {1e6 * profile.link.latency_s:,.0f} us "
            f"({profile.link.source})"
        )
    if profile.start_up_s is not None:
        lines.append(f"start-up: {profile.start_up_s:.2f} s from starting a process to its first token")
    if profile.power is not None:
        power = profile.power
        lines.append(
            f"power: idle {power.idle_w:,.0f} W, prompt {power.prefill_w:,.0f} W, token {power.decode_w:,.0f} W "
            f"({power.source})"
        )
    lines += [f"{what}: unknown, {why}" for what, why in profile.unknown.items()]
    return lines + [f"note: {note}" for note in profile.notes]
