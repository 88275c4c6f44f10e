"""The connector's settings, and the text by which it knows weights."""

from pathlib import Path

import pytest

from phasesplit.errors import TransferError
from phasesplit.vllm.connector_machine import join_key, usual_staging_bytes, weights_text
from phasesplit.vllm.settings import Settings
from phasesplit.vllm.staging import Slots, slots_for


def test_settings_are_read() -> None:
    """Wrong if what a person sets is ignored, or a misspelt name is not reported."""
    assert Settings.from_extra_config({"machine": "a", "epoch": 3, "threshold_tokens": 7}).threshold_tokens == 7
    assert Settings.from_extra_config({"machine": "a", "epoch": 3}).threshold_tokens is None
    with pytest.raises(TransferError, match="unknown name 'treshold_tokens'"):
        Settings.from_extra_config({"machine": "a", "epoch": 3, "treshold_tokens": 7})
    with pytest.raises(TransferError, match=r"epoch: got '3', allowed is int"):
        Settings.from_extra_config({"machine": "a", "epoch": "3"})


def weights(directory: Path, name: str, content: bytes, config: str = "{}") -> str:
    """Write a model into a new directory; return its text."""
    directory.mkdir()
    (directory / "config.json").write_text(config)
    (directory / name).write_bytes(content)
    return weights_text(str(directory), None)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "consolidated.pt", "model.gguf"])
@pytest.mark.parametrize("place", [0, 150_000, 3_000_000, 5_999_999])
def test_other_weights_have_another_text(tmp_path: Path, name: str, place: int) -> None:
    """Wrong if two trainings of one model, equal in the first tensors, take each other's KV."""
    first, second = bytearray(6_000_000), bytearray(6_000_000)
    second[place : place + 400_000] = b"\1" * len(second[place : place + 400_000])
    text = weights(tmp_path / "a", name, first)
    assert text == weights(tmp_path / "same", name, first)
    assert text != weights(tmp_path / "b", name, second)
    assert text != weights(tmp_path / "c", name, first, config='{"rope_theta": 1}')
    assert text != weights_text(str(tmp_path / "a"), None, loaded_as="fp8")


def test_weights_elsewhere_are_known_by_their_name(tmp_path: Path) -> None:
    """Wrong if a hub's models are taken for one another, or nothing to compare by is taken for equal."""
    assert weights_text("hub/name", None) == "hub/name@main"
    assert weights_text("hub/name", "v2", loaded_as="fp8") == "hub/name@v2 fp8"
    file = tmp_path / "small.gguf"
    file.write_bytes(b"1")
    text = weights_text(str(file), None)
    file.write_bytes(b"2")
    assert text != weights_text(str(file), None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(TransferError, match=r"kv_connector_extra_config\.model"):
        weights_text(str(tmp_path / "empty"), None)


def test_pinned_memory_is_no_more_than_needed() -> None:
    """Wrong if a machine with a GPU takes its host's memory for staging, or cannot stage its longest prompt."""
    gib = 1 << 30
    assert usual_staging_bytes(gib, is_pinned=True) == usual_staging_bytes(gib, is_pinned=False) == 4 * gib
    assert usual_staging_bytes(3 * gib, is_pinned=True) == 8 * gib
    assert usual_staging_bytes(16 * gib, is_pinned=True) == 32 * gib
    assert usual_staging_bytes(16 * gib, is_pinned=False) == 64 * gib


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
