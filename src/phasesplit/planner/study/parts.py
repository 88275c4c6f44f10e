"""The outcome of the published study, part by part."""

from collections.abc import Iterable
from dataclasses import dataclass

from phasesplit.planner.problem import Measure
from phasesplit.planner.study.ablation import (
    COST_OPTIMAL,
    DEFAULT,
    H100,
    NOTHING,
    PUBLISHED_RATIOS,
    REPORTED,
    RERUN,
    ROBUSTNESS,
    AblationStep,
    PublishedFigure,
    paper_w,
    signed,
)
from phasesplit.planner.study.reproduction import (
    CAP_CASES,
    CAP_RATE_PER_S,
    PAPER_OPTIMUM_CASE,
    STEADY,
    WANTED,
    Findings,
    foreign_cases,
    iso_cost_cases,
    iso_power_cases,
    llama_cases,
)
from phasesplit.planner.study.rows import (
    Cell,
    StudyRow,
    beside_prose,
    bursty,
    change_text,
    computed_row,
    divided_row,
    quotients,
    rate_row,
    ratio_row,
    reasons_of,
    sensitive,
    taken_of,
    to_default,
)
from phasesplit.planner.study.study import (
    CODING,
    CODING_RATE_PER_S,
    CONVERSATION,
    ISO_COST,
    ISO_POWER,
    LAYOUTS,
    SPLITS,
    Case,
    named,
    pool_text,
    taken,
)

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StudyPart:
    """A part of the study.

    Attributes:
        title: Its heading.
        unit: What its figures are.
        rows: Its rows.
    """

    title: str
    unit: str
    rows: tuple[StudyRow, ...]


def parts(found: Findings) -> list[StudyPart]:
    """Return the study's outcome, part by part."""
    return [
        StudyPart(
            f"1. Cost-optimal Splitwise-HH, coding at {CODING_RATE_PER_S:g} requests/s",
            "machines",
            tuple(_optimum(found)),
        ),
        StudyPart("2a. Iso-power, conversation", "requests/s held", tuple(_iso_power(found, CONVERSATION))),
        StudyPart("2b. Iso-power, coding", "requests/s held", tuple(_iso_power(found, CODING))),
        StudyPart("3. Iso-cost, conversation", "requests/s held", tuple(_iso_cost(found))),
        StudyPart(
            "4. Iso-throughput, conversation: as fast as Baseline-H100 40",
            "cost or power against Baseline-H100 40",
            tuple(_iso_throughput(found)),
        ),
        StudyPart(
            "5a. Conversation on the clusters sized for coding",
            "throughput against the cluster sized for it",
            tuple(_foreign(found)),
        ),
        StudyPart(
            "5b. Llama2-70B on the clusters sized for BLOOM-176B, conversation",
            "requests/s held",
            tuple(rate_row(found, case) for case in llama_cases()),
        ),
        StudyPart("6a. Batch jobs, conversation", "requests/s from a backlog", tuple(_batch(found, CONVERSATION))),
        StudyPart("6b. Batch jobs, coding", "requests/s from a backlog", tuple(_batch(found, CODING))),
        StudyPart("7. What the power cap buys, conversation", "against no cap, same machines", tuple(_cap(found))),
    ]


def ablations(found: Findings) -> dict[str, dict[AblationStep, float]]:
    """Return the requests/s held at every step by the clusters that the study is about most."""
    cases = [
        case
        for workload in (CONVERSATION, CODING)
        for case in iso_power_cases(workload)
        if case.layout in ("HH", "H100")
    ]
    return {f"{case.name}, {case.workload.removeprefix('azure-')}": found.ablated_steps(case) for case in cases}


def _optimum(found: Findings) -> Iterable[StudyRow]:
    optima = found.optima()
    stock = found.bench.stock
    usd = {ablation_step: taken(stock, "HH", counts, Measure.COST) for ablation_step, counts in optima.items()}
    cells = {
        ablation_step: Cell(usd[ablation_step], f"{pool_text(counts)}, {usd[ablation_step]:,.0f} USD/h")
        for ablation_step, counts in optima.items()
    }
    steps = ", ".join(
        f"{ablation_step.label} {pool_text(optima[ablation_step])}"
        for before, ablation_step in zip(list(optima), list(optima)[1:], strict=False)
        if optima[ablation_step] != optima[before] and ablation_step <= DEFAULT
    )
    off = usd[AblationStep.PUBLISHED] / COST_OPTIMAL.number - 1
    yield StudyRow(
        what="cheapest Splitwise-HH",
        published=COST_OPTIMAL,
        ours={ablation_step: cells[ablation_step] for ablation_step in REPORTED},
        why=reasons_of(
            "published setting finds the published price"
            if abs(off) < 1e-9
            else f"published setting costs {signed(off)}",
            f"to the default: {steps}" if steps else "",
            bursty(usd),
        ),
        ablated_steps=usd,
    )
    yield rate_row(found, PAPER_OPTIMUM_CASE, PublishedFigure(CODING_RATE_PER_S, ">= 70/s", "P"), compared=False)


