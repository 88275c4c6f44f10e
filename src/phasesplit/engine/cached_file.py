"""Files fetched once and kept: where, whole or not at all, and one process at a time."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from phasesplit.atomic_files import atomic_path
from phasesplit.errors import SpecError

Say = Callable[[str], None]
"""Takes one line for a person: what takes time."""
_PIECE_BYTES = 1 << 20


class Source(Protocol):
    """Where bytes come from: an open file, a response."""

    def read(self, size: int, /) -> bytes:
        """Return up to so many bytes, none at the end."""


def cache_directory() -> Path:
    """Return where models are kept: under PHASESPLIT_CACHE_DIR, XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("PHASESPLIT_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "phasesplit" / "models"


@contextlib.contextmanager
def alone(path: Path, say: Say) -> Iterator[Path]:
    """Hold other processes that want the same file off, and give a directory on its disk that goes when the block ends.

    Args:
        path: The file or directory to be made; its own directory is made too, and a lock file stays next to it.
        say: Called when another process is at it.

    Raises:
        SpecError: The directory cannot be written.
    """
    lock, start = path.with_name(f"{path.name}.lock"), f"{path.name}.part-"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("ab")
    except OSError as error:
        raise SpecError(f"{lock}: cannot be written: {error.strerror or error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            say(f"waiting for another process that fetches {path.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        for left in path.parent.glob(f"{start}*"):  # by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=start) as scratch:
            yield Path(scratch)


def is_whole(path: Path, sha256: str) -> bool:
    """Return whether a kept file has the digest it should have.

    The whole file is read only when its size or its time differ from those at which it was last found right.

    Args:
        path: The file; its stamp is next to it.
        sha256: The digest, in hexadecimal.
    """
    try:
        now = _stamp(path, sha256)
    except OSError:
        return False
    stamp = _stamp_path(path)
    try:
        if json.loads(stamp.read_bytes()) == now:
            return True
    except (OSError, ValueError):
        pass
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return False
    if found == sha256:
        _remember(path, sha256)
    return found == sha256


def write_checked(path: Path, source: Source, *, size_bytes: int, sha256: str | None, where: str) -> None:
    """Write what a source gives, and check it on the way.

    Args:
        path: A new file in the directory that `alone` gave.
        source: Gives its bytes.
        size_bytes: How many there have to be.
        sha256: Their digest in hexadecimal, None where it is not known.
        where: The source's name, for messages.

    Raises:
        SpecError: Size or digest is another.
        OSError: It cannot be read or written.
    """
    digest, left = hashlib.sha256(), size_bytes
    with path.open("xb") as file:
        while piece := source.read(min(_PIECE_BYTES, left + 1)):
            left -= len(piece)
            if left < 0:
                raise SpecError(f"{where}: has more than the {size_bytes} bytes it should have")
            digest.update(piece)
            file.write(piece)
    if left:
        raise SpecError(f"{where}: broke off after {size_bytes - left} of {size_bytes} bytes")
    if sha256 is not None and digest.hexdigest() != sha256:
        raise SpecError(f"{where}: has the sha256 {digest.hexdigest()}, it should be {sha256}")


def adopt(made: Path, path: Path, sha256: str) -> None:
    """Put a checked file in its place.

    Args:
        made: The file, which `write_checked` wrote.
        path: Its place; what was there is replaced.
        sha256: Its digest, in hexadecimal.

    Raises:
        OSError: It cannot be put there.
    """
    made.replace(path)
    _remember(path, sha256)


def _stamp_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.stamp")


def _stamp(path: Path, sha256: str) -> dict[str, int | str]:
    status = path.stat()
    return {"size_bytes": status.st_size, "changed_ns": status.st_mtime_ns, "sha256": sha256}


def _remember(path: Path, sha256: str) -> None:
    """Write the stamp; where that fails, the next start reads the whole file again."""
    stamp = _stamp_path(path)
    with contextlib.suppress(OSError), atomic_path(stamp) as part:
        part.write_text(json.dumps(_stamp(path, sha256)), encoding="utf-8")
