"""A profile as its file keeps it: what was measured, read back for `--resume`, and what this host is."""

import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasesplit.errors import SpecError
from phasesplit.kv_transfer.layout import shown
from phasesplit.profiling.fitting import Shape, Timed
from phasesplit.profiling.profiler import Errors, Profiled

if TYPE_CHECKING:
    from phasesplit.io.profile_schema import Knots, MachineFacts, ModelFacts, PhaseErrors, ProfileSpec, TimedRuns


PHASES = ("prefill", "decode", "mixed")
_DIGITS = 7
_SAME = ("processor", "cores", "threads", "features", "memory_bytes")
_SAME_SETTINGS = ("kv_bytes", "concurrency")


def knots(found: Profiled) -> "Knots | None":
    """Return the phase times as a file keeps them."""
    from phasesplit.io.profile_schema import Knots

    times = found.times
    if times is None:
        return None
    return Knots(
        prefill_knots_tokens=tuple(times.prefill_knots_tokens.tolist()),
        prefill_knots_s=_rounded(times.prefill_knots_s.tolist()),
        decode_knots_requests=tuple(times.decode_knots_requests.tolist()),
        decode_knots_s=_rounded(times.decode_knots_s.tolist()),
        prefill_pair_s=times.prefill_pair_s,
        decode_context_s=times.decode_context_s,
        measured_prompt_tokens=times.measured_prompt_tokens,
        measured_requests=times.measured_requests,
    )


def errors(found: Profiled) -> dict[str, "PhaseErrors"]:
    """Return the held-out errors over all phases and of each that was checked."""
    by_phase = {"all": found.errors()} | {phase: found.errors(phase) for phase in PHASES}
    return {name: _phase_errors(one) for name, one in by_phase.items() if one.count or name == "all"}


def iterations(found: Profiled) -> tuple["TimedRuns", ...]:
    """Return everything that was timed, in order of shape."""
    from phasesplit.io.profile_schema import TimedRuns

    return tuple(
        TimedRuns(
            **asdict(one.shape),
            held_out=one.is_held_out,
            median_s=one.median_s,
            spread_s=one.spread_s,
            runs=len(one.runs_s),
            rejected=one.rejected,
            runs_s=_rounded(one.runs_s),
        )
        for one in sorted(found.timed, key=lambda one: one.shape)
    )


def known_iterations(
    profile: "ProfileSpec",
    where: str,
    *,
    target: str,
    machine: "MachineFacts",
    model: "ModelFacts",
    settings: dict[str, Any],
) -> tuple[Timed, ...]:
    """Return what an earlier profile measured, to go on from there.

    Args:
        profile: The profile.
        where: How the person knows it.
        target: What is measured now; it must be the same, as must be the rest.
        machine: The machine now.
        model: The model now.
        settings: The settings now, of which those that set what can be asked for count.

    Raises:
        SpecError: It measured something else.
    """
    then: list[tuple[str, object, object]] = [("target", profile.target, target)]
    then += [(f"machine, {name}", getattr(profile.machine, name), getattr(machine, name)) for name in _SAME]
    then += [("model", profile.model.name, model.name), ("weights", profile.model.digest, model.digest)]
    then += [(f"settings, {name}", profile.settings.get(name), settings.get(name)) for name in _SAME_SETTINGS]
    for what, before, now in then:
        if before != now:
            raise SpecError(
                f"{where}, {what}: measured was {shown(before)}, here it is {shown(now)}; start a profile of its own"
            )
    return tuple(
        Timed(
            shape=Shape(
                prompts=one.prompts,
                prompt_tokens=one.prompt_tokens,
                behind_tokens=one.behind_tokens,
                requests=one.requests,
                context_tokens=one.context_tokens,
            ),
            runs_s=one.runs_s,
            is_held_out=one.held_out,
        )
        for one in profile.iterations
    )


def _phase_errors(found: Errors) -> "PhaseErrors":
    from phasesplit.io.profile_schema import PhaseErrors

    return PhaseErrors(
        count=found.count,
        mean=None if math.isnan(found.mean) else found.mean,
        worst=None if math.isnan(found.worst) else found.worst,
        worst_at="" if found.worst_at is None else str(found.worst_at),
    )


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    """Return times without digits that no clock gives: the file is read by people too."""
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values)


_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "sve",
)
"""Instruction sets that change how fast matrix products are."""
_SOFTWARE = ("numpy", "numba", "llvmlite")


def host_facts(name: str | None = None, *, threads: int | None = 1, root: Path = Path("/")) -> "MachineFacts":
    """Return what this host is.

    Args:
        name: As machine files call it; by default of its processor.
        threads: Threads that compute, None where it cannot be seen.
        root: What stands in for the root of the file system, in tests.
    """
    from phasesplit.io.profile_schema import MachineFacts
    from phasesplit.planner.pool.cores import usable_cores

    processor, flags = _processor(root / "proc/cpuinfo")
    return MachineFacts(
        name=name or f"{'-'.join(processor.lower().split()) or platform.machine()}-core",
        processor=processor or platform.machine(),
        cores=usable_cores(),
        threads=threads,
        features=tuple(feature for feature in _FEATURES if feature in flags),
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        system=f"{platform.system()} {platform.release()}",
    )


def software_versions() -> dict[str, str]:
    """Return versions of this package and of what sets the times of the embedded engine."""
    from importlib.metadata import version

    from phasesplit._version import __version__

    return {
        "phasesplit": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _SOFTWARE},
    }


def _processor(path: Path) -> tuple[str, frozenset[str]]:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "", frozenset()
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)  # those of the first core stay
    named = {name.strip(): value.strip() for name, value in fields.items()}
    flags = named.get("flags") or named.get("Features") or ""
    return named.get("model name", ""), frozenset(flags.split())
