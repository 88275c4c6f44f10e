"""What the gateway expects: output lengths, the rate of prompts, and when it turns requests away."""

import pytest

from phasesplit.errors import SpecError
from phasesplit.gateway.estimates import Backlog, OutputLength, PrefillRate


def test_output_length_begins_at_its_start_and_comes_to_the_mean() -> None:
    """Rules would count on a length that nothing supports."""
    lengths = OutputLength()
    assert lengths.expected(4_000) == OutputLength.START
    assert lengths.expected(5) == 5
    for _ in range(1_000):
        lengths.add(20)
    assert 20 <= lengths.expected(4_000) <= 22
    lengths.add(0)
    assert lengths.expected(4_000) >= 1


def test_output_length_follows_a_change() -> None:
    """After a million requests the estimate would never move again."""
    lengths = OutputLength()
    for tokens in [10] * 100_000 + [500] * 5_000:
        lengths.add(tokens)
    assert lengths.expected(4_000) > 450


def test_prompt_rate_counts_busy_time_once() -> None:
    """Prompts in one batch would each count the whole time, and waiting for work would look like slowness."""
    rate = PrefillRate()
    assert rate.per_s() is None
    rate.begin(0.0)
    rate.begin(0.0)
    rate.end(3_000, 1.0)
    rate.end(1_000, 1.0)
    assert rate.per_s() == pytest.approx(4_000.0)
    rate.begin(100.0)
    rate.end(4_000, 101.0)
    assert rate.per_s() == pytest.approx(4_000.0)
    rate.begin(200.0)
    rate.end(0, 202.0)
    assert rate.per_s() == pytest.approx(2_000.0)


def test_a_slow_first_prompt_says_nothing_yet() -> None:
    """A machine whose first prompt is slow would have requests turned away that it computes in a moment."""
    rate = PrefillRate()
    rate.begin(0.0)
    rate.end(40, 4.0)
    assert rate.per_s() is None
    rate.begin(10.0)
    rate.end(PrefillRate.TRUSTED_TOKENS - 41, 11.0)
    assert rate.per_s() is None
    rate.begin(20.0)
    rate.end(1, 20.0)
    assert rate.per_s() == pytest.approx(PrefillRate.TRUSTED_TOKENS / 5.0)


def test_the_slowest_machine_gets_its_rate() -> None:
    """A machine that computes fewer tokens than are asked for in all the time remembered would take any backlog."""
    rate = PrefillRate()
    for prompt in range(100):
        rate.begin(100.0 * prompt)
        rate.end(10, 100.0 * prompt + 10.0)
    assert rate.per_s() == pytest.approx(1.0)


def test_prompt_rate_forgets() -> None:
    """A machine that has become slow would be believed fast for hours."""
    rate = PrefillRate()
    for second in range(1_000):
        rate.begin(float(second))
        rate.end(1_000 if second < 500 else 100, second + 1.0)
    assert rate.per_s() == pytest.approx(100.0, rel=0.01)


def test_backlog_lets_the_first_in_and_bounds_the_others() -> None:
    """An idle cluster would refuse, or a full one take more."""
    backlog = Backlog(most_wait_s=10.0, most_pending_tokens=1_000)
    assert backlog.turned_away(0, 5_000, 0.0) is None
    assert backlog.turned_away(500, 500, None) is None
    assert backlog.turned_away(500, 500, 10.0) is None
    for pending, wait_s, retry_after_s in [
        (501, None, 1.0),
        (501, 8.0, 4.0),
        (1, 10.5, 1.0),
        (1, 15.0, 5.0),
        (1, 1e9, 10.0),
    ]:
        found = backlog.turned_away(pending, 500, wait_s)
        assert found is not None
        assert found.retry_after_s == retry_after_s


@pytest.mark.parametrize("wrong", [{"most_wait_s": 0.0}, {"most_pending_tokens": -1}, {"most_wait_s": float("inf")}])
def test_backlog_without_sense_is_refused(wrong: dict[str, float]) -> None:
    """A typing error in the limits would turn all requests away."""
    with pytest.raises(SpecError, match=next(iter(wrong))):
        Backlog(**wrong)  # type: ignore[arg-type]
