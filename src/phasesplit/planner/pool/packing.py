"""A question and its outcome as bytes, whatever goes wrong between.

An executor pickles as well, but an exception that cannot be unpickled would break its pool.
"""

import pickle
import traceback
from collections.abc import Callable
from typing import Any

from phasesplit.errors import SimulationError, SpecError


def packed(value: object) -> bytes:
    """Return a value pickled.

    Args:
        value: Any value of classes and functions from modules.

    Raises:
        pickle.PicklingError: It cannot be pickled; AttributeError and TypeError say the same.
    """
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def unpacked_answer(packed_answer: bytes) -> Callable[[Any], Any]:
    """Return the callable that answers questions, or one that refuses them all where it cannot be loaded here.

    Args:
        packed_answer: It, pickled by the process that asks.
    """
    try:
        answer: Callable[[Any], Any] = pickle.loads(packed_answer)  # noqa: S301 - from the process that asks
    except Exception as problem:
        refusal = (
            f"workers: the answer cannot be loaded in another process ({problem}); "
            "its classes and functions must stand in a module, not in the script that is run"
        )

        def refuse(_question: Any) -> Any:
            raise SpecError(refusal)

        return refuse
    return answer


def outcome(answer: Callable[[Any], Any], packed_question: bytes) -> bytes:
    """Return the packed outcome: the answer, or the exception it raised with its traceback as a note.

    Args:
        answer: Answers one question.
        packed_question: The pickled question.
    """
    try:
        return packed((True, answer(pickle.loads(packed_question))))  # noqa: S301 - from the process that asks
    except Exception as problem:
        problem.add_note("".join(traceback.format_exception(problem)))
        return packed((False, _portable(problem)))


def unpacked_outcome(packed_outcome: bytes) -> Any:
    """Return the answer in what `outcome` returned.

    Args:
        packed_outcome: What `outcome` returned.

    Raises:
        Exception: What the answer raised.
    """
    answered, value = pickle.loads(packed_outcome)  # noqa: S301 - from a process that this one started
    if not answered:
        raise value
    return value


def _portable(problem: Exception) -> Exception:
    """Return the exception, or one that says the same where it does not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(problem))  # noqa: S301 - made in this line
    except Exception:
        same = SimulationError(f"{type(problem).__name__}: {problem}")
        same.__notes__ = list(problem.__notes__)
        return same
    return problem
