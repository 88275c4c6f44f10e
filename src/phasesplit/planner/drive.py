"""Many searches at once over one set of workers: questions go out as they come, answers are kept."""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol, TypeVar

from phasesplit.planner.probe import Answer, Question
from phasesplit.planner.search import Stopped

Key = TypeVar("Key", bound=Hashable)


class Workers(Protocol):
    """Where questions are answered."""

    @property
    def width(self) -> int:
        """How many questions are worth asking at once."""

    def submit(self, question: Question) -> "Future[Answer]":
        """Return the future answer."""


class Journal(Protocol):
    """Answers by question, perhaps kept beyond this process."""

    def get(self, question: Question) -> Answer | None:
        """Return the answer known, None if there is none."""

    def put(self, question: Question, answer: Answer) -> None:
        """Keep an answer."""


class Interrupted(KeyboardInterrupt):
    """A person interrupted; `found` is what each search had by then, None where it had nothing.

    Args:
        found: By key of the search.
    """

    def __init__(self, found: dict[Any, Any]) -> None:
        super().__init__("interrupted")
        self.found = found


class MemoryJournal:
    """A journal of this process alone."""

    def __init__(self) -> None:
        self._answers: dict[Question, Answer] = {}

    def get(self, question: Question) -> Answer | None:
        """Return the answer known, None if there is none."""
        return self._answers.get(question)

    def put(self, question: Question, answer: Answer) -> None:
        """Keep an answer."""
        self._answers[question] = answer


class _Running:
    """One search, and the questions it waits for."""

    def __init__(self, search: Generator[Sequence[Question], Sequence[Answer], Any]) -> None:
        self.search = search
        self.questions: Sequence[Question] = ()
        self.answers: dict[Question, Answer] = {}

    def ready(self) -> bool:
        return all(question in self.answers for question in self.questions)

    def replies(self) -> list[Answer]:
        return [self.answers[question] for question in self.questions]


def drive(
    searches: Mapping[Key, Generator[Sequence[Question], Sequence[Answer], Any]],
    workers: Workers,
    journal: Journal,
    on_answer: Callable[[Key, Question, Answer], None] | None = None,
) -> dict[Key, Any]:
    """Run searches to their ends and return what each found, in the order given.

    What a search finds does not depend on the others, nor on how many workers there are: it sees only its own answers.

    Args:
        searches: Generators that yield questions and take answers.
        workers: Where questions are answered.
        journal: Asked first; every new answer goes into it.
        on_answer: Called once with every answer as it comes, and with the search that asked for it first.

    Raises:
        Interrupted: On a KeyboardInterrupt, once every search has been stopped; it carries what they have.
    """
    found: dict[Key, Any] = {}
    running = {key: _Running(search) for key, search in searches.items()}
    waiting: dict[Future[Answer], Question] = {}
    asked: dict[Question, list[Key]] = {}

    def advance(key: Key, *, first: bool = False) -> None:
        one = running[key]
        while True:
            try:
                one.questions = next(one.search) if first else one.search.send(one.replies())
            except StopIteration as end:
                found[key] = end.value
                return
            first = False
            one.answers = {}
            for question in one.questions:
                known = journal.get(question)
                if known is not None:
                    one.answers[question] = known
                elif question in asked:
                    # A search that asks the same twice goes on once.
                    if key not in asked[question]:
                        asked[question].append(key)
                else:
                    asked[question] = [key]
                    waiting[workers.submit(question)] = question
            if not one.ready():
                return

    try:
        for key in running:
            advance(key, first=True)
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            # In the order of asking, so that the order of answers does not depend on a set's order.
            for future in [one for one in waiting if one in done]:
                question = waiting.pop(future)
                answer = future.result()
                journal.put(question, answer)
                keys = asked.pop(question)
                if on_answer is not None:
                    on_answer(keys[0], question, answer)
                for key in keys:
                    running[key].answers[question] = answer
                    if running[key].ready():
                        advance(key)
    except KeyboardInterrupt:
        for future, question in waiting.items():
            if future.done() and not future.cancelled() and future.exception() is None:
                journal.put(question, future.result())
        raise Interrupted({key: found.get(key) or stopped(one.search) for key, one in running.items()}) from None
    finally:
        for future in waiting:
            future.cancel()
    return {key: found[key] for key in searches}


def stopped(search: Generator[Any, Any, Any]) -> Any:
    """Stop a search; return the best it has, None if it has nothing."""
    try:
        search.throw(Stopped())
    except StopIteration as end:
        return end.value
    except (Stopped, RuntimeError):
        return None
    return None
