"""Autoscaling policies as people write them."""

import re

import pytest

from phasesplit.errors import SpecError
from phasesplit.io.policies import parse_policy, policy_text
from phasesplit.scheduler.autoscaling import Joint, Policy, Schedule, Static, Threshold
from refusals import assert_refused

HOUR_S = 3_600.0
EXAMPLES = {
    "static": "static:initial=4+2",
    "threshold": "threshold:high=4000,low=500",
    "joint": "joint:target=1000,ratio=2",
    "schedule": "schedule:0h=4+2,8h=10+6,20h=4+2",
}
"""What the messages about each policy show."""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("static", Static()),
        ("static:initial=4+2", Static(initial=(4, 2))),
        (
            "threshold:high=4000,low=500,every=30,least=1,startup=60",
            Threshold(high_tokens=4_000, low_tokens=500, interval_s=30, least=1, startup_s=60),
        ),
        (
            " threshold:high=4e3, low=5e2,token-high=9000,token-low=10,full=0.8,step=2,cooldown=5,load=1e9,"
            "delay=7,stale=8",
            Threshold(
                high_tokens=4_000, low_tokens=500, decode_high_tokens=9_000, decode_low_tokens=10, full_share=0.8,
                step=2, cooldown_s=5, load_bytes_per_s=1e9, signal_delay_s=7, stale_after_s=8,
            ),
        ),
        ("joint:target=900,ratio=1.5,slack=0.2", Joint(target_tokens_per_s=900, ratio=1.5, slack=0.2)),
        (
            "schedule:0h=4+2,8.5h=10+6,20h=4+2,startup=5",
            Schedule(entries=((0.0, (4, 2)), (8.5 * HOUR_S, (10, 6)), (20 * HOUR_S, (4, 2))), startup_s=5),
        ),
        ("schedule:6h=3", Schedule(entries=((6 * HOUR_S, (3,)),))),
    ],
)  # fmt: skip
def test_policies_as_people_write_them(text: str, expected: Policy) -> None:
    """A setting would be ignored, or mean something else than it says."""
    assert parse_policy(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *EXAMPLES.values(), "static",
        "threshold:high=1e7,low=0.125,decode-high=9000,decode-low=10,full=0.8,step=2,least=2",
        "joint:target=1234567.5", "schedule:0h=4,7.5h=8,every=10,cooldown=5,startup=0,load=1e9,delay=7,stale=8",
    ],
)  # fmt: skip
def test_a_policy_is_written_as_it_is_read(text: str) -> None:
    """A person who copies a fitted policy would run another one."""
    policy = parse_policy(text)
    assert parse_policy(policy_text(policy)) == policy


def test_what_is_usual_is_not_written() -> None:
    """A policy in a report would be a list of defaults."""
    assert policy_text(Joint(target_tokens_per_s=3695.0)) == "joint:target=3695"
    assert policy_text(Static()) == "static"


def test_examples_are_policies() -> None:
    """The help would show a text that is refused."""
    for name, text in EXAMPLES.items():
        assert parse_policy(text).name == name
        with pytest.raises(SpecError, match=re.escape(f"as in {text}")):
            parse_policy(f"{name}:nonsense=1")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("treshold:high=1", ["--autoscale", "'treshold'", "threshold"]),
        ("", ["--autoscale", "''"]),
        ("threshold", ["all settings", "threshold:high=4000,low=500"]),
        ("threshold:high=4000", ["all settings", "threshold"]),
        ("threshold:hihg=4000,low=1", ["'hihg=4000'", "threshold", "initial, least"]),
        ("threshold:high=many,low=1", ["--autoscale", "high", "'many'", "number"]),
        ("threshold:high=,low=1", ["--autoscale", "high", "''", "number"]),
        ("threshold:high=4,low=1,step=1.5", ["--autoscale", "step", "'1.5'", "whole number"]),
        ("threshold:high=4,low=1,high=5", ["--autoscale", "high", "'5'", "each setting once"]),
        ("threshold:high=4,low=9", ["autoscale threshold", "low_tokens", "9.0", "0 to below high"]),
        ("threshold:high=nan,low=9", ["autoscale threshold", "low_tokens", "got 9.0"]),
        ("static:initial=4-2", ["--autoscale", "initial", "'4-2'", "machines of each role", "4+2"]),
        ("joint:ratio=2", ["all settings", "joint:target=1000,ratio=2"]),
        ("schedule", ["autoscale schedule", "entries"]),
        ("schedule:8=4+2", ["'8=4+2'", "schedule", "8h"]),
        ("schedule:eighth=4+2", ["'eighth=4+2'", "schedule"]),
        ("schedule:8h=four", ["--autoscale", "8h", "'four'", "machines of each role"]),
        ("schedule:nanh=4", ["autoscale schedule", "entries"]),
        ("static:0h=4+2", ["'0h=4+2'", "static"]),
    ],
)
def test_wrong_policies_say_what_is_allowed(text: str, named: list[str]) -> None:
    """A wrong policy would be taken for another, or its message would not say what to write."""
    with pytest.raises(SpecError) as caught:
        parse_policy(text, "--autoscale")
    assert_refused(caught.value, *named)
