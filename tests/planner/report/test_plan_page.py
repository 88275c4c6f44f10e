"""The report and the sheet of a plan: whole, self-contained, and with the plan's own figures."""

from collections.abc import Callable
from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from phasesplit.errors import SpecError
from phasesplit.io.catalog import compare_sources
from phasesplit.io.specs import load_machine, load_model
from phasesplit.planner.documents import policy_setting
from phasesplit.planner.lower_bounds import Bottleneck
from phasesplit.planner.plan import Plan
from phasesplit.planner.problem import Measure
from phasesplit.planner.report import write_plan_figure, write_plan_html
from phasesplit.planner.report.plan_page import plan_report
from phasesplit.planner.report.plan_panels import (
    crossover_line,
    draw_front,
    front_line,
    iso_measure,
    latency_metrics,
    tint,
    unbeaten,
)
from phasesplit.planner.report.plan_tables import MEASURE_NAMES, factor, heading, why_not
from phasesplit.planner.sensitivity import Axis, Point
from phasesplit.planner.sources import MachineSources
from planner.report.plans import (
    CASES,
    HOSTILE,
    INFINITE,
    bare,
    infeasible,
    interrupted,
    one_sided,
    rate_plan,
    refused,
    result,
    split_plan,
    unsplit_plan,
    unsure,
    with_days,
    with_measured_link,
)
from planner.report.plans import CHUNKED as UNSPLIT
from report.html_page import Page

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_page_is_whole_and_loads_nothing(case: str, tmp_path: Path) -> None:
    """A report of a plan with parts missing would not be written, be a broken page, or need a network or scripts."""
    target = tmp_path / "plan.html"
    write_plan_html(*CASES[case](), target)
    page = Page(target.read_text(encoding="utf-8"))
    assert page.open == []
    assert page.loads == []
    assert "script" not in page.tags
    assert len(set(page.identifiers)) == len(page.identifiers)
    assert "nan" not in page.text.lower().split()
    assert "inf" not in page.text.lower().split()


@pytest.mark.parametrize("case", ["unsplit", "rate", "existing", "bare", "misses", "nothing looked at"])
def test_every_plan_can_be_drawn(case: str, tmp_path: Path) -> None:
    """A plan with parts missing would end without its picture."""
    target = tmp_path / "plan.png"
    write_plan_figure(*CASES[case](), target)
    assert target.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.png"]


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    """Reports under version control would change without a change of the plan."""
    assert plan_report(split_plan(), result()) == plan_report(split_plan(), result())
    for kind in ("png", "svg"):
        first, second = tmp_path / f"first.{kind}", tmp_path / f"second.{kind}"
        write_plan_figure(bare(), None, first)
        write_plan_figure(bare(), None, second)
        assert first.read_bytes() == second.read_bytes(), kind


def test_another_ending_is_named_in_one_line(tmp_path: Path) -> None:
    """A person would see a traceback, or a file half-written."""
    with pytest.raises(SpecError, match=r"\.png, \.pdf, \.svg"):
        write_plan_figure(bare(), None, tmp_path / "plan.jpg")
    assert list(tmp_path.iterdir()) == []


def test_names_are_escaped() -> None:
    """The name of a machine, a model or an SLO could put a script into the report."""
    plan, _ = CASES["hostile"]()
    text = plan_report(plan, None)
    assert HOSTILE not in text
    assert HOSTILE in Page(text).text
    assert "script" not in Page(text).tags


def test_ranking_has_the_numbers_of_the_plan() -> None:
    """The table of designs would print another cost, power, rate or capacity than the plan found."""
    plan = split_plan()
    rows = Page(plan_report(plan, None)).rows
    pools = ("6 prefill dgx-h100 + 4 decode dgx-a100", "8 unsplit dgx-h100")
    for rank, (entry, counts) in enumerate(zip(plan.entries, pools, strict=True), 1):
        assert entry.capacity is not None
        taken = [entry.taken[measure] for measure in MEASURE_NAMES]
        row = rows[f"All designs: {rank}  {entry.design.kind}: {counts}"]
        assert row == [*taken, entry.rate_per_s, entry.capacity.rate_per_s]


def test_seeds_have_the_numbers_of_the_plan() -> None:
    """The spread over the seeds would not be that which the verdict rests on."""
    plan = split_plan()
    rows = Page(plan_report(plan, None)).rows
    assert plan.verdict is not None
    assert rows["All designs: advantage of the split"] == list(plan.verdict.per_seed)
    for entry in plan.entries:
        assert rows[f"All designs: capacity, {entry.design.name}"] == [one.rate_per_s for one in entry.per_seed]


