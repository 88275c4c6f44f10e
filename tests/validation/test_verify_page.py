"""The page of a verification: every figure of its record, misses marked, nothing loaded from elsewhere."""

import re
from typing import Any

from phasesplit.validation.verify_page import verify_report

STAGES = ("queue", "prefill", "exposed transfer", "wait", "decode", "front end")


def figure(name: str, predicted: float | None, measured: float | None, goal: float | None = None) -> dict[str, Any]:
    error = None if predicted is None or measured is None else predicted / measured - 1
    met = None if goal is None else error is not None and abs(error) <= goal
    return {
        "name": name, "unit": "s", "predicted": predicted, "measured": measured, "error": error, "goal": goal,
        "met": met,
    }  # fmt: skip


def record(name: str = "<split>", **changes: Any) -> dict[str, Any]:
    """What `verify --json` prints, with one miss."""
    shares = [0.0, 0.5, 1.0]
    metrics = ("ttft_s", "itl_s", "e2e_s")
    curves = {metric: {"predicted": [0.1, 0.2, 0.3], "measured": [0.1, 0.25, 0.4]} for metric in metrics}
    latencies = [figure(f"{metric} p50", 0.102, 0.1, 0.05) for metric in ("TTFT", "ITL", "E2E")]
    latencies.append(figure("E2E p99", 2.0, 1.0, 0.2))
    return {
        "cluster": {"name": name, "pools": {"prompt": 1, "token": 1}, "model": "tiny"},
        "trace": {"name": "a & b", "requests": 40, "duration_s": 20.0, "rate_per_s": 2.0},
        "profile": "measured: tiny", "kv_blocks": {"prefill-0": 9, "decode-0": 9}, "block_tokens": 32,
        "cores": {"prefill-0": "0", "decode-0": "1"}, "front_cores": "0", "core_share": 0.45,
        "front_end": {"added": True, "iteration_s": 0.001, "decode_s": 0.0, "queue_s": 0.002}, "compared": 40,
        "distributions": {"shares": shares, **curves}, "latencies": latencies,
        "stages": [figure(stage, 0.1, 0.11) for stage in STAGES],
        "totals": [figure("requests completed", 1.9, 2.0)],
        "explanations": [{"metric": "E2E", "text": "E2E: it is the queue"}],
        "placements": {"differ": 0, "first": []}, "errors": {}, "gateway_share": 0.02, "client_share": 0.01,
        "others_share": 0.0, "core_wait_share": {}, "warnings": [], **changes,
    }  # fmt: skip


def test_only_what_misses_its_goal_is_marked() -> None:
    """A miss would look like a hit, or a hit like a miss."""
    page = verify_report([record()])
    assert re.findall(r'<td class="broken"><data[^>]*>([^<]*)', page) == ["+100.0%"]
    assert "3 of 4" in page


def test_names_are_text_and_nothing_is_loaded() -> None:
    """A name from a file would become part of the page, or the page would need a network."""
    page = verify_report([record()])
    assert "&lt;split&gt;" in page
    assert "a &amp; b" in page
    assert not re.search(r"<split>|(?:src|href)=[\"']?(?:https?:)?//|@import|<script", page)


def test_several_verifications_share_a_page_without_mixing_their_drawings() -> None:
    """The drawing of one would be shown with the clip paths of another."""
    page = verify_report([record("split"), record("unsplit", warnings=["it was busy"])], notes=["A worker was lost."])
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert page.count("<svg") == 8
    assert page.index("A worker was lost.") < page.index("It was busy.")


def test_where_nothing_was_measured_the_page_says_so() -> None:
    """A run without answers would have no page, or one that shows zeros."""
    nothing = {metric: {"predicted": [None] * 3, "measured": [None] * 3} for metric in ("ttft_s", "itl_s", "e2e_s")}
    page = verify_report([record(distributions={"shares": [0.0, 0.5, 1.0], **nothing})])
    assert "No requests to show." in page


def test_the_first_misplaced_request_is_named() -> None:
    """A reader would not find the decision that differs."""
    first = {"request": 7, "predicted": ["prefill-0", "decode-0"], "measured": ["decode-0", "decode-0"]}
    page = verify_report([record(placements={"differ": 3, "first": [first]})])
    assert "3 requests went elsewhere than predicted; the first is request 7: decode-0 and decode-0" in page
