"""Small plans to show, from a full one to one with nothing in it; their numbers are made up and all different."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from phasesplit.domain.cluster import Role
from phasesplit.domain.machine import Link
from phasesplit.domain.slo import parse_slo
from phasesplit.io.catalog import phase_times
from phasesplit.io.specs import load_machine, load_model
from phasesplit.io.workloads import load_workload
from phasesplit.planner.capacity import Capacity
from phasesplit.planner.designs import Counts, Design, DesignKind, cluster_for
from phasesplit.planner.drift import Day
from phasesplit.planner.lower_bounds import Bottleneck, Resource
from phasesplit.planner.plan import Gain, Plan, RankedDesign
from phasesplit.planner.probe import Answer
from phasesplit.planner.problem import Measure, Offer, Problem, Traffic
from phasesplit.planner.search import Found
from phasesplit.planner.sensitivity import FACTORS, Axis, Point
from phasesplit.planner.verdict import advantage_of, decide
from phasesplit.scheduler.autoscaling import Joint, Static
from phasesplit.simulator.result import Result
from report.runs import SPLIT, simulated

INFINITE = float("inf")
HOSTILE = """<script>alert("1")</script>&'"""
STATIC = Design(DesignKind.STATIC, ((Role.PREFILL, 0), (Role.DECODE, 1)), "split, static: dgx-h100 + dgx-a100")
CHUNKED = Design(DesignKind.CHUNKED, ((Role.UNSPLIT, 0),), "unsplit, chunked prompts: dgx-h100")
FOUR = Design(
    DesignKind.ELASTIC,
    ((Role.PREFILL, 0), (Role.PREFILL, 1), (Role.DECODE, 0), (Role.DECODE, 1)),
    "split, elastic: dgx-a100, dgx-h100",
)


@cache
def problem() -> Problem:
    model = load_model("llama-3.1-70b")
    machines = [load_machine(name) for name in ("dgx-h100", "dgx-a100")]
    return Problem(
        model=model,
        offers=tuple(Offer(machine=machine, times=phase_times(model, machine)) for machine in machines),
        traffic=Traffic(source=load_workload("azure-conversation"), rate_per_s=70.0, duration_s=120.0),
        reference=phase_times(model, machines[1]),
    )


def with_measured_link(made: Problem) -> Problem:
    """Return the problem with a link of the second machine that was measured."""
    first, second = made.offers
    link = Link(bytes_per_s=1e9, latency_s=0.0, per_layer_s=0.0, streaming_slowdown=0.0)
    machine = replace(second.machine, link=link, sources={"link": "measured with iperf"})
    return replace(made, offers=(first, replace(second, machine=machine)))


def answer(worst: float) -> Answer:
    return Answer(worst < 1, worst, "TTFT slowdown p99", (worst,), 1000.0, 2.0, (0.5,), (0.1,))


def capacity(rate_per_s: float) -> Capacity:
    return Capacity(
        rate_per_s=rate_per_s, broken_per_s=rate_per_s * 1.01, answers=(), bottleneck="ITL slowdown p90", probes=3
    )


def entry(design: Design, counts: Counts, value: float, held_per_s: float, rate_per_s: float = 70.0) -> RankedDesign:
    taken = {measure: value * factor for measure, factor in zip(Measure, (1, 291, 183, 0.084, 0.033), strict=True)}
    return RankedDesign(
        found=Found(design=design, counts=counts, value=value, answers=(answer(0.9),), probes=7),
        cluster=cluster_for(problem(), design, counts),
        taken=taken,
        rate_per_s=rate_per_s,
        capacity=capacity(held_per_s),
        per_seed=tuple(capacity(held_per_s * factor) for factor in (1.0, 1.013, 1.027)),
    )


def points(splits: Callable[[float], float], unsplit: float) -> list[Point]:
    return [
        Point(axis=axis, factor=factor, split=splits(factor), unsplit=unsplit)
        for axis in Axis
        for factor in FACTORS[axis]
    ]


