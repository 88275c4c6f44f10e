"""Split or do not: by how much, and whether more than chance says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

EVEN = 0.01
"""An advantage below this share is none: capacities themselves are only found to within one per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether to split.

    Attributes:
        split: Whether the best split design is better than the best unsplit one.
        sure: Whether the capacities on every seed say the same.
        advantage: By which share the split takes less of the objective (negative: more); of a rate, holds more. NaN
            where one of the two keeps the SLO with no number of machines.
        per_seed: The same on each seed alone, of the objective per request/s of capacity: what is left when whole
            machines are not counted.
        text: One sentence for people.
    """

    split: bool
    sure: bool
    advantage: float
    per_seed: tuple[float, ...]
    text: str

    @property
    def spread(self) -> tuple[float, float]:
        """Least and largest advantage over the seeds; NaN without any."""
        return (min(self.per_seed), max(self.per_seed)) if self.per_seed else (float("nan"), float("nan"))


def advantage_of(split: float, unsplit: float) -> float:
    """Return by which share the split takes less; values may be minus a rate, of which more is better."""
    if unsplit == float("inf") or split == float("inf"):
        return float("nan")
    return (unsplit - split) / abs(unsplit)


def decide(split: float, unsplit: float, per_seed: Sequence[float], what: str, *, apart: bool = False) -> Verdict:
    """Return the verdict.

    Args:
        split: The objective of the best split design, infinite where none keeps the SLO.
        unsplit: Of the best unsplit design.
        per_seed: Advantage of the split per capacity, on each seed.
        what: What is compared, as a noun ("cost").
        apart: The unsplit side is several clusters, one of each type of machine.
    """
    infinite = float("inf")
    if unsplit == infinite or split == infinite:
        wins = split < unsplit
        if split == unsplit:
            text = "Neither a split nor an unsplit cluster keeps the SLO."
        elif wins:
            text = "Split: no unsplit cluster keeps the SLO with any number of machines that was looked at."
        else:
            text = "Do not split: no split cluster keeps the SLO with any number of machines that was looked at."
        return Verdict(split=wins, sure=True, advantage=float("nan"), per_seed=(), text=text)
    share = advantage_of(split, unsplit)
    middle = median(per_seed) if per_seed else share
    wins = share > EVEN or (abs(share) <= EVEN and middle > EVEN)
    agree = sum(one > 0 for one in per_seed) if wins else sum(one <= EVEN for one in per_seed)
    sure = agree == len(per_seed)
    text = _text(wins, sure, share, per_seed, what, apart=apart)
    return Verdict(split=wins, sure=sure, advantage=share, per_seed=tuple(per_seed), text=text)


def _text(wins: bool, sure: bool, share: float, per_seed: Sequence[float], what: str, *, apart: bool) -> str:
    than = "unsplit machines, each type by itself" if apart else "the best unsplit cluster"
    head = f"{'Split' if wins else 'Do not split'}: a split {_compared(share, what, than)}"
    if not per_seed:
        return f"{head}."
    per = "" if what == "rate" else "per request/s of capacity "
    seeds = "1 seed" if len(per_seed) == 1 else f"{len(per_seed)} seeds"
    low, high = _signed(min(per_seed)), _signed(max(per_seed))
    spread = low if low == high else f"{low} to {high}"
    doubt = ""
    if not sure:
        # With every seed on the other side, it is the rounding to whole machines that speaks for the winner.
        against = abs(share) > EVEN and all((one > 0) != wins for one in per_seed)
        doubt = f"; {'whole machines alone decide' if against else 'the seeds do not agree'}, so take it as even"
    return f"{head} ({per}{spread} over {seeds}, + is for the split){doubt}."


def _compared(share: float, what: str, than: str) -> str:
    """Return what a split takes or holds, compared with what is unsplit, as a verb and its object."""
    if what == "rate":
        if abs(share) <= EVEN:
            return f"holds the same rate as {than}"
        return f"holds a {abs(share):.0%} {'higher' if share > 0 else 'lower'} rate than {than}"
    if abs(share) <= EVEN:
        return f"takes as {'many' if what == 'machines' else 'much'} {what} as {than}"
    less = "fewer" if what == "machines" else "less"
    return f"takes {abs(share):.0%} {less if share > 0 else 'more'} {what} than {than}"


def _signed(share: float) -> str:
    return f"{share:+.0%}"
