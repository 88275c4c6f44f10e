"""A cluster at a glance: from Prometheus' text to rows and lines."""

import pytest

from phasesplit.errors import SpecError
from phasesplit.launcher.top_command import MACHINE_COLUMNS, GatewayReading, machine_rows, summary

TEXT = """\
# HELP phasesplit_requests_total Choices.
phasesplit_requests_total{outcome="completed"} 4.0
phasesplit_requests_total{outcome="failed"} 1.0
phasesplit_output_tokens_total 100.0
phasesplit_live_requests{state="queued"} 2.0
phasesplit_live_requests{state="decoding"} 3.0
phasesplit_retries_total 1.0
phasesplit_pool_machines{pool="prefill"} 1.0
phasesplit_pool_moves_total{move="prefill_to_mixed"} 2.0
phasesplit_machine_pool{machine="p",pool="mixed",home="prefill",epoch="7"} 1.0
phasesplit_machine_state{machine="p",state="serving"} 1.0
phasesplit_machine_waiting_prompts{machine="p"} 5.0
phasesplit_machine_running_requests{machine="p"} 6.0
phasesplit_machine_kv_used_blocks{machine="p"} 25.0
phasesplit_machine_kv_capacity_blocks{machine="p"} 100.0
phasesplit_transfers_total{machine="p",mode="layerwise"} 8.0
phasesplit_transfers_total{machine="p",mode="serialized"} 9.0
phasesplit_transfer_sent_bytes_total{machine="p"} 2500000.0
phasesplit_degraded 0.0
phasesplit_ttft_seconds_bucket{le="0.1"} 1.0
phasesplit_ttft_seconds_bucket{le="0.2"} 4.0
phasesplit_ttft_seconds_bucket{le="+Inf"} 5.0
"""


def test_a_machine_has_a_row() -> None:
    """A figure would stand under another one's heading."""
    (row,) = machine_rows(GatewayReading.from_text(TEXT, 0.0))
    assert dict(zip(MACHINE_COLUMNS, row, strict=True)) == {
        "machine": "p", "pool": "mixed", "home": "prefill", "state": "serving", "queue": "5", "running": "6",
        "KV used": "25 %", "of": "100 blocks", "layerwise": "8", "whole": "9", "sent": "2.5 MB",
    }  # fmt: skip


def test_rates_are_those_between_two_looks() -> None:
    """A cluster that idles after a busy day would look busy."""
    before = GatewayReading.from_text(TEXT, 10.0)
    grown = TEXT.replace('"completed"} 4.0', '"completed"} 10.0').replace("tokens_total 100.0", "tokens_total 160.0")
    grown = grown.replace('le="0.2"} 4.0', 'le="0.2"} 6.0').replace('le="+Inf"} 5.0', 'le="+Inf"} 7.0')
    first, live, moves = summary(GatewayReading.from_text(grown, 12.0), before)
    assert first == "3.0 requests/s, 30 tokens/s; TTFT p50 <200 ms p99 <200 ms; ITL -"
    assert live == "now: 2 queued, 0 prefilling, 0 transferring, 0 waiting, 3 decoding"
    assert moves == "retries 1; moves: 2 prefill to mixed"


def test_machines_stand_in_the_order_of_their_names() -> None:
    """A row would jump with whoever joined last, and machine 10 stand between 1 and 2."""
    names = ["decode-0", "prefill-10", "prefill-2"]
    text = TEXT + "".join(f'phasesplit_machine_pool{{machine="{name}",pool="p",home="p"}} 1.0\n' for name in names)
    rows = machine_rows(GatewayReading.from_text(text, 0.0))
    assert [row[0] for row in rows] == ["decode-0", "p", "prefill-2", "prefill-10"]


def test_what_is_wrong_stands_in_the_summary() -> None:
    """A cluster that is not split as it should be, or whose log has ended, would look well."""
    text = TEXT.replace("phasesplit_degraded 0.0", "phasesplit_degraded 1.0\nphasesplit_decision_log_ended 1.0")
    told = summary(GatewayReading.from_text(text, 0.0), None)[-1]
    assert "DEGRADED" in told
    assert "THE DECISION LOG HAS ENDED" in told
    assert "LOG" not in summary(GatewayReading.from_text(TEXT, 0.0), None)[-1]


def test_the_first_look_counts_from_the_start() -> None:
    """The only look of `--once` would show nothing."""
    assert summary(GatewayReading.from_text(TEXT, 0.0), None)[0] == "5 requests; TTFT p50 <200 ms p99 >200 ms; ITL -"


@pytest.mark.parametrize("text", ["", "<html>no</html>", "process_cpu_seconds_total 1.0\n"])
def test_other_servers_are_not_taken_for_gateways(text: str) -> None:
    """A wrong address would show an empty cluster."""
    with pytest.raises(SpecError, match=r"^http://h: what answers there is not a phasesplit gateway"):
        GatewayReading.from_text(text, 0.0, "http://h")
