"""Where the Unix sockets of a host's workers are: a directory that goes with the process that made it."""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"phasesplit-(\d+)-\w+")


@contextlib.contextmanager
def socket_directory() -> Iterator[str]:
    """Make a directory for as long as the block runs, and remove those that killed processes have left behind."""
    _remove_orphans(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=f"phasesplit-{os.getpid()}-", ignore_cleanup_errors=True) as directory:
        yield directory


def _remove_orphans(place: Path) -> None:
    """Remove the directories of this user's processes that are no more."""
    for path in place.glob("phasesplit-*"):
        found = _NAME.fullmatch(path.name)
        if found is None or Path(f"/proc/{found[1]}").exists():
            continue
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
