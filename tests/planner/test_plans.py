"""A plan as JSON, and its winner as a cluster file."""

import math
from typing import Any

import orjson
import pytest

from phasesplit.io.policies import parse_policy
from phasesplit.planner.documents import cluster_spec, pareto_designs, plan_summary, winner_result
from phasesplit.planner.plan import Plan
from phasesplit.planner.problem import Measure
from phasesplit.planner.problem_file import read_problem
from phasesplit.planner.provision import make_plan, simulate_days
from phasesplit.planner.question import Asked
from phasesplit.planner.sensitivity import Axis, Point

VALUES = {
    "model": "llama-3.1-70b", "machines": "dgx-h100,dgx-a100", "workload": "azure-conversation", "rate": 10,
    "duration": 20, "seeds": 2, "slo": "ttft_p99<2s,tpot_p90<80ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def question() -> Asked:
    """Return a small question with an SLO of times."""
    return read_problem(None, VALUES)


@pytest.fixture(scope="module")
def made(question: Asked) -> Plan:
    """Return its plan; no test changes it."""
    return make_plan(question, workers=1, thorough=False)


@pytest.fixture(scope="module")
def summary(made: Plan) -> dict[str, Any]:
    """Return its summary after a round through JSON."""
    found: dict[str, Any] = orjson.loads(orjson.dumps(plan_summary(made, 1.5, winner_result(made))))
    return found


def test_the_winner_is_shown_with_its_machines_and_what_they_take(made: Plan, summary: dict[str, Any]) -> None:
    """A script that buys what the plan says would buy something else."""
    best = made.best
    assert best is not None
    assert best.cluster is not None
    entry = summary["best"]
    pools = [(pool["role"], pool["machine"], pool["count"]) for pool in entry["pools"]]
    assert pools == [(str(pool.role), pool.machine.name, pool.count) for pool in best.cluster.pools]
    assert entry["cost_usd_per_hour"] == pytest.approx(
        sum(pool.count * pool.machine.price_usd_per_hour for pool in best.cluster.pools)
    )
    assert entry["provisioned_power_w"] == best.taken[Measure.POWER]
    assert entry["servers"] == best.cluster.machines
    assert entry["capacity_per_s"] >= 0.9 * summary["rate_per_s"]
    assert entry["objective"] == entry["cost_usd_per_hour"]


def test_the_nine_slowdowns_are_shown_whatever_the_slo_is(summary: dict[str, Any]) -> None:
    """Plans for other SLOs could not be compared with the paper's."""
    slowdowns = summary["best"]["slowdowns"]
    assert set(slowdowns) == {f"{metric}_p{p}" for metric in ("ttft", "itl", "e2e") for p in (50, 90, 99)}
    assert all(value > 0 for value in slowdowns.values())
    assert slowdowns["ttft_p50"] <= slowdowns["ttft_p90"] <= slowdowns["ttft_p99"]


def test_each_limit_is_shown_with_its_worst_seed(made: Plan, summary: dict[str, Any]) -> None:
    """A limit would look kept that one seed breaks."""
    limits = summary["best"]["slo"]
    assert [(limit["metric"], limit["percentile"]) for limit in limits] == [("ttft_s", 99.0), ("itl_mean_s", 90.0)]
    for limit in limits:
        assert len(limit["values"]) == 2
        assert limit["value"] == max(limit["values"]) < limit["below"]


def test_every_design_is_shown_and_the_first_is_the_best(made: Plan, summary: dict[str, Any]) -> None:
    """Candidates would be missing from the comparison, or out of order."""
    assert [one["design"] for one in summary["candidates"]] == [entry.design.name for entry in made.entries]
    holding = [one for one in summary["candidates"] if one["holds"]]
    assert [one["objective"] for one in holding] == sorted(one["objective"] for one in holding)
    assert holding[0]["design"] == summary["best"]["design"]
    assert {one["kind"] for one in summary["candidates"]} == {
        "unsplit, chunked prompts", "unsplit, whole prompts", "split, elastic", "split, static",
    }  # fmt: skip
    for one in summary["candidates"]:
        assert bool(one.get("refused")) != one["holds"]


def test_what_a_plan_rests_on_is_shown(summary: dict[str, Any]) -> None:
    """Nobody could say later which question was answered, or by which phase times."""
    assert summary["seeds"] == [0, 1]
    assert summary["elapsed_s"] == 1.5
    assert summary["complete"] is True
    assert summary["questions"] > 0
    assert "roofline" in summary["times_sources"]["dgx-h100"]
    assert summary["link_sources"]["dgx-h100"] is None
    assert summary["verdict"]["text"]
    assert len(summary["verdict"]["per_seed"]) in (0, 2)


def test_numbers_that_are_none_become_null(made: Plan, question: Asked) -> None:
    """Strict readers of JSON would refuse the plan."""
    varied = Plan(problem=made.problem, entries=made.entries, verdict=made.verdict)
    varied.points = [Point(axis=Axis.RATE, factor=f, split=math.inf, unsplit=1.0) for f in (0.5, 1.0)]
    content = plan_summary(varied, math.nan, None)
    assert content["elapsed_s"] is None
    assert content["sensitivity"][0]["points"][0]["split"] is None
    assert content["best"]["slowdowns"] is None


def test_no_design_of_the_front_is_beaten_in_everything(made: Plan) -> None:
    """The Pareto front would hold designs that nobody should choose, or miss the cheapest."""
    names = pareto_designs(made)
    assert made.best is not None
    cheapest = min(one.taken[Measure.COST] for one in made.entries if one.found.holds)
    assert any(one.taken[Measure.COST] == cheapest for one in made.entries if one.design.name in names)
    assert len(names) < len(made.entries)


def test_a_plan_without_winner_is_shown_with_reasons() -> None:
    """An honest negative answer would be a traceback or an empty list."""
    hopeless = make_plan(read_problem(None, {**VALUES, "slo": "ttft_p50<1ms"}), workers=1)
    content = plan_summary(hopeless, 0.1, winner_result(hopeless))
    assert content["best"] is None
    assert all("alone on an idle machine" in one["refused"] for one in content["candidates"])


def test_the_cluster_file_names_machines_as_they_were_written(made: Plan, question: Asked) -> None:
    """The file could not be read back where machines come from files of one's own."""
    spec = cluster_spec(made, question)
    assert spec.model == "llama-3.1-70b"
    assert {pool.machine for pool in spec.pools} <= set(question.written.values())


def test_days_are_shown_in_base_units_with_the_policy_to_copy() -> None:
    """A script could not compare policies, or run the one that it chose."""
    asked = read_problem(None, {**VALUES, "rate": 0.3, "duration": 60, "day": ["joint:target=77,ratio=2"]})
    planned = make_plan(asked, workers=1, thorough=False)
    simulate_days(planned, asked, workers=1)
    content = orjson.loads(orjson.dumps(plan_summary(planned, 1.0, None)))
    assert len(content["days"]) == len(planned.days) == 10
    for shown, day in zip(content["days"], planned.days, strict=True):
        assert shown["design"] == day.design.name
        assert parse_policy(shown["autoscale"]) == day.policy
        assert shown["fitted"] == (shown["autoscale"] != "joint:target=77,ratio=2")
        assert shown["counts"] == list(day.counts)
        for name in ("requests", "machine_hours", "usd", "energy_j", "kg_co2e", "changes", "missed_share", "holds"):
            assert shown[name] == getattr(day, name), name
    assert content["day_verdict"].startswith("The least over the day")
    assert (content["day_notes"], content["days_complete"]) == ([], True)
