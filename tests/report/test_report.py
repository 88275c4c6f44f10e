"""The HTML report: one valid page that loads nothing, escapes names, and holds the result's own figures."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phasesplit.errors import SpecError
from phasesplit.io.catalog import build_cluster
from phasesplit.report import write_html
from phasesplit.report.page import table
from phasesplit.report.simulation_page import html_report
from phasesplit.simulator.run import simulate
from report.html_page import Page
from report.runs import CASES, SPLIT, one_request, short_trace, simulated

pytestmark = pytest.mark.slow

HOSTILE = """<script>alert("1")</script>&'"""


@pytest.mark.parametrize("case", CASES)
def test_page_is_whole_and_loads_nothing(case: str, tmp_path: Path) -> None:
    """A report would be a broken page, or one that shows nothing without a network."""
    target = tmp_path / "report.html"
    write_html(CASES[case](), target)
    text = target.read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.loads == []
    assert "http://" not in text
    assert "https://" not in text
    assert "script" not in page.tags
    assert len(page.identifiers) == len(set(page.identifiers))
    assert not re.search(r"\bnan\b", page.text, re.IGNORECASE)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_references_inside_drawings_lead_somewhere() -> None:
    """A curve would lose its clipping, or a mark its shape, beside another drawing."""
    text = html_report(simulated(SPLIT))
    wanted = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', text))
    assert wanted
    assert wanted <= set(Page(text).identifiers)


def test_names_are_escaped() -> None:
    """A name of a trace, a cluster or a machine would become part of the page."""
    cluster = build_cluster("bloom-176b", list(SPLIT), name=HOSTILE)
    result = simulate(cluster, short_trace())
    hostile = replace(
        result,
        trace=HOSTILE,
        pools=tuple(replace(pool, name=HOSTILE, times=HOSTILE) for pool in result.pools),
        warnings=(HOSTILE,),
    )
    text = html_report(hostile)
    page = Page(text)
    assert "<script" not in text
    assert page.open == []
    assert page.text.count(HOSTILE) >= 7


def test_tables_hold_the_result() -> None:
    """A table would say something else than the result."""
    result = simulated(SPLIT)
    rows = Page(html_report(result)).rows
    for metric, name in (("ttft_s", "TTFT"), ("itl_s", "ITL, all gaps"), ("e2e_slowdown", "E2E slowdown")):
        found = result.metrics[metric]
        quantiles = [found.quantile(q) for q in (0.5, 0.9, 0.99)]
        assert rows[f"Latencies: {name}"] == [*quantiles, found.largest, found.mean, found.count]
    assert result.slo is not None
    for finding in result.slo.findings:
        name = f"{finding.limit.metric.partition('_')[0].upper()} p{finding.limit.percentile:g}"
        value, below = finding.value, finding.limit.below
        assert rows[f"Service-level objective: {name}"] == [value, below, value / below]
    for pool in result.pools:
        shares = [pool.prefill_share, pool.decode_share, pool.mixed_share, 1 - pool.busy_share, pool.kv_share]
        assert rows[f"Pools: {pool.name}"] == [*shares, pool.mean_batch]
    money = "Money, power, carbon"
    cost = result.bill
    assert rows[f"{money}: provisioned power"] == [cost.provisioned_w]
    assert rows[f"{money}: price"] == [cost.usd_per_hour, cost.usd_per_request, cost.usd_per_million_tokens]
    assert rows[f"{money}: energy"] == [cost.energy_j, cost.energy_j_per_request, cost.energy_j_per_million_tokens]
    did = "What the scheduler did"
    assert rows[f"{did}: requests completed"] == [result.statuses["completed"]]
    assert rows[f"{did}: preemptions"] == [result.counts["preemptions"]]


def test_overload_is_not_overlooked() -> None:
    """A reader would take the latencies of a growing queue for those of a cluster."""
    overloaded = simulate(build_cluster("bloom-176b", list(SPLIT)), short_trace(70.0, 40.0))
    assert overloaded.overload is not None
    assert 'class="banner alarm"' in html_report(overloaded)
    assert "did not keep up" in Page(html_report(overloaded)).text
    assert 'class="banner alarm"' not in html_report(simulated(SPLIT))


def test_verdict_says_what_the_slo_says() -> None:
    """The page would say kept where a limit is broken or a request was not served."""
    result = one_request()
    assert result.slo is not None
    assert result.slo.holds
    assert "Kept: all 9 limits" in Page(html_report(result)).text
    unserved = replace(
        result, slo=replace(result.slo, complete=False), statuses={"completed": 0, "refused": 1, "unfinished": 0}
    )
    assert "Broken: 1 request not served." in Page(html_report(unserved)).text
    first = replace(result.slo.findings[0], holds=False)
    broken = replace(result, slo=replace(result.slo, findings=(first, *result.slo.findings[1:])))
    assert "Broken: 1 of 9 limits" in Page(html_report(broken)).text


def test_the_same_result_gives_the_same_page() -> None:
    """Two reports of one run would differ."""
    result = simulated(SPLIT)
    assert html_report(result) == html_report(result)


def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    """A person would see a traceback where a folder is missing."""
    with pytest.raises(SpecError, match="cannot be written") as caught:
        write_html(one_request(), tmp_path / "absent" / "report.html")
    assert "\n" not in str(caught.value)


def test_a_table_escapes_its_cells() -> None:
    """A cell would be able to end its table."""
    assert Page(table(("<a>",), [("</td>",)])).open == []
    assert np.all([piece in table(("<a>",), [("</td>",)]) for piece in ("&lt;a&gt;", "&lt;/td&gt;")])
