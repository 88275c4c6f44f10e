"""The cores that a process may use, on file systems made up for it."""

import os
from pathlib import Path

import pytest

from phasesplit.planner.pool.cores import usable_cores

ALLOWED = len(os.sched_getaffinity(0))


def rooted(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return tmp_path


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, None, id="no cgroups"),
        pytest.param({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/cpu.max": "max 100000"}, None, id="no quota"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1, id="one core"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "20000 100000"}, 1, id="a fifth of one"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "110000 100000"}, 2, id="rounded up"),
        pytest.param(
            {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "100000 100000"}, 1, id="of the group above"
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/a\n0::/\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
            },
            1,
            id="version 1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu:/a\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            },
            None,
            id="version 1, no quota",
        ),
    ],
)
def test_quota_of_the_control_group_counts(tmp_path: Path, files: dict[str, str], quota: int | None) -> None:
    """A container with one core of a large machine would get as many processes as the machine has cores."""
    assert usable_cores(rooted(tmp_path, files)) == (ALLOWED if quota is None else min(quota, ALLOWED))
