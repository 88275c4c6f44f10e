"""Rows of the published study: a figure published, ours as published, ours by default, and why they differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from phasesplit.planning.ladder import DEFAULT, PAPER_POWER, REPORTED, Rung
from phasesplit.planning.objective import Measure
from phasesplit.planning.paper import NOTHING, RERUN_STEP_PER_S, Figure
from phasesplit.planning.reasons import beside_paper, changes, signed, why, why_bursty
from phasesplit.planning.reproduction import LOOSER, STEADY, Findings
from phasesplit.planning.study import LAYOUTS, Case, named, pool_text, taken

_MUCH = 0.25
_SMALL = (Rung.MEMORY, Rung.TRANSFER, Rung.JOINT)
"""Corrections that cannot move a sound figure much."""


class Cell(NamedTuple):
    """A figure of ours.

    Attributes:
        number: Its value in the unit of the row.
        text: As it reads.
    """

    number: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A figure of the study beside its published one.

    Attributes:
        what: What it is of.
        published: The published figure.
        ours: By rung, those of REPORTED that were looked at.
        why: Where the differences come from, each part a sentence.
        ladder: The figure at every rung where all were looked at.
    """

    what: str
    published: Figure = NOTHING
    ours: Mapping[Rung, Cell]
    why: tuple[str, ...]
    ladder: Mapping[Rung, float] = field(default_factory=dict)


def rate_row(found: Findings, case: Case, published: Figure = NOTHING, *, compared: bool = True) -> Row:
    """Return the row of the highest rate that a cluster holds."""
    ladder = found.ladder(case)
    step = RERUN_STEP_PER_S if published.tag == "R" else 0.0
    beside = beside_paper(published, ladder[Rung.PUBLISHED], found.per_seed.get(case, ()), step)
    return Row(
        what=case.name,
        published=published,
        ours={rung: Cell(ladder[rung], _rate(ladder[rung])) for rung in REPORTED},
        why=reasons_of(
            beside if compared else "",
            to_default(ladder),
            bursty(ladder),
            sensitive(found, _rate, case),
        ),
        ladder=ladder,
    )


def ratio_row(found: Findings, case: Case, base: Case, published: Figure = NOTHING) -> Row:
    """Return the row of one cluster's highest rate over another's."""
    ratios = quotients(found.ladder(case), found.ladder(base))
    return Row(
        what=f"{named(case.layout, ())} / {named(base.layout, ())}",
        published=published,
        ours={rung: Cell(ratios[rung], _ratio(ratios[rung])) for rung in REPORTED},
        why=reasons_of(
            beside_paper(published, ratios[Rung.PUBLISHED]),
            to_default(ratios),
            bursty(ratios),
            sensitive(found, _ratio, case, base),
        ),
        ladder=ratios,
    )


def divided_row(found: Findings, case: Case) -> Row:
    """Return the row of a layout's best counts within the same power."""
    ladder = found.ladder(case)
    cells, told = {}, []
    for rung in STEADY:
        if (case.layout, case.workload, rung) not in found.division:
            continue
        counts, rate = found.division[case.layout, case.workload, rung]
        cells[rung] = Cell(rate, f"{rate:.1f} ({pool_text(counts)})")
        gain = rate / ladder[rung] - 1 if ladder[rung] else float("inf")
        told.append(f"{'by default' if rung == DEFAULT else 'published setting'} {signed(gain)}")
    return Row(
        what=f"{named(case.layout, ())}, divided anew",
        ours=cells,
        why=(f"against {pool_text(case.counts)}: {', '.join(told)}",),
    )


def computed_row(found: Findings, layout: str, counts: tuple[int, ...], measure: Measure, published: Figure) -> Row:
    """Return the row of what follows from machines alone: money or power against 40 unsplit DGX-H100."""
    share = taken_of(found, layout, counts, measure) / taken_of(found, "H100", (40,), measure) - 1
    by_name = taken(found.bench.stock, layout, counts, measure) / taken(found.bench.stock, "H100", (40,), measure) - 1
    cell = Cell(share, signed(share))
    told = f"the paper's own {'prices' if measure == Measure.COST else 'relative powers'} give {signed(share)}"
    if measure == Measure.POWER:
        told += f", the nameplates {signed(by_name)}"
    return Row(
        what=f"{measure} of {named(layout, counts)} against Baseline-H100 40",
        published=published,
        ours=dict.fromkeys(REPORTED, cell),
        why=(told,),
    )


def taken_of(found: Findings, layout: str, counts: tuple[int, ...], measure: Measure) -> float:
    """Return what a cluster takes: money, or power as the paper budgets it."""
    if measure == Measure.POWER:
        return sum(count * PAPER_POWER[name] for count, name in zip(counts, LAYOUTS[layout], strict=True))
    return taken(found.bench.stock, layout, counts, measure)


def reasons_of(*sentences: str) -> tuple[str, ...]:
    """Return the sentences that say something."""
    return tuple(sentence for sentence in sentences if sentence)


def to_default(ladder: Mapping[Rung, float]) -> str:
    """Return what moved a figure on the way to the default."""
    return f"to the default: {why(ladder)}"


def bursty(ladder: Mapping[Rung, float]) -> str:
    """Return what real burstiness does to the default's figure, "" where that is little."""
    told = why_bursty(ladder)
    return f"then {told}" if told else ""


def beside_prose(share: float, published: Figure) -> str:
    """Return a change as of setting `published` beside the paper's, "" where the paper has none."""
    return f"published setting {signed(share)} where the paper has {published.text}" if published.tag else ""


def sensitive(found: Findings, shown: Callable[[float], str], *cases: Case) -> str:
    """Return what slightly looser limits would give, where a capacity of the cases is sensitive to them.

    Past some rate latencies may hardly grow with load; near a limit the rate that is held then says little.

    Args:
        found: The outcome.
        shown: How the figure reads.
        cases: The cluster, and perhaps the one whose rate it is divided by.
    """
    if not any(_hangs(found, case) for case in cases):
        return ""
    looser = [{rung: found.loose[case, rung] for rung in REPORTED} for case in cases]
    figures = looser[0] if len(cases) == 1 else quotients(looser[0], looser[1])
    texts = ", ".join(shown(figures[rung]) for rung in REPORTED)
    return f"is sensitive: with limits {100 * (LOOSER - 1):.0f} % looser the three are {texts}"


def _hangs(found: Findings, case: Case) -> bool:
    ladder = found.ladder(case)
    jumps = [abs(one.share) for one in changes(ladder) if one.rung in _SMALL]
    return max(jumps) > _MUCH or any(found.loose[case, rung] > (1 + _MUCH) * ladder[rung] for rung in REPORTED)


def quotients(above: Mapping[Rung, float], below: Mapping[Rung, float]) -> dict[Rung, float]:
    """Return one ladder over another, rung by rung."""
    return {rung: above[rung] / below[rung] if below[rung] else float("inf") for rung in above}


def _rate(value: float) -> str:
    return f"{value:.1f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def change_text(value: float) -> str:
    """Return a quotient as a change in per cent."""
    return signed(value - 1)
