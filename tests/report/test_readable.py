"""Quantities as people read them."""

import math
from itertools import pairwise

import pytest

from phasesplit.report import readable


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (math.nan, "–"), (0.0, "0 s"), (2.5e-5, "25 µs"), (0.0615, "61.5 ms"), (0.9999, "1 s"), (12.88, "12.9 s"),
        (99.9, "99.9 s"), (336.0, "5.6 min"), (7_200.0, "2 h"),
    ],
)  # fmt: skip
def test_durations_get_the_unit_that_fits(value_s: float, text: str) -> None:
    """A reader would have to count zeros."""
    assert readable.seconds(value_s) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (math.nan, "–"), (0.0, "0 %"), (0.0001, "<0.1 %"), (0.0834, "8.3 %"), (0.38, "38 %"), (0.9995, "99.9 %"),
        (1.0, "100 %"), (1.0001, "100.1 %"),
        (606.5, "606 times"),
    ],
)  # fmt: skip
def test_only_all_reads_as_all(share: float, text: str) -> None:
    """A limit that just holds would read as one that is reached."""
    assert readable.percent(share) == text


def test_a_value_never_reads_like_its_limit() -> None:
    """A broken limit and a kept one would look the same."""
    assert readable.against("itl_slowdown", 1.2488, 1.25) == "1.2488 of 1.25"
    assert readable.against("ttft_s", 0.5, 1.0) == "500 ms of 1 s"
    assert readable.against("ttft_s", 0.49999, 0.5) == "0.49999 s of 500 ms"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(408_000.0, "W", "408 kW"), (0.98, "Wh", "980 mWh"), (0.0, "g", "0 g"), (2.5e10, "W", "25 GW")],
)
def test_prefixes(value: float, unit: str, text: str) -> None:
    """A quantity would be off by a factor of a thousand."""
    assert readable.with_prefix(value, unit) == text


@pytest.mark.parametrize(("low_s", "high_s"), [(0.03, 0.2), (0.01, 7_200.0), (1.1, 5.5), (1e-4, 1e5), (30.0, 150.0)])
def test_ticks_are_apart_and_inside(low_s: float, high_s: float) -> None:
    """Labels of an axis would run into each other, or there would be none to read it by."""
    ticks = readable.time_ticks(low_s, high_s)
    assert len(ticks) >= 2
    assert low_s <= ticks[0]
    assert ticks[-1] <= high_s
    share = [math.log(right / left) / math.log(high_s / low_s) for left, right in pairwise(ticks)]
    assert min(share) > 0.18


def test_long_names_keep_both_ends() -> None:
    """Two clusters whose names differ at the end would look alike."""
    assert readable.shortened("short", 10) == "short"
    assert readable.shortened("a" * 20 + "z" * 20, 16) == "a" * 10 + "…" + "z" * 5
