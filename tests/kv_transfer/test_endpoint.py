"""Posts of two machines: orders and offers in every order, over both transports, with machines that come and go."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.pairs import OpenPair, Pair
from kv_transfer.wires import BLOCKS, LAYOUT, needles, open_files, open_sockets
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import BlockPool, Use
from phasesplit.kv_transfer.channel import Condition
from phasesplit.kv_transfer.chooser import Mode
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import NoRoomError, TransferTimeouts
from phasesplit.kv_transfer.outgoing import boot_id, open_channel
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from waiting import eventually


@pytest.mark.parametrize("first", ["order", "offer"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_a_prompt_arrives_with_its_note(open_pair: OpenPair, first: str, tokens: int) -> None:
    """KV or first token would be lost when offer and order come in this order, or at a border of blocks."""
    pair = open_pair()
    if first == "order":
        pair.order("r")
        pair.settle()
        assert pair.prefill.outgoing.state("r") is OutboundState.AWAITED
    pair.decode.incoming.expect("r", tokens, "prefill-0")
    pair.settle()
    if first == "offer":
        pair.order("r")
    eventually(lambda: pair.prefill.outgoing.state("r") is OutboundState.OFFERED, pair.step)
    blocks = pair.prefill.free.hold("r", Use.SEND, LAYOUT.blocks_for(tokens)).blocks
    pair.prefill.outgoing.open("r", blocks)
    pair.prefill.outgoing.send_all("r")
    pair.settle()
    assert pair.decode.incoming.state("r") is InboundState.RECEIVING
    with pytest.raises(TransferError):
        pair.decode.incoming.take("r")
    pair.prefill.outgoing.note("r", b'{"id": 7}')
    pair.until_over("r")
    delivery = pair.decode.incoming.take("r")
    assert delivery.note == b'{"id": 7}'
    assert np.array_equal(pair.decode.pool[:, list(delivery.blocks)], pair.prefill.pool[:, list(blocks)])
    assert pair.prefill.outgoing.sent.transfers == {Mode.SERIALIZED: 1}
    assert pair.prefill.outgoing.sent.size_bytes == LAYOUT.layers * LAYOUT.block_bytes * len(blocks)
    pair.decode.incoming.release("r")
    assert pair.decode.free.used == 0


def test_layers_leave_before_the_next_ones_exist(open_pair: OpenPair) -> None:
    """A layer-wise transfer would wait for the end of the prefill phase, or send a chunk's blocks twice."""
    pair = open_pair()
    blocks = pair.offered("r", 16, wants_note=False)
    for chunk in (range(3), range(3, 4)):
        for layer in range(LAYOUT.layers):
            pair.prefill.outgoing.send_layer("r", layer, chunk.start, chunk.stop)
            pair.settle()
            held = pair.decode.incoming._receiver
            arrived = held._inbound[1].arrived if chunk.start == 0 else None
            assert arrived is None or (arrived[: layer + 1, :3].all() and not arrived[layer + 1 :].any())
    pair.until_over("r")
    taken = pair.decode.incoming.take("r").blocks
    assert np.array_equal(pair.decode.pool[:, list(taken)], pair.prefill.pool[:, list(blocks)])
    assert pair.prefill.outgoing.sent.transfers == {Mode.LAYERWISE: 1}


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["first", "order", "offer", "offered", "open", "layer", "sent", "whole", "taken"])
def test_abort_in_every_state(open_pair: OpenPair, side: str, when: str) -> None:
    """An abort, twice, by either machine, would leave blocks held, KV readable, or the other machine waiting."""
    pair = open_pair()
    pair.connect()
    pair.settle()
    end = pair.prefill.outgoing if side == "prefill" else pair.decode.incoming
    steps: list[tuple[str, Callable[[], object]]] = [
        ("first", lambda: None),
        ("order", lambda: pair.order("r")),
        ("offer", lambda: pair.decode.incoming.expect("r", 16, "prefill-0")),
        ("offered", lambda: eventually(lambda: pair.prefill.outgoing.state("r") is OutboundState.OFFERED, pair.step)),
        ("open", lambda: pair.prefill.outgoing.open("r", (0, 1, 2, 3))),
        ("layer", lambda: pair.prefill.outgoing.send_layer("r", 0)),
        ("sent", lambda: [pair.prefill.outgoing.send_layer("r", layer) for layer in (1, 2)]),
        ("whole", lambda: (pair.prefill.outgoing.note("r", b"n"), pair.until_over("r"))),
        ("taken", lambda: pair.decode.incoming.take("r")),
    ]
    for name, step in steps:
        step()
        if name == when:
            break
    for _ in range(2):
        end.abort("r", "given up")
        pair.settle()
    if when in ("first", "order"):  # the other half of the request comes all the same
        if when == "first":
            pair.order("r")
        if side == "prefill":
            pair.decode.incoming.expect("r", 16, "prefill-0")
        else:
            assert pair.prefill.outgoing.state("r") is OutboundState.AWAITED
            pair.prefill.outgoing.abort("r", "its decode machine never offered anything")
    completed = when in ("whole", "taken")
    eventually(lambda: pair.prefill.outgoing.state("r") is not OutboundState.AWAITED, pair.step)
    assert pair.prefill.outgoing.state("r") is (OutboundState.COMPLETED if completed else OutboundState.FAILED)
    assert pair.prefill.outgoing.may_free("r")
    if completed and side == "prefill":
        pair.decode.incoming.release("r")
    pair.until_free()
    if not (completed and side == "prefill"):
        with pytest.raises(TransferError):
            pair.decode.incoming.take("r")
    pair.prefill.outgoing.forget("r")
    pair.decode.incoming.abort("r", "again")
    pair.offered("next")
    pair.prefill.outgoing.send_all("next")
    pair.prefill.outgoing.note("next", b"")
    pair.until_over("next")
    assert pair.prefill.outgoing.state("next") is OutboundState.COMPLETED
    assert pair.decode.incoming.take("next").note == b""


