"""Rows of the published study: a figure published, ours as published, ours by default, and why they differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from phasesplit.planner.problem import Measure
from phasesplit.planner.study.ablation import (
    DEFAULT,
    NOTHING,
    PAPER_POWER,
    REPORTED,
    RERUN_STEP_PER_S,
    AblationStep,
    PublishedFigure,
    beside_paper,
    changes,
    signed,
    why,
    why_bursty,
)
from phasesplit.planner.study.reproduction import LOOSER, STEADY, Findings
from phasesplit.planner.study.study import LAYOUTS, Case, named, pool_text, taken

_MUCH = 0.25
_SMALL = (AblationStep.MEMORY, AblationStep.TRANSFER, AblationStep.JOINT)
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
class StudyRow:
    """A figure of the study with its published one.

    Attributes:
        what: What it is of.
        published: The published figure.
        ours: By step, those of REPORTED that were looked at.
        why: Where the differences come from, each part a sentence.
        ablated_steps: The figure at every step where all were looked at.
    """

    what: str
    published: PublishedFigure = NOTHING
    ours: Mapping[AblationStep, Cell]
    why: tuple[str, ...]
    ablated_steps: Mapping[AblationStep, float] = field(default_factory=dict)


def rate_row(found: Findings, case: Case, published: PublishedFigure = NOTHING, *, compared: bool = True) -> StudyRow:
    """Return the row of the highest rate that a cluster holds."""
    ablated_steps = found.ablated_steps(case)
    step = RERUN_STEP_PER_S if published.tag == "R" else 0.0
    difference = beside_paper(published, ablated_steps[AblationStep.PUBLISHED], found.per_seed.get(case, ()), step)
    return StudyRow(
        what=case.name,
        published=published,
        ours={
            ablation_step: Cell(ablated_steps[ablation_step], _rate(ablated_steps[ablation_step]))
            for ablation_step in REPORTED
        },
        why=reasons_of(
            difference if compared else "",
            to_default(ablated_steps),
            bursty(ablated_steps),
            sensitive(found, _rate, case),
        ),
        ablated_steps=ablated_steps,
    )


def ratio_row(found: Findings, case: Case, base: Case, published: PublishedFigure = NOTHING) -> StudyRow:
    """Return the row of one cluster's highest rate over another's."""
    ratios = quotients(found.ablated_steps(case), found.ablated_steps(base))
    return StudyRow(
        what=f"{named(case.layout, ())} / {named(base.layout, ())}",
        published=published,
        ours={ablation_step: Cell(ratios[ablation_step], _ratio(ratios[ablation_step])) for ablation_step in REPORTED},
        why=reasons_of(
            beside_paper(published, ratios[AblationStep.PUBLISHED]),
            to_default(ratios),
            bursty(ratios),
            sensitive(found, _ratio, case, base),
        ),
        ablated_steps=ratios,
    )


def divided_row(found: Findings, case: Case) -> StudyRow:
    """Return the row of a layout's best counts within the same power."""
    ablated_steps = found.ablated_steps(case)
    cells, gains = {}, []
    for ablation_step in STEADY:
        if (case.layout, case.workload, ablation_step) not in found.division:
            continue
        counts, rate = found.division[case.layout, case.workload, ablation_step]
        cells[ablation_step] = Cell(rate, f"{rate:.1f} ({pool_text(counts)})")
        gain = rate / ablated_steps[ablation_step] - 1 if ablated_steps[ablation_step] else float("inf")
        gains.append(f"{'by default' if ablation_step == DEFAULT else 'published setting'} {signed(gain)}")
    return StudyRow(
        what=f"{named(case.layout, ())}, divided anew",
        ours=cells,
        why=(f"against {pool_text(case.counts)}: {', '.join(gains)}",),
    )


def computed_row(
    found: Findings, layout: str, counts: tuple[int, ...], measure: Measure, published: PublishedFigure
) -> StudyRow:
    """Return the row of what follows from machines alone: money or power against 40 unsplit DGX-H100."""
    share = taken_of(found, layout, counts, measure) / taken_of(found, "H100", (40,), measure) - 1
    by_name = taken(found.bench.stock, layout, counts, measure) / taken(found.bench.stock, "H100", (40,), measure) - 1
    cell = Cell(share, signed(share))
    text = f"the paper's own {'prices' if measure == Measure.COST else 'relative powers'} give {signed(share)}"
    if measure == Measure.POWER:
        text += f", the nameplates {signed(by_name)}"
    return StudyRow(
        what=f"{measure} of {named(layout, counts)} against Baseline-H100 40",
        published=published,
        ours=dict.fromkeys(REPORTED, cell),
        why=(text,),
    )


def taken_of(found: Findings, layout: str, counts: tuple[int, ...], measure: Measure) -> float:
    """Return what a cluster takes: money, or power as the paper budgets it."""
    if measure == Measure.POWER:
        return sum(count * PAPER_POWER[name] for count, name in zip(counts, LAYOUTS[layout], strict=True))
    return taken(found.bench.stock, layout, counts, measure)


def reasons_of(*sentences: str) -> tuple[str, ...]:
    """Return the sentences that say something."""
    return tuple(sentence for sentence in sentences if sentence)


def to_default(ablated_steps: Mapping[AblationStep, float]) -> str:
    """Return what moved a figure on the way to the default."""
    return f"to the default: {why(ablated_steps)}"


def bursty(ablated_steps: Mapping[AblationStep, float]) -> str:
    """Return what real burstiness does to the default's figure, "" where that is little."""
    text = why_bursty(ablated_steps)
    return f"then {text}" if text else ""


def beside_prose(share: float, published: PublishedFigure) -> str:
    """Return a change as of setting `published` with the paper's, "" where the paper has none."""
    return f"published setting {signed(share)} where the paper has {published.text}" if published.tag else ""


def sensitive(found: Findings, shown: Callable[[float], str], *cases: Case) -> str:
    """Return what slightly looser limits would give, where a capacity of the cases is sensitive to them.

    Past some rate latencies may hardly grow with load; near a limit the rate that is held then says little.

    Args:
        found: The outcome.
        shown: How the figure reads.
        cases: The cluster, and perhaps the one whose rate it is divided by.
    """
    if not any(_is_sensitive(found, case) for case in cases):
        return ""
    looser = [{ablation_step: found.loose[case, ablation_step] for ablation_step in REPORTED} for case in cases]
    figures = looser[0] if len(cases) == 1 else quotients(looser[0], looser[1])
    texts = ", ".join(shown(figures[ablation_step]) for ablation_step in REPORTED)
    return f"is sensitive: with limits {100 * (LOOSER - 1):.0f} % looser the three are {texts}"


def _is_sensitive(found: Findings, case: Case) -> bool:
    ablated_steps = found.ablated_steps(case)
    jumps = [abs(one.share) for one in changes(ablated_steps) if one.ablation_step in _SMALL]
    return max(jumps) > _MUCH or any(
        found.loose[case, ablation_step] > (1 + _MUCH) * ablated_steps[ablation_step] for ablation_step in REPORTED
    )


def quotients(above: Mapping[AblationStep, float], below: Mapping[AblationStep, float]) -> dict[AblationStep, float]:
    """Return one ablation over another, step by step."""
    return {
        ablation_step: above[ablation_step] / below[ablation_step] if below[ablation_step] else float("inf")
        for ablation_step in above
    }


def _rate(value: float) -> str:
    return f"{value:.1f}"


def _ratio(value: float) -> str:
    return f"{value:.2f}x"


def change_text(value: float) -> str:
    """Return a quotient as a change in per cent."""
    return signed(value - 1)
