"""The record of a machine from joining to being lost, and the breaker that leaves a failing one alone."""

import pytest

from doubles import FakeWorker
from phasesplit.errors import SpecError
from phasesplit.gateway.connections import Connection
from phasesplit.gateway.dispatcher import Dispatcher
from phasesplit.gateway.registry import Breaker, BreakerRule
from phasesplit.scheduler.rules import Rules

RULE = BreakerRule(failures=3, open_s=1.0, growth=2.0, most_open_s=5.0)


def failed(breaker: Breaker, now_s: float, times: int = 1) -> Breaker:
    for _ in range(times):
        breaker.failed(now_s)
    return breaker


def test_opens_after_failures_in_a_row() -> None:
    """A machine would be left alone for one failure, or never."""
    breaker = failed(Breaker(RULE), 0.0, 2)
    breaker.succeeded()
    assert not failed(breaker, 0.0, 2).open(0.0)
    assert failed(breaker, 0.0).open(0.0)
    assert breaker.open(0.99)
    assert not breaker.open(1.0)


def test_failures_begun_before_it_opened_do_not_lengthen_it() -> None:
    """A hundred requests that were on the machine when it broke would keep it away for the longest time."""
    breaker = failed(Breaker(RULE), 0.0, 100)
    assert (breaker.openings, breaker.open(1.0)) == (1, False)


def test_stays_open_longer_each_time_up_to_a_bound() -> None:
    """A machine that stays broken would be tried every second for ever, or not for years."""
    breaker = failed(Breaker(RULE), 0.0, 3)
    now_s = 0.0
    lasted_s = []
    for _ in range(200):
        assert breaker.until_s is not None
        lasted_s.append(breaker.until_s - now_s)
        now_s = breaker.until_s
        breaker.failed(now_s)
    assert lasted_s[:4] == [1.0, 2.0, 4.0, 5.0]
    assert set(lasted_s[4:]) == {5.0}
    breaker.succeeded()
    assert failed(breaker, now_s, 3).until_s == now_s + 1.0


@pytest.mark.parametrize(
    "wrong", [{"failures": 0}, {"open_s": 0.0}, {"growth": 0.9}, {"most_open_s": -1.0}, {"open_s": float("nan")}]
)
def test_rule_without_sense_is_refused(wrong: dict[str, float]) -> None:
    """A typing error in the limits would switch the breaker off, or keep machines away for ever."""
    with pytest.raises(SpecError, match=next(iter(wrong))):
        BreakerRule(**wrong)  # type: ignore[arg-type]


def test_lost_machine_that_is_still_called_outlives_its_row() -> None:
    """A machine that comes back would be unknown to those who call it, or get the row of the one that replaced it."""
    dispatcher = Dispatcher(Rules(), most_machines=1)
    registry = dispatcher.registry
    dispatcher.join("a", 5, "mixed", 100, 0.0)
    first = registry.known("a")
    first.connection = Connection("http://a", FakeWorker("a"))
    dispatcher.lost("a", 1.0)
    dispatcher.join("b", 1, "mixed", 100, 2.0)
    assert [view.name for view in dispatcher.pools(2.0)] == ["b"]
    assert (registry.connected(), first.row, dispatcher.is_drained("a")) == ([first], -1, True)
    dispatcher.lost("b", 3.0)
    dispatcher.join("a", 5, "mixed", 100, 4.0)
    assert registry.known("a") is first
    assert (first.row, first.url, registry.get("b")) == (0, "http://a", None)
    assert [view.name for view in dispatcher.pools(4.0)] == ["a"]


def test_lost_machine_that_nobody_calls_is_forgotten_with_its_row() -> None:
    """The records of machines that never come back would grow without bound."""
    dispatcher = Dispatcher(Rules(), most_machines=1)
    registry = dispatcher.registry
    dispatcher.join("a", 1, "mixed", 100, 0.0)
    first = registry.known("a")
    first.connection = Connection("http://a", FakeWorker("a"))
    dispatcher.lost("a", 1.0)
    registry.forget(first)
    assert registry.get("a") is first
    dispatcher.join("b", 1, "mixed", 100, 2.0)
    first.connection = None
    registry.forget(first)
    assert registry.get("a") is None
