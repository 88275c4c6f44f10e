"""The page for Prometheus: what it shows, and that its documents tell the same."""

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from gateways import Rig, play, settle
from phasesplit.gateway.meters import LATENCIES_S, Histogram

DOCS = Path(__file__).resolve().parents[2] / "docs"


def shown(page: str) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the values of a page by name and labels."""
    values: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            values.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return values


def test_documents_name_what_the_page_shows() -> None:
    """A metric would be shown that no document explains, or be explained and not be there."""

    async def scenario() -> None:
        async with Rig() as rig:
            await rig.complete().answer()
            page = (await rig.call("/metrics").answer()).body.decode()
        names = set()
        for family in text_string_to_metric_families(page):
            names.add(f"{family.name}_total" if family.type == "counter" else family.name)
            assert family.documentation
        table = (DOCS / "metrics.md").read_text(encoding="utf-8")
        rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.MULTILINE))
        assert set(rows) == names
        board = (DOCS / "grafana-dashboard.json").read_text(encoding="utf-8")
        asked = {re.sub("_bucket$", "", name) for name in re.findall(r"phasesplit_\w+", board)}
        assert asked <= names
        assert json.loads(board)["panels"]

    play(scenario())


def test_counts_of_a_day() -> None:
    """An outcome, a retry or a latency would be counted under another name, or not at all."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].prefill_s, rig.workers["t"].decode_s = 0.25, 0.5
            call = rig.complete(max_tokens=3)
            await settle()
            await rig.pass_time(2.0)
            await call.answer()
            gone = rig.complete()
            await settle()
            gone.leave()
            await gone.answer()
            await rig.complete("x" * 5000).answer()
            values = shown((await rig.call("/metrics").answer()).body.decode())
        assert values["phasesplit_requests_total"] == {("completed",): 1, ("client_gone",): 1}
        assert values["phasesplit_http_responses_total"] == {
            ("/v1/completions", "200"): 1, ("/v1/completions", "400"): 1, ("/v1/completions", "499"): 1,
        }  # fmt: skip
        assert values["phasesplit_output_tokens_total"] == {(): 3}
        assert values["phasesplit_ttft_seconds_sum"] == {(): 0.25}
        assert (values["phasesplit_itl_seconds_sum"], values["phasesplit_itl_seconds_count"]) == ({(): 1.0}, {(): 2})
        assert values["phasesplit_stage_seconds_sum"]["decode",] == 0.5
        assert values["phasesplit_kv_leases_ended_total"]["completed",] == 2

    play(scenario())


def test_gauges_show_what_is_held_and_return_to_zero() -> None:
    """Leaked KV would not be seen, or KV be shown that is free."""
    layout = {"layers": 2, "kv_heads": 3, "head_dim": 8, "dtype": "float32", "block_tokens": 16}

    async def scenario() -> None:
        async with Rig(layout=layout) as rig:
            rig.workers["p"].hold("prefill")
            call = rig.complete()
            await settle()
            values = shown((await rig.call("/metrics").answer()).body.decode())
            assert values["phasesplit_live_requests"]["prefilling",] == 1
            blocks = values["phasesplit_kv_lease_blocks"]
            assert blocks["p", "prefill"] > 0
            assert blocks["t", "decode"] > 0
            sizes = values["phasesplit_kv_lease_bytes"]
            assert sizes["p", "prefill"] == blocks["p", "prefill"] * 2 * 2 * 3 * 8 * 4 * 16
            rig.workers["p"].go("prefill")
            await call.answer()
            values = shown((await rig.call("/metrics").answer()).body.decode())
            assert set(values["phasesplit_kv_lease_blocks"].values()) == {0}
            assert set(values["phasesplit_live_requests"].values()) == {0}

    play(scenario())


def test_a_decision_log_that_ended_is_shown() -> None:
    """Somebody who wants to replay a day's decisions would learn at its end that a disk was full."""

    async def scenario() -> None:
        async with Rig() as rig:
            for why, shows in (("", 0), ("No space left on device", 1)):
                rig.gateway.in_flight.log_ended = lambda why=why: why
                values = shown((await rig.call("/metrics").answer()).body.decode())
                assert values["phasesplit_decision_log_ended"] == {(): shows}

    play(scenario())


def test_histogram_counts_at_its_bounds() -> None:
    """A latency on a bound would be counted above it, and every percentile be off."""
    histogram = Histogram()
    for seconds in (LATENCIES_S[0], LATENCIES_S[0] / 2, LATENCIES_S[-1] + 1):
        histogram.add(seconds)
    buckets = dict(histogram.buckets())
    assert (buckets[str(LATENCIES_S[0])], buckets[str(LATENCIES_S[-1])], buckets["+Inf"]) == (2, 2, 3)