@pytest.mark.parametrize("ordered", [False, True])
def test_an_offer_that_was_withdrawn_fails_its_order(open_pair: OpenPair, ordered: bool) -> None:
    """A prefill machine would hold its KV, or compute, for a decode machine that has refused already."""
    pair = open_pair()
    pair.connect()
    if ordered:
        pair.order("r")
    pair.decode.incoming.expect("r", 16, "prefill-0")
    pair.settle()
    pair.decode.incoming.abort("r", "the client is gone")
    pair.until_free()
    if not ordered:
        pair.order("r")
    assert pair.prefill.outgoing.state("r") is OutboundState.FAILED
    assert "the client is gone" in pair.prefill.outgoing.why("r")


def test_an_offer_without_an_order_is_turned_down_in_the_end(open_pair: OpenPair) -> None:
    """Blocks would wait for a prompt that never comes, or one machine's memory fill with others' offers."""
    pair = open_pair(timeouts=TransferTimeouts(lease_s=1_000.0))
    pair.connect()
    pair.decode.incoming.expect("r", 16, "prefill-0")
    pair.settle()
    pair.now_s = 31.0
    pair.until_free()
    assert pair.decode.incoming.state("r") is InboundState.RELEASED
    assert "deadline" in pair.decode.incoming.why("r")


def test_nobody_keeps_alive_what_was_not_ordered(open_pair: OpenPair) -> None:
    """Blocks would wait for a prefill machine that has no order, because it answers for every offer."""
    pair = open_pair(timeouts=TransferTimeouts(lease_s=10.0, heartbeat_s=1.0))
    pair.connect()
    pair.settle()
    pair.decode.incoming.expect("r", 16, "prefill-0")
    for _ in range(11):
        pair.now_s += 1.0
        pair.settle()
    pair.until_free()
    assert pair.decode.incoming.why("r") == "no heartbeat"


def test_leases_live_as_long_as_the_order_and_no_longer(open_pair: OpenPair) -> None:
    """Blocks would be taken away while the prompt waits in a long queue, or be kept when nobody asks for them."""
    pair = open_pair()
    pair.order("r")
    pair.decode.incoming.expect("r", 16, "prefill-0")
    pair.decode.incoming.expect("nobody's", 16, "prefill-7")
    pair.settle()
    for _ in range(20):
        pair.now_s += 5.0
        pair.settle()
    assert pair.prefill.outgoing.state("r") is OutboundState.OFFERED
    assert pair.decode.incoming.held() == {"r": 4}
    assert pair.decode.incoming.why("nobody's") == "no heartbeat"
    pair.now_s = 121.0
    pair.until_free()
    assert pair.prefill.outgoing.state("r") is OutboundState.FAILED
    assert "deadline" in pair.prefill.outgoing.why("r")


