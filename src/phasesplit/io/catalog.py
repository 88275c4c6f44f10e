"""Phase times by name: `time_sources` finds them, `compare_sources` compares all sources of a model and machine.

Sources are the shipped measurements, a profile that the user measured, the operator tables of the optional package
aiconfigurator, and the roofline.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.machine import Machine, fitting_degree, sliced
from phasesplit.domain.model import Model
from phasesplit.domain.profile import Measurements, PhaseTimes, profile_times, published_times
from phasesplit.domain.roofline import (
    ENGINE_2023_OVERHEAD_PER_LAYER_S,
    MODERN_OVERHEAD_PER_LAYER_S,
    PairError,
    calibration_error,
    roofline_times,
)
from phasesplit.errors import SpecError
from phasesplit.io.operator_engine import OperatorEngine, engine_named, operator_engine
from phasesplit.io.specs import is_path, known_machines, known_models, load_machine, load_model

Floats = NDArray[np.float64]

PROMPT_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""Tokens of the prefill iterations that are asked for; matrix products were measured with up to so many rows.

Source: rows m of gemm_perf.parquet, h100_sxm, vllm 0.24.0, aiconfigurator-core 0.12.0.
"""

LONGEST_PROMPT_TOKENS = 16_384
"""Longest single prompt that is asked for: attention was measured up to it.

Source: column isl of context_attention_perf.parquet, the same tables.
"""

PROMPTS = (1, 4, 16)
"""Prompts that share them: with several, fewer pairs of tokens attend to one another."""

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Requests of the decode iterations that are asked for."""

CONTEXT_TOKENS = (128, 512, 2048, 8192)
"""Context of each of them; only what fits into the machine's memory is asked for."""


