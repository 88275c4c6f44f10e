"""What the processor, the memory and the kernel of this machine offer to a cluster."""

import os
import resource
import time
from pathlib import Path

from phasesplit.measuring.checkup import Finding, State

_NEEDED_BYTES = 600e6
"""Two workers and the gateway as they start, before KV. Source: measured: `phasesplit serve`, resident sizes."""
_FILES_PER_REQUEST = 3
"""Of the gateway: the client's connection and those of both legs."""
_FEWEST_FILES = 128
_NAPS, _NAP_S, _LATE_S = 20, 0.001, 0.001
_ROOT = Path("/")


def processor() -> Finding:
    """Return which kernels of the engine are used on this processor."""
    from phasesplit.engine.kernels import compiling

    name = compiling.PROCESSOR
    if not compiling.IS_COMPILED:
        return Finding(
            "processor", State.NOTE, f"{name}: nothing is compiled, hundreds of times slower", "unset PHASESPLIT_JIT"
        )
    if compiling.HAS_AVX512:
        return Finding("processor", State.OK, f"{name}: AVX-512 kernels, 16 numbers at a time")
    if compiling.HAS_AVX2:
        return Finding("processor", State.OK, f"{name}: AVX2 and FMA kernels, 8 numbers at a time (no AVX-512)")
    return Finding("processor", State.NOTE, f"{name}: plain kernels, slow: it has neither AVX-512 nor AVX2 with FMA")


def cores() -> Finding:
    """Return how many cores this process may use, against the workers of the default cluster."""
    from phasesplit.files.serve_files import ServedCluster
    from phasesplit.pool.cores import usable_cores

    usable, there = usable_cores(), os.cpu_count() or 1
    workers = sum(ServedCluster().pools.values())
    says = f"{usable} to use" + (f" of {there} (affinity or a quota)" if usable < there else "")
    if usable < workers:
        return Finding("cores", State.NOTE, f"{says}; the {workers} workers of `serve` take turns on them")
    return Finding("cores", State.OK, f"{says}; `serve` has {workers} workers, with one core each")


def memory(root: Path = _ROOT) -> Finding:
    """Return how much memory is free, against what the default cluster takes."""
    from phasesplit.files.serve_files import ServedCluster

    free = _free_bytes(root)
    cluster = ServedCluster()
    full = _NEEDED_BYTES + cluster.kv_bytes * sum(cluster.pools.values())
    says = f"{free / 1e9:.1f} GB free"
    if free < _NEEDED_BYTES:
        return Finding("memory", State.STOPS, f"{says}; `serve` starts with {_NEEDED_BYTES / 1e9:.1f} GB")
    if free < full:
        return Finding("memory", State.NOTE, f"{says}; `serve` takes {full / 1e9:.1f} GB when its KV is full",
                       "phasesplit serve --kv-memory 128MB")  # fmt: skip
    return Finding("memory", State.OK, f"{says}; `serve` takes at most {full / 1e9:.1f} GB, KV included")


def descriptors() -> Finding:
    """Return how many files and sockets a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("descriptors", State.OK, "no limit of open files")
    says = f"{soft:,} open files: about {soft // _FILES_PER_REQUEST:,} requests at once"
    if soft >= 1024:
        return Finding("descriptors", State.OK, says)
    more = "more" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    state = State.NOTE if soft >= _FEWEST_FILES else State.STOPS
    return Finding("descriptors", state, says, f"ulimit -n {more}" if hard != soft else "")


def clock(root: Path = _ROOT) -> Finding:
    """Return how late a process wakes up: a replay's instants and all times measured depend on it."""
    late_s = []
    for _ in range(_NAPS):
        began_s = time.perf_counter()
        time.sleep(_NAP_S)
        late_s.append(time.perf_counter() - began_s - _NAP_S)
    middle_s = sorted(late_s)[_NAPS // 2]
    try:
        kind = (root / "sys/devices/system/clocksource/clocksource0/current_clocksource").read_text("ascii").strip()
    except OSError:
        kind = "unknown source"
    says = f"{kind}; wakes up {middle_s * 1e3:.2f} ms late (median of {_NAPS}), {max(late_s) * 1e3:.1f} ms at worst"
    if middle_s > _LATE_S:
        return Finding("clock", State.NOTE, f"{says}: the host is busy, measured times are long", "end what else runs")
    return Finding("clock", State.OK, says)


def power(root: Path = _ROOT) -> Finding:
    """Return whether power can be read, which only profiles use."""
    from phasesplit.measuring.power import NotReadableError, PowerMeter

    try:
        return Finding("power", State.OK, PowerMeter(root).source)
    except NotReadableError as reason:
        return Finding("power", State.ABSENT, f"`profile` cannot read it: {reason}",
                       "phasesplit profile --power IDLE,PROMPT,TOKEN")  # fmt: skip


def _free_bytes(root: Path) -> float:
    """Return free memory: the kernel's estimate, or what a control group leaves.

    Source: Linux kernel, filesystems/proc.rst (MemAvailable), admin-guide/cgroup-v2.rst (memory.max).
    """
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = root / "sys/fs/cgroup"
    try:
        most, used = ((group / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return min(free, float(most) - float(used)) if most.isdigit() else free


CHECKS = (
    ("processor", processor),
    ("cores", cores),
    ("memory", memory),
    ("descriptors", descriptors),
    ("clock", clock),
    ("power", power),
)
