"""Files that lines are appended to while a cluster serves.

- `DecisionLog`: every call of the scheduler; `read_decisions` reads it back, line by line.
- `RequestLog`: one JSON object for each request that the gateway has served.
- `WorkerLogs`: what each worker prints, in a file of its own.
"""

import gzip
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TextIO

import orjson

from phasesplit.errors import SpecError
from phasesplit.io.compression import GZIP

_LONGEST_LINE_BYTES = 1 << 20


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
                self._break_off(problem)

    def close(self) -> None:
        """Take no more."""
        try:
            self._file.close()
        except OSError as problem:
            self._break_off(problem)

    def _break_off(self, problem: OSError) -> None:
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
            compressed = start.read(len(GZIP)) == GZIP
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


class RequestLog:
    """A file that records are appended to.

    Args:
        path: Made where it is not there.

    Raises:
        SpecError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("ab")
        except OSError as problem:
            raise SpecError(f"--log-requests: {path} cannot be written: {problem.strerror or problem}") from None

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record; it is in the file when this returns."""
        self._file.write(orjson.dumps(record) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WorkerLogs:
    """Files of a directory, one for each worker, which lines are appended to.

    Args:
        directory: Made where it is not there.

    Raises:
        SpecError: It cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, TextIO] = {}
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / ".writable").touch()
            (directory / ".writable").unlink()
        except OSError as problem:
            raise SpecError(f"--logs: {directory} cannot be written: {problem.strerror or problem}") from None

    def write(self, name: str, line: str) -> None:
        """Append a line, with the time, to the worker's file; one that cannot be written is lost."""
        try:
            if name not in self._files:
                self._files[name] = (self._directory / f"{name}.log").open("a", encoding="utf-8", buffering=1)
            self._files[name].write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} {line}\n")
        except OSError:
            return
