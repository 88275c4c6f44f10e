"""What a receiver offers, and what a sender makes of it in every order of offer, order and withdrawal."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.wires import BLOCKS, LAYOUT, needles
from phasesplit.errors import TransferError
from phasesplit.kv_transfer import sender as sending
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import (
    LONGEST_TEXT_BYTES,
    Message,
    MessageKind,
    ReservedBlocks,
    offer_text,
    read_offer,
)
from phasesplit.kv_transfer.sender import Sender
from phasesplit.kv_transfer.transfer_states import OutboundState

RESERVED = ReservedBlocks("decode-0", 1, 7, 16, (0, 1, 2, 5), wants_note=True)


@given(st.sets(st.integers(0, 4_000), min_size=1), st.text(), st.booleans())
def test_an_offer_comes_back(blocks: set[int], key: str, wants_note: bool) -> None:
    """KV would go to other blocks than were reserved, or under another key."""
    reservation = ReservedBlocks("decode-0", 3, 9, 100, tuple(sorted(blocks)), wants_note)
    assert read_offer(offer_text(key, reservation), most_blocks=4_001) == (key, reservation)


def test_neighbours_are_written_as_one_piece() -> None:
    """The offer for a long prompt would not fit into a message."""
    text = offer_text("r", ReservedBlocks("decode-0", 1, 1, 10**6, tuple(range(100_000))))
    assert len(text) < 200
    with pytest.raises(TransferError, match="in 100000 pieces"):
        offer_text("r", ReservedBlocks("decode-0", 1, 1, 10**6, tuple(range(0, 200_000, 2))))


@pytest.mark.parametrize(
    "change",
    [
        {"pieces": [[0, 17]]}, {"pieces": [[-1, 2]]}, {"pieces": [[0, 0]]}, {"pieces": [[0, 2], [1, 2]]},
        {"pieces": []}, {"pieces": [["0", 1]]}, {"pieces": [[0.5, 1]]}, {"pieces": 4}, {"epoch": "1"}, {"machine": 4},
        {"wants_note": 1}, {"more": 1},
    ],
)  # fmt: skip
def test_what_is_no_offer_is_refused(change: dict[str, object]) -> None:
    """A peer that is wrong could have KV sent outside the pool, or raise something that nobody expects."""
    offer = json.loads(offer_text("r", RESERVED))
    offer["reservation"].update(change)
    with pytest.raises(TransferError, match="not an offer"):
        read_offer(json.dumps(offer).encode(), most_blocks=BLOCKS)
    for text in (b"", b"[]", b"{}", b"\xff", b'{"key": 3}'):
        with pytest.raises(TransferError, match="not an offer"):
            read_offer(text, most_blocks=BLOCKS)


def ready_sender() -> Sender:
    """Return a sender that decode-0 has welcomed."""
    sender = Sender(PeerInfo(machine="prefill-0", epoch=1, layout=LAYOUT), needles(LAYOUT, BLOCKS))
    theirs = PeerInfo(machine="decode-0", epoch=1, layout=LAYOUT, blocks=BLOCKS)
    sender.on_message(Message(MessageKind.WELCOME, text=theirs.to_text()), 0.0)
    said(sender)
    return sender


def said(sender: Sender) -> list[tuple[MessageKind, int]]:
    """Return what a sender says, as kinds with their transfers, and take it away."""
    words = []
    while head := sender.head():
        words.append((head[0].kind, head[0].transfer))
        sender.taken()
    return words


OFFER = Message(MessageKind.OFFER, 1, 7, text=offer_text("r", RESERVED))
STEPS = {
    "order": lambda sender: sender.await_offer("r", 100.0),
    "offer": lambda sender: sender.on_message(OFFER, 0.0),
    "withdraw": lambda sender: sender.on_message(Message(MessageKind.ABORT, 1, 7, text=b"withdrawn"), 0.0),
    "abort": lambda sender: sender.abort("r", "given up"),
}


@pytest.mark.parametrize("end", ["withdraw", "abort"])
@pytest.mark.parametrize(
    "steps",
    [order for n in range(1, 4) for order in itertools.permutations(["order", "offer", "end"], n)],
    ids="-".join,
)
@pytest.mark.parametrize("times", [1, 2])
def test_every_order_of_offer_order_and_end(steps: tuple[str, ...], end: str, times: int) -> None:
    """KV would be sent that nobody wants, or one end wait for the other: each step may come first, last or twice."""
    sender = ready_sender()
    answers = []
    for step in steps:
        for _ in range(times if step != "order" else 1):
            STEPS[end if step == "end" else step](sender)
        answers += said(sender)
    if "order" in steps and "end" not in steps:
        assert sender.state("r") is (OutboundState.OFFERED if "offer" in steps else OutboundState.AWAITED)
        assert answers == []
    elif "order" in steps and "offer" in steps:
        # A reservation that ended before it was offered says nothing of the key that it would have had.
        unknown = end == "withdraw" and steps.index("end") < steps.index("offer")
        assert sender.state("r") is (OutboundState.AWAITED if unknown else OutboundState.FAILED)
    if "end" in steps and "offer" in steps:
        answer = MessageKind.STOPPED if end == "withdraw" else MessageKind.ABORT
        assert (answer, 7) in answers
        assert sender.offer("r") is None or sender.state("r") is OutboundState.FAILED
    sender.heartbeat()
    alive = steps in (("order", "offer"), ("offer", "order"))
    assert said(sender) == ([(MessageKind.HEARTBEAT, 7)] if alive else [])


def test_a_reservation_is_opened_once() -> None:
    """A repeated offer would begin a transfer again that has ended."""
    sender = ready_sender()
    STEPS["offer"](sender)
    STEPS["order"](sender)
    with pytest.raises(TransferError, match="ordered before"):
        STEPS["order"](sender)
    with pytest.raises(TransferError, match="it was not opened"):
        sender.send("r", 0)
    sender.open(RESERVED, (0, 1, 2, 3), 100.0)
    STEPS["offer"](sender)
    assert sender.state("r") is OutboundState.OPEN
    with pytest.raises(TransferError, match="is open already"):
        sender.open(RESERVED, (0, 1, 2, 3), 100.0)
    other = Message(MessageKind.OFFER, 1, 8, text=offer_text("r", ReservedBlocks("decode-0", 1, 8, 4, (9,))))
    sender.on_message(other, 0.0)
    assert said(sender) == [(MessageKind.ABORT, 8)]
    sender.forget("r")
    STEPS["offer"](sender)
    STEPS["order"](sender)
    assert sender.state("r") is OutboundState.FAILED


def test_offers_that_are_kept_without_orders_are_few_and_do_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer could fill the memory of another with offers."""
    monkeypatch.setattr(sending, "MOST_UNORDERED", 2)
    sender = ready_sender()
    for number, key in enumerate("abc", start=1):
        text = offer_text(key, ReservedBlocks("decode-0", 1, number, 4, (number,)))
        sender.on_message(Message(MessageKind.OFFER, 1, number, text=text), 10.0)
    assert said(sender) == [(MessageKind.ABORT, 3)]
    sender.await_offer("b", 100.0)
    sender.tick(10.0 + sending.UNORDERED_S)
    assert said(sender) == [(MessageKind.ABORT, 1)]
    assert (sender.offer("a"), sender.state("b")) == (None, OutboundState.OFFERED)


