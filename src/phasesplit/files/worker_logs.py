"""What workers write, each in a file of its own."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from phasesplit.errors import SpecError


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