def _iso_power(found: Findings, workload: str) -> Iterable[StudyRow]:
    cases = {case.layout: case for case in iso_power_cases(workload)}
    for layout, case in cases.items():
        yield rate_row(found, case, RERUN[layout] if workload == CONVERSATION else NOTHING)
    if workload == CONVERSATION:
        yield ratio_row(found, cases["AA"], cases["A100"], PUBLISHED_RATIOS["AA / Baseline-A100"])
        yield ratio_row(found, cases["HA"], cases["H100"], PUBLISHED_RATIOS["HA / Baseline-H100"])
        yield computed_row(found, "HA", cases["HA"].counts, Measure.COST, PUBLISHED_RATIOS["HA cost"])
    else:
        yield ratio_row(found, cases["AA"], cases["A100"])
        yield ratio_row(found, cases["HA"], cases["H100"])
    for layout in ("HH", "HHcap"):
        yield ratio_row(found, cases[layout], cases["H100"])
    for layout in SPLITS:
        yield divided_row(found, cases[layout])


def _iso_cost(found: Findings) -> Iterable[StudyRow]:
    cases = {case.layout: case for case in iso_cost_cases()}
    for case in cases.values():
        yield rate_row(found, case)
    yield ratio_row(found, cases["AA"], cases["H100"], PUBLISHED_RATIOS["iso-cost AA / Baseline-H100"])
    yield computed_row(found, "AA", ISO_COST["AA"], Measure.POWER, PUBLISHED_RATIOS["iso-cost AA power"])


def _iso_throughput(found: Findings) -> Iterable[StudyRow]:
    own = {case.layout: case for case in iso_power_cases(CONVERSATION)}
    for layout, measure in WANTED:
        published = PUBLISHED_RATIOS.get(f"iso-throughput {layout} {measure}", NOTHING)
        cells = {}
        for ablation_step in STEADY:
            counts = found.fast[ablation_step][1][layout, measure]
            cells[ablation_step] = _against_unsplit(found, layout, counts, measure)
        yield StudyRow(
            what=f"{named(layout, ())}, least {measure}",
            published=published,
            ours=cells,
            why=reasons_of(
                beside_prose(cells[AblationStep.PUBLISHED].number, published),
                f"rates to match {found.fast[AblationStep.PUBLISHED][0]:.1f}/s"
                f" and, by default, {found.fast[DEFAULT][0]:.1f}/s",
                f"requests/s of its iso-power counts, {to_default(found.ablated_steps(own[layout]))}",
            ),
        )


def _against_unsplit(found: Findings, layout: str, counts: tuple[int, ...], measure: Measure) -> Cell:
    if not counts:
        return Cell(float("nan"), "no number of machines")
    share = taken_of(found, layout, counts, measure) / taken_of(found, "H100", (40,), measure) - 1
    return Cell(share, f"{signed(share)} ({pool_text(counts)})")


def _foreign(found: Findings) -> Iterable[StudyRow]:
    for case in foreign_cases():
        own = Case(case.layout, ISO_POWER[CONVERSATION][case.layout], CONVERSATION)
        ratios = quotients(found.ablated_steps(case), found.ablated_steps(own))
        published = ROBUSTNESS[case.layout]
        yield StudyRow(
            what=f"{case.name} against {pool_text(own.counts)}",
            published=published,
            ours={
                ablation_step: Cell(ratios[ablation_step] - 1, signed(ratios[ablation_step] - 1))
                for ablation_step in REPORTED
            },
            why=reasons_of(
                beside_prose(ratios[AblationStep.PUBLISHED] - 1, published),
                to_default(ratios),
                bursty(ratios),
                sensitive(found, change_text, case, own),
            ),
            ablated_steps=ratios,
        )


def _batch(found: Findings, workload: str) -> Iterable[StudyRow]:
    stock = found.bench.stock
    for case in iso_power_cases(workload):
        ablated_steps = found.batch_steps(case)
        usd_per_h = taken(stock, case.layout, case.counts, Measure.COST)
        machines = [stock.machines[name] for name in LAYOUTS[case.layout]]
        power_w = sum(
            count * paper_w(machine, stock.machines[H100]) for count, machine in zip(case.counts, machines, strict=True)
        )

        def cell(rate: float, usd_per_h: float = usd_per_h, kilowatts: float = power_w / 1e3) -> Cell:
            return Cell(
                rate, f"{rate:.0f}/s; {rate * _SECONDS_PER_HOUR / usd_per_h:.0f} a USD; {rate / kilowatts:.2f}/s a kW"
            )

        yield StudyRow(
            what=case.name,
            ours={ablation_step: cell(ablated_steps[ablation_step]) for ablation_step in STEADY},
            why=reasons_of(to_default(ablated_steps)),
            ablated_steps=ablated_steps,
        )


def _cap(found: Findings) -> Iterable[StudyRow]:
    free, capped = CAP_CASES
    stock = found.bench.stock
    power = [taken(stock, case.layout, case.counts, Measure.POWER) for case in CAP_CASES]
    shares = {
        "requests/s held": found.rates[capped, DEFAULT] / found.rates[free, DEFAULT] - 1,
        "provisioned power": power[1] / power[0] - 1,
        f"power drawn at {CAP_RATE_PER_S:g} requests/s": found.drawn_w[capped] / found.drawn_w[free] - 1,
    }
    for what, share in shares.items():
        yield StudyRow(
            what=f"{capped.name}: {what}",
            ours={DEFAULT: Cell(share, signed(share))},
            why=("the cap slows prefill by 30 % and decode not at all, as the published simulator assumes (S)",),
        )
