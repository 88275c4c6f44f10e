"""SLOs: limits, shares of good requests, and the texts that name them."""

import numpy as np
import pytest

from phasesplit.domain.latency import Exact
from phasesplit.domain.slo import GOODPUT_RATIO, SPLITWISE, Limit, Slo, goodput_ratio, judge, parse_slo
from phasesplit.errors import SpecError
from refusals import assert_refused


def test_scaled_slo_moves_every_limit_and_no_share() -> None:
    """A sensitivity study over tightness would move only some limits, or ask for more requests than there are."""
    slo = parse_slo("ttft_p99<2s,goodput(tpot<50ms)>=95%").scaled(0.5)
    assert slo.limits == (Limit("ttft_s", 99.0, 1.0), Limit(GOODPUT_RATIO, 95.0, 1.0))
    assert slo.each == (("itl_mean_s", 0.025),)
    assert [limit.below for limit in SPLITWISE.scaled(2).limits] == [2 * limit.below for limit in SPLITWISE.limits]


def test_metrics_of_an_slo_are_those_it_limits() -> None:
    """A probe would leave out a distribution that its verdict needs."""
    assert parse_slo("ttft_p99<2s,goodput(tpot<50ms)>=95%").metrics == {"ttft_s", GOODPUT_RATIO}
    assert len(SPLITWISE.metrics) == 3


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("splitwise", True),
        ("none", False),
        ("ttft_p50<1s", False),
        ("goodput(ttft_slowdown<2)>=90%", True),
        ("ttft_p50<1s,e2e_slowdown_p99<5", True),
    ],
)
def test_only_slowdowns_need_a_reference(text: str, needs: bool) -> None:
    """A cluster without a reference would be judged by slowdowns that it lacks, or not by limits that it has."""
    assert parse_slo(text).needs_reference is needs


def test_goodput_counts_requests_that_keep_all_their_limits() -> None:
    """A request that keeps one limit and breaks another would count as good, or one without gaps as bad."""
    values = {"ttft_s": np.array([1.0, 1.0, 3.0, 1.0]), "itl_mean_s": np.array([0.02, 0.08, 0.02, np.nan])}
    ratio = goodput_ratio(values, (("ttft_s", 2.0), ("itl_mean_s", 0.05)))
    assert ratio == pytest.approx([0.5, 1.6, 1.5, 0.5])


@pytest.mark.parametrize(("good", "holds"), [(97, True), (93, False)])
def test_goodput_is_judged_by_the_share_of_requests(good: int, holds: bool) -> None:
    """A goodput of 95 % would be granted to fewer requests, or withheld from more."""
    slo = parse_slo("goodput(ttft<2s)>=95%")
    ttft_s = np.repeat([1.0, 9.0], [good, 100 - good])
    ratio = goodput_ratio({"ttft_s": ttft_s}, slo.each)
    assert judge(slo, {GOODPUT_RATIO: Exact(ratio)}, complete=True).holds is holds


def test_text_of_every_metric() -> None:
    """A limit would be held against another metric, percentile or unit than the one written."""
    slo = parse_slo(
        "ttft_p99<2s, itl_p99.9<100ms, tpot_p90<50ms, e2e_p50<20s, itl_max_p99<0.5s, queue_p95<1s, ttft_slowdown_p50<2"
    )
    assert slo.limits == (
        Limit("ttft_s", 99.0, 2.0),
        Limit("itl_s", 99.9, 0.1),
        Limit("itl_mean_s", 90.0, 0.05),
        Limit("e2e_s", 50.0, 20.0),
        Limit("itl_max_s", 99.0, 0.5),
        Limit("queue_s", 95.0, 1.0),
        Limit("ttft_slowdown", 50.0, 2.0),
    )
    assert slo.each == ()


def test_itl_of_a_good_request_is_its_largest_gap() -> None:
    """A request with one long stall would count as good."""
    assert parse_slo("goodput(itl<100ms)>=90%").each == (("itl_max_s", 0.1),)


@pytest.mark.parametrize(
    "text", ["itl_p99<100ms", "itl_max_p99<0.5s", "itl_slowdown_p90<1.5", "goodput(ttft<2s,itl<100ms)>=90%"]
)
def test_the_papers_name_of_a_gap_is_understood(text: str) -> None:
    """An SLO in the words of the paper, ITL, would be refused or limit something else."""
    ours, papers = parse_slo(text), parse_slo(text.replace("itl", "tbt"))
    assert (papers.limits, papers.each) == (ours.limits, ours.each)


def test_text_with_a_factor() -> None:
    """A factor would be lost, or apply to a part of the list."""
    assert parse_slo("splitwise*1.5").limits[0].below == 3.0
    assert parse_slo("splitwise*1.5").name == "splitwise*1.5"
    both = parse_slo("(ttft_p99<2s, itl_p99<100ms)*2")
    assert [limit.below for limit in both.limits] == [4.0, 0.2]
    assert parse_slo(both.name) == both
    assert parse_slo("splitwise") is SPLITWISE
    assert parse_slo("none") == Slo("none", ())


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["splitwise or none"]),
        ("strict", ["'strict'", "splitwise or none"]),
        ("splitwise*0", ["factor", "'0'"]),
        ("splitwise*x", ["factor", "'x'"]),
        ("ttft<2s", ["METRIC_pPERCENTILE<VALUE"]),
        ("ttft_p99<2s,", ["''"]),
        ("tft_p99<2s", ["metric", "'tft'", "ttft"]),
        ("ttft_p99<2", ["number with ms or s"]),
        ("ttft_p99<2h", ["'2h'"]),
        ("ttft_slowdown_p99<2s", ["factor without a unit"]),
        ("ttft_p0<2s", ["percentile", "'0'"]),
        ("ttft_p101<2s", ["percentile", "'101'"]),
        ("ttft_p99<0s", ["ttft", "'0'"]),
        ("ttft_p99<1.2.3s", ["'1.2.3'"]),
        ("ttft_p99<2s,ttft_p99<3s", ["one limit on the same percentile"]),
        ("goodput(ttft<2s)", ["goodput("]),
        ("goodput(ttft_p99<2s)>=95%", ["without a percentile"]),
        ("goodput(ttft<2s,ttft<3s)>=95%", ["one limit on a metric"]),
        ("goodput(ttft<2s)>=950%", ["'950'"]),
        ("goodput(queue<2s)>=95%", ["metric", "'queue'"]),
        ("goodput(ttft<2s)>=95%,goodput(e2e<2s)>=95%", ["one goodput"]),
        ("ttft_p99<2s,itl_p99<100ms*2", ["'itl_p99<100ms*2'"]),
    ],
)
def test_wrong_text_says_what_is_allowed(text: str, named: list[str]) -> None:
    """A misspelt SLO would judge by something else, or its message would not help."""
    with pytest.raises(SpecError) as caught:
        parse_slo(text, "--slo")
    assert_refused(caught.value, "--slo", *named)
