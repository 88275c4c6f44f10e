"""The machines of a plan's best designs by source of phase times: whose, which sources, and with which figures."""

from dataclasses import replace
from typing import Any

import pytest

from phasesplit.domain.cluster import Role
from phasesplit.io.catalog import compare_sources, phase_times
from phasesplit.io.specs import load_machine, load_model
from phasesplit.io.workloads import load_workload
from phasesplit.planner.designs import Counts, Design, DesignKind, cluster_for
from phasesplit.planner.plan import Plan, RankedDesign
from phasesplit.planner.problem import Offer, Problem, Traffic
from phasesplit.planner.search import Found
from phasesplit.planner.sources import plan_sources, sources_content

H100, A100, H200 = 0, 1, 2
UNSPLIT = Design(DesignKind.CHUNKED, ((Role.UNSPLIT, H100),), "unsplit")
WHOLE = Design(DesignKind.WHOLE, ((Role.UNSPLIT, H200),), "whole prompts")
SPLIT = Design(DesignKind.STATIC, ((Role.PREFILL, A100), (Role.DECODE, H100), (Role.DECODE, H200)), "split")


def plan(*designs: tuple[Design, Counts], published: bool = False) -> Plan:
    """Return a plan for Llama2-70B whose ranking is these designs."""
    served = load_model("llama2-70b")
    names = ("dgx-h100", "dgx-a100") if published else ("dgx-h100", "dgx-a100", "dgx-h200")
    machines = [load_machine(name) for name in names]
    offers = tuple(
        Offer(machine=machine, times=phase_times(served, machine, published=published)) for machine in machines
    )
    traffic = Traffic(source=load_workload("azure-coding"), rate_per_s=1.0, duration_s=60.0)
    problem = Problem(model=served, offers=offers, traffic=traffic)
    entries = [
        RankedDesign(
            found=Found(design=design, counts=counts, value=float(rank)),
            cluster=cluster_for(problem, design, counts),
            taken={},
            rate_per_s=1.0,
        )
        for rank, (design, counts) in enumerate(designs)
    ]
    return Plan(problem=problem, entries=entries)


def test_machines_are_those_of_the_winner_and_of_the_best_of_the_other_kind(no_tables: None) -> None:
    """Sources would be compared on machines that nobody would buy, or not on those that decide."""
    unsplit, split, whole = (UNSPLIT, (3,)), (SPLIT, (2, 4, 0)), (WHOLE, (5,))
    named = [one.machine for one in plan_sources(plan(unsplit, whole, split), "auto", ask_tables=False)]
    assert named == ["dgx-h100", "dgx-a100"]
    named = [one.machine for one in plan_sources(plan(split, unsplit), "auto", ask_tables=False)]
    assert named == ["dgx-a100", "dgx-h100"]
    assert plan_sources(plan(), "auto", ask_tables=False) == ()


def test_rows_are_those_of_the_comparison(no_tables: None) -> None:
    """The report of a plan would differ from the comparison it quotes, or show a machine as measured that is not."""
    measured, _, estimated = plan_sources(plan((UNSPLIT, (3,)), (SPLIT, (1, 0, 1))), "auto", ask_tables=False)
    assert list(measured.rows) == compare_sources(load_model("llama2-70b"), load_machine("dgx-h100"))
    assert (measured.used, set(measured.described)) == ("measured", {"measured", "roofline"})
    assert "pip install" in measured.absent["aiconfigurator"]
    assert (estimated.machine, estimated.used, estimated.rows) == ("dgx-h200", "roofline", ())
    assert set(estimated.absent) == {"measured", "aiconfigurator"}


def test_content_has_every_row(no_tables: None) -> None:
    """A script could not follow how far the plan hangs on its source."""
    sources = plan_sources(plan((UNSPLIT, (3,))), "auto", ask_tables=False)
    (content,) = sources_content(sources)
    assert len(content["iterations"]) == len(sources[0].rows) == 14
    first, row = content["iterations"][0], sources[0].rows[0]
    assert first["time_s"] == row.seconds
    assert first["ratio_to_roofline"]["measured"] == row.seconds["measured"] / row.seconds["roofline"]
    assert content["used"] == "measured"


@pytest.mark.parametrize(
    ("times", "ask_tables", "engines"),
    [
        ("auto", False, []),
        ("auto", True, ["vllm"]),
        ("aiconfigurator", False, ["vllm"]),
        ("aiconfigurator:sglang", True, ["sglang"]),
    ],
)
def test_tables_are_asked_where_somebody_waits_for_them(
    fake_tables: Any, times: str, ask_tables: bool, engines: list[str]
) -> None:
    """Every plan would take two seconds more, or the tables that were asked for be missing or another engine's."""
    (found,) = plan_sources(plan((UNSPLIT, (3,))), times, ask_tables=ask_tables)
    assert [one["backend"] for one in fake_tables.asked] == engines
    assert ("aiconfigurator" in found.described) == bool(engines)
    assert ("two seconds" in found.absent.get("aiconfigurator", "")) == (not engines)


def test_what_the_plan_was_made_with_is_compared(no_tables: None) -> None:
    """Measurements of one's own, or the published look-up, would be replaced by those that are shipped."""
    made = plan((UNSPLIT, (3,)))
    assert made.best is not None
    assert made.best.cluster is not None
    (pool,) = made.best.cluster.pools
    own = replace(pool.times.scaled(2.0, 2.0), source="measured: mine")
    made.entries[0] = replace(made.entries[0], cluster=replace(made.best.cluster, pools=(replace(pool, times=own),)))
    (found,) = plan_sources(made, "auto", ask_tables=False)
    assert found.described["measured"] == "measured: mine"
    assert found.rows[0].seconds["measured"] == pytest.approx(2 * pool.times.prefill_time_s(128))

    (found,) = plan_sources(plan((UNSPLIT, (3,)), published=True), "auto", ask_tables=False)
    assert found.used == "published look-up"
    assert set(found.rows[3].seconds) == {"published look-up", "measured", "roofline"}
