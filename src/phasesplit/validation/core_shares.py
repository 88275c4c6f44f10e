"""Which core each process computes on, and how much of it."""

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phasesplit.errors import SpecError

SHARED = 0.9
"""Of a core that several share: the rest is for reading requests and copying KV, and lets a late iteration catch up."""

_PARENT_FIELD, _CPU_FIELDS = 1, slice(11, 13)
"""Parent, and user and system time, counted from the state that follows the name in /proc/PID/stat."""

_HOST_FIELDS = (0, 1, 2, 5, 6, 7)
"""User, nice, system, interrupts, and what a hypervisor took, in the first line of /proc/stat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorePlan:
    """Where workers compute, and how much of it is theirs.

    Attributes:
        workers: Worker to its cores.
        front: The cores of gateway and client; none of them is a worker's, unless there are too few.
        core_share: What each worker may use of its cores, 0 to 1.
        has_process_trees: Whether a worker is several processes, which share its cores among one another.
    """

    workers: Mapping[str, frozenset[int]]
    front: frozenset[int]
    core_share: float
    has_process_trees: bool = False

    @property
    def cores_each(self) -> int:
        """The fewest cores that a worker has, >= 1."""
        return min(map(len, self.workers.values()))


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
        workers={name: frozenset({own[index % len(own)]}) for index, name in enumerate(workers)},
        front=frozenset(front),
        core_share=1.0 if sharers == 1 else SHARED / sharers,
    )


def whole_core_plan(workers: Sequence[str], cores: Sequence[int] | None = None) -> CorePlan:
    """Return a plan for workers of many threads, which cannot keep to a share: each has as many whole cores.

    The first core is for gateway and client where there are more cores than workers. Where there are not, they compute
    on all of them, next to the workers.

    Args:
        workers: Their names, at least one.
        cores: Numbers of the cores; None: those that this process may use.

    Raises:
        SpecError: There are fewer cores than workers.
    """
    usable = sorted(os.sched_getaffinity(0)) if cores is None else list(cores)
    if len(usable) < len(workers):
        raise SpecError(
            f"{len(workers)} vLLM machines on {len(usable)} cores: each needs a core of its own, for what they would "
            "show is how they wait for one another"
        )
    own = usable[1:] if len(usable) > len(workers) else usable
    each = len(own) // len(workers)
    taken = {name: frozenset(own[index * each : (index + 1) * each]) for index, name in enumerate(workers)}
    front = frozenset(usable).difference(*taken.values())
    return CorePlan(workers=taken, front=front or frozenset(usable), core_share=1.0, has_process_trees=True)


@contextlib.contextmanager
def pinned(plan: CorePlan, workers: Mapping[str, int], front: Iterable[int]) -> Iterator[None]:
    """Let processes compute where a plan says until the block ends; those of the front then go where they may.

    Args:
        plan: The plan.
        workers: Worker to its process; those that it has started go with it.
        front: Processes of gateway and client.
    """
    usable, front = os.sched_getaffinity(0), list(front)
    for name, pid in workers.items():
        for each in with_descendants(pid):
            pin(each, plan.workers[name])
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
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def with_descendants(pid: int, root: Path = Path("/proc")) -> list[int]:
    """Return a process that runs, and all that it and they have started; none where it does not run."""
    children: dict[int, list[int]] = {}
    for place in root.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            children.setdefault(int(_fields(int(place.name), root)[_PARENT_FIELD]), []).append(int(place.name))
    found = [pid] if (root / str(pid)).exists() else []
    for one in found:
        found += children.get(one, ())
    return found


def cpu_s(pid: int, root: Path = Path("/proc")) -> float:
    """Return how long the threads of a process, and those of all that it has started, have computed so far."""
    ticks = 0
    for each in with_descendants(pid, root):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            ticks += sum(map(int, _fields(each, root)[_CPU_FIELDS]))
    return ticks / os.sysconf("SC_CLK_TCK")


def core_wait_s(pid: int, root: Path = Path("/proc")) -> float:
    """Return how long the threads of a process and of all that it has started were ready so far, but had no core.

    0 where nobody counts.
    """
    waited_ns = 0
    for each in with_descendants(pid, root):
        for schedule in (root / str(each) / "task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile, or nobody counts
                waited_ns += int(schedule.read_text(encoding="ascii").split()[1])
    return waited_ns / 1e9


def _fields(pid: int, root: Path) -> list[str]:
    """Return what /proc/PID/stat says after the name."""
    return (root / str(pid) / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()


def cores_text(cores: Collection[int]) -> str:
    """Return numbers of cores as people write them: `1`, `0-3`, `0,4-7`."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def host_cpu_s(root: Path = Path("/proc")) -> float:
    """Return how long all cores of this host have computed so far, for whomever."""
    fields = (root / "stat").read_text(encoding="ascii", errors="replace").split("\n", 1)[0].split()[1:]
    return sum(int(fields[index]) for index in _HOST_FIELDS) / os.sysconf("SC_CLK_TCK")
