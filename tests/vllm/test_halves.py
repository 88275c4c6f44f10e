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
    machines = Half("p", tmp_path, seed=1), Half("d", tmp_path, seed=2)
    yield machines
    for machine in machines:
        machine.close()


def offered(pair: Pair, request: str) -> None:
    """Wait until blocks are offered for a request."""
    prefill, decode = pair
    prefill.step()
    leaving = prefill.worker._sends[request]
    prefill.until(lambda: leaving.is_offered, decode)


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 31, 32])
def test_layers_arrive_in_the_blocks_they_are_for(pair: Pair, tokens: int) -> None:
    """Wrong if a block lands in another place, or one is lost around a block's edge."""
    prefill, decode = pair
    count = -(-tokens // BLOCK_TOKENS)
    theirs, ours = tuple(range(20, 20 - count, -1)), tuple(range(1, 1 + 2 * count, 2))
    before = decode.kv.copy()
    prefill.prefill_leg("k", tokens, decode)
    decode.decode_leg("k", tokens, prefill, ours)
    offered(pair, "p.k")
    prefill.step({"p.k": (0, tokens)}, {"p.k": theirs})
    prefill.until(lambda: "d.k" in decode.received, decode)
    assert not decode.failed
    np.testing.assert_array_equal(decode.kv[:, list(ours)], prefill.kv[:, list(theirs)])
    others = [block for block in range(before.shape[1]) if block not in ours]
    np.testing.assert_array_equal(decode.kv[:, others], before[:, others])


def test_chunks_send_only_blocks_that_are_final(pair: Pair) -> None:
    """Wrong if a block leaves before the chunk that fills it: it would carry what was there before."""
    prefill, decode = pair
    blocks = tuple(range(8))
    prefill.prefill_leg("k", 30, decode)
    decode.decode_leg("k", 30, prefill, blocks)
    offered(pair, "p.k")
    for done, tokens in ((0, 10), (10, 9), (19, 11)):
        first = done // BLOCK_TOKENS
        end = -(-(done + tokens) // BLOCK_TOKENS)
        for layer in range(LAYERS):
            prefill.kv[layer, first:end] = (layer + 1) * 16 + done  # the chunk writes into its blocks
        prefill.step({"p.k": (done, tokens)}, {"p.k": blocks})
    final = prefill.kv.copy()
    prefill.kv[:] = 0
    prefill.until(lambda: "d.k" in decode.received, decode)
    np.testing.assert_array_equal(decode.kv[:, :8], final[:, :8])


def test_an_offer_in_mid_pass_is_taken_up(pair: Pair) -> None:
    """Wrong if a prompt whose offer comes while it is computed waits for its end."""
    prefill, decode = pair
    prefill.prefill_leg("k", 8, decode)
    prefill.step()

    def then(layer: int) -> None:
        if layer == 1:
            decode.decode_leg("k", 8, prefill, (5, 6))
            offered_now = prefill.worker._sends["p.k"]
            decode.until(lambda: offered_now.is_offered)

    prefill.step({"p.k": (0, 8)}, {"p.k": (2, 3)}, then)
    prefill.until(lambda: "d.k" in decode.received, decode)
    np.testing.assert_array_equal(decode.kv[:, 5:7], prefill.kv[:, 2:4])
    prefill.until(lambda: prefill.endpoint.outgoing.sent.transfers[Mode.LAYERWISE] == 1)


def test_a_threshold_comes_down_the_line(tmp_path: Path) -> None:
    """Wrong if the measured link is not reported, or the threshold that follows from it is not used."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "line"))
        listener.listen(1)
        prefill = Half("p", tmp_path, seed=1, reports=str(tmp_path / "line"), threshold_tokens=None)
        decode = Half("d", tmp_path, seed=2)
        line, _ = listener.accept()
    try:
        hello = json.loads(line.recv(1 << 16))["hello"]
        assert hello["threshold_tokens"] is None
        assert Link(**hello["link"]).bytes_per_s > 0
        sent = prefill.endpoint.outgoing.sent
        assert not sum(sent.transfers.values())  # what was sent to measure is no traffic
        for key, mode in (("before", Mode.SERIALIZED), ("after", Mode.LAYERWISE)):
            request = prefill.prefill_leg(key, 8, decode)
            decode.decode_leg(key, 8, prefill, (5, 6))
            offered((prefill, decode), f"p.{key}")
            prefill.step({f"p.{key}": (0, 8)}, {f"p.{key}": (2, 3)})
            prefill.finish(request, (2, 3))
            prefill.until(lambda key=key: f"p.{key}" in prefill.sent, decode)  # type: ignore[misc]
            assert sent.transfers[mode] == 1
            line.send(b'{"threshold_tokens": 8}')
            prefill.until(lambda: prefill.worker._transfers.threshold_tokens == 8)
    finally:
        prefill.close()
        decode.close()
        line.close()


@pytest.mark.parametrize("thresholds", [(1, 1000, 1000, 1000), (1000, 1, 1, 1), (1000, 1000, 1, 1000)])
def test_a_threshold_that_changes_in_mid_prompt(pair: Pair, thresholds: tuple[int, ...]) -> None:
    """Wrong if blocks are lost, or sent from another place, because the way of a prompt is thought over on its way."""
    prefill, decode = pair
    blocks = tuple(range(8))
    prefill.prefill_leg("k", 30, decode)
    decode.decode_leg("k", 30, prefill, blocks)
    offered(pair, "p.k")
    prefill.worker._transfers.threshold_tokens = thresholds[0]
    for done, tokens, threshold in zip((0, 10, 19), (10, 9, 11), thresholds[1:], strict=True):

        def then(layer: int, threshold: int = threshold) -> None:
            if layer == 1:  # orders arrive while the model computes
                prefill.worker._transfers.threshold_tokens = threshold

        first, end = done // BLOCK_TOKENS, -(-(done + tokens) // BLOCK_TOKENS)
        prefill.kv[:, first:end] = done
        prefill.step({"p.k": (done, tokens)}, {"p.k": blocks}, then)
    prefill.until(lambda: "d.k" in decode.received, decode)
    assert not decode.failed
    np.testing.assert_array_equal(decode.kv[:, :8], prefill.kv[:, :8])
    prefill.until(lambda: prefill.endpoint.outgoing.sent.transfers[Mode.LAYERWISE] == 1)


def test_blocks_are_kept_until_a_late_offer_has_its_kv(pair: Pair) -> None:
    """Wrong if vLLM may use a prompt's blocks again before they have left, or never learns that it may."""
    prefill, decode = pair
    request = prefill.prefill_leg("k", 9, decode)
    prefill.step({"p.k": (0, 9)}, {"p.k": (7, 8, 9)})
    assert prefill.finish(request, (7, 8, 9))
    prefill.step()
    assert not prefill.sent
    decode.decode_leg("k", 9, prefill, (1, 2, 3))
    prefill.until(lambda: "p.k" in prefill.sent and "d.k" in decode.received, decode)
    np.testing.assert_array_equal(decode.kv[:, 1:4], prefill.kv[:, 7:10])
    prefill.until(lambda: prefill.is_clean() and decode.is_clean(), decode)
    assert [mode.value for mode in prefill.endpoint.outgoing.sent.transfers] == ["serialized"]


def test_what_is_cached_here_is_not_written_over(pair: Pair) -> None:
    """Wrong if blocks that other requests share through the prefix cache are written to."""
    prefill, decode = pair
    before = decode.kv.copy()
    prefill.prefill_leg("k", 12, decode)
    decode.decode_leg("k", 12, prefill, (1, 2, 3), cached=8)
    offered(pair, "p.k")
    prefill.step({"p.k": (0, 12)}, {"p.k": (4, 5, 6)})
    prefill.until(lambda: "d.k" in decode.received, decode)
    np.testing.assert_array_equal(decode.kv[:, 1:3], before[:, 1:3])
    np.testing.assert_array_equal(decode.kv[:, 3], prefill.kv[:, 6])


def test_cached_blocks_of_the_prefill_machine_leave_too(pair: Pair) -> None:
    """Wrong if only what a step computes is sent, and not what its prefix cache had."""
    prefill, decode = pair
    prefill.prefill_leg("k", 12, decode)
    decode.decode_leg("k", 12, prefill, (1, 2, 3))
    offered(pair, "p.k")
    prefill.step({"p.k": (8, 4)}, {"p.k": (4, 5, 6)})
    prefill.until(lambda: "d.k" in decode.received, decode)
    np.testing.assert_array_equal(decode.kv[:, 1:4], prefill.kv[:, 4:7])


def test_a_preempted_prompt_sends_the_rest_from_its_new_blocks(pair: Pair) -> None:
    """Wrong if a prompt that was computed again sends a block twice, or from the place that it has lost."""
    prefill, decode = pair
    prefill.prefill_leg("k", 12, decode)
    decode.decode_leg("k", 12, prefill, (1, 2, 3))
    offered(pair, "p.k")
    prefill.step({"p.k": (0, 8)}, {"p.k": (4, 5)})
    first = prefill.kv[:, 4:6].copy()
    prefill.kv[:, 4:6] = 0
    prefill.step({"p.k": (0, 8)}, {"p.k": (9, 10)})
    prefill.step({"p.k": (8, 4)}, {"p.k": (9, 10, 11)})
    prefill.until(lambda: "d.k" in decode.received, decode)
    np.testing.assert_array_equal(decode.kv[:, 1:3], first)
    np.testing.assert_array_equal(decode.kv[:, 3], prefill.kv[:, 11])


def test_a_request_is_taken_once() -> None:
    """Wrong if a decode machine that lost its blocks waits again for KV that nobody has any more."""
    half = SchedulerHalf(BLOCK_TOKENS)
    request = Request("t", 9, {"do_remote_prefill": True, "key": "k", "peer": "p", "peer_epoch": 1})
    half.arrived(request)
    assert half.awaited_tokens(request, 4) == 5
    half.allocated(request, (1, 2, 3), 5)
    assert half.awaited_tokens(request, 0) == 0
    (take,) = half.step({}, [], {}.__getitem__).receives
    assert (take.first, take.blocks) == (1, (1, 2, 3))


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": None}, {"key": ""}, {"peer": 3}, {"peer_epoch": "1"}, {"peer_epoch": -1}, {"address": None},
        {"address": "here"}, {"do_remote_decode": False}, {"key": "k" * 257}, {"key": "\ud800"}, {"peer": "a\nb"},
        {"peer_epoch": 10**4000},
    ],
)  # fmt: skip
def test_wrong_kv_params_end_no_engine(pair: Pair, wrong: dict[str, Any]) -> None:
    """Wrong if words that a client sends can end a machine, or make it keep blocks for nobody."""
    prefill, decode = pair
    request = prefill.prefill_leg("k", 8, decode, wrong)
    assert not prefill.scheduler.step({}, [], {}.__getitem__).sends
    assert not prefill.finish(request, (1, 2))


