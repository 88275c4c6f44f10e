"""What the connector is told, and what it makes of the weights' place."""

from pathlib import Path

import pytest

from phasesplit.errors import TransferError
from phasesplit.vllm.machine import join_key, weights_text
from phasesplit.vllm.settings import Settings
from phasesplit.vllm.staging import Slots, slots_for


def test_settings_are_read() -> None:
    """Wrong if what a person sets is ignored, or a misspelt name is not told."""
    assert Settings.from_extra_config({"machine": "a", "epoch": 3, "threshold_tokens": 7}).threshold_tokens == 7
    assert Settings.from_extra_config({"machine": "a", "epoch": 3}).threshold_tokens is None
    with pytest.raises(TransferError, match="unknown name 'treshold_tokens'"):
        Settings.from_extra_config({"machine": "a", "epoch": 3, "treshold_tokens": 7})
    with pytest.raises(TransferError, match=r"epoch: got '3', allowed is int"):
        Settings.from_extra_config({"machine": "a", "epoch": "3"})


def test_other_weights_have_another_text(tmp_path: Path) -> None:
    """Wrong if machines with different weights of the same shape take each other's KV."""
    texts = set()
    for number in range(2):
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "config.json").write_text("{}")
        (directory / "model.safetensors").write_bytes(bytes([number]) * 100)
        texts.add(weights_text(str(directory), None))
        assert weights_text(str(directory), None) in texts
    assert len(texts) == 2
    assert weights_text("hub/name", None) == "hub/name@main"


def test_the_key_is_in_the_environment() -> None:
    """Wrong if machines of a cluster with a key meet without it, or an empty one counts as a key."""
    assert join_key({"PHASESPLIT_JOIN_KEY": "secret"}) == b"secret"
    assert join_key({"PHASESPLIT_JOIN_KEY": ""}) is join_key({}) is None


def test_slots_are_lent_once() -> None:
    """Wrong if two requests are staged in the same place."""
    slots = Slots(10, 4)
    first, second = slots.take(3), slots.take(1)
    assert sorted((first or ()) + (second or ())) == [10, 11, 12, 13]
    assert slots.take(1) is None
    slots.give(first or ())
    assert (slots.used, slots.take(3)) == (1, first)


def test_each_share_holds_the_longest_prompt() -> None:
    """Wrong if a machine starts whose staging memory can never take a prompt that vLLM admits."""
    assert slots_for(2 * 5 * 100, 100, 40, 8) == 5
    with pytest.raises(TransferError, match="allowed is 1000 or more"):
        slots_for(999, 100, 40, 8)