def full(asked: Problem, split: RankedDesign, unsplit: RankedDesign) -> Plan:
    entries = sorted((split, unsplit), key=lambda one: one.found.value)
    per_seed = [
        advantage_of(split.found.value / own.rate_per_s, unsplit.found.value / other.rate_per_s)
        if asked.objective is not None
        else advantage_of(-own.rate_per_s, -other.rate_per_s)
        for own, other in zip(split.per_seed, unsplit.per_seed, strict=True)
    ]
    best = entries[0]
    ranges = [range(max(count - 3, 1), count + 4) for count in best.found.counts]
    grid: dict[Counts, Answer] = {(first,): answer(5.1 / first) for first in ranges[0]}
    if len(ranges) == 2:
        grid = {(x, y): answer(5.1 / x + 0.3 / y if x > 3 else INFINITE) for x in ranges[0] for y in ranges[1]}
    return Plan(
        problem=asked,
        entries=entries,
        verdict=decide(split.found.value, unsplit.found.value, per_seed, str(asked.objective or "rate")),
        bottlenecks=[
            Bottleneck(Resource.FLOPS, "the prefill machines", 0.617),
            Bottleneck(Resource.HBM_BYTES, "the decode machines", 1.25),
        ],
        gains=[
            Gain(what="one more prompt dgx-h100", rate_per_s=87.31, base_per_s=83.17),
            Gain(what="one more network card on every server", rate_per_s=83.19, base_per_s=83.17),
        ],
        grid=grid,
        points=points(lambda factor: 283.0 + 23.0 / factor if factor > 0.1 else INFINITE, 301.5),
        questions=431,
    )


def split_plan() -> Plan:
    return full(problem(), entry(STATIC, (6, 4), 299.2, 83.17), entry(CHUNKED, (8,), 304.64, 71.9))


def unsplit_plan() -> Plan:
    return full(problem(), entry(STATIC, (6, 5), 316.88, 71.3), entry(CHUNKED, (8,), 304.64, 72.9))


def rate_plan() -> Plan:
    asked = replace(problem(), objective=None, budgets={Measure.COST: 400.0})
    split, unsplit = entry(STATIC, (6, 4), 299.2, 83.17, 83.17), entry(CHUNKED, (8,), 304.64, 71.9, 71.9)
    for one in (split, unsplit):
        one.found.value = -one.rate_per_s
    plan = full(asked, split, unsplit)
    plan.points = points(lambda factor: 23.0 / factor - 90.0 if factor > 0.1 else INFINITE, -71.9)
    return plan


def existing_plan() -> Plan:
    plan = rate_plan()
    offers = tuple(replace(offer, existing=count) for offer, count in zip(problem().offers, (6, 5), strict=True))
    plan.problem = replace(plan.problem, offers=offers, budgets={})
    plan.entries[0] = replace(plan.entries[0], found=replace(plan.entries[0].found, design=FOUR, counts=(6, 0, 0, 5)))
    plan.entries = [replace(one, taken=plan.entries[0].taken) for one in plan.entries]
    plan.grid = {(1, 1, 1, 1): answer(2.0)}
    plan.points = []
    return plan


def refused(
    design: Design, bottleneck: Bottleneck | None = None, miss: tuple[Counts, Answer] | None = None
) -> RankedDesign:
    return RankedDesign(
        found=Found(design=design, bottleneck=bottleneck, miss=miss), cluster=None, taken={}, rate_per_s=0.0
    )


def unsure() -> Plan:
    plan = split_plan()
    plan.verdict = decide(299.2, 304.64, (0.02, -0.03, 0.01), "cost")
    return plan


def infeasible(*entries: RankedDesign) -> Plan:
    return Plan(problem=problem(), entries=list(entries), verdict=decide(INFINITE, INFINITE, (), "cost"), questions=5)