def test_what_was_taken_is_kept(open_pair: OpenPair) -> None:
    """A request that decodes for long would lose its blocks because its sender says nothing more."""
    pair = open_pair()
    pair.offered("r", wants_note=False)
    pair.prefill.outgoing.send_all("r")
    pair.until_over("r")
    pair.prefill.outgoing.forget("r")
    for state in (InboundState.READY, InboundState.READING):
        for _ in range(20):
            pair.now_s += 20.0
            pair.step()
        assert pair.decode.incoming.state("r") is state
        pair.decode.incoming.take("r")


def test_transfers_and_the_engine_draw_from_one_pool(open_pair: OpenPair) -> None:
    """A transfer would be written into blocks that a local prompt holds."""
    pair = open_pair()
    growth = pair.decode.free.hold("own", Use.COMPUTE, BLOCKS - 4)
    pair.decode.incoming.expect("r", 16, "prefill-0")
    with pytest.raises(NoRoomError):
        pair.decode.incoming.expect("next", 1, "prefill-0")
    with pytest.raises(TransferError, match="expected already"):
        pair.decode.incoming.expect("r", 16, "prefill-0")
    pair.decode.free.give(growth)
    pair.decode.incoming.expect("next", 1, "prefill-0")
    assert pair.decode.incoming.held() == {"r": 4, "next": 1}
    for key in ("r", "next"):
        pair.decode.incoming.abort(key, "over")
    assert pair.decode.free.free == BLOCKS


def test_refusal_is_told_with_its_reason(open_pair: OpenPair, caplog: pytest.LogCaptureFixture) -> None:
    """Machines whose blocks differ would exchange them, or an operator not learn why nothing works."""
    pair = open_pair(theirs=replace(LAYOUT, model="other"))
    pair.order("r")
    eventually(lambda: pair.prefill.outgoing.state("r") is OutboundState.FAILED, pair.step)
    reason = "refused: layout model: ours is 'tiny', the peer's is 'other'"
    assert caplog.messages == [f"no KV goes to decode-0 in epoch 1: {pair.prefill.outgoing.why('r')}"]
    assert pair.prefill.outgoing.why("r").startswith(reason)


