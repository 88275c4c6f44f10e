"""Files that appear whole or not at all: written next to their place, then renamed."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path: str | Path, *, is_synced: bool = False, is_alone: bool = False) -> Iterator[Path]:
    """Give a path next to `path` to write to; what was written takes the place of `path`, unless the block fails.

    A failed block leaves `path` as it was, and nothing next to it. A link is followed: the file that it names changes.

    Args:
        path: The file. Its folder must exist.
        is_synced: Have the content on the disk before it gets its name, so that it is whole even after a power cut.
        is_alone: The caller sees to it that no other process writes the same file. The path next to it is then always
            the same one, so that the next call overwrites what a killed process left.

    Raises:
        OSError: The file cannot be written.
    """
    target = Path(path).resolve()
    # The ending stays at the end, because writers tell the format from it.
    part = target.with_name(f".{'' if is_alone else f'{os.getpid()}.'}part.{target.name}")
    try:
        yield part
        if is_synced:
            with part.open("rb") as file:
                os.fsync(file.fileno())
        part.replace(target)
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