def test_an_offer_of_another_life_or_machine_is_refused() -> None:
    """KV would go to blocks that another process has reserved."""
    sender = ready_sender()
    for machine, epoch, transfer in (("decode-9", 1, 7), ("decode-0", 2, 7), ("decode-0", 1, 6)):
        text = offer_text("r", ReservedBlocks(machine, epoch, transfer, 16, (0, 1, 2, 3)))
        sender.on_message(Message(MessageKind.OFFER, 1, 7, text=text), 0.0)
    sender.on_message(Message(MessageKind.OFFER, 0, 7, text=offer_text("r", RESERVED)), 0.0)
    assert sender.offer("r") is None
    assert sender.absorbed == {"bad offer": 3, "stale epoch": 1}


def test_notes_are_wanted_once_and_short() -> None:
    """A first token would be sent twice, cut, or to a machine that does not ask for it."""
    sender = ready_sender()
    STEPS["order"](sender)
    STEPS["offer"](sender)
    sender.open(RESERVED, (0, 1, 2, 3), 100.0)
    with pytest.raises(TransferError, match="not wanted"):
        sender.note("r", b"x" * (LONGEST_TEXT_BYTES + 1))
    sender.note("r", b"x")
    with pytest.raises(TransferError, match="not wanted"):
        sender.note("r", b"x")
    plain = ReservedBlocks("decode-0", 1, 8, 4, (9,))
    sender.open(plain, (4,), 100.0)
    with pytest.raises(TransferError, match="not wanted"):
        sender.note(plain, b"x")
    sender.send_all("r")
    assert (MessageKind.NOTE, 7) in said(sender)
    assert sender.state("r") is OutboundState.SENT