def operator_times(
    model: Model, machine: Machine, *, backend: str = "vllm", version: str | None = None, config: Path | None = None
) -> PhaseTimes:
    """Return phase times fitted to a grid of iterations, before the machine's time factors.

    The package adds up the times of the operators of one iteration: matrix products, attention and all-reduces
    measured one by one on the accelerator, and formulae for what is small. Scheduler, sampling and the gaps between
    kernels are not in it, so a real engine takes longer. `mean_error` is how far the fit is from the package's own
    figures; how far those are from an engine, this package cannot know (docs/phase-times.md has published cases).

    Prompts: f(B) for each B of `PROMPT_TOKENS`, and one pair term for all of them. Tokens: g(n) for each n of
    `REQUESTS`, and one context term. Both by least squares of relative errors.

    Args:
        model: The model; its layers and weights must be those of a packaged one, or of `config`.
        machine: The machine or a slice of one; the model runs tensor-parallel over its accelerators.
        backend: The engine: vllm, sglang or trtllm.
        version: Version of the engine, or `current`, `previous` or `next`; by default `current`, the newest complete
            one. The package has tables for at most three.
        config: The model's Hugging Face config.json, or its folder, for a model that is not packaged.

    Raises:
        SpecError: The package is not installed, has no tables for the machine, engine, version or model, or the model
            does not fit into the machine's memory.

    Source: aiconfigurator, Apache-2.0 (NVIDIA; arXiv 2601.06288); the split into batch, pair and context terms: ours.
    """
    free_tokens = (machine.hbm_bytes - model.weights_bytes) / model.kv_bytes_per_token
    if free_tokens < REQUESTS[1] * CONTEXT_TOKENS[0]:
        raise SpecError.bad(
            f"model {model.name} on machine {machine.name}, weights",
            f"{model.weights_bytes / 1e9:,.1f} GB",
            f"less than the machine's memory of {machine.hbm_bytes / 1e9:,.1f} GB",
        )
    engine = operator_engine(model, machine, backend=backend, version=version, config=config)
    prompt = _prefill_fit(engine, min(LONGEST_PROMPT_TOKENS, model.max_context_tokens), free_tokens)
    token = _decode_fit(engine, model.max_context_tokens, free_tokens)
    mean_error = float(np.concatenate([prompt.errors, token.errors]).mean())
    return PhaseTimes(
        source=(
            f"{engine.described}; {engine.measured_share():.0%} of the time from measured operators, nothing for the"
            f" engine around them, fitted within {mean_error:.1%}"
        ),
        prefill_knots_tokens=prompt.knots,
        prefill_knots_s=prompt.levels_s,
        decode_knots_requests=token.knots,
        decode_knots_s=token.levels_s,
        prefill_pair_s=prompt.slope_s,
        decode_context_s=token.slope_s,
        measured_prompt_tokens=float(prompt.knots[-1]),
        measured_requests=float(token.knots[-1]),
        mean_error=mean_error,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """Times as a level for each knot and one slope: the slope's argument is pairs, or tokens of context.

    Attributes:
        knots: float64 (k,), increasing.
        levels_s: float64 (k,), non-decreasing.
        slope_s: Seconds for each unit of the argument, >= 0.
        errors: float64 (n,), relative error of each time that was fitted, >= 0.
    """

    knots: Floats
    levels_s: Floats
    slope_s: float
    errors: Floats


def _prefill_fit(engine: OperatorEngine, longest_tokens: float, most_tokens: float) -> _Fit:
    grid = [
        (tokens, prompts)
        for tokens in PROMPT_TOKENS
        for prompts in PROMPTS
        if tokens <= most_tokens and prompts <= tokens / prompts <= longest_tokens
    ]
    return _fit(
        np.array([tokens for tokens, _ in grid], dtype=np.float64),
        np.array([tokens**2 / prompts / 2 for tokens, prompts in grid]),
        np.array([engine.prefill_s(prompts, tokens // prompts) for tokens, prompts in grid]),
    )


def _decode_fit(engine: OperatorEngine, longest_tokens: float, most_tokens: float) -> _Fit:
    grid = [
        (requests, context)
        for requests in REQUESTS
        for context in CONTEXT_TOKENS
        if requests * context <= most_tokens and context <= longest_tokens
    ]
    return _fit(
        np.array([requests for requests, _ in grid], dtype=np.float64),
        np.array([requests * context for requests, context in grid], dtype=np.float64),
        np.array([engine.decode_s(requests, context) for requests, context in grid]),
    )


def _fit(group: Floats, argument: Floats, seconds: Floats) -> _Fit:
    """Return levels by group and their common slope, with the least sum of squared relative errors.

    Levels that fall with more work are noise of the tables (one request: 10.1 ms, two: 9.5 ms); they become the middle
    between the highest so far and the lowest still to come.
    """
    weight = 1 / seconds**2
    knots, index = np.unique(group, return_inverse=True)
    total = np.bincount(index, weight)
    mean_argument = np.bincount(index, weight * argument) / total
    mean_s = np.bincount(index, weight * seconds) / total
    off = argument - mean_argument[index]
    slope_s = max(float(np.sum(weight * off * seconds) / np.sum(weight * off**2)), 0.0)
    levels_s = mean_s - slope_s * mean_argument
    levels_s = (np.maximum.accumulate(levels_s) + np.minimum.accumulate(levels_s[::-1])[::-1]) / 2
    errors = np.abs((levels_s[index] + slope_s * argument) / seconds - 1)
    return _Fit(knots=knots, levels_s=levels_s, slope_s=slope_s, errors=errors)


PUBLISHED_HARDWARE = {"a100-80gb": "dgx-a100", "h100-80gb": "dgx-h100"}
"""What perf_model.csv calls the machines of this catalog."""

WHOLE = 8
"""Accelerators of the machines that were measured."""

_SHIPPED = "Splitwise, ISCA 2024, tensor parallelism over {} GPUs, medians of 5 runs"
_OWN_COLUMNS = ("prompt_size", "batch_size", "token_size", "prompt_time", "token_time")
SLOW_LINKS = "without fast links between accelerators times may be 10 to 20 times as long"
"""Said of a roofline over PCIe. Source: aiconfigurator's tables of 8 L40S against it (docs/phase-times.md)."""
TIME_SOURCES = ("auto", "measured", "roofline", "aiconfigurator")
"""Where phase times may come from; auto: measured where there are measurements, else the roofline."""
_LARGEST = 1e9


def phase_times(
    model: Model,
    machine: Machine,
    *,
    published: bool = False,
    profile: str | Path | None = None,
    overhead_per_layer_s: float | None = None,
    source: str = "auto",
) -> PhaseTimes:
    """Return how long the iterations of a model take on a machine, its time factors applied.

    Measured times where the model was measured on so many of the machine's accelerators, otherwise the roofline; a
    machine or model of one's own that only shares the name of a measured one was not measured, unless it names the
    profile. A model that was measured on some machine keeps the overhead of that (2023) engine on the others, and on
    slices of them, so that machines compare like with like; all other models get the overhead of a modern engine.

    Args:
        model: The model.
        machine: The machine; `machine.profile_name` says whose measurements apply.
        published: Look times up as the published simulator does.
        profile: Measurements of one's own, instead of those that the machine's file may name: a profile that
            `phasesplit profile` wrote (.json), or a CSV file in the layout of perf_model.csv (columns model, hardware,
            prompt_size, batch_size, token_size, prompt_time and token_time in ms, tensor_parallel; others are ignored).
        overhead_per_layer_s: Use the roofline, measured or not, with this overhead (see `roofline_times`).
        source: auto; or, instead of all that, measured, roofline, or aiconfigurator[:engine[:version]] alone.

    Raises:
        SpecError: The model does not fit into the machine's memory; the machine names a profile that is not known;
            `published` for a pair that was not measured; the profile file has a value that is not allowed, or nothing
            for this pair.
    """
    if model.weights_bytes >= machine.hbm_bytes:
        raise _does_not_fit(model, machine)
    if profile is None and machine.profile and not is_path(machine.profile) and machine.profile not in known_machines():
        raise SpecError.unknown(f"machine {machine.name}, profile", machine.profile, known_machines())
    if profile is not None and published:
        raise SpecError.bad(
            "profile", str(profile), "no profile under the published rules, which have their own look-up"
        )
    kind = _checked_source(source, alone=not published and profile is None and overhead_per_layer_s is None)
    if is_path(machine.profile) and kind in ("auto", "measured") and not published and overhead_per_layer_s is None:
        profile = profile or machine.profile
    if kind == "aiconfigurator":
        from phasesplit.io.operator_engine import engine_named

        backend, version = engine_named(source)
        times = operator_times(model, machine, backend=backend, version=version)
    elif profile is not None:
        times = _own_times(profile, model, machine)
    elif published:
        times = _published(model, machine)
    else:
        as_measured = overhead_per_layer_s is None and kind != "roofline" and _is_as_measured(model, machine)
        shipped = measurements(model.name, machine.profile_name, machine.accelerators) if as_measured else None
        if shipped is not None:
            times = profile_times(shipped)
        elif kind == "measured":
            raise SpecError(f"source of phase times: nobody measured {model.name} on {machine.name}")
        else:
            overhead_s = _overhead_s(model) if overhead_per_layer_s is None else overhead_per_layer_s
            times = roofline_times(model, machine, overhead_per_layer_s=overhead_s)
            if machine.accelerators > 1 and not machine.has_fast_links:
                times = replace(times, source=f"{times.source}; {SLOW_LINKS}")
    return times.scaled(machine.prefill_time_factor, machine.decode_time_factor)


def _own_times(profile: str | Path, model: Model, machine: Machine) -> PhaseTimes:
    if Path(profile).suffix != ".json":
        return profile_times(read_profile(profile, model, machine))
    from phasesplit.io.profiles import measured_times

    return measured_times(profile, model, machine)


def _checked_source(source: str, *, alone: bool) -> str:
    """Return the kind of a source of phase times."""
    kind, colon, _ = source.partition(":")
    if kind not in TIME_SOURCES or (colon and kind != "aiconfigurator"):
        raise SpecError.unknown("source of phase times", source, TIME_SOURCES)
    if kind != "auto" and not alone:
        allowed = "auto where the published rules, a profile or an overhead say where times come from"
        raise SpecError.bad("source of phase times", source, allowed)
    return kind


def _does_not_fit(model: Model, machine: Machine) -> SpecError:
    """Return the error that says how much memory is missing, and what has enough."""
    return SpecError(
        f"model {model.name} on machine {machine.name}: weights of {model.weights_bytes / 1e9:,.1f} GB are"
        f" {(model.weights_bytes - machine.hbm_bytes) / 1e9:,.1f} GB more than its memory of"
        f" {machine.hbm_bytes / 1e9:,.1f} GB, enough have {with_room_for(model, machine)}"
    )


def with_room_for(model: Model, machine: Machine) -> str:
    """Return which machines hold a model, as a text: a machine with more of its accelerators first, then known ones."""
    server = machine.server or machine.name
    degree = fitting_degree(model, machine)
    own = [] if degree is None else [f"{server} with tensor parallelism {degree}"]
    others = [
        name for name in known_machines() if name != server and fitting_degree(model, load_machine(name)) is not None
    ]
    return ", ".join(own + others) or "none of the known machines"


def build_cluster(
    model: Model | str | Path,
    pools: Sequence[tuple[Role | str, int, Machine | str | Path]],
    *,
    published: bool = False,
    profile: str | Path | None = None,
    overhead_per_layer_s: float | None = None,
    source: str = "auto",
    name: str | None = None,
    reference: Machine | str | Path = "dgx-a100",
) -> Cluster:
    """Return a cluster, with the phase times of its model on each of its machines.

    Args:
        model: The model, its name, or the path of its file.
        pools: Role, number of machines (>= 1) and machine (or its name or path) of each pool.
        published: Look times up as the published simulator does.
        profile: Measurements of one's own, as for `phase_times`, with rows for every machine.
        overhead_per_layer_s: Use the roofline with this overhead, as for `phase_times`.
        source: As for `phase_times`; the reference's times come from it too.
        name: As in reports; by default what the pools are.
        reference: The machine that slowdowns compare with; the paper's is a DGX-A100.

    Raises:
        SpecError: A name is not known, a file or a figure is not allowed, or the pools cannot serve both phases.
    """
    served = model if isinstance(model, Model) else load_model(model)
    built: list[Pool] = []
    for role, count, which in pools:
        machine = which if isinstance(which, Machine) else load_machine(which, where=f"pool {role}:{count}, machine")
        purpose = Role.parse(role, "pool, role")
        times = phase_times(
            served,
            machine,
            published=published,
            profile=profile,
            overhead_per_layer_s=overhead_per_layer_s,
            source=source,
        )
        built.append(Pool(role=purpose, count=count, machine=machine, times=times))
    described = " + ".join(f"{pool.count} {pool.role} {pool.machine.name}" for pool in built)
    compared_with = reference if isinstance(reference, Machine) else load_machine(reference, where="reference machine")
    return Cluster(
        name=name or described,
        model=served,
        pools=tuple(built),
        reference=reference_times(served, compared_with, published=published, source=source),
    )


def reference_times(
    model: Model, machine: Machine, *, published: bool = False, source: str = "auto"
) -> PhaseTimes | None:
    """Return the phase times that slowdowns compare with, None where the model does not fit on that machine.

    Args:
        model: The model.
        machine: The machine to compare with.
        published: As for `phase_times`.
        source: As for `phase_times`: slowdowns of one engine over another would say nothing.
    """
    if model.weights_bytes >= machine.hbm_bytes:
        return None
    return phase_times(model, machine, published=published, source=source)


def measurements(model_name: str, machine_name: str, tensor_parallel: int = WHOLE) -> Measurements | None:
    """Return the shipped measurements of a model on so many accelerators of a machine, or None where there are none."""
    measured = (model_name, machine_name, tensor_parallel)
    rows = [row for row in _shipped("measured.csv") if _measured_on(row) == measured]
    if not rows:
        return None
    return Measurements(
        source=f"{model_name} on {machine_name} ({_SHIPPED.format(tensor_parallel)})",
        prompt_tokens=_column(rows, "prompt_tokens"),
        batch_requests=_column(rows, "batch_requests"),
        output_tokens=_column(rows, "output_tokens"),
        prefill_s=_column(rows, "prefill_s"),
        decode_s=_column(rows, "decode_s"),
        runs=_column(rows, "runs"),
    )


def measured_pairs() -> list[tuple[str, str]]:
    """Return the (model, machine) names with shipped measurements on the whole machine."""
    return sorted({(model, machine) for model, machine, degree in _all_measured() if degree == WHOLE})


def calibration_errors() -> dict[tuple[str, str], PairError]:
    """Return the error of the roofline on each measured pair of model and machine."""
    return {(model, machine): _roofline_error(model, machine, WHOLE) for model, machine in measured_pairs()}


def slice_errors() -> dict[tuple[str, str, int], PairError]:
    """Return the error of the roofline by model, machine and measured part of it; it was not fitted to those."""
    return {measured: _roofline_error(*measured) for measured in _all_measured() if measured[-1] != WHOLE}


def _roofline_error(model: str, machine: str, tensor_parallel: int) -> PairError:
    shipped = measurements(model, machine, tensor_parallel)
    assert shipped is not None  # noqa: S101 - the callers take the names from the table
    return calibration_error(load_model(model), sliced(load_machine(machine), tensor_parallel), shipped)


def _all_measured() -> list[tuple[str, str, int]]:
    return sorted({_measured_on(row) for row in _shipped("measured.csv")})


def _measured_on(row: Mapping[str, str]) -> tuple[str, str, int]:
    return row["model"], row["machine"], int(row["tensor_parallel"])


def read_profile(path: str | Path, model: Model, machine: Machine) -> Measurements:
    """Return the measurements of a model on a machine from a CSV file in the layout of perf_model.csv.

    A row counts when its model is the model's name, its hardware the machine's profile name (or what the published
    file calls it) and its tensor_parallel, where there is such a column, the machine's number of accelerators.

    Raises:
        SpecError: The file cannot be read, lacks a column, has a value that is not allowed, or no row for the pair.
    """
    where = Path(path)
    hardware = {machine.profile_name} | {
        name for name, ours in PUBLISHED_HARDWARE.items() if ours == machine.profile_name
    }
    kept: list[dict[str, float]] = []
    try:
        with where.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(line for line in file if not line.startswith("#"))
            for column in ("model", "hardware", *_OWN_COLUMNS):
                if column not in (reader.fieldnames or ()):
                    raise SpecError.bad(f"{where}, header", list(reader.fieldnames or ()), f"a column {column}")
            for number, row in enumerate(reader, start=1):
                if row["model"] != model.name or row["hardware"] not in hardware:
                    continue
                if str(row.get("tensor_parallel") or machine.accelerators) != str(machine.accelerators):
                    continue
                kept.append({column: _positive(where, number, column, row[column]) for column in _OWN_COLUMNS})
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise SpecError(f"{where}: cannot be read as CSV text ({problem})") from problem
    if not kept:
        raise SpecError(
            f"{where}: no row for model {model.name}, hardware {' or '.join(sorted(hardware))}"
            f" and tensor_parallel {machine.accelerators}"
        )
    return Measurements(
        source=f"{model.name} on {machine.profile_name} ({where.name})",
        prompt_tokens=_column(kept, "prompt_size"),
        batch_requests=_column(kept, "batch_size"),
        output_tokens=_column(kept, "token_size"),
        prefill_s=_column(kept, "prompt_time") / 1e3,
        decode_s=_column(kept, "token_time") / 1e3,
        runs=np.ones(len(kept)),
    )


def _overhead_s(model: Model) -> float:
    was_measured = any(model.name == name for name, _ in measured_pairs())
    return ENGINE_2023_OVERHEAD_PER_LAYER_S if was_measured else MODERN_OVERHEAD_PER_LAYER_S


def _is_as_measured(model: Model, machine: Machine) -> bool:
    """Whether measurements under these names are of this model on this machine: what sets the times is as shipped."""
    if model.name not in known_models() or machine.profile_name not in known_machines():
        return False
    sizes = ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "parameters")
    speeds = ("hbm_bytes_per_s", "flops_per_s")
    own, shipped = model, load_model(model.name)
    if any(getattr(own, size) != getattr(shipped, size) for size in sizes):
        return False
    if machine.profile:
        return True
    whole = load_machine(machine.profile_name)
    share = machine.accelerators / whole.accelerators
    return all(math.isclose(getattr(machine, speed), share * getattr(whole, speed)) for speed in speeds)


def _published(model: Model, machine: Machine) -> PhaseTimes:
    table = _shipped("published.csv")
    rows = [row for row in table if (row["model"], row["machine"]) == (model.name, machine.profile_name)]
    if not rows or machine.instances_per_server > 1:
        pairs = ", ".join(f"{name} on {on}" for name, on in sorted({(row["model"], row["machine"]) for row in table}))
        raise SpecError(
            f"published rules: {model.name} on {machine.name} was not measured by the paper; measured are {pairs}"
        )
    return published_times(
        f"{model.name} on {machine.profile_name} ({_SHIPPED.format(WHOLE)})",
        _column(rows, "batch_tokens"),
        _column(rows, "prefill_s"),
        _column(rows, "decode_s"),
    )


def _shipped(name: str) -> list[dict[str, str]]:
    text = (files("phasesplit") / "profiles" / "phase_times" / name).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def _column(rows: Sequence[Mapping[str, str | float]], name: str) -> NDArray[np.float64]:
    return np.array([float(row[name]) for row in rows], dtype=np.float64)


def _positive(where: Path, number: int, column: str, text: str | None) -> float:
    try:
        value = float(text or "")
    except ValueError:
        value = float("nan")
    if not 0 < value < _LARGEST:
        raise SpecError.bad(f"{where}, row {number}, {column}", text, "a positive number below 1e9")
    return value


COMPARED_PROMPT_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
COMPARED_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
COMPARED_CONTEXT_TOKENS = 512
"""Context of each request of the decode iterations that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceComparison:
    """One iteration as several sources have it.

    Attributes:
        phase: "prefill": one prompt, alone; "decode": requests of `COMPARED_CONTEXT_TOKENS` each.
        size: Tokens of the prompt, or requests.
        seconds: Source, as `TimeSources` names it, to its time of the iteration.
    """

    phase: Literal["prefill", "decode"]
    size: int
    seconds: Mapping[str, float]

    @property
    def ratios(self) -> dict[str, float]:
        """Source to its time as a multiple of the roofline's."""
        return {name: time_s / self.seconds["roofline"] for name, time_s in self.seconds.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSources:
    """What each source has for one model on one machine, the machine's time factors applied.

    Attributes:
        times: Source to its phase times: "measured" and "aiconfigurator" where they cover the pair, "roofline" always.
        absent: Source to why it has none, in one line.
    """

    times: Mapping[str, PhaseTimes]
    absent: Mapping[str, str]


def time_sources(model: Model, machine: Machine, *, source: str | None = "aiconfigurator") -> TimeSources:
    """Return the phase times of every source that covers a model on a machine.

    The roofline is the one that `phase_times` would take: with the overhead of the 2023 engine for models that were
    measured with it, otherwise with that of a modern engine.

    Args:
        model: The model.
        machine: The machine.
        source: `aiconfigurator[:engine[:version]]`: which of its tables; None: none of them, which saves the seconds
            that the first answer takes.

    Raises:
        SpecError: `source` is not of that form, or the model does not fit into the machine's memory.
    """
    times: dict[str, PhaseTimes] = {}
    absent: dict[str, str] = {}
    if source is not None:
        engine_named(source)
    for name in ("measured", *([] if source is None else [source]), "roofline"):
        kind = name.partition(":")[0]
        try:
            times[kind] = phase_times(model, machine, source=name)
        except SpecError as problem:
            if kind == "roofline":
                raise
            absent[kind] = str(problem)
    return TimeSources(times=times, absent=absent)


def compare_sources(model: Model, machine: Machine, *, source: str = "aiconfigurator") -> list[SourceComparison]:
    """Return the same iterations from every source that covers a model on a machine; see `compare_times`.

    Args:
        model: The model.
        machine: The machine.
        source: `aiconfigurator[:engine[:version]]`: which of its tables.

    Raises:
        SpecError: As `time_sources`.
    """
    return compare_times(time_sources(model, machine, source=source).times)


def compare_times(found: Mapping[str, PhaseTimes]) -> list[SourceComparison]:
    """Return the same iterations from every source that covers them, prompts first.

    A source covers what lies inside the data it rests on; the roofline, which rests on none, covers everything.
    Where no other source covers an iteration it is left out, so without any the list is empty.

    Args:
        found: Source to its phase times, "roofline" among them.
    """
    rows = [_row("prefill", tokens, found) for tokens in COMPARED_PROMPT_TOKENS]
    rows += [_row("decode", requests, found) for requests in COMPARED_REQUESTS]
    return [row for row in rows if len(row.seconds) > 1]


def _row(phase: Literal["prefill", "decode"], size: int, found: Mapping[str, PhaseTimes]) -> SourceComparison:
    seconds: dict[str, float] = {}
    for name, times in found.items():
        knots = times.prefill_knots_tokens if phase == "prefill" else times.decode_knots_requests
        largest = times.measured_prompt_tokens if phase == "prefill" else times.measured_requests
        if name == "roofline" or knots[0] <= size <= largest:
            context_tokens = size * COMPARED_CONTEXT_TOKENS
            at = times.prefill_time_s(size) if phase == "prefill" else times.decode_time_s(size, context_tokens)
            seconds[name] = float(at)
    return SourceComparison(phase=phase, size=size, seconds=seconds)
