"""Answers in this process, one after the other."""

from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Generic, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class InThisProcess(Generic[Question, Answer]):
    """Workers of which there is one, and it is this process: a question is answered when it is asked.

    Args:
        answer: Answers one question.
    """

    width = 1

    def __init__(self, answer: Callable[[Question], Answer]) -> None:
        self._answer = answer

    def submit(self, question: Question) -> Future[Answer]:
        """Answer a question and return the finished future; what the answer raises is in it, except KeyboardInterrupt.

        Args:
            question: What `answer` takes.
        """
        future: Future[Answer] = Future()
        try:
            future.set_result(self._answer(question))
        except Exception as problem:
            future.set_exception(problem)
        return future

    def __enter__(self) -> "InThisProcess[Question, Answer]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
