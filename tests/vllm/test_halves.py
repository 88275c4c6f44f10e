"""The connector's halves of two machines, over real transfers, without vLLM."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from phasesplit.domain.machine import Link
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.chooser import Mode
from phasesplit.vllm.scheduler_half import SchedulerHalf, StepOrders
from vllm_halves import BLOCK_TOKENS, LAYERS, LONGEST_TOKENS, Half, Request, layout

Pair = tuple[Half, Half]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Return a prefill machine and a decode machine."""
    machines = Half("p", tmp_path, seed=1), Half("t", tmp_path, seed=2)
    yield machines
    for machine in machines:
        machine.close()


def offered(pair: Pair, request: str) -> None:
    """Wait until blocks are offered for a request."""
    prompt, token = pair
    prompt.step()
    leaving = prompt.worker._leaving[request]
    prompt.until(lambda: leaving.is_offered, token)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 31, 32])
def test_layers_arrive_in_the_blocks_they_are_for(pair: Pair, tokens: int) -> None:
    """Wrong if a block lands in another place, or one is lost around a block's edge."""
    prompt, token = pair
    count = -(-tokens // BLOCK_TOKENS)
    theirs, ours = tuple(range(20, 20 - count, -1)), tuple(range(1, 1 + 2 * count, 2))
    before = token.kv.copy()
    prompt.prefill_leg("k", tokens, token)
    token.decode_leg("k", tokens, prompt, ours)
    offered(pair, "p.k")
    prompt.step({"p.k": (0, tokens)}, {"p.k": theirs})
    prompt.until(lambda: "t.k" in token.received, token)
    assert not token.failed
    np.testing.assert_array_equal(token.kv[:, list(ours)], prompt.kv[:, list(theirs)])
    others = [block for block in range(before.shape[1]) if block not in ours]
    np.testing.assert_array_equal(token.kv[:, others], before[:, others])


def test_chunks_send_only_blocks_that_are_final(pair: Pair) -> None:
    """Wrong if a block leaves before the chunk that fills it: it would carry what was there before."""
    prompt, token = pair
    blocks = tuple(range(8))
    prompt.prefill_leg("k", 30, token)
    token.decode_leg("k", 30, prompt, blocks)
    offered(pair, "p.k")
    for done, tokens in ((0, 10), (10, 9), (19, 11)):
        first = done // BLOCK_TOKENS
        end = -(-(done + tokens) // BLOCK_TOKENS)
        for layer in range(LAYERS):
            prompt.kv[layer, first:end] = (layer + 1) * 16 + done  # the chunk writes into its blocks
        prompt.step({"p.k": (done, tokens)}, {"p.k": blocks})
    final = prompt.kv.copy()
    prompt.kv[:] = 0
    prompt.until(lambda: "t.k" in token.received, token)
    np.testing.assert_array_equal(token.kv[:, :8], final[:, :8])


def test_an_offer_in_mid_pass_is_taken_up(pair: Pair) -> None:
    """Wrong if a prompt whose offer comes while it is computed waits for its end."""
    prompt, token = pair
    prompt.prefill_leg("k", 8, token)
    prompt.step()

    def then(layer: int) -> None:
        if layer == 1:
            token.decode_leg("k", 8, prompt, (5, 6))
            offered_now = prompt.worker._leaving["p.k"]
            token.until(lambda: offered_now.is_offered)

    prompt.step({"p.k": (0, 8)}, {"p.k": (2, 3)}, then)
    prompt.until(lambda: "t.k" in token.received, token)
    np.testing.assert_array_equal(token.kv[:, 5:7], prompt.kv[:, 2:4])
    prompt.until(lambda: prompt.endpoint.outgoing.sent.transfers[Mode.LAYERWISE] == 1)


def test_a_threshold_comes_down_the_line(tmp_path: Path) -> None:
    """Wrong if what the link was measured is not told, or the threshold that follows from it is not obeyed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "line"))
        listener.listen(1)
        prompt = Half("p", tmp_path, seed=1, reports=str(tmp_path / "line"), threshold_tokens=None)
        token = Half("t", tmp_path, seed=2)
        line, _ = listener.accept()
    try:
        hello = json.loads(line.recv(1 << 16))["hello"]
        assert hello["threshold_tokens"] is None
        assert Link(**hello["link"]).bytes_per_s > 0
        sent = prompt.endpoint.outgoing.sent
        assert not sum(sent.transfers.values())  # what was sent to measure is no traffic
        for key, mode in (("before", Mode.SERIALIZED), ("after", Mode.LAYERWISE)):
            request = prompt.prefill_leg(key, 8, token)
            token.decode_leg(key, 8, prompt, (5, 6))
            offered((prompt, token), f"p.{key}")
            prompt.step({f"p.{key}": (0, 8)}, {f"p.{key}": (2, 3)})
            prompt.finish(request, (2, 3))
            prompt.until(lambda key=key: f"p.{key}" in prompt.sent, token)  # type: ignore[misc]
            assert sent.transfers[mode] == 1
            line.send(b'{"threshold_tokens": 8}')
            prompt.until(lambda: prompt.worker._mover.threshold_tokens == 8)
    finally:
        prompt.close()
        token.close()
        line.close()


@pytest.mark.parametrize("thresholds", [(1, 1000, 1000, 1000), (1000, 1, 1, 1), (1000, 1000, 1, 1000)])
def test_a_threshold_that_changes_in_mid_prompt(pair: Pair, thresholds: tuple[int, ...]) -> None:
    """Wrong if blocks are lost, or sent from another place, because the way of a prompt is thought over on its way."""
    prompt, token = pair
    blocks = tuple(range(8))
    prompt.prefill_leg("k", 30, token)
    token.decode_leg("k", 30, prompt, blocks)
    offered(pair, "p.k")
    prompt.worker._mover.threshold_tokens = thresholds[0]
    for done, tokens, threshold in zip((0, 10, 19), (10, 9, 11), thresholds[1:], strict=True):

        def then(layer: int, threshold: int = threshold) -> None:
            if layer == 1:  # the line is heard while the model computes
                prompt.worker._mover.threshold_tokens = threshold

        first, end = done // BLOCK_TOKENS, -(-(done + tokens) // BLOCK_TOKENS)
        prompt.kv[:, first:end] = done
        prompt.step({"p.k": (done, tokens)}, {"p.k": blocks}, then)
    prompt.until(lambda: "t.k" in token.received, token)
    assert not token.failed
    np.testing.assert_array_equal(token.kv[:, :8], prompt.kv[:, :8])
    prompt.until(lambda: prompt.endpoint.outgoing.sent.transfers[Mode.LAYERWISE] == 1)


def test_blocks_are_kept_until_a_late_offer_has_its_kv(pair: Pair) -> None:
    """Wrong if vLLM may use a prompt's blocks again before they have left, or is never told that it may."""
    prompt, token = pair
    request = prompt.prefill_leg("k", 9, token)
    prompt.step({"p.k": (0, 9)}, {"p.k": (7, 8, 9)})
    assert prompt.finish(request, (7, 8, 9))
    prompt.step()
    assert not prompt.sent
    token.decode_leg("k", 9, prompt, (1, 2, 3))
    prompt.until(lambda: "p.k" in prompt.sent and "t.k" in token.received, token)
    np.testing.assert_array_equal(token.kv[:, 1:4], prompt.kv[:, 7:10])
    prompt.until(lambda: prompt.is_clean() and token.is_clean(), token)
    assert [mode.value for mode in prompt.endpoint.outgoing.sent.transfers] == ["serialized"]


def test_what_is_cached_here_is_not_written_over(pair: Pair) -> None:
    """Wrong if blocks that other requests share through the prefix cache are written to."""
    prompt, token = pair
    before = token.kv.copy()
    prompt.prefill_leg("k", 12, token)
    token.decode_leg("k", 12, prompt, (1, 2, 3), cached=8)
    offered(pair, "p.k")
    prompt.step({"p.k": (0, 12)}, {"p.k": (4, 5, 6)})
    prompt.until(lambda: "t.k" in token.received, token)
    np.testing.assert_array_equal(token.kv[:, 1:3], before[:, 1:3])
    np.testing.assert_array_equal(token.kv[:, 3], prompt.kv[:, 6])


def test_cached_blocks_of_the_prompt_machine_leave_too(pair: Pair) -> None:
    """Wrong if only what a step computes is sent, and not what its prefix cache had."""
    prompt, token = pair
    prompt.prefill_leg("k", 12, token)
    token.decode_leg("k", 12, prompt, (1, 2, 3))
    offered(pair, "p.k")
    prompt.step({"p.k": (8, 4)}, {"p.k": (4, 5, 6)})
    prompt.until(lambda: "t.k" in token.received, token)
    np.testing.assert_array_equal(token.kv[:, 1:4], prompt.kv[:, 4:7])


def test_a_preempted_prompt_sends_the_rest_from_its_new_blocks(pair: Pair) -> None:
    """Wrong if a prompt that was computed again sends a block twice, or from the place that it has lost."""
    prompt, token = pair
    prompt.prefill_leg("k", 12, token)
    token.decode_leg("k", 12, prompt, (1, 2, 3))
    offered(pair, "p.k")
    prompt.step({"p.k": (0, 8)}, {"p.k": (4, 5)})
    first = prompt.kv[:, 4:6].copy()
    prompt.kv[:, 4:6] = 0
    prompt.step({"p.k": (0, 8)}, {"p.k": (9, 10)})
    prompt.step({"p.k": (8, 4)}, {"p.k": (9, 10, 11)})
    prompt.until(lambda: "t.k" in token.received, token)
    np.testing.assert_array_equal(token.kv[:, 1:3], first)
    np.testing.assert_array_equal(token.kv[:, 3], prompt.kv[:, 11])


def test_a_request_is_taken_once() -> None:
    """Wrong if a decode machine that lost its blocks waits again for KV that nobody has any more."""
    half = SchedulerHalf(BLOCK_TOKENS)
    request = Request("t", 9, {"do_remote_prefill": True, "key": "k", "peer": "p", "peer_epoch": 1})
    half.arrived(request)
    assert half.awaited_tokens(request, 4) == 5
    half.allocated(request, (1, 2, 3), 5)
    assert half.awaited_tokens(request, 0) == 0
    (take,) = half.step({}, [], {}.__getitem__).takes
    assert (take.first, take.blocks) == (1, (1, 2, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": None}, {"key": ""}, {"peer": 3}, {"peer_epoch": "1"}, {"peer_epoch": -1}, {"address": None},
        {"address": "here"}, {"do_remote_decode": False}, {"key": "k" * 257}, {"key": "\ud800"}, {"peer": "a\nb"},
        {"peer_epoch": 10**4000},
    ],
)  # fmt: skip
def test_a_wish_that_is_wrong_ends_no_engine(pair: Pair, wrong: dict[str, Any]) -> None:
    """Wrong if words that a client sends can end a machine, or make it keep blocks for nobody."""
    prompt, token = pair
    request = prompt.prefill_leg("k", 8, token, wrong)
    assert not prompt.scheduler.step({}, [], {}.__getitem__).sends
    assert not prompt.finish(request, (1, 2))


@pytest.mark.parametrize("params", ["x", ["key"], 3, True])
def test_what_is_no_mapping_is_no_wish(params: object) -> None:
    """Wrong if a client that sends a text for `kv_transfer_params` ends vLLM's scheduler."""
    half, request = SchedulerHalf(BLOCK_TOKENS), Request("r", 9, params)
    half.arrived(request)
    assert half.awaited_tokens(request, 0) == 0
    assert half.step({"r": 9}, [("r", 0)], {}.__getitem__) == StepOrders()


def test_a_whole_request_says_when_its_prompt_phase_begins(tmp_path: Path) -> None:
    """Wrong if the gateway cannot tell a request that waits from one that is computed, or hears of one that is gone."""
    half = SchedulerHalf(BLOCK_TOKENS)
    waiting, gone, other = (
        Request("r1", 9, {"key": "a"}), Request("r2", 9, {"key": "b"}), Request("r3", 9, {"key": "c" * 257}),
    )  # fmt: skip
    for request in (waiting, gone, other):
        half.arrived(request)
    assert half.step({}, [], {}.__getitem__).started == ()
    gone.status = SimpleNamespace(name="FINISHED_ABORTED")
    assert not half.finished(gone, ())
    step = half.step({"r1": 4, "r2": 4, "r3": 4}, [("r1", 0)], {}.__getitem__)
    assert step.started == ("a",)
    assert half.step({"r1": 5}, [("r1", 4)], {}.__getitem__).started == ()

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "line"))
        listener.listen(1)
        machine = Half("u", tmp_path, seed=1, reports=str(tmp_path / "line"))
        line, _ = listener.accept()
    with line:
        line.recv(1 << 16)  # its greeting
        machine.worker.begin(step)
        assert json.loads(line.recv(1 << 16)) == {"prefill_started": "a"}
        machine.close()


