"""Circuit breakers: when they open, for how long, and what closes them."""

import pytest

from phasesplit.errors import SpecError
from phasesplit.gateway.breaker import Breaker, BreakerRule

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
