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
from phasesplit.kv_transfer.transfer_states import Arrival, Departure
from waiting import eventually


@pytest.mark.parametrize("first", ["order", "offer"])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33])
def test_a_prompt_arrives_with_its_note(open_pair: OpenPair, first: str, tokens: int) -> None:
    """KV or first token would be lost when offer and order come in this order, or at a border of blocks."""
    pair = open_pair()
    if first == "order":
        pair.order("r")
        pair.settle()
        assert pair.prompt.outgoing.state("r") is Departure.AWAITED
    pair.token.incoming.expect("r", tokens, "prefill-0")
    pair.settle()
    if first == "offer":
        pair.order("r")
    eventually(lambda: pair.prompt.outgoing.state("r") is Departure.OFFERED, pair.step)
    blocks = pair.prompt.free.hold("r", Use.SEND, LAYOUT.blocks_for(tokens)).blocks
    pair.prompt.outgoing.open("r", blocks)
    pair.prompt.outgoing.send_all("r")
    pair.settle()
    assert pair.token.incoming.state("r") is Arrival.RECEIVING
    with pytest.raises(TransferError):
        pair.token.incoming.take("r")
    pair.prompt.outgoing.note("r", b'{"id": 7}')
    pair.until_over("r")
    delivery = pair.token.incoming.take("r")
    assert delivery.note == b'{"id": 7}'
    assert np.array_equal(pair.token.pool[:, list(delivery.blocks)], pair.prompt.pool[:, list(blocks)])
    assert pair.prompt.outgoing.sent.transfers == {Mode.SERIALIZED: 1}
    assert pair.prompt.outgoing.sent.size_bytes == LAYOUT.layers * LAYOUT.block_bytes * len(blocks)
    pair.token.incoming.release("r")
    assert pair.token.free.used == 0


def test_layers_leave_before_the_next_ones_exist(open_pair: OpenPair) -> None:
    """A layer-wise transfer would wait for the end of the prefill phase, or send a chunk's blocks twice."""
    pair = open_pair()
    blocks = pair.offered("r", 16, wants_note=False)
    for chunk in (range(3), range(3, 4)):
        for layer in range(LAYOUT.layers):
            pair.prompt.outgoing.send_layer("r", layer, chunk.start, chunk.stop)
            pair.settle()
            held = pair.token.incoming._receiver
            arrived = held._inbound[1].arrived if chunk.start == 0 else None
            assert arrived is None or (arrived[: layer + 1, :3].all() and not arrived[layer + 1 :].any())
    pair.until_over("r")
    taken = pair.token.incoming.take("r").blocks
    assert np.array_equal(pair.token.pool[:, list(taken)], pair.prompt.pool[:, list(blocks)])
    assert pair.prompt.outgoing.sent.transfers == {Mode.LAYERWISE: 1}


