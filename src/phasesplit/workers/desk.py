"""The worker's side of a question: bytes in, bytes out, whatever goes wrong between."""

import pickle
import traceback
from collections.abc import Callable
from typing import Any

from phasesplit.errors import SimulationError, SpecError


class Desk:
    """Answers packed questions, in the process of the worker.

    Args:
        packed_answer: The pickled callable that answers a question.
    """

    def __init__(self, packed_answer: bytes) -> None:
        self._answer = _loaded(packed_answer)

    def reply(self, packed_question: bytes) -> bytes:
        """Return the packed outcome: the answer, or the exception it raised with its traceback as a note.

        Args:
            packed_question: The pickled question.
        """
        try:
            return _packed((True, self._answer(pickle.loads(packed_question))))  # noqa: S301 - from our own parent
        except Exception as problem:
            problem.add_note("".join(traceback.format_exception(problem)))
            return _packed((False, _portable(problem)))


def opened(packed_outcome: bytes) -> Any:
    """Return the answer in what `Desk.reply` returned.

    Args:
        packed_outcome: What `Desk.reply` returned.

    Raises:
        Exception: What the answer raised.
    """
    answered, value = pickle.loads(packed_outcome)  # noqa: S301 - from a worker that this process started
    if not answered:
        raise value
    return value


def _packed(value: object) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def _loaded(packed_answer: bytes) -> Callable[[Any], Any]:
    try:
        answer: Callable[[Any], Any] = pickle.loads(packed_answer)  # noqa: S301 - from our own parent
    except Exception as problem:
        refusal = (
            f"workers: the answer cannot be loaded in another process ({problem}); "
            "its classes and functions must stand in a module, not in the script that is run"
        )

        def refuse(_question: Any) -> Any:
            raise SpecError(refusal)

        return refuse
    return answer


def _portable(problem: Exception) -> Exception:
    """Return the exception, or one that says the same where it does not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(problem))  # noqa: S301 - made in this line
    except Exception:
        told = SimulationError(f"{type(problem).__name__}: {problem}")
        told.__notes__ = list(problem.__notes__)
        return told
    return problem