def test_walls_and_gains_have_the_numbers_of_the_plan() -> None:
    """A person would buy the wrong thing."""
    plan = split_plan()
    rows = Page(plan_report(plan, None)).rows
    for bottleneck in plan.bottlenecks:
        assert rows[f"What the winner hits next: {bottleneck.resource} of {bottleneck.where}"] == [bottleneck.share]
    for gain in plan.gains:
        bought = gain.rate_per_s - gain.base_per_s
        assert rows[f"What the winner hits next: {gain.what}"] == [gain.rate_per_s, bought]


@pytest.mark.parametrize("make", [split_plan, rate_plan])
def test_sensitivity_has_the_numbers_of_the_plan(make: Callable[[], Plan]) -> None:
    """The table of where the verdict flips would differ from the plan, or call an impossible design possible."""
    plan = make()
    rows = Page(plan_report(plan, None)).rows
    assert any(isnan(point.advantage) for point in plan.points)
    for point in plan.points:
        known = [abs(value) for value in (point.split, point.unsplit) if value < INFINITE]
        known += [] if isnan(point.advantage) else [point.advantage]
        assert rows[f"Where the verdict flips: {point.axis} × {factor(point.factor)}"] == known


def test_tiles_have_the_numbers_of_the_winner() -> None:
    """The first figures that a person reads would be another design's."""
    best = split_plan().best
    assert best is not None
    assert best.capacity is not None
    text = plan_report(split_plan(), None)
    for value in (*best.taken.values(), best.rate_per_s, best.capacity.rate_per_s, best.capacity.rate_per_s / 70 - 1):
        assert f'<dd><data value="{value!r}">' in text


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (split_plan, "Split: a split takes 1.8 % less cost than the best unsplit design"),
        (unsplit_plan, "Do not split: a split takes 4.0 % more cost than the best unsplit design"),
        (rate_plan, "Split: a split holds a rate 16 % higher than the best unsplit design"),
        (one_sided, "Split: no unsplit cluster that was looked at keeps the SLO"),
        (bare, "No verdict: split and unsplit designs were not both compared"),
        (interrupted, "No verdict yet: split and unsplit designs were still being sized"),
        (unsure, "Split, but not surely: a split takes 1.8 % less cost than the best unsplit design"),
        (infeasible, "No design that was looked at keeps the SLO"),
    ],
)
def test_verdict_in_words(make: Callable[[], Plan], said: str) -> None:
    """The report would give the advantage to the wrong side, compare costs where rates count, or invent a verdict."""
    plan = make()
    assert heading(plan) == said
    assert said in Page(plan_report(plan, None)).text


def test_interruption_is_said_first() -> None:
    """A person would take the best of a search that was cut short for the best there is."""
    text = Page(plan_report(interrupted(), None)).text
    assert 0 < text.index("Interrupted: this plan is not complete") < text.index("All designs")


def test_sources_of_phase_times_are_compared_whole() -> None:
    """A person would not see how far the plan hangs on its source, or take one source's time for another's."""
    model, machine = load_model("llama2-70b"), load_machine("dgx-h100")
    compared = compare_sources(model, machine, source=None)
    sources = (
        MachineSources(machine="h", used="measured", described={}, absent={}, rows=tuple(compared)),
        MachineSources(
            machine="a", used="roofline", described={"roofline": "r"}, absent={"measured": HOSTILE}, rows=()
        ),
    )
    page = Page(plan_report(split_plan(), None, sources))
    section = "Where the phase times come from"
    for row in compared:
        what = f"prefill of {row.size:,}" if row.phase == "prefill" else f"decode, batch {row.size}"
        times_ms = [row.seconds["measured"] * 1e3, row.seconds["roofline"] * 1e3]
        assert page.rows[f"{section}: h, {what}"] == [*times_ms, row.ratios["measured"]]
    assert len([row for row in page.rows if row.startswith(f"{section}: h, ")]) == 14
    assert f"a: times by roofline alone. measured: {HOSTILE}." in page.text
    assert "script" not in page.tags


def test_a_measured_link_is_named_with_the_phase_times() -> None:
    """A person would not know whether the transfers of the plan rest on a measurement."""
    plan = split_plan()
    assert "where its link comes from" not in Page(plan_report(plan, None)).text
    plan.problem = with_measured_link(plan.problem)
    text = Page(plan_report(plan, None)).text
    assert "where its link comes from" in text
    assert text.index("its network cards") < text.index("measured with iperf")