def hostile_plan() -> Plan:
    plan = split_plan()
    own = plan.problem
    offers = tuple(replace(offer, machine=replace(offer.machine, name=HOSTILE)) for offer in own.offers)
    sourced = tuple(replace(offer, times=replace(offer.times, source=HOSTILE)) for offer in offers)
    slo = replace(own.slo, name=HOSTILE)
    plan.problem = replace(own, model=replace(own.model, name=HOSTILE), offers=sourced, slo=slo)
    plan.entries.append(refused(replace(CHUNKED, name=HOSTILE), Bottleneck(HOSTILE, HOSTILE, 1.7)))
    plan.gains.append(Gain(what=HOSTILE, rate_per_s=90.0, base_per_s=83.17))
    return plan


def with_huge_grid() -> Plan:
    plan = split_plan()
    plan.grid = {(x, y): answer(200 / x + 20 / y) for x in range(5, 400, 9) for y in range(2, 200, 5)}
    return plan


def with_days() -> Plan:
    plan = split_plan()
    policies = (Static(), Joint(target_tokens_per_s=3695.0), Joint(target_tokens_per_s=977.0))
    plan.days = [
        Day(
            design=entry.design, counts=entry.found.counts, policy=policy, written=HOSTILE if number == 2 else "",
            requests=4_032_000, machine_hours=239.7 / (1 + number), usd=7172.0 / (1 + number), energy_j=3.79e9 + number,
            kg_co2e=491.0 + number, changes=33 * number, missed_share=0.0009 * number, worst_hour_share=0.12 * number,
            holds=number < 2,
        )
        for entry in plan.entries
        for number, policy in enumerate(policies)
    ]  # fmt: skip
    plan.day_notes = ["static:initial=1+1 does not fit"]
    plan.days_complete = False
    return plan


def on_absolute_limits() -> Plan:
    plan = split_plan()
    slo = parse_slo("ttft_p99<2s,itl_p99<100ms,goodput(ttft<2s,tpot<50ms)>=95%")
    plan.problem = replace(plan.problem, slo=slo)
    return plan


def one_sided() -> Plan:
    plan = split_plan()
    plan.entries = [plan.entries[0], refused(CHUNKED, miss=((9,), answer(1.43)))]
    plan.verdict = decide(plan.entries[0].found.value, INFINITE, (), "cost")
    plan.points = []
    return plan


def bare() -> Plan:
    plan = split_plan()
    return Plan(problem=plan.problem, entries=[replace(one, capacity=None, per_seed=()) for one in plan.entries])


def interrupted() -> Plan:
    plan = bare()
    plan.entries[1] = refused(CHUNKED)
    plan.complete = plan.entries[1].found.complete = False
    return plan


def result() -> Result:
    return simulated(SPLIT)


CASES: dict[str, Callable[[], tuple[Plan, Result | None]]] = {
    "split": lambda: (split_plan(), result()),
    "unsplit": lambda: (unsplit_plan(), result()),
    "rate": lambda: (rate_plan(), result()),
    "existing": lambda: (existing_plan(), result()),
    "absolute limits": lambda: (on_absolute_limits(), result()),
    "one-sided": lambda: (one_sided(), result()),
    "no result": lambda: (split_plan(), None),
    "huge grid": lambda: (with_huge_grid(), None),
    "bare": lambda: (bare(), None),
    "interrupted": lambda: (interrupted(), None),
    "bottlenecks": lambda: (
        infeasible(refused(CHUNKED, Bottleneck("ITL p50, alone on an idle machine,", "h", 1.85))),
        None,
    ),
    "misses": lambda: (infeasible(refused(CHUNKED, miss=((8,), answer(1.31))), refused(STATIC)), None),
    "saturated": lambda: (infeasible(refused(STATIC, miss=((8, 3), answer(INFINITE)))), None),
    "endless wall": lambda: (infeasible(refused(STATIC, Bottleneck(Resource.KV_CAPACITY, "h", INFINITE))), None),
    "nothing looked at": lambda: (Plan(problem=problem(), complete=False), None),
    "days": lambda: (with_days(), None),
    "hostile": lambda: (hostile_plan(), None),
}
