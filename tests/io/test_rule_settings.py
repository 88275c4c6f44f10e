"""The scheduler's rules as people write them."""

from pathlib import Path
from typing import Any

import pytest

from phasesplit.errors import SpecError
from phasesplit.io.rule_settings import rules_from, rules_settings
from phasesplit.io.text import Places, inside
from phasesplit.scheduler.rules import Batching, Placement, Rules, Transfer
from refusals import assert_refused


def test_nothing_set_is_the_default() -> None:
    """A run without settings would follow other rules than `Rules()`."""
    assert rules_from({}) == Rules()


@pytest.mark.parametrize("rules", [Rules(), Rules.as_published(), Rules(transfer=Transfer.LAYERWISE, spill_tokens=9)])
def test_written_rules_are_read_back(rules: Rules) -> None:
    """The rules that a summary names could not be used again, or would be others."""
    assert rules_from(rules_settings(rules)) == rules
    assert rules_settings(Rules())["decode_placement"] == "jsq-kv"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"transfer": "serialized"}, Rules(transfer=Transfer.SERIALIZED)),
        ({"token-placement": "two_choices"}, Rules(decode_placement=Placement.TWO_CHOICES)),
        ({"Unsplit_Batching": "WHOLE"}, Rules(unsplit_batching=Batching.WHOLE)),
        ({"batch_requests": "64", "kv_headroom": "0.05"}, Rules(batch_requests=64, kv_headroom=0.05)),
        ({"batch_requests": 64, "repurpose_after_s": 5}, Rules(batch_requests=64, repurpose_after_s=5.0)),
        ({"layerwise_from_tokens": "auto", "streaming_slowdown": None}, Rules()),
        ({"elastic": "false"}, Rules(elastic=False)),
        ({"layerwise_from_tokens": 512}, Rules(layerwise_from_tokens=512)),
        ({"published": "true", "seed": 3}, rules_from({"seed": 3}, base=Rules.as_published())),
        ({"published": True, "batch_requests": 64}, rules_from({"batch_requests": 64}, base=Rules.as_published())),
    ],
)
def test_values_as_people_write_them(settings: dict[str, Any], expected: Rules) -> None:
    """A setting would be ignored, or mean something else than it says."""
    assert rules_from(settings) == expected


def test_published_and_back() -> None:
    """Leaving the published rules would keep their block size of one token and their lack of headroom."""
    assert rules_from({"published": True}) == Rules.as_published()
    assert rules_from({"published": False}, base=Rules.as_published()) == Rules()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"transfr": "auto"}, ["transfr", "'transfr'", "transfer"]),
        ({"transfer": "fast"}, ["transfer", "'fast'", "auto", "serialized", "layerwise"]),
        ({"prefill_placement": "custom"}, ["prefill_placement", "'custom'", "round-robin"]),
        ({"batch_requests": "many"}, ["batch_requests", "'many'", "whole number"]),
        ({"batch_requests": 1.5}, ["batch_requests", "1.5", "whole number"]),
        ({"batch_requests": "1.5"}, ["batch_requests", "'1.5'"]),
        ({"batch_requests": True}, ["batch_requests", "True"]),
        ({"batch_requests": [1]}, ["batch_requests", "[1]"]),
        ({"batch_requests": float("inf")}, ["batch_requests", "inf"]),
        ({"batch_requests": None}, ["batch_requests", "None"]),
        ({"kv_headroom": "nan"}, ["kv_headroom", "nan"]),
        ({"kv_headroom": 0.9}, ["kv_headroom", "0.9", "0 to 0.5"]),
        ({"published": "maybe"}, ["published", "'maybe'", "true or false"]),
        ({"published": True, "transfer": "layerwise"}, ["transfer", "'layerwise'", "auto"]),
        ({1: 2}, ["1", "'1'"]),
    ],
)
def test_wrong_settings_name_the_field_and_what_is_allowed(settings: dict[Any, Any], named: list[str]) -> None:
    """A wrong setting would be taken for another, or its message would not say what to write."""
    with pytest.raises(SpecError) as caught:
        rules_from(settings)
    assert_refused(caught.value, *named)


def test_the_message_names_the_file() -> None:
    """Somebody with five cluster files would not know which one to correct, or in which line."""
    where = inside(Places(Path("big.yaml"), {"rules": 3, "rules.kv-headroom": 5}), "rules")
    for settings, place in (
        ({"kv-headroom": 0.9}, "big.yaml, line 5, rules.kv_headroom"),
        ({"transfer": "fast"}, "big.yaml, line 3, rules.transfer"),
        ({"published": True, "transfer": "layerwise"}, "big.yaml, line 3, rules.transfer"),
        ({"nothing": 1}, "big.yaml, line 3, rules.nothing"),
    ):
        with pytest.raises(SpecError, match=f"^{place}: "):
            rules_from(settings, where)
