"""How long this process has been there: a worker's start-up counts from the start of its process."""

import os
import time
from pathlib import Path

_IMPORTED_S = time.monotonic()


def start_up_s() -> float:
    """Return the seconds since this process began, where the system does not say since this module was imported.

    Source: Linux, proc(5): the 22nd field of /proc/self/stat, in clock ticks since the boot.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return time.monotonic() - _IMPORTED_S
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