def test_refusals_say_why() -> None:
    """A person would not learn what to change about an SLO that cannot be kept."""
    bottlenecks, _ = CASES["bottlenecks"]()
    assert "ITL p50, alone on an idle machine, h: 185 % of its limit" in Page(plan_report(bottlenecks, None)).text
    misses, _ = CASES["misses"]()
    text = Page(plan_report(misses, None)).text
    assert "nearest miss 8 unsplit dgx-h100: TTFT slowdown p99 at 131 % of its limit" in text
    assert "no counts within the budgets hold any rate" in text
    bottleneck = Bottleneck("KV capacity", "the decode machines", 1.5)
    assert "KV capacity of the decode machines: 150 % of what there is" in why_not(
        misses.problem, refused(UNSPLIT, bottleneck)
    )


def test_colours_change_at_the_limit() -> None:
    """Counts that break the SLO would have the colour of those that keep it."""
    plan = split_plan()
    assert {tint(one).partition("-")[0] for one in plan.grid.values() if one.holds} == {"keeps"}
    assert {tint(one).partition("-")[0] for one in plan.grid.values() if not one.holds} == {"breaks", "idle"}


def test_lines_of_equal_measure_follow_the_machines() -> None:
    """Lines would show a measure that depends on load as if it followed from the counts."""
    assert iso_measure(split_plan()) == Measure.COST
    plan = rate_plan()
    plan.problem.budgets.clear()
    plan.problem.budgets[Measure.POWER] = 1e5
    assert iso_measure(plan) == Measure.POWER


def test_front_leaves_out_what_another_beats() -> None:
    """A design that costs more, needs more power and holds less would be shown as worth a look."""
    plan = split_plan()
    assert unbeaten(plan) == [1]
    assert front_line(plan).endswith(": 1.")


@pytest.mark.parametrize("dear", [0, 1])
def test_front_shows_what_the_verdict_compares(dear: int) -> None:
    """The chart would show cheap designs that hold little, and leave out the winner or its rival as far beyond."""
    plan = rate_plan()
    cheap = replace(
        plan.entries[1], taken={measure: taken / 9 for measure, taken in plan.entries[1].taken.items()}, rate_per_s=1.0
    )
    dearest = {measure: 2 * taken for measure, taken in plan.entries[dear].taken.items()}
    plan.entries[dear] = replace(plan.entries[dear], taken=dearest)
    plan.entries += [
        cheap,
        replace(plan.entries[dear], taken={one: taken * (1 + 1e-15) for one, taken in dearest.items()}),
    ]
    axes = Figure().subplots()
    draw_front(axes, plan)
    for entry in plan.entries[:2]:
        low, high = axes.get_xlim()
        assert low < entry.taken[Measure.COST] < high
        low, high = axes.get_ylim()
        assert low < entry.taken[Measure.POWER] / 1e3 < high
    assert not any("far beyond" in text.get_text() for text in axes.texts)


def test_crossover_names_both_kinds_of_flips() -> None:
    """A person would not see where the answer changes, or read a precise place out of an impossible design."""
    plan = split_plan()
    plan.points = [
        Point(axis=Axis.LINK, factor=one, split=283 + 23 / one if one > 0.1 else INFINITE, unsplit=301.5)
        for one in (1 / 32, 1.0, 2.0)
    ]
    line = crossover_line(plan, Axis.LINK)
    assert f"the lead changes at {2 ** (4.5 / 11.5):.2f} times" in line
    assert "only unsplit keeps the SLO at 1/32" in line
    plan.points = [Point(axis=Axis.LINK, factor=one, split=9 if one > 1 else INFINITE, unsplit=10) for one in (1, 2)]
    assert "the lead changes between 1 and 2" in crossover_line(plan, Axis.LINK)


def test_days_have_the_numbers_of_the_plan() -> None:
    """The report would print another saving, or other misses, than the days have; or hide that days are missing."""
    plan = with_days()
    page = Page(plan_report(plan, None))
    rows = {name: row for name, row in page.rows.items() if name.startswith("Over a day: ")}
    assert len(rows) == len(plan.days)
    for (name, row), day in zip(rows.items(), plan.days, strict=True):
        assert name.endswith(policy_setting(day))
        assert row == [
            day.machine_hours, day.usd, day.energy_j / 3.6e6, day.kg_co2e, day.changes, day.missed_share,
            day.worst_hour_share,
        ]  # fmt: skip
    assert "static:initial=1+1 does not fit" in page.text
    assert "Interrupted: days are missing." in page.text
    assert "split 3,586 USD (joint, 50% less than with all always on, but 12% missed in its worst hour)" in page.text
    assert "Over a day" not in Page(plan_report(split_plan(), None)).text


def test_latencies_are_those_of_the_slo() -> None:
    """Curves would show latencies that no limit is on, in place of those that decide."""
    assert latency_metrics(split_plan()) == ["ttft_slowdown", "itl_slowdown", "e2e_slowdown"]
    plan, _ = CASES["absolute limits"]()
    assert latency_metrics(plan) == ["ttft_s", "itl_s", "goodput_ratio"]
