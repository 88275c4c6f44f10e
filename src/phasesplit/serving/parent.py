"""A worker does not outlive the process that supervises it, however that one ends."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2)."""


def end_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; a stopped process is killed too.

    Args:
        parent: The parent's process id. Where it has gone already, this process exits.

    Raises:
        SystemExit: The parent has gone.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)
