"""Which core each worker computes on, and what it costs to share one."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_CPU_FIELDS = slice(11, 13)
"""User and system time, counted from the state that follows the name in /proc/PID/stat."""

_HOST_FIELDS = (0, 1, 2, 5, 6, 7)
"""User, nice, system, interrupts, and what a hypervisor took, in the first line of /proc/stat."""


def core_plan(workers: Sequence[str], cores: Sequence[int] | None = None) -> dict[str, int]:
    """Return the core of each worker: one each, in order, and from the first one again where there are too few.

    Args:
        workers: Their names.
        cores: Numbers of the cores; None: those that this process may use.
    """
    usable = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    return {name: usable[index % len(usable)] for index, name in enumerate(workers)}


def pin(pid: int, core: int, root: Path = Path("/proc")) -> None:
    """Let all threads of a process, and those they start, compute on one core alone."""
    for thread in (root / str(pid) / "task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})


def cpu_s(pid: int, root: Path = Path("/proc")) -> float:
    """Return how long the threads of a process have computed so far."""
    fields = (root / str(pid) / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return sum(map(int, fields[_CPU_FIELDS])) / os.sysconf("SC_CLK_TCK")


def core_wait_s(pid: int, root: Path = Path("/proc")) -> float:
    """Return how long the threads of a process that runs were ready so far, but had no core; 0 where nobody counts."""
    waited_ns = 0
    for thread in (root / str(pid) / "task").iterdir():
        try:
            waited_ns += int((thread / "schedstat").read_text(encoding="ascii").split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has ended meanwhile, or the kernel keeps no account
    return waited_ns / 1e9


def host_cpu_s(root: Path = Path("/proc")) -> float:
    """Return how long all cores of this host have computed so far, for whomever."""
    fields = (root / "stat").read_text(encoding="ascii", errors="replace").split("\n", 1)[0].split()[1:]
    return sum(int(fields[index]) for index in _HOST_FIELDS) / os.sysconf("SC_CLK_TCK")


def shared_factors(plan: Mapping[str, int], busy: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each worker's iterations get longer because others compute on its core.

    While two compute at once, each gets half of the core; so an iteration takes longer by the share of its time in
    which another one computes, taken to be that one's share of all time.

    Args:
        plan: Worker to its core.
        busy: Worker to the share of time in which it computes, 0 to 1.

    Source: ours; the operating system's scheduler is fair over times of the order of an iteration.
    """
    return {
        name: 1.0 + sum(min(busy[other], 1.0) for other in plan if other != name and plan[other] == core)
        for name, core in plan.items()
    }
