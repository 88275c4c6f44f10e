"""Answers to a plan's questions in a file, so that a plan that was interrupted goes on where it was."""

import dataclasses
import fcntl
import hashlib
import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from pydantic import TypeAdapter, ValidationError

from phasesplit._version import __version__
from phasesplit.errors import SpecError
from phasesplit.planner.probe import Answer, Question
from phasesplit.planner.problem import ADDITIVE, Problem

MOST_ANSWERS = 1_000_000
"""No more answers than this are kept in a file; later ones only in memory."""

_SOURCES = ("domain", "scheduler", "simulator", "planner")
_KIND = "phasesplit plan journal"
_LARGEST_BYTES = 1 << 30

Key = tuple[str, tuple[int, ...], float, int, tuple[float, ...]]
_ENTRY = TypeAdapter(tuple[Key, Answer])
"""A line of the file after its header; NaN and infinity as Python writes them."""


class FileJournal:
    """A `drive.Journal` in a file of JSON lines: a header, then one line for each answer.

    The header names what answers depend on: of the problem, everything but the rate, the seeds, the objective and those
    budgets that follow from the machines alone; of phasesplit, the sources. A last line that a crash left half-written
    is cut off. One plan at a time may use a file.

    Args:
        path: The file; begun anew where there is none.
        problem: The problem that questions are about.

    Raises:
        SpecError: The file is no journal, is one of another problem or of another phasesplit, or cannot be used.
    """

    def __init__(self, path: str | Path, problem: Problem) -> None:
        self._path = Path(path)
        self._answers: dict[Key, Answer] = {}
        self._header = {"kind": _KIND, "problem": problem_digest(problem), "phasesplit": f"{__version__} {_sources()}"}
        self._file = self._opened()

    def get(self, question: Question) -> Answer | None:
        """Return the answer known, None if there is none."""
        return self._answers.get(_key(question))

    def put(self, question: Question, answer: Answer) -> None:
        """Keep an answer; it is in the file before this returns.

        Raises:
            SpecError: The file cannot be written.
        """
        key = _key(question)
        self._answers[key] = answer
        if len(self._answers) <= MOST_ANSWERS:
            self._write([list(key), list(answer)])

    def __len__(self) -> int:
        return len(self._answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _opened(self) -> IO[bytes]:
        try:
            there = self._path.exists()
            if there and not self._path.is_file():
                raise SpecError(f"{self._path}: cannot be used as a journal, it is not a file")
            if there and self._path.stat().st_size > _LARGEST_BYTES:
                raise SpecError(f"{self._path}: too large for a journal of a plan")
            content = self._path.read_bytes() if there else b""
            whole = content[: content.rfind(b"\n") + 1]  # nothing, where only the start of a header was written
            if content and not _packed(self._header).startswith(content):
                self._read(whole.splitlines())
            file = self._path.open("r+b" if there else "xb")
            self._lock(file)
            file.truncate(len(whole))
            file.seek(len(whole))
        except OSError as problem:
            raise SpecError(f"{self._path}: cannot be used as a journal, {problem.strerror}") from problem
        if not whole:
            self._file = file
            self._write(self._header)
        return file

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise SpecError(f"{self._path}: another plan is using this journal; name another file") from None

    def _read(self, lines: list[bytes]) -> None:
        header = _line(lines[0]) if lines else None
        if not isinstance(header, dict) or header.get("kind") != _KIND:
            raise SpecError(f"{self._path}: not a journal of a plan; name another file, or delete it")
        for field, what in (("phasesplit", "by another version of phasesplit"), ("problem", "for another problem")):
            if header.get(field) != self._header[field]:
                raise SpecError(f"{self._path}: this journal was written {what}; name another file, or delete it")
        for number, line in enumerate(lines[1:], start=2):
            try:
                key, answer = _ENTRY.validate_json(line, strict=True)
            except ValidationError:
                raise SpecError(f"{self._path}, line {number}: not an answer; delete the file") from None
            self._answers[key] = answer

    def _write(self, content: object) -> None:
        try:
            self._file.write(_packed(content))
            self._file.flush()
        except OSError as problem:
            raise SpecError(f"{self._path}: cannot be written ({problem.strerror})") from problem


def problem_digest(problem: Problem) -> str:
    """Return a digest of what answers to questions about a problem depend on; the same in every process."""
    traffic = problem.traffic
    parts = (
        problem.model,
        [(offer.machine, offer.times) for offer in problem.offers],
        (traffic.source, traffic.duration_s, traffic.arrivals, traffic.oracle),
        problem.slo,
        problem.reference,
        problem.rules,
        problem.grid_kg_per_kwh,
        # Whether a simulation draws too much is part of its answer.
        [(measure, most) for measure, most in sorted(problem.budgets.items()) if measure not in ADDITIVE],
    )
    digest = hashlib.sha256()
    _add(digest, parts)
    return digest.hexdigest()[:32]


def _add(digest: Any, value: Any) -> None:
    """Add a value and all within it to a digest, each part with its kind and its size."""
    if isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype.str} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif dataclasses.is_dataclass(value):
        digest.update(f"{type(value).__name__}(".encode())
        for field in dataclasses.fields(value):
            digest.update(f"{field.name}=".encode())
            _add(digest, getattr(value, field.name))
        digest.update(b")")
    elif isinstance(value, Mapping):
        _add(digest, sorted(value.items(), key=str))
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}:".encode())
        for one in value:
            _add(digest, one)
    elif value is None or isinstance(value, str | bool | int | float | Enum):
        text = repr(value.value if isinstance(value, Enum) else value)
        digest.update(f"{len(text)}:{text};".encode())
    else:
        raise TypeError(f"no digest of a {type(value).__name__}")


def _sources() -> str:
    """Return a digest of the sources that answers come from."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for package in _SOURCES:
        for path in sorted((root / package).glob("*.py")):
            digest.update(f"{package}/{path.name}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _key(question: Question) -> Key:
    # Within one problem a name has one design.
    return question.design.name, question.counts, question.rate_per_s, question.seed, tuple(question.variation)


def _packed(content: object) -> bytes:
    # NaN and infinity as Python writes and reads them.
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def _line(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
