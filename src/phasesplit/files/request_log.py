"""Records of requests that a gateway has served: one JSON object a line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from phasesplit.errors import SpecError


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
