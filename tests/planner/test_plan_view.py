"""A plan as text: nothing cut, and no more said than the searches know."""

import re
from dataclasses import replace

import pytest

from phasesplit.planner.plan import Gain
from phasesplit.planner.plan_view import flip_texts, gain_text, print_plan
from phasesplit.planner.problem import Measure
from phasesplit.planner.sensitivity import Axis, Point
from planner.report.plans import split_plan, with_measured_link


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_nothing_of_the_ranking_is_cut(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person would read the percentile p9 where the limit is p99, and not know that something is missing."""
    monkeypatch.setenv("COLUMNS", str(columns))
    plan = split_plan()
    plan.problem = replace(plan.problem, budgets={Measure.ENERGY: 1e6})  # one more column
    print_plan(plan, 1.0)
    printed = capsys.readouterr().out
    words = printed.split("Split: ")[0].split()
    assert max(map(len, printed.splitlines())) <= columns
    for word in ("299.20", "304.64", "87.1", "88.7", "83.2/s", "71.9/s"):
        assert word in words, word
    for word, times in {
        "TTFT": 2,
        "p99": 2,
        "90%": 2,
        "dgx-h100": 2,
        "prefill": 1,
        "prompts": 1,
        "dgx-a100": 1,
    }.items():
        assert words.count(word) == times, word


def test_capacities_on_the_first_seed_differ_in_print_from_those_on_all(capsys: pytest.CaptureFixture[str]) -> None:
    """A person would compare a rate that one seed allows with one that all of them allow."""
    plan = split_plan()
    print_plan(plan, 1.0)
    assert "~" not in capsys.readouterr().out
    plan.entries.append(replace(plan.entries[1], per_seed=()))
    print_plan(plan, 1.0)
    printed = capsys.readouterr().out
    assert re.findall(r"\S+/s(?= |$)", printed.split("Split: ")[0], re.M) == ["83.2/s", "71.9/s", "~71.9/s"]
    assert "~ on the first seed alone\n" in printed
    plan.problem = replace(plan.problem, seeds=(0,))
    print_plan(plan, 1.0)
    assert "~" not in capsys.readouterr().out


def test_sources_are_shown_of_settings_that_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """A winner of slices would stand there without a word on where its times are from."""
    plan = split_plan()
    slices = [
        replace(offer, variant_of="a server", times=replace(offer.times, source="of slices"))
        for offer in plan.problem.offers
    ]
    plan.problem = replace(plan.problem, offers=tuple(slices))
    print_plan(plan, 1.0)
    assert "phase times (dgx-h100, dgx-a100): of slices" in " ".join(capsys.readouterr().out.split())
    plan.entries = plan.entries[1:]  # the design of dgx-h100 alone
    print_plan(plan, 1.0)
    assert "phase times (dgx-h100): of slices" in " ".join(capsys.readouterr().out.split())


def test_a_measured_link_differs_in_print_from_one_that_follows_from_the_cards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A person would not know whether the transfers of the plan rest on a measurement."""
    plan = split_plan()
    print_plan(plan, 1.0)
    assert "link (" not in capsys.readouterr().out
    plan.problem = with_measured_link(plan.problem)
    print_plan(plan, 1.0)
    assert "link (dgx-a100): measured with iperf\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rate_per_s", "said"),
    [
        (102.0, "102 requests/s (+2.0%)"),
        (100.9, "nothing (within 1%)"),
        (99.0, "nothing (within 1%)"),
        (97.0, "97 requests/s (no more)"),
    ],
)
def test_what_searches_leave_open_is_no_gain(rate_per_s: float, said: str) -> None:
    """A person would read that one more machine makes a cluster slower, by what is the search's own width."""
    assert gain_text(Gain(what="one more", rate_per_s=rate_per_s, base_per_s=100.0)) == said


def points(axis: Axis, *pairs: tuple[float, float, float]) -> list[Point]:
    return [Point(axis=axis, factor=factor, split=split, unsplit=unsplit) for factor, split, unsplit in pairs]


def test_flips_say_on_which_side_unsplit_is_better() -> None:
    """A person would split where it does not pay."""
    low = points(Axis.RATIO, (0.25, 1.5, 1.0), (1.0, 1.0, 2.0))
    assert flip_texts(Axis.RATIO, low, 70.0) == ["to unsplit below x0.5"]
    high = points(Axis.RATE, (1.0, 1.0, 2.0), (4.0, 2.0, 1.0))
    assert flip_texts(Axis.RATE, high, 10.0)[0].startswith("to unsplit above ")
    assert flip_texts(Axis.RATE, high, 10.0)[0].endswith("/s")
    near = points(Axis.TIGHTNESS, (0.125, float("inf"), 1.0), (1.25, 1.0, 2.0))
    assert flip_texts(Axis.TIGHTNESS, near, 1.0) == ["to unsplit below somewhere from x0.125 to x1.25"]
    gone = points(Axis.TIGHTNESS, (0.5, float("inf"), 1.0), (1.0, 1.0, 2.0))
    assert flip_texts(Axis.TIGHTNESS, gone, 1.0) == ["to unsplit below somewhere from x0.5 to x1"]
    assert flip_texts(Axis.LINK, points(Axis.LINK, (0.5, 2.0, 1.0), (1.0, 2.0, 1.0)), 1.0) == []