@pytest.mark.parametrize(
    "address",
    [
        {"boot_id": "", "unix": None, "tcp": ["127.0.0.1", 1]},
        {"boot_id": "here", "unix": "/nowhere/kv", "tcp": None},
        {"boot_id": "elsewhere", "unix": "/nowhere/kv", "tcp": None},
        {"tcp": "nonsense"},
        {"tcp": ["127.0.0.1", math.inf]},
        {},
    ],
)
def test_a_machine_that_is_not_there(
    open_pair: OpenPair, address: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    """An order would wait for a machine that cannot be reached, or raise something that nobody expects."""
    pair = open_pair()
    if address.get("boot_id") == "here":
        address = {**address, "boot_id": pair.decode.endpoint.address["boot_id"]}
    pair.prefill.outgoing.await_offer("r", "decode-9", address, 1)
    eventually(lambda: pair.prefill.outgoing.state("r") is OutboundState.FAILED, pair.step)
    pair.step()
    assert pair.prefill.outgoing.why("r") != ""
    assert caplog.messages == [f"no KV goes to decode-9 in epoch 1: {pair.prefill.outgoing.why('r')}"]
    pair.prefill.outgoing.forget("r")
    pair.order("r2")
    pair.decode.incoming.expect("r2", 4, "prefill-0")
    eventually(lambda: pair.prefill.outgoing.state("r2") is OutboundState.OFFERED, pair.step)


@pytest.mark.parametrize("wrong", ["pool", "directory"])
def test_a_post_that_cannot_be_made_leaves_nothing(wrong: str, tmp_path: Path) -> None:
    """A worker that fails to start would leave a socket that the next one falls over."""
    memory = SharedPool(LAYOUT, 2)
    other = replace(LAYOUT, layers=2) if wrong == "pool" else LAYOUT
    before = open_sockets()
    folder = str(tmp_path if wrong == "pool" else tmp_path / "nowhere")
    with pytest.raises((TransferError, OSError)):
        KvEndpoint(
            PeerInfo(machine="a", epoch=1, layout=other), memory, BlockPool(2), directory=folder, tcp=("127.0.0.1", 0)
        )
    assert open_sockets() == before
    assert list(tmp_path.iterdir()) == []
    memory.close()


def test_nixl_goes_before_tcp_where_both_have_it() -> None:
    """Machines with RDMA would send through the kernel, or not reach one another."""
    pytest.importorskip("nixl")
    pair = Pair("nixl")
    pair.decode.endpoint._address["tcp"] = ["127.0.0.1", 1]
    blocks = pair.offered("r")
    pair.prefill.outgoing.note("r", b"n")
    pair.prefill.outgoing.send_all("r")
    pair.until_over("r")
    delivery = pair.decode.incoming.take("r")
    assert delivery.note == b"n"
    assert np.array_equal(pair.decode.pool[:, list(delivery.blocks)], pair.prefill.pool[:, list(blocks)])
    pair.close()


def test_a_host_that_sees_no_socket_of_ours_is_reached_over_tcp() -> None:
    """Two containers of one host would not reach one another."""
    pair = Pair("tcp")
    address = {**pair.decode.endpoint.address, "unix": "/nowhere/kv"}
    pair.prefill.outgoing.await_offer("r", "decode-0", address, 1)
    pair.decode.incoming.expect("r", 4, "prefill-0")
    eventually(lambda: pair.prefill.outgoing.state("r") is OutboundState.OFFERED, pair.step)
    pair.close()


def test_another_machine_at_the_address(open_pair: OpenPair) -> None:
    """KV would go to whoever listens there now."""
    pair = open_pair()
    pair.prefill.outgoing.await_offer("a", "decode-9", pair.decode.endpoint.address, 1)
    pair.prefill.outgoing.await_offer("b", "decode-0", pair.decode.endpoint.address, 2)
    eventually(lambda: pair.prefill.outgoing.state("b") is OutboundState.FAILED, pair.step)
    eventually(lambda: pair.prefill.outgoing.state("a") is OutboundState.FAILED, pair.step)
    assert pair.prefill.outgoing.why("a") == "expected decode-9 in epoch 1, found decode-0 in epoch 1"
    assert pair.prefill.outgoing.why("b") == "expected decode-0 in epoch 2, found decode-0 in epoch 1"


def test_a_token_machine_that_was_started_again(open_pair: OpenPair) -> None:
    """An order for its former life would be carried out in the new one, or the new one never be reached."""
    pair = open_pair()
    pair.offered("old")
    pair.prefill.outgoing.send_layer("old", 0)
    pair.decode.close()
    pair.decode = pair.start("decode-0", epoch=2)
    pair.order("new")
    eventually(lambda: pair.prefill.outgoing.state("old") is OutboundState.FAILED, pair.step)
    pair.settle()
    with pytest.raises(TransferError, match="epoch 1 of decode-0 is stale, the latest is 2"):
        pair.prefill.outgoing.await_offer("late", "decode-0", pair.decode.endpoint.address, 1)
    pair.decode.incoming.expect("new", 4, "prefill-0")
    eventually(lambda: pair.prefill.outgoing.state("new") is OutboundState.OFFERED, pair.step)


def test_an_epoch_that_nobody_has_shown_ends_nothing(open_pair: OpenPair) -> None:
    """One order with a wrong epoch would end what goes on, and cut the machine off from all its prefill machines."""
    pair = open_pair()
    pair.offered("going on", wants_note=False)
    address = pair.decode.endpoint.address
    for number, wrong in enumerate((10**15, 2, 3)):
        pair.prefill.outgoing.await_offer(f"wrong{number}", "decode-0", address, wrong)
        pair.order(f"next{number}")
        eventually(
            lambda number=number: pair.prefill.outgoing.state(f"wrong{number}") is OutboundState.FAILED, pair.step
        )  # type: ignore[misc]
    pair.order("after")
    pair.prefill.outgoing.send_all("going on")
    pair.until_over("going on")
    assert pair.prefill.outgoing.state("going on") is OutboundState.COMPLETED
    for key in ("next0", "next1", "next2", "after"):
        pair.decode.incoming.expect(key, 4, "prefill-0")
        eventually(lambda key=key: pair.prefill.outgoing.state(key) is OutboundState.OFFERED, pair.step)  # type: ignore[misc]
    assert len(pair.prefill.outgoing._links) == 2  # and the latest that failed, which can say why


def test_a_prompt_machine_that_was_started_again(open_pair: OpenPair) -> None:
    """Blocks would stay reserved for its former life, or what was offered to that be filled by the new one."""
    pair = open_pair()
    pair.offered("old")
    pair.prefill.outgoing.send_layer("old", 0)
    pair.settle()
    former, pair.prefill = pair.prefill, pair.start("prefill-0", epoch=2)
    pair.offered("new")
    eventually(lambda: pair.decode.incoming.held() == {"new": 4}, lambda: (pair.step(), former.endpoint.poll()))
    assert pair.decode.incoming.state("old") is InboundState.RELEASED
    eventually(lambda: former.outgoing.state("old") is OutboundState.FAILED, former.endpoint.poll)
    former.close()


def test_a_channel_that_broke_is_opened_again(open_pair: OpenPair) -> None:
    """One broken connection would end all business between two machines."""
    pair = open_pair()
    pair.offered("r")
    next(iter(pair.decode.incoming._channels.values())).close()
    eventually(lambda: pair.prefill.outgoing.state("r") is OutboundState.FAILED, pair.step)
    pair.until_free()
    pair.offered("next", wants_note=False)
    pair.prefill.outgoing.send_all("next")
    pair.until_over("next")
    assert pair.prefill.outgoing.state("next") is OutboundState.COMPLETED


def test_a_peer_that_does_not_answer(open_pair: OpenPair) -> None:
    """An order would wait for ever for a machine that takes connections and says nothing; so would the other end."""
    pair = open_pair()
    pair.order("r")
    pair.now_s = 9.9
    pair.prefill.endpoint.poll()
    assert pair.prefill.outgoing.state("r") is OutboundState.AWAITED
    pair.now_s = 10.0
    pair.prefill.endpoint.poll()
    assert pair.prefill.outgoing.why("r") == "decode-0 has not answered the handshake within 10 s"


def test_a_peer_that_does_not_identify_itself_is_dropped(open_pair: OpenPair) -> None:
    """Connections of port scanners would stay open for ever, until no handle is left for the peers."""
    pair = open_pair()
    channel = open_channel(pair.decode.endpoint.address, boot_id())
    eventually(lambda: len(pair.decode.incoming._channels) == 1, pair.decode.endpoint.poll)
    pair.now_s = 10.0
    eventually(lambda: not pair.decode.incoming._channels, pair.decode.endpoint.poll)
    eventually(lambda: channel.condition is not Condition.OPEN, lambda: channel.poll(lambda _: None))


def test_many_transfers_leave_nothing(open_pair: OpenPair) -> None:
    """Sockets, keys, leases or blocks of ended transfers would pile up."""
    pair = open_pair()
    for number in range(2_000):
        key = f"r{number}.1"
        pair.offered(key, 5)
        pair.prefill.free.give(pair.sources.pop(key))
        pair.prefill.outgoing.send_all(key)
        pair.prefill.outgoing.note(key, b"n")
        pair.until_over(key)
        pair.prefill.outgoing.forget(key)
        pair.decode.incoming.take(key)
        pair.decode.incoming.release(key)
        if number == 0:
            before = open_files()
    assert open_files() == before
    assert pair.decode.incoming.held() == {}
    assert pair.decode.free.used == 0
    assert pair.prefill.outgoing._orders == {} == pair.decode.incoming._transfers
    assert pair.prefill.outgoing.sent.transfers == {Mode.SERIALIZED: 2_000}


def test_exposed_time_is_from_the_last_layer_to_the_completion(open_pair: OpenPair) -> None:
    """The figure for what a transfer costs would count what went on behind the prefill phase, or miss the wait."""
    pair = open_pair()
    pair.offered("r")
    pair.prefill.outgoing.note("r", b"")
    for layer in range(LAYOUT.layers):
        pair.prefill.outgoing.send_layer("r", layer)
        pair.now_s += 0.5
    pair.until_over("r")
    assert pair.prefill.outgoing.sent.last_exposed_s == pytest.approx(0.5)


def test_needles_of_two_requests_do_not_meet(open_pair: OpenPair) -> None:
    """Two transfers at once would write into one another's blocks."""
    pair = open_pair()
    blocks = {key: pair.offered(key, tokens, wants_note=False) for key, tokens in (("a", 16), ("b", 20), ("c", 3))}
    for layer in range(LAYOUT.layers):
        for key in blocks:
            pair.prefill.outgoing.send_layer(key, layer)
    for key, ours in blocks.items():
        pair.until_over(key)
        taken = pair.decode.incoming.take(key).blocks
        assert np.array_equal(pair.decode.pool[:, list(taken)], needles(LAYOUT, BLOCKS)[:, list(ours)])
