"""Searches run side by side as if each were alone, whatever order answers come in."""

import random
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from threading import Thread
from time import sleep
from typing import Any

import pytest

from phasesplit.planner.designs import DesignKind, design
from phasesplit.planner.drive import Interrupted, MemoryJournal, drive
from phasesplit.planner.probe import Answer, Question
from phasesplit.planner.search import Stopped
from planner.problems import Answering, problem

DESIGN = design(problem(), DesignKind.CHUNKED, [0])


def question(count: int, seed: int = 0) -> Question:
    return Question(DESIGN, (count,), 1.0, seed)


def answered(asked: Question) -> Answer:
    worst = (asked.counts[0] * 7 % 11) / 10
    return Answer(worst < 1, worst, "", (), 0.0, 0.0, (), ())


def walk(start: int, steps: int) -> Generator[Sequence[Question], Sequence[Answer], list[float]]:
    """Ask about two counts at a time; which ones hangs on the answers before."""
    received: list[float] = []
    at = start
    try:
        for _ in range(steps):
            replies = yield [question(at), question(at + 1)]
            received += [reply.worst for reply in replies]
            at = (at * 3 + round(10 * received[-1]) + 1) % 50
    except Stopped:
        received.append(-1.0)
    return received


class Shuffled:
    """Workers that hold questions back and answer them in a random order, from another thread."""

    def __init__(self, seed: int, width: int) -> None:
        self.width = width
        self.waiting: list[tuple[Future[Answer], Question]] = []
        self.asked: list[Question] = []
        self._random = random.Random(seed)  # noqa: S311 - an order, not a secret
        self._over = False
        self._thread = Thread(target=self._answer, daemon=True)
        self._thread.start()

    def submit(self, asked: Question) -> "Future[Answer]":
        future: Future[Answer] = Future()
        self.asked.append(asked)
        self.waiting.append((future, asked))
        return future

    def close(self) -> None:
        self._over = True
        self._thread.join()

    def _answer(self) -> None:
        while not self._over:
            for _ in range(min(len(self.waiting), self.width)):
                future, asked = self.waiting.pop(self._random.randrange(len(self.waiting)))
                future.set_result(answered(asked))
            sleep(1e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [1, 7])
def test_the_order_of_answers_changes_nothing(seed: int, width: int) -> None:
    """If wrong, a plan depends on how busy the cores are."""
    alone = {start: drive({0: walk(start, 9)}, Answering(answered), MemoryJournal())[0] for start in range(8)}
    workers = Shuffled(seed, width)
    try:
        found = drive({start: walk(start, 9) for start in range(8)}, workers, MemoryJournal())
    finally:
        workers.close()
    assert found == alone
    assert list(found) == list(alone)
    assert len(set(workers.asked)) == len(workers.asked)


def test_what_two_searches_ask_is_asked_once_and_both_hear() -> None:
    """If wrong, the same simulation runs twice, or one of the searches waits for ever."""
    workers = Shuffled(0, 1)
    reported: list[Any] = []
    try:
        found = drive(
            {"one": walk(3, 2), "two": walk(3, 2)},
            workers,
            MemoryJournal(),
            lambda key, asked, _: reported.append((key, asked)),
        )
    finally:
        workers.close()
    assert found["one"] == found["two"]
    assert len(workers.asked) == len(set(workers.asked)) == len(reported)


def test_a_search_that_asks_the_same_twice_hears_it_twice() -> None:
    """If wrong, a search gets fewer replies than it has questions."""

    def twice() -> Generator[Sequence[Question], Sequence[Answer], int]:
        replies = yield [question(1), question(1)]
        return len(replies)

    workers = Answering(answered)
    assert drive({0: twice()}, workers, MemoryJournal()) == {0: 2}
    assert len(workers.asked) == 1


def test_a_search_without_questions_ends() -> None:
    """If wrong, a search that asks nothing, or nothing for once, is never ended."""

    def nothing() -> Generator[Sequence[Question], Sequence[Answer], str]:
        replies = yield []
        assert list(replies) == []
        return "done"

    assert drive({0: nothing(), 1: walk(1, 0)}, Answering(answered), MemoryJournal()) == {0: "done", 1: []}


def test_what_the_journal_knows_is_not_asked() -> None:
    """If wrong, a resumed plan simulates everything again."""
    journal = MemoryJournal()
    first = Answering(answered)
    found = drive({0: walk(1, 5)}, first, journal)
    again = Answering(answered)
    assert drive({0: walk(1, 5)}, again, journal) == found
    assert first.asked
    assert not again.asked


def test_what_a_worker_raises_comes_out_and_the_rest_is_cancelled() -> None:
    """If wrong, a plan hangs, or goes on for minutes after it has failed."""

    class Failing:
        width = 3

        def __init__(self) -> None:
            self.futures: list[Future[Answer]] = []

        def submit(self, _asked: Question) -> "Future[Answer]":
            future: Future[Answer] = Future()
            self.futures.append(future)
            if len(self.futures) == 3:
                future.set_exception(ValueError("no such machine"))
            return future

    workers = Failing()
    with pytest.raises(ValueError, match="no such machine"):
        drive({start: walk(start, 3) for start in (1, 10, 20)}, workers, MemoryJournal())
    others = [future for index, future in enumerate(workers.futures) if index != 2]
    assert len(others) == 5
    assert all(future.cancelled() for future in others)


@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_interrupted_it_carries_what_each_search_has(at: int) -> None:
    """If wrong, an interrupted plan loses what it had found."""
    workers = Answering(answered)

    def interrupt(asked: Question) -> Answer:
        if len(workers.asked) > at:
            raise KeyboardInterrupt
        return answered(asked)

    workers._answer = interrupt
    with pytest.raises(Interrupted) as caught:
        drive({"done": walk(1, 1), "long": walk(20, 9), "late": walk(30, 9)}, workers, MemoryJournal())
    found = caught.value.found
    assert list(found) == ["done", "long", "late"]
    done = drive({0: walk(1, 1)}, Answering(answered), MemoryJournal())[0]
    whole = drive({0: walk(20, 9)}, Answering(answered), MemoryJournal())[0]
    for part in (found["done"], found["long"]):
        assert part is None or part[-1] == -1.0 or part == done
    if at == 9:
        assert found["done"] == done
        assert found["long"][:-1] == whole[: len(found["long"]) - 1]
        assert len(found["long"]) > 1


def test_what_was_answered_before_an_interruption_is_kept() -> None:
    """If wrong, a resumed plan asks again what was answered already."""
    workers = Answering(answered)

    def interrupt(asked: Question) -> Answer:
        if len(workers.asked) > 3:
            raise KeyboardInterrupt
        return answered(asked)

    workers._answer = interrupt
    journal = MemoryJournal()
    with pytest.raises(Interrupted):
        drive({0: walk(1, 3), 1: walk(20, 3)}, workers, journal)
    assert [journal.get(asked) is not None for asked in workers.asked] == [True, True, True, False]