def test_a_dead_mover_ends_its_machine(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a decode machine goes on without the thread that brings KV, and its requests wait for ever."""
    _, token = pair

    def fail() -> None:
        raise OSError("no buffer space")

    monkeypatch.setattr(threading, "excepthook", Mock())
    token.worker._mover.do(fail)
    token.worker._mover._thread.join(10.0)
    with pytest.raises(RuntimeError, match="the thread that moves KV has ended"):
        token.step()


def test_a_refused_request_leaves_the_first_of_its_key_alone(pair: Pair) -> None:
    """Wrong if the end of a request that came under a key in use takes the KV of the other with it."""
    prompt, token = pair
    request = prompt.prefill_leg("k", 12, token)
    again = Request("p.again", 12, request.kv_transfer_params)
    prompt.scheduler.arrived(again)
    token.decode_leg("k", 12, prompt, (1, 2, 3))
    offered(pair, "p.k")
    prompt.finish(again, (), "FINISHED_ABORTED")
    prompt.step()
    prompt.step({"p.k": (0, 12)}, {"p.k": (4, 5, 6)})
    assert prompt.finish(request, (4, 5, 6))
    prompt.until(lambda: "t.k" in token.received, token)
    assert not token.failed
    np.testing.assert_array_equal(token.kv[:, 1:4], prompt.kv[:, 4:7])


@pytest.mark.parametrize("when", ["waiting", "begun", "computed"])
def test_an_abort_of_the_prompt_frees_both_sides(pair: Pair, when: str) -> None:
    """Wrong if a client that gives up leaves staging slots held, or the decode machine waiting."""
    prompt, token = pair
    request = prompt.prefill_leg("k", 12, token)
    token.decode_leg("k", 12, prompt, (1, 2, 3))
    offered(pair, "p.k")
    if when != "waiting":
        prompt.step({"p.k": (0, 8)}, {"p.k": (4, 5, 6)})
    if when == "computed":
        prompt.endpoint.outgoing.send_layer = Mock()  # type: ignore[method-assign]
        prompt.step({"p.k": (8, 4)}, {"p.k": (4, 5, 6)})
    assert not prompt.finish(request, (4, 5, 6), "FINISHED_ABORTED")
    prompt.until(lambda: "t.k" in token.received, token)
    assert token.failed == {"t.k"}
    prompt.until(lambda: prompt.is_clean() and token.is_clean(), token)
    assert not prompt.sent  # vLLM has freed the blocks itself


def test_an_abort_of_the_token_side_lets_the_prompt_machine_go(pair: Pair) -> None:
    """Wrong if KV that nobody will take stays on the prefill machine."""
    prompt, token = pair
    request = prompt.prefill_leg("k", 12, token)
    waiting = token.decode_leg("k", 12, prompt, (1, 2, 3))
    offered(pair, "p.k")
    token.finish(waiting, (1, 2, 3), "FINISHED_ABORTED")
    token.until(lambda: "t.k" in token.received, prompt)
    prompt.step({"p.k": (0, 12)}, {"p.k": (4, 5, 6)})
    assert prompt.finish(request, (4, 5, 6))
    prompt.until(lambda: "p.k" in prompt.sent, token)
    prompt.until(lambda: prompt.is_clean() and token.is_clean(), token)


def test_a_machine_that_is_gone_is_not_waited_for(pair: Pair, tmp_path: Path) -> None:
    """Wrong if a decode machine holds blocks for a prefill machine that has ended."""
    prompt, token = pair
    prompt.prefill_leg("k", 12, token)
    token.decode_leg("k", 12, prompt, (1, 2, 3))
    offered(pair, "p.k")
    prompt.step({"p.k": (0, 8)}, {"p.k": (4, 5, 6)})
    prompt.close()
    token.until(lambda: "t.k" in token.failed)
    token.until(token.is_clean)


def test_more_requests_than_slots_go_one_after_the_other(tmp_path: Path) -> None:
    """Wrong if a full staging memory loses a request, or stops all."""
    block_bytes = LAYERS * layout().block_bytes
    small = 2 * block_bytes * (LONGEST_TOKENS // BLOCK_TOKENS)
    prompt, token = (Half(name, tmp_path, seed=5, staging_bytes=small) for name in ("p", "t"))
    try:
        for number in range(3):
            request = prompt.prefill_leg(f"k{number}", 32, token)
            token.decode_leg(f"k{number}", 32, prompt, tuple(range(8 * number, 8 * number + 8)))
            blocks = tuple(range(8 * number, 8 * number + 8))
            prompt.step({f"p.k{number}": (0, 32)}, {f"p.k{number}": blocks})
            assert prompt.finish(request, blocks)
        prompt.until(lambda: len(prompt.sent) == 3 == len(token.received), token)
        assert not token.failed
        np.testing.assert_array_equal(token.kv, prompt.kv)
        prompt.until(lambda: prompt.is_clean() and token.is_clean(), token)
    finally:
        prompt.close()
        token.close()


def test_unequal_layouts_are_refused_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong if blocks that are packed differently are taken for each other, or nobody learns why KV does not come."""
    prompt = Half("p", tmp_path, seed=1)
    token = Half("t", tmp_path, seed=2, layout=layout(block_layout="another order"))
    try:
        prompt.prefill_leg("k", 8, token)
        prompt.until(lambda: "no KV goes to t in epoch" in caplog.text)
        assert "block_layout" in caplog.text
    finally:
        prompt.close()
        token.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [(b"one", b"one", ""), (b"one", b"two", "another key"), (b"one", None, "has none"), (None, b"one", "has none")],
)
def test_machines_prove_the_clusters_key(
    tmp_path: Path, ours: bytes | None, theirs: bytes | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong if a machine that does not know the cluster's key is given KV, or one that does is turned away."""
    prompt, token = Half("p", tmp_path, seed=1, key=ours), Half("t", tmp_path, seed=2, key=theirs)
    try:
        prompt.prefill_leg("k", 8, token)
        token.decode_leg("k", 8, prompt, (1, 2))
        if reason:
            prompt.until(lambda: "no KV goes to t in epoch" in caplog.text, token)
            assert reason in caplog.text
        else:
            offered((prompt, token), "p.k")
    finally:
        prompt.close()
        token.close()


def test_staging_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """Wrong if a machine starts that can never send its longest prompt."""
    with pytest.raises(TransferError, match="staging_bytes: got 100"):
        Half("p", tmp_path, seed=1, staging_bytes=100)
