"""How many cores this process may use."""

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: those of its affinity mask, or fewer by the quota of its cgroup.

    A quota of one and a half cores counts as two: it is used up then, and with one it would not be.

    Args:
        root: What stands in for the root of the file system, in tests.
    """
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of this process's control group and all above it, in cgroup versions 1 and 2.

    Source: Linux kernel, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and scheduler/sched-bwc.rst (cfs_quota_us).
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = [*line.split(":", 2), "", ""][:3]
        top, files = root / "sys/fs/cgroup", ["cpu.max"]
        if hierarchy != "0":
            if "cpu" not in controllers.split(","):
                continue
            top, files = top / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        group = Path(path.lstrip("/"))
        # In a container the path may be that of the host, of which only the top is seen.
        for inner in (group, *group.parents):
            fields = " ".join(_text(top / inner / name) for name in files).split()
            if len(fields) == 2 and all(field.isdigit() for field in fields):  # "max" and -1: no quota
                yield int(fields[0]) / int(fields[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
