"""Which core each process computes on, and how much of it."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SHARED = 0.9
"""Of a core that several share: the rest is for reading requests and copying KV, and lets a late iteration catch up."""

_CPU_FIELDS = slice(11, 13)
"""User and system time, counted from the state that follows the name in /proc/PID/stat."""

_HOST_FIELDS = (0, 1, 2, 5, 6, 7)
"""User, nice, system, interrupts, and what a hypervisor took, in the first line of /proc/stat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """Where workers compute, and how much of it is theirs.

    Attributes:
        workers: Worker to its core.
        front: The cores of gateway and client; none of them is a worker's, unless there is only one core.
        core_share: What each worker may use of its core, 0 to 1.
    """

    workers: Mapping[str, int]
    front: frozenset[int]
    core_share: float


def core_plan(workers: Sequence[str], cores: Sequence[int] | None = None) -> CorePlan:
    """Return a plan in which nobody takes another's time: gateway and client apart, and each worker its share.

    Where there are more cores than workers, each worker has one. Where there are fewer, the first core is for gateway
    and client, and the workers share the others evenly, less a part that is left for what they do besides iterations.

    Args:
        workers: Their names, at least one.
        cores: Numbers of the cores; None: those that this process may use.
    """
    usable = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    front = usable[: max(1, len(usable) - len(workers))]
    own = usable[len(front) :] or usable
    sharers = -(-len(workers) // len(own)) + (own == front)
    return CorePlan(
        workers={name: own[index % len(own)] for index, name in enumerate(workers)},
        front=frozenset(front),
        core_share=1.0 if sharers == 1 else SHARED / sharers,
    )


@contextlib.contextmanager
def pinned(plan: CorePlan, workers: Mapping[str, int], front: Iterable[int]) -> Iterator[None]:
    """Let processes compute where a plan says until the block ends; those of the front then go where they may.

    Args:
        plan: The plan.
        workers: Worker to its process.
        front: Processes of gateway and client.
    """
    usable, front = os.sched_getaffinity(0), list(front)
    for name, pid in workers.items():
        pin(pid, {plan.workers[name]})
    try:
        for pid in front:
            pin(pid, plan.front)
        yield
    finally:
        for pid in front:
            with contextlib.suppress(OSError):  # it has ended meanwhile
                pin(pid, usable)


def pin(pid: int, cores: Collection[int], root: Path = Path("/proc")) -> None:
    """Let all threads of a process, and those they start, compute on some cores alone."""
    for thread in (root / str(pid) / "task").iterdir():
        os.sched_setaffinity(int(thread.name), cores)


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
