"""The decision log's file: lines appended while the cluster serves, and read back one by one."""

import gzip
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from phasesplit.errors import SpecError

_LONGEST_LINE_BYTES = 1 << 20
_GZIP = b"\x1f\x8b"


class DecisionLog:
    """A new file that takes lines; each is in the file before `write` returns, so that a killed gateway loses none.

    A cluster serves on when the file takes no more (a full disk): the log ends there.

    Attributes:
        broken: Why it has ended early; empty as long as it has not.

    Args:
        path: The file; one that is there is not written over.

    Raises:
        SpecError: It is there already, or cannot be written.
    """

    def __init__(self, path: str | Path) -> None:
        self.broken = ""
        try:
            self._file = Path(path).open("xb")  # noqa: SIM115 - closed by `close`
        except FileExistsError:
            raise SpecError(f"{path}: a file is there already; name another one for the decision log") from None
        except (OSError, ValueError) as problem:
            raise SpecError(f"{path}: cannot be written ({getattr(problem, 'strerror', None) or problem})") from None

    def write(self, line: bytes) -> None:
        """Take a line, with its line feed."""
        if not self.broken:
            try:
                self._file.write(line)
                self._file.flush()
            except OSError as problem:
                self._give_up(problem)

    def close(self) -> None:
        """Take no more."""
        try:
            self._file.close()
        except OSError as problem:
            self._give_up(problem)

    def _give_up(self, problem: OSError) -> None:
        self.broken = problem.strerror or str(problem)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_decisions(path: str | Path) -> Iterator[bytes]:
    """Yield a log's lines, each with its line feed, from a file that may be compressed by gzip.

    Raises:
        SpecError: The file cannot be read, or has a line that is far too long for a log.
    """
    try:
        with Path(path).open("rb") as start:
            compressed = start.read(len(_GZIP)) == _GZIP
        file: IO[bytes]
        with gzip.open(path, "rb") if compressed else Path(path).open("rb") as file:  # type: ignore[assignment]
            number = 1
            while line := file.readline(_LONGEST_LINE_BYTES):
                if len(line) == _LONGEST_LINE_BYTES:
                    raise SpecError(f"{path}, line {number}: longer than any line of a decision log")
                yield line
                number += 1
    except FileNotFoundError:
        raise SpecError(f"{path}: no such file") from None
    except EOFError:
        raise SpecError(f"{path}: the gzip file is cut off before its end") from None
    except (OSError, ValueError) as problem:
        raise SpecError(f"{path}: cannot be read ({getattr(problem, 'strerror', None) or problem})") from None
