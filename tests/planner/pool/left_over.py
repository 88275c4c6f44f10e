"""Which processes that a test has started are still there."""

import contextlib
import time
import uuid
from pathlib import Path


def new_mark() -> dict[str, str]:
    """Return an entry for the environment by which all processes under one are found again."""
    return {"PHASESPLIT_TEST_MARK": uuid.uuid4().hex}


def marked(mark: dict[str, str]) -> list[int]:
    """Return the processes that have a mark, and have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark["PHASESPLIT_TEST_MARK"].encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def none_left(mark: dict[str, str]) -> bool:
    """Return whether all processes with a mark have ended, within some seconds."""
    for _ in range(100):
        if not marked(mark):
            return True
        time.sleep(0.1)
    return False
