"""Phase times by name: from the shipped measurements, from a measured profile of one's own, or from the roofline."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.machine import Machine
from phasesplit.domain.measured import Measurements, profile_times, published_times
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.roofline import (
    ENGINE_2023_OVERHEAD_PER_LAYER_S,
    MODERN_OVERHEAD_PER_LAYER_S,
    PairError,
    calibration_error,
    roofline_times,
)
from phasesplit.domain.variants import fitting_degree, sliced
from phasesplit.errors import SpecError
from phasesplit.files.specs import is_path, known_machines, known_models, load_machine, load_model

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
        from phasesplit.files.operator_engine import engine_named
        from phasesplit.files.operator_tables import operator_times

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
    return times.scaled(machine.prompt_time_factor, machine.token_time_factor)


def _own_times(profile: str | Path, model: Model, machine: Machine) -> PhaseTimes:
    if Path(profile).suffix != ".json":
        return profile_times(read_profile(profile, model, machine))
    from phasesplit.files.profile_files import measured_times

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
        prompt_s=_column(rows, "prompt_s"),
        token_s=_column(rows, "token_s"),
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
        prompt_s=_column(kept, "prompt_time") / 1e3,
        token_s=_column(kept, "token_time") / 1e3,
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
        _column(rows, "prompt_s"),
        _column(rows, "token_s"),
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