@pytest.mark.parametrize("params", ["x", ["key"], 3, True])
def test_what_is_no_mapping_is_no_kv_params(params: object) -> None:
    """Wrong if a client that sends a text for `kv_transfer_params` ends vLLM's scheduler."""
    half, request = SchedulerHalf(BLOCK_TOKENS), Request("r", 9, params)
    half.arrived(request)
    assert half.awaited_tokens(request, 0) == 0
    assert half.step({"r": 9}, [("r", 0)], {}.__getitem__) == StepOrders()


def test_a_whole_request_reports_when_its_prefill_begins(tmp_path: Path) -> None:
    """Wrong if the gateway takes a request that waits for one that is computed, or learns of one that is gone."""
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


def test_a_transfer_thread_that_ends_takes_its_machine_along(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a decode machine goes on without the thread that brings KV, and its requests wait for ever."""
    _, decode = pair

    def fail() -> None:
        raise OSError("no buffer space")

    monkeypatch.setattr(threading, "excepthook", Mock())
    decode.worker._transfers.do(fail)
    decode.worker._transfers._thread.join(10.0)
    with pytest.raises(RuntimeError, match="the thread that moves KV has ended"):
        decode.step()


def test_a_refused_request_leaves_the_first_of_its_key_alone(pair: Pair) -> None:
    """Wrong if the end of a request that came under a key in use takes the KV of the other with it."""
    prefill, decode = pair
    request = prefill.prefill_leg("k", 12, decode)
    again = Request("p.again", 12, request.kv_transfer_params)
    prefill.scheduler.arrived(again)
    decode.decode_leg("k", 12, prefill, (1, 2, 3))
    offered(pair, "p.k")
    prefill.finish(again, (), "FINISHED_ABORTED")
    prefill.step()
    prefill.step({"p.k": (0, 12)}, {"p.k": (4, 5, 6)})
    assert prefill.finish(request, (4, 5, 6))
    prefill.until(lambda: "d.k" in decode.received, decode)
    assert not decode.failed
    np.testing.assert_array_equal(decode.kv[:, 1:4], prefill.kv[:, 4:7])


@pytest.mark.parametrize("when", ["waiting", "begun", "computed"])
def test_an_abort_of_the_prefill_leg_frees_both_sides(pair: Pair, when: str) -> None:
    """Wrong if a client that gives up leaves staging slots held, or the decode machine waiting."""
    prefill, decode = pair
    request = prefill.prefill_leg("k", 12, decode)
    decode.decode_leg("k", 12, prefill, (1, 2, 3))
    offered(pair, "p.k")
    if when != "waiting":
        prefill.step({"p.k": (0, 8)}, {"p.k": (4, 5, 6)})
    if when == "computed":
        prefill.endpoint.outgoing.send_layer = Mock()  # type: ignore[method-assign]
        prefill.step({"p.k": (8, 4)}, {"p.k": (4, 5, 6)})
    assert not prefill.finish(request, (4, 5, 6), "FINISHED_ABORTED")
    prefill.until(lambda: "d.k" in decode.received, decode)
    assert decode.failed == {"d.k"}
    prefill.until(lambda: prefill.is_clean() and decode.is_clean(), decode)
    assert not prefill.sent  # vLLM has freed the blocks itself


def test_an_abort_of_the_decode_leg_frees_the_prefill_machine(pair: Pair) -> None:
    """Wrong if KV that nobody will take stays on the prefill machine."""
    prefill, decode = pair
    request = prefill.prefill_leg("k", 12, decode)
    waiting = decode.decode_leg("k", 12, prefill, (1, 2, 3))
    offered(pair, "p.k")
    decode.finish(waiting, (1, 2, 3), "FINISHED_ABORTED")
    decode.until(lambda: "d.k" in decode.received, prefill)
    prefill.step({"p.k": (0, 12)}, {"p.k": (4, 5, 6)})
    assert prefill.finish(request, (4, 5, 6))
    prefill.until(lambda: "p.k" in prefill.sent, decode)
    prefill.until(lambda: prefill.is_clean() and decode.is_clean(), decode)


def test_a_machine_that_is_gone_is_not_waited_for(pair: Pair, tmp_path: Path) -> None:
    """Wrong if a decode machine holds blocks for a prefill machine that has ended."""
    prefill, decode = pair
    prefill.prefill_leg("k", 12, decode)
    decode.decode_leg("k", 12, prefill, (1, 2, 3))
    offered(pair, "p.k")
    prefill.step({"p.k": (0, 8)}, {"p.k": (4, 5, 6)})
    prefill.close()
    decode.until(lambda: "d.k" in decode.failed)
    decode.until(decode.is_clean)


def test_more_requests_than_slots_go_one_after_the_other(tmp_path: Path) -> None:
    """Wrong if a full staging memory loses a request, or stops all."""
    block_bytes = LAYERS * layout().block_bytes
    small = 2 * block_bytes * (LONGEST_TOKENS // BLOCK_TOKENS)
    prefill, decode = (Half(name, tmp_path, seed=5, staging_bytes=small) for name in ("p", "d"))
    try:
        for number in range(3):
            request = prefill.prefill_leg(f"k{number}", 32, decode)
            decode.decode_leg(f"k{number}", 32, prefill, tuple(range(8 * number, 8 * number + 8)))
            blocks = tuple(range(8 * number, 8 * number + 8))
            prefill.step({f"p.k{number}": (0, 32)}, {f"p.k{number}": blocks})
            assert prefill.finish(request, blocks)
        prefill.until(lambda: len(prefill.sent) == 3 == len(decode.received), decode)
        assert not decode.failed
        np.testing.assert_array_equal(decode.kv, prefill.kv)
        prefill.until(lambda: prefill.is_clean() and decode.is_clean(), decode)
    finally:
        prefill.close()
        decode.close()


def test_unequal_layouts_are_refused_with_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Wrong if blocks that are packed differently are taken for each other, or nobody learns why KV does not come."""
    prefill = Half("p", tmp_path, seed=1)
    decode = Half("d", tmp_path, seed=2, layout=layout(block_layout="another order"))
    try:
        prefill.prefill_leg("k", 8, decode)
        prefill.until(lambda: "no KV goes to d in epoch" in caplog.text)
        assert "block_layout" in caplog.text
    finally:
        prefill.close()
        decode.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [(b"one", b"one", ""), (b"one", b"two", "another key"), (b"one", None, "has none"), (None, b"one", "has none")],
)
def test_machines_prove_the_clusters_key(
    tmp_path: Path, ours: bytes | None, theirs: bytes | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Wrong if a machine that does not know the cluster's key is given KV, or one that does is turned away."""
    prefill, decode = Half("p", tmp_path, seed=1, key=ours), Half("d", tmp_path, seed=2, key=theirs)
    try:
        prefill.prefill_leg("k", 8, decode)
        decode.decode_leg("k", 8, prefill, (1, 2))
        if reason:
            prefill.until(lambda: "no KV goes to d in epoch" in caplog.text, decode)
            assert reason in caplog.text
        else:
            offered((prefill, decode), "p.k")
    finally:
        prefill.close()
        decode.close()


def test_staging_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """Wrong if a machine starts that can never send its longest prompt."""
    with pytest.raises(TransferError, match="staging_bytes: got 100"):
        Half("p", tmp_path, seed=1, staging_bytes=100)