@pytest.mark.parametrize("side", ["prompt", "token"])
@pytest.mark.parametrize("when", ["first", "order", "offer", "offered", "open", "layer", "sent", "whole", "taken"])
def test_abort_in_every_state(open_pair: OpenPair, side: str, when: str) -> None:
    """An abort, twice, by either machine, would leave blocks held, KV readable, or the other machine waiting."""
    pair = open_pair()
    pair.connect()
    pair.settle()
    end = pair.prompt.outgoing if side == "prompt" else pair.token.incoming
    steps: list[tuple[str, Callable[[], object]]] = [
        ("first", lambda: None),
        ("order", lambda: pair.order("r")),
        ("offer", lambda: pair.token.incoming.expect("r", 16, "prefill-0")),
        ("offered", lambda: eventually(lambda: pair.prompt.outgoing.state("r") is Departure.OFFERED, pair.step)),
        ("open", lambda: pair.prompt.outgoing.open("r", (0, 1, 2, 3))),
        ("layer", lambda: pair.prompt.outgoing.send_layer("r", 0)),
        ("sent", lambda: [pair.prompt.outgoing.send_layer("r", layer) for layer in (1, 2)]),
        ("whole", lambda: (pair.prompt.outgoing.note("r", b"n"), pair.until_over("r"))),
        ("taken", lambda: pair.token.incoming.take("r")),
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
        if side == "prompt":
            pair.token.incoming.expect("r", 16, "prefill-0")
        else:
            assert pair.prompt.outgoing.state("r") is Departure.AWAITED
            pair.prompt.outgoing.abort("r", "its decode machine never offered anything")
    completed = when in ("whole", "taken")
    eventually(lambda: pair.prompt.outgoing.state("r") is not Departure.AWAITED, pair.step)
    assert pair.prompt.outgoing.state("r") is (Departure.COMPLETED if completed else Departure.FAILED)
    assert pair.prompt.outgoing.may_free("r")
    if completed and side == "prompt":
        pair.token.incoming.release("r")
    pair.until_free()
    if not (completed and side == "prompt"):
        with pytest.raises(TransferError):
            pair.token.incoming.take("r")
    pair.prompt.outgoing.forget("r")
    pair.token.incoming.abort("r", "again")
    pair.offered("next")
    pair.prompt.outgoing.send_all("next")
    pair.prompt.outgoing.note("next", b"")
    pair.until_over("next")
    assert pair.prompt.outgoing.state("next") is Departure.COMPLETED
    assert pair.token.incoming.take("next").note == b""


@pytest.mark.parametrize("ordered", [False, True])
def test_an_offer_that_was_withdrawn_fails_its_order(open_pair: OpenPair, ordered: bool) -> None:
    """A prefill machine would hold its KV, or compute, for a decode machine that has refused already."""
    pair = open_pair()
    pair.connect()
    if ordered:
        pair.order("r")
    pair.token.incoming.expect("r", 16, "prefill-0")
    pair.settle()
    pair.token.incoming.abort("r", "the client is gone")
    pair.until_free()
    if not ordered:
        pair.order("r")
    assert pair.prompt.outgoing.state("r") is Departure.FAILED
    assert "the client is gone" in pair.prompt.outgoing.why("r")


def test_an_offer_without_an_order_is_turned_down_in_the_end(open_pair: OpenPair) -> None:
    """Blocks would wait for a prompt that never comes, or one machine's memory fill with others' offers."""
    pair = open_pair(patience=TransferTimeouts(lease_s=1_000.0))
    pair.connect()
    pair.token.incoming.expect("r", 16, "prefill-0")
    pair.settle()
    pair.now_s = 31.0
    pair.until_free()
    assert pair.token.incoming.state("r") is Arrival.RELEASED
    assert "deadline" in pair.token.incoming.why("r")


def test_nobody_keeps_alive_what_was_not_ordered(open_pair: OpenPair) -> None:
    """Blocks would wait for a prefill machine that was told nothing, because it answers for every offer."""
    pair = open_pair(patience=TransferTimeouts(lease_s=10.0, heartbeat_s=1.0))
    pair.connect()
    pair.settle()
    pair.token.incoming.expect("r", 16, "prefill-0")
    for _ in range(11):
        pair.now_s += 1.0
        pair.settle()
    pair.until_free()
    assert pair.token.incoming.why("r") == "no heartbeat"


def test_leases_live_as_long_as_the_order_and_no_longer(open_pair: OpenPair) -> None:
    """Blocks would be taken away while the prompt waits in a long queue, or be kept when nobody asks for them."""
    pair = open_pair()
    pair.order("r")
    pair.token.incoming.expect("r", 16, "prefill-0")
    pair.token.incoming.expect("nobody's", 16, "prefill-7")
    pair.settle()
    for _ in range(20):
        pair.now_s += 5.0
        pair.settle()
    assert pair.prompt.outgoing.state("r") is Departure.OFFERED
    assert pair.token.incoming.held() == {"r": 4}
    assert pair.token.incoming.why("nobody's") == "no heartbeat"
    pair.now_s = 121.0
    pair.until_free()
    assert pair.prompt.outgoing.state("r") is Departure.FAILED
    assert "deadline" in pair.prompt.outgoing.why("r")


def test_what_was_taken_is_kept(open_pair: OpenPair) -> None:
    """A request that decodes for long would lose its blocks because its sender says nothing more."""
    pair = open_pair()
    pair.offered("r", wants_note=False)
    pair.prompt.outgoing.send_all("r")
    pair.until_over("r")
    pair.prompt.outgoing.forget("r")
    for state in (Arrival.READY, Arrival.READING):
        for _ in range(20):
            pair.now_s += 20.0
            pair.step()
        assert pair.token.incoming.state("r") is state
        pair.token.incoming.take("r")


def test_transfers_and_the_engine_draw_from_one_pool(open_pair: OpenPair) -> None:
    """A transfer would be written into blocks that a local prompt holds."""
    pair = open_pair()
    growth = pair.token.free.hold("own", Use.COMPUTE, BLOCKS - 4)
    pair.token.incoming.expect("r", 16, "prefill-0")
    with pytest.raises(NoRoomError):
        pair.token.incoming.expect("next", 1, "prefill-0")
    with pytest.raises(TransferError, match="expected already"):
        pair.token.incoming.expect("r", 16, "prefill-0")
    pair.token.free.give(growth)
    pair.token.incoming.expect("next", 1, "prefill-0")
    assert pair.token.incoming.held() == {"r": 4, "next": 1}
    for key in ("r", "next"):
        pair.token.incoming.abort(key, "over")
    assert pair.token.free.free == BLOCKS


def test_refusal_is_told_with_its_reason(open_pair: OpenPair, caplog: pytest.LogCaptureFixture) -> None:
    """Machines whose blocks differ would exchange them, or an operator not learn why nothing works."""
    pair = open_pair(theirs=replace(LAYOUT, model="other"))
    pair.order("r")
    eventually(lambda: pair.prompt.outgoing.state("r") is Departure.FAILED, pair.step)
    reason = "refused: layout model: ours is 'tiny', the peer's is 'other'"
    assert caplog.messages == [f"no KV goes to decode-0 in epoch 1: {pair.prompt.outgoing.why('r')}"]
    assert pair.prompt.outgoing.why("r").startswith(reason)


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
        address = {**address, "boot_id": pair.token.endpoint.address["boot_id"]}
    pair.prompt.outgoing.await_offer("r", "decode-9", address, 1)
    eventually(lambda: pair.prompt.outgoing.state("r") is Departure.FAILED, pair.step)
    pair.step()
    assert pair.prompt.outgoing.why("r") != ""
    assert caplog.messages == [f"no KV goes to decode-9 in epoch 1: {pair.prompt.outgoing.why('r')}"]
    pair.prompt.outgoing.forget("r")
    pair.order("r2")
    pair.token.incoming.expect("r2", 4, "prefill-0")
    eventually(lambda: pair.prompt.outgoing.state("r2") is Departure.OFFERED, pair.step)


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
    pair.token.endpoint._address["tcp"] = ["127.0.0.1", 1]
    blocks = pair.offered("r")
    pair.prompt.outgoing.note("r", b"n")
    pair.prompt.outgoing.send_all("r")
    pair.until_over("r")
    delivery = pair.token.incoming.take("r")
    assert delivery.note == b"n"
    assert np.array_equal(pair.token.pool[:, list(delivery.blocks)], pair.prompt.pool[:, list(blocks)])
    pair.close()


def test_a_host_that_sees_no_socket_of_ours_is_reached_over_tcp() -> None:
    """Two containers of one host would not reach one another."""
    pair = Pair("tcp")
    address = {**pair.token.endpoint.address, "unix": "/nowhere/kv"}
    pair.prompt.outgoing.await_offer("r", "decode-0", address, 1)
    pair.token.incoming.expect("r", 4, "prefill-0")
    eventually(lambda: pair.prompt.outgoing.state("r") is Departure.OFFERED, pair.step)
    pair.close()


def test_another_machine_at_the_address(open_pair: OpenPair) -> None:
    """KV would go to whoever listens there now."""
    pair = open_pair()
    pair.prompt.outgoing.await_offer("a", "decode-9", pair.token.endpoint.address, 1)
    pair.prompt.outgoing.await_offer("b", "decode-0", pair.token.endpoint.address, 2)
    eventually(lambda: pair.prompt.outgoing.state("b") is Departure.FAILED, pair.step)
    eventually(lambda: pair.prompt.outgoing.state("a") is Departure.FAILED, pair.step)
    assert pair.prompt.outgoing.why("a") == "looked for decode-9 in epoch 1, found decode-0 in epoch 1"
    assert pair.prompt.outgoing.why("b") == "looked for decode-0 in epoch 2, found decode-0 in epoch 1"


def test_a_token_machine_that_was_started_again(open_pair: OpenPair) -> None:
    """An order for its former life would be carried out in the new one, or the new one never be reached."""
    pair = open_pair()
    pair.offered("old")
    pair.prompt.outgoing.send_layer("old", 0)
    pair.token.close()
    pair.token = pair.start("decode-0", epoch=2)
    pair.order("new")
    eventually(lambda: pair.prompt.outgoing.state("old") is Departure.FAILED, pair.step)
    pair.settle()
    with pytest.raises(TransferError, match="epoch 1 of decode-0 is stale, the latest is 2"):
        pair.prompt.outgoing.await_offer("late", "decode-0", pair.token.endpoint.address, 1)
    pair.token.incoming.expect("new", 4, "prefill-0")
    eventually(lambda: pair.prompt.outgoing.state("new") is Departure.OFFERED, pair.step)


def test_an_epoch_that_nobody_has_shown_ends_nothing(open_pair: OpenPair) -> None:
    """One order with a wrong epoch would end what goes on, and cut the machine off from all its prefill machines."""
    pair = open_pair()
    pair.offered("going on", wants_note=False)
    address = pair.token.endpoint.address
    for number, wrong in enumerate((10**15, 2, 3)):
        pair.prompt.outgoing.await_offer(f"wrong{number}", "decode-0", address, wrong)
        pair.order(f"beside{number}")
        eventually(lambda number=number: pair.prompt.outgoing.state(f"wrong{number}") is Departure.FAILED, pair.step)  # type: ignore[misc]
    pair.order("after")
    pair.prompt.outgoing.send_all("going on")
    pair.until_over("going on")
    assert pair.prompt.outgoing.state("going on") is Departure.COMPLETED
    for key in ("beside0", "beside1", "beside2", "after"):
        pair.token.incoming.expect(key, 4, "prefill-0")
        eventually(lambda key=key: pair.prompt.outgoing.state(key) is Departure.OFFERED, pair.step)  # type: ignore[misc]
    assert len(pair.prompt.outgoing._links) == 2  # and the latest that failed, which can say why


def test_a_prompt_machine_that_was_started_again(open_pair: OpenPair) -> None:
    """Blocks would stay reserved for its former life, or what was offered to that be filled by the new one."""
    pair = open_pair()
    pair.offered("old")
    pair.prompt.outgoing.send_layer("old", 0)
    pair.settle()
    former, pair.prompt = pair.prompt, pair.start("prefill-0", epoch=2)
    pair.offered("new")
    eventually(lambda: pair.token.incoming.held() == {"new": 4}, lambda: (pair.step(), former.endpoint.poll()))
    assert pair.token.incoming.state("old") is Arrival.RELEASED
    eventually(lambda: former.outgoing.state("old") is Departure.FAILED, former.endpoint.poll)
    former.close()


def test_a_channel_that_broke_is_opened_again(open_pair: OpenPair) -> None:
    """One broken connection would end all business between two machines."""
    pair = open_pair()
    pair.offered("r")
    next(iter(pair.token.incoming._channels.values())).close()
    eventually(lambda: pair.prompt.outgoing.state("r") is Departure.FAILED, pair.step)
    pair.until_free()
    pair.offered("next", wants_note=False)
    pair.prompt.outgoing.send_all("next")
    pair.until_over("next")
    assert pair.prompt.outgoing.state("next") is Departure.COMPLETED


def test_a_peer_that_does_not_answer(open_pair: OpenPair) -> None:
    """An order would wait for ever for a machine that takes connections and says nothing; so would the other end."""
    pair = open_pair()
    pair.order("r")
    pair.now_s = 9.9
    pair.prompt.endpoint.poll()
    assert pair.prompt.outgoing.state("r") is Departure.AWAITED
    pair.now_s = 10.0
    pair.prompt.endpoint.poll()
    assert pair.prompt.outgoing.why("r") == "decode-0 has not answered the greeting within 10 s"


def test_a_stranger_is_shown_out(open_pair: OpenPair) -> None:
    """Connections of port scanners would stay open for ever, until no handle is left for the peers."""
    pair = open_pair()
    channel = open_channel(pair.token.endpoint.address, boot_id())
    eventually(lambda: len(pair.token.incoming._channels) == 1, pair.token.endpoint.poll)
    pair.now_s = 10.0
    eventually(lambda: not pair.token.incoming._channels, pair.token.endpoint.poll)
    eventually(lambda: channel.condition is not Condition.OPEN, lambda: channel.poll(lambda _: None))


def test_many_transfers_leave_nothing(open_pair: OpenPair) -> None:
    """Sockets, keys, leases or blocks of ended transfers would pile up."""
    pair = open_pair()
    for number in range(2_000):
        key = f"r{number}.1"
        pair.offered(key, 5)
        pair.prompt.free.give(pair.sources.pop(key))
        pair.prompt.outgoing.send_all(key)
        pair.prompt.outgoing.note(key, b"n")
        pair.until_over(key)
        pair.prompt.outgoing.forget(key)
        pair.token.incoming.take(key)
        pair.token.incoming.release(key)
        if number == 0:
            before = open_files()
    assert open_files() == before
    assert pair.token.incoming.held() == {}
    assert pair.token.free.used == 0
    assert pair.prompt.outgoing._orders == {} == pair.token.incoming._transfers
    assert pair.prompt.outgoing.sent.transfers == {Mode.SERIALIZED: 2_000}


def test_exposed_time_is_from_the_last_layer_to_the_completion(open_pair: OpenPair) -> None:
    """The figure for what a transfer costs would count what went on behind the prefill phase, or miss the wait."""
    pair = open_pair()
    pair.offered("r")
    pair.prompt.outgoing.note("r", b"")
    for layer in range(LAYOUT.layers):
        pair.prompt.outgoing.send_layer("r", layer)
        pair.now_s += 0.5
    pair.until_over("r")
    assert pair.prompt.outgoing.sent.last_exposed_s == pytest.approx(0.5)


def test_needles_of_two_requests_do_not_meet(open_pair: OpenPair) -> None:
    """Two transfers at once would write into one another's blocks."""
    pair = open_pair()
    blocks = {key: pair.offered(key, tokens, wants_note=False) for key, tokens in (("a", 16), ("b", 20), ("c", 3))}
    for layer in range(LAYOUT.layers):
        for key in blocks:
            pair.prompt.outgoing.send_layer(key, layer)
    for key, ours in blocks.items():
        pair.until_over(key)
        taken = pair.token.incoming.take(key).blocks
        assert np.array_equal(pair.token.pool[:, list(taken)], needles(LAYOUT, BLOCKS)[:, list(ours)])
