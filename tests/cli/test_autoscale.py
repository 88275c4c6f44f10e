"""`phasesplit simulate --autoscale`."""

import json
from typing import Any

import pytest

from phasesplit import cli
from refusals import assert_refused

SMALL = (
    "simulate", "--model", "llama-3.1-70b", "--pool", "prefill:3:dgx-h100", "--pool", "decode:2:dgx-h100",
    "--workload", "azure-conversation", "--rate", "4", "--duration", "200",
)  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run([*SMALL, *arguments])
    written = capsys.readouterr()
    return code, written.out, written.err


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


def test_json_says_what_the_policy_did(capsys: pytest.CaptureFixture[str]) -> None:
    """A script could not compare policies by machine-hours, cost and missed requests."""
    every = shown(capsys)
    scaled = shown(capsys, "--autoscale", "threshold:high=4000,low=500,every=10,cooldown=10,least=1,startup=60")
    assert every["autoscaling"] is None
    policy = scaled["autoscaling"]["policy"]
    assert (policy["name"], policy["high_tokens"], policy["startup_s"]) == ("threshold", 4000, 60)
    assert scaled["autoscaling"]["stops"] >= 3
    assert set(scaled["autoscaling"]["miss_limits"]) == {"ttft_slowdown", "itl_slowdown", "e2e_slowdown"}
    assert scaled["autoscaling"]["requests_by_hour"] == [scaled["requests"]]
    hours, less = (sum(pool["machine_hours"] for pool in found["pools"]) for found in (every, scaled))
    assert hours == pytest.approx(5 * every["bill"]["duration_s"] / 3600)
    assert less < 0.8 * hours
    assert scaled["bill"]["usd"] / every["bill"]["usd"] == pytest.approx(less / hours, rel=0.05)


def test_the_report_says_it_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A reader would not see that machines came and went, or who waited for them."""
    code, out, _ = run(capsys, "--autoscale", "joint:target=800,ratio=1.5,every=10,cooldown=20")
    assert code == 0
    text = " ".join(out.split())
    assert "autoscaling joint: " in text
    assert "machine-hours: " in text
    assert "requests that missed the SLO (TTFT slowdown < 6, ITL slowdown < 5, E2E slowdown < 5 each): " in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--autoscale", "thresh:high=1"), ["--autoscale", "'thresh'"]),
        (("--autoscale", "threshold:high=a,low=1"), ["--autoscale", "high", "'a'", "a number"]),
        (("--autoscale", "schedule:0h=4+2"), ["autoscale schedule", "0h", "'4+2'", "3+2 at most"]),
        (("--autoscale", "static", "--rules", "published", "--model", "llama2-70b"), ["static", "published rules"]),
    ],
)
def test_wrong_input_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: list[str]
) -> None:
    """Somebody would get a traceback, or a run by another policy than the one meant."""
    assert_refused(run(capsys, *arguments), *named)
