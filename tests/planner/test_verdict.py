"""The verdict says what the numbers say, in words that read well."""

from itertools import product
from math import inf, isnan

import pytest

from phasesplit.planner.verdict import advantage_of, decide

HOPELESS = "keeps the SLO with any number of machines that was looked at."


@pytest.mark.parametrize(
    ("split", "unsplit", "per_seed", "what", "text"),
    [
        (
            80.0, 100.0, [0.21, 0.19], "cost",
            "Split: a split takes 20% less cost than the best unsplit cluster (per request/s of capacity +19% to +21%"
            " over 2 seeds, + is for the split).",
        ),
        (
            120.0, 100.0, [-0.2, -0.1], "power",
            "Do not split: a split takes 20% more power than the best unsplit cluster (per request/s of capacity -20%"
            " to -10% over 2 seeds, + is for the split).",
        ),
        (
            100.0, 100.0, [0.05, 0.08], "machines",
            "Split: a split takes as many machines as the best unsplit cluster (per request/s of capacity +5% to +8%"
            " over 2 seeds, + is for the split).",
        ),
        (
            100.0, 100.0, [0.0, -0.02], "cost",
            "Do not split: a split takes as much cost as the best unsplit cluster (per request/s of capacity -2% to +0%"
            " over 2 seeds, + is for the split).",
        ),
        (
            9.0, 10.0, [0.1], "machines",
            "Split: a split takes 10% fewer machines than the best unsplit cluster (per request/s of capacity +10% over"
            " 1 seed, + is for the split).",
        ),
        (
            -120.0, -100.0, [0.25, 0.15], "rate",
            "Split: a split holds a 20% higher rate than the best unsplit cluster (+15% to +25% over 2 seeds, + is for"
            " the split).",
        ),
        (
            -80.0, -100.0, [-0.2, 0.02], "rate",
            "Do not split: a split holds a 20% lower rate than the best unsplit cluster (-20% to +2% over 2 seeds, + is"
            " for the split); the seeds do not agree, so take it as even.",
        ),
        (-100.0, -100.0, [], "rate", "Do not split: a split holds the same rate as the best unsplit cluster."),
        (inf, 1.0, [], "cost", f"Do not split: no split cluster {HOPELESS}"),
        (1.0, inf, [], "cost", f"Split: no unsplit cluster {HOPELESS}"),
        (inf, inf, [], "cost", "Neither a split nor an unsplit cluster keeps the SLO."),
    ],
)  # fmt: skip
def test_the_sentence(split: float, unsplit: float, per_seed: list[float], what: str, text: str) -> None:
    """If wrong, what people read is not what was found."""
    assert decide(split, unsplit, per_seed, what).text == text


@pytest.mark.parametrize(
    ("split", "first", "second"), list(product((80.0, 99.5, 100.0, 100.5, 120.0), (-0.2, 0.0, 0.2), (-0.2, 0.0, 0.2)))
)
def test_the_verdict_follows_the_numbers(split: float, first: float, second: float) -> None:
    """If wrong, a split is advised that is dearer, or doubt is hidden."""
    verdict = decide(split, 100.0, [first, second], "cost")
    if split < 99:
        assert verdict.split
        assert verdict.sure == (first > 0 and second > 0)
    elif split > 101:
        assert not verdict.split
        assert verdict.sure == (first <= 0 and second <= 0)
    else:
        assert verdict.split == ((first + second) / 2 > 0.01)
    assert verdict.advantage == pytest.approx((100 - split) / 100)
    assert verdict.spread == (min(first, second), max(first, second))
    assert verdict.text.startswith("Split: " if verdict.split else "Do not split: ")
    assert ("take it as even" in verdict.text) == (not verdict.sure)


def test_of_rates_more_is_better() -> None:
    """If wrong, the sign of an advantage turns where the objective is a rate."""
    assert advantage_of(-110.0, -100.0) == pytest.approx(0.1)
    assert advantage_of(90.0, 100.0) == pytest.approx(0.1)
    assert isnan(advantage_of(inf, 100.0))
    assert isnan(decide(inf, 3.0, [], "cost").spread[0])
