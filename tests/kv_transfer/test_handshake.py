"""Machines that prove to one another that they know their cluster's key, and unidentified who cannot."""

import hmac
import json
import os
import socket
import struct
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kv_transfer.in_memory import InMemoryChannel, in_memory_pair
from kv_transfer.pairs import OpenPair, Pair
from kv_transfer.wires import BLOCKS, LAYOUT, needles, open_sockets
from phasesplit.errors import TransferError
from phasesplit.kv_transfer import shared_memory
from phasesplit.kv_transfer.channel import Condition
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.handshake import HandshakeClient
from phasesplit.kv_transfer.incoming import MOST_UNIDENTIFIED
from phasesplit.kv_transfer.layout import PROTOCOL, PeerInfo
from phasesplit.kv_transfer.messages import LONGEST_TEXT_BYTES, Message, MessageKind
from phasesplit.kv_transfer.outgoing import boot_id, open_channel
from phasesplit.kv_transfer.receiver import Receiver, drive_receiver
from phasesplit.kv_transfer.sender import Sender, drive_sender
from phasesplit.kv_transfer.shared_memory import SharedMemoryListener, SharedPool, connect_shared_memory
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from waiting import eventually

KEY = b"a cluster's key"
PREFILL = PeerInfo(machine="prefill-0", epoch=1, layout=LAYOUT)
DECODE = PeerInfo(machine="decode-0", epoch=3, layout=LAYOUT, blocks=BLOCKS)


class Eavesdropper:
    """A receiver and the senders that call it, with every message that passes kept."""

    def __init__(self, secret: bytes | None = KEY, info: PeerInfo = DECODE) -> None:
        self.pool = np.zeros((LAYOUT.layers, BLOCKS, LAYOUT.block_bytes), np.uint8)
        self.receiver = Receiver(info, self.pool, secret=secret)
        self.channels: dict[int, InMemoryChannel] = {}

    def on_message(self, channel: int, *messages: Message) -> list[Message]:
        """Give the receiver messages of a channel; return its answers."""
        for message in messages:
            self.receiver.on_message(channel, message, 0.0)
        said = [message for number, message in self.receiver.outbox if number == channel]
        self.receiver.outbox.clear()
        return said

    def meet(self, channel: int, caller: HandshakeClient) -> list[Message]:
        """Carry a whole handshake out; return what passed, of both."""
        passed = [caller.hello()]
        passed += self.on_message(channel, passed[0])
        if passed[-1].kind is MessageKind.CHALLENGE:
            passed.append(caller.proof(passed[-1].text))
            passed += self.on_message(channel, passed[-1])
        return passed


def test_both_prove_that_they_know_the_key() -> None:
    """Machines of one cluster would not connect, or the receiver be trusted before it has proven anything."""
    there = Eavesdropper()
    caller = HandshakeClient(PREFILL, KEY, ("decode-0", 3))
    passed = there.meet(1, caller)
    assert [message.kind for message in passed] == [
        MessageKind.HELLO,
        MessageKind.CHALLENGE,
        MessageKind.PROOF,
        MessageKind.WELCOME,
    ]
    assert there.receiver.is_registered(1)
    assert caller.on_welcome(passed[-1].text) == DECODE
    assert not any(KEY in message.text or KEY.hex().encode() in message.text for message in passed)


def test_each_end_proves_all_that_was_said_under_its_own_label() -> None:
    """One end's proof could serve as the other's, or a part be moved from one message into the next."""
    hello, challenge, proof, welcome = Eavesdropper().meet(1, HandshakeClient(PREFILL, KEY, None))

    def due(end: str, *said: bytes) -> bytes:
        parts = [f"phasesplit transfer {PROTOCOL}, {end}".encode(), *said]
        return hmac.new(KEY, b"".join(struct.pack("<Q", len(part)) + part for part in parts), "sha256").digest()

    assert proof.text == due("sender", hello.text, challenge.text)
    shown = due("receiver", hello.text, challenge.text, DECODE.to_text())
    assert json.loads(welcome.text)["proof"] == shown.hex()


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (KEY, None, "prefill-0 wants proof of the cluster's key, and decode-0 has none"),
        (None, KEY, "decode-0 wants proof of the cluster's key, and prefill-0 has none"),
        (KEY, b"another", "prefill-0 has another key than the cluster of decode-0"),
    ],
)
def test_keys_that_differ_are_refused_with_a_reason(
    open_pair: OpenPair, ours: bytes | None, theirs: bytes | None, why: str
) -> None:
    """A machine of another cluster would be let in, or its people not learn why it is not."""
    pair = open_pair(secrets=(ours, theirs))
    pair.decode.incoming.expect("r", 4, "prefill-0")
    pair.order("r")
    eventually(lambda: pair.prefill.outgoing.state("r") is OutboundState.FAILED, pair.step)
    assert pair.prefill.outgoing.why("r") == f"refused: {why}"
    assert pair.decode.incoming._receiver._peers == {}
    assert pair.decode.incoming.state("r") is InboundState.RESERVED


def test_kv_moves_between_machines_with_a_key(open_pair: OpenPair) -> None:
    """A cluster with a key would not work."""
    pair = open_pair(secrets=(KEY, KEY))
    blocks = pair.offered("r", 33)
    pair.prefill.outgoing.send_all("r")
    pair.prefill.outgoing.note("r", b"n")
    pair.until_over("r")
    delivery = pair.decode.incoming.take("r")
    assert delivery.note == b"n"
    assert np.array_equal(pair.decode.pool[:, list(delivery.blocks)], pair.prefill.pool[:, list(blocks)])


def test_an_empty_key_is_none() -> None:
    """A key file with nothing in it would look like protection."""
    memory = SharedPool(LAYOUT, 2)
    with pytest.raises(TransferError, match="the cluster's key is empty"):
        KvEndpoint(PREFILL, memory, None, secret=b"")
    memory.close()


def test_what_was_overheard_opens_no_other_channel() -> None:
    """Whoever listens on the network could repeat what a machine said, and be taken for it."""
    there = Eavesdropper()
    passed = there.meet(1, HandshakeClient(PREFILL, KEY, None))
    hello, _, proof, _ = passed
    assert [said.kind for said in there.on_message(2, hello)] == [MessageKind.CHALLENGE]
    assert [said.kind for said in there.on_message(2, proof)] == [MessageKind.REFUSE]
    # Nor on the channel where it was said, once that has ended and its number is used again.
    there.receiver.lost(1, 0.0)
    assert [said.kind for said in there.on_message(1, hello, proof)] == [MessageKind.CHALLENGE, MessageKind.REFUSE]
    assert not there.receiver.is_registered(1)
    assert not there.receiver.is_registered(2)


def test_a_welcome_of_another_channel_is_not_believed() -> None:
    """KV would go to whoever has recorded the handshake of the receiver with somebody else."""
    there = Eavesdropper()
    overheard = there.meet(1, HandshakeClient(PREFILL, KEY, None))
    caller = HandshakeClient(PREFILL, KEY, None)
    caller.proof(overheard[1].text)
    with pytest.raises(TransferError, match="decode-0 has not proven that it knows the cluster's key"):
        caller.on_welcome(overheard[3].text)


@pytest.mark.parametrize("challenged", [False, True])
@pytest.mark.parametrize("shown", ["nothing", "nonsense", "surrogate", "a number", "our own"])
def test_an_impostor_is_not_believed(challenged: bool, shown: str) -> None:
    """KV would go to whoever listens at the address: it leaves the proof out, makes it up, or sends ours back."""
    caller = HandshakeClient(PREFILL, KEY, ("decode-0", 3))
    challenge = json.dumps({"machine": "decode-0", "epoch": 3, "nonce": json.loads(caller.hello().text)["nonce"]})
    proof = caller.proof(challenge.encode()).text.hex() if challenged else ""
    proofs = {"nonsense": "0" * 64, "surrogate": "\ud800", "a number": 7, "our own": proof}
    text = DECODE.to_text(**({} if shown == "nothing" else {"proof": proofs[shown]}))
    with pytest.raises(TransferError, match="has not proven"):
        caller.on_welcome(text)


def test_a_machine_proves_nothing_to_itself_on_behalf_of_another() -> None:
    """Whoever relays a machine's call back to that machine's own port would have it prove both sides."""
    itself = Eavesdropper(info=replace(DECODE, machine="prefill-0", epoch=1))
    caller = HandshakeClient(PREFILL, KEY, ("decode-0", 3))
    (challenge,) = itself.on_message(1, caller.hello())
    with pytest.raises(TransferError, match="expected decode-0 in epoch 3, found prefill-0 in epoch 1"):
        caller.proof(challenge.text)
    # It looks like the right machine if the relay says so; then the proof is none for the machine itself.
    posing = challenge.text.replace(b'"prefill-0", "epoch": 1', b'"decode-0", "epoch": 3')
    assert posing != challenge.text
    assert [said.kind for said in itself.on_message(1, caller.proof(posing))] == [MessageKind.REFUSE]


@pytest.mark.parametrize(
    ("said", "instead"),
    [(b'"prefill-0"', b'"prefill-1"'), (b'"epoch": 1', b'"epoch": 2'), (b'"blocks": 0', b'"blocks": 9')],
)
def test_what_a_machine_says_of_itself_is_proven(said: bytes, instead: bytes) -> None:
    """Whoever sits between two machines could give one of them another name, or end its channels by a later epoch."""
    there = Eavesdropper()
    caller = HandshakeClient(PREFILL, KEY, None)
    hello = caller.hello()
    changed = replace(hello, text=hello.text.replace(said, instead))
    assert changed != hello
    (challenge,) = there.on_message(1, changed)
    assert [answer.kind for answer in there.on_message(1, caller.proof(challenge.text))] == [MessageKind.REFUSE]
    assert there.receiver._epochs == {}


def test_what_a_receiver_says_of_itself_is_proven() -> None:
    """Whoever sits between two machines could change the receiver's pool, or let its former life speak."""
    caller = HandshakeClient(PREFILL, KEY, None)
    welcome = Eavesdropper().meet(1, caller)[-1]
    with pytest.raises(TransferError, match="has not proven"):
        caller.on_welcome(welcome.text.replace(b'"epoch": 3', b'"epoch": 4'))


def test_a_challenge_is_answered_once_and_only_where_there_is_a_key() -> None:
    """A receiver could have proofs made for as long as it likes; or a machine without a key would stop."""
    challenge = json.dumps({"machine": "decode-0", "epoch": 3, "nonce": ""}).encode()
    caller = HandshakeClient(PREFILL, KEY, None)
    caller.proof(challenge)
    with pytest.raises(TransferError, match="a second proof"):
        caller.proof(challenge)
    with pytest.raises(TransferError, match="prefill-0 has none"):
        HandshakeClient(PREFILL, None, None).proof(challenge)
    for nonsense in (b"", b"[]", b"[" * LONGEST_TEXT_BYTES, b'{"machine": 1, "epoch": 1e999}', b"\xff"):
        with pytest.raises(TransferError, match="not a challenge"):
            HandshakeClient(PREFILL, KEY, None).proof(nonsense)


@pytest.mark.parametrize("kind", [kind for kind in MessageKind if kind is not MessageKind.HELLO])
def test_nobody_is_heard_before_the_proof(kind: MessageKind) -> None:
    """Whoever can connect could end, fill or keep alive another machine's transfer."""
    there = Eavesdropper()
    reservation = there.receiver.reserve("r", 4, "prefill-0", 0.0)
    there.on_message(1, HandshakeClient(PREFILL, KEY, None).hello())
    early = Message(kind, 3, reservation.transfer, blocks=1, length_bytes=LAYOUT.block_bytes)
    assert there.receiver.place(1, early) is None
    assert [said.kind for said in there.on_message(1, early)] == [MessageKind.REFUSE]
    assert there.receiver.state(reservation.transfer) is InboundState.RESERVED
    assert there.on_message(1, *[early] * 9) == []
    assert there.receiver.cuts == {1}


def test_a_machine_that_has_been_met_stays_who_it_is() -> None:
    """A machine could take another one's name later, and fill its transfers."""
    there = Eavesdropper(secret=None)
    there.meet(1, HandshakeClient(PREFILL, None, None))
    assert there.on_message(1, HandshakeClient(replace(PREFILL, machine="prefill-1"), None, None).hello()) == []
    assert there.receiver._peers == {1: "prefill-0"}


def test_a_name_that_cannot_be_written_is_refused() -> None:
    """An odd name would stop the receiver when it says why the peer is refused."""
    there = Eavesdropper(secret=None)
    there.meet(1, HandshakeClient(replace(PREFILL, machine="\ud800", epoch=2), None, None))
    refused = there.meet(2, HandshakeClient(replace(PREFILL, machine="\ud800"), None, None))[-1]
    assert (refused.kind, refused.text) == (MessageKind.REFUSE, b"epoch 1 of ? is stale, the latest is 2")


def test_the_proofs_pass_a_channel() -> None:
    """The messages of a handshake would not be sent, or frames go before it has ended."""
    sending, receiving = in_memory_pair()
    there = Eavesdropper()
    sender = Sender(PREFILL, needles(LAYOUT, BLOCKS), secret=KEY, expected=("decode-0", 3))
    for _ in range(2):
        assert sender.receiver is None
        drive_sender(sender, sending, 0.0)
        drive_receiver(there.receiver, {0: receiving}, 0.0)
    drive_sender(sender, sending, 0.0)
    assert sender.receiver == DECODE


def test_who_proves_nothing_never_gets_the_memory(tmp_path: Path) -> None:
    """A process without the key could write into a pool that its descriptor was sent for."""
    memory = SharedPool(LAYOUT, BLOCKS)
    listener = SharedMemoryListener(str(tmp_path / "kv"), memory)
    receiver = Receiver(DECODE, memory.blocks, secret=KEY)
    channel = connect_shared_memory(str(tmp_path / "kv"))
    caller = HandshakeClient(PREFILL, b"another", None)
    accepted = {0: listener.accept()}
    channel.offer(caller.hello(), None)
    drive_receiver(receiver, accepted, 0.0)
    (challenge,) = channel.poll(lambda _: None)
    channel.offer(caller.proof(challenge.text), None)
    drive_receiver(receiver, accepted, 0.0)
    assert [said.kind for said in channel.poll(lambda _: None)] == [MessageKind.REFUSE]
    assert channel._target is None
    for end in (channel, accepted[0], listener, memory):
        end.close()


@pytest.mark.parametrize("first", [b"", HandshakeClient(PREFILL, KEY, None).hello().pack()])
def test_bytes_that_trickle_keep_nothing_open(first: bytes) -> None:
    """A peer that sends a byte now and then, before or after its first message, would keep its channel for ever."""
    pair = Pair("tcp", secrets=(KEY, KEY))
    with socket.create_connection(pair.decode.endpoint.address["tcp"]) as peer:
        peer.sendall(first)
        eventually(lambda: len(pair.decode.incoming._channels) == 1, pair.decode.endpoint.poll)
        for byte in Message(MessageKind.HELLO, text=b"x" * LONGEST_TEXT_BYTES).pack()[:99]:
            pair.now_s += 0.1
            peer.send(bytes([byte]))
            pair.decode.endpoint.poll()
        assert len(pair.decode.incoming._channels) == 1
        pair.now_s = 10.0
        pair.decode.endpoint.poll()
        assert pair.decode.incoming._channels == {}
    assert pair.decode.incoming._receiver._handshakes == {}
    pair.close()


def test_a_flood_of_channels_without_a_name_is_bounded_and_keeps_nobody_out(open_pair: OpenPair) -> None:
    """Connections of unidentified would take all handles, or all the room that a machine of the cluster needs."""
    pair = open_pair(secrets=(KEY, KEY))
    unidentified = []
    for _ in range(3):
        unidentified += [open_channel(pair.decode.endpoint.address, boot_id()) for _ in range(MOST_UNIDENTIFIED // 2)]
        pair.settle()
    assert len(pair.decode.incoming._channels) == MOST_UNIDENTIFIED
    assert (
        sum(not each.poll(lambda _: None) and each.condition is Condition.OPEN for each in unidentified)
        == MOST_UNIDENTIFIED
    )
    pair.offered("r", wants_note=False)
    pair.prefill.outgoing.send_all("r")
    pair.until_over("r")
    assert pair.prefill.outgoing.state("r") is OutboundState.COMPLETED
    for each in unidentified:
        each.close()


def test_a_peer_that_does_not_read_holds_no_memory() -> None:
    """Answers to a peer that sends and does not read would pile up."""
    pair = Pair("tcp", secrets=(KEY, KEY))
    with socket.create_connection(pair.decode.endpoint.address["tcp"]) as peer:
        peer.setblocking(False)
        flood = Message(MessageKind.HEARTBEAT, 1, 1).pack() * 5_000
        sent = peer.send(flood)
        eventually(lambda: not pair.decode.incoming._channels, pair.decode.endpoint.poll)
        assert sent > 1_000
    assert len(pair.decode.incoming._receiver.outbox) <= 1
    pair.close()


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_directory_that_others_enter_is_refused(tmp_path: Path, mode: int) -> None:
    """Other users of the host could reach, or replace, the socket over which memory is shared."""
    tmp_path.chmod(mode)
    memory = SharedPool(LAYOUT, 1)
    with pytest.raises(PermissionError, match=f"mode {mode:04o}, allowed is a directory of user {os.geteuid()}"):
        SharedMemoryListener(str(tmp_path / "kv"), memory)
    assert list(tmp_path.iterdir()) == []
    memory.close()


def test_another_user_is_not_let_in_and_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of another user would be given the memory, or be given KV."""
    before = open_sockets()
    memory = SharedPool(LAYOUT, 1)
    listener = SharedMemoryListener(str(tmp_path / "kv"), memory)
    channel = connect_shared_memory(str(tmp_path / "kv"))
    monkeypatch.setattr(shared_memory, "_user_behind", lambda _: os.geteuid() + 1)
    assert listener.accept() is None
    channel.poll(lambda _: None)
    assert channel.condition is not Condition.OPEN
    with pytest.raises(PermissionError, match="another user listens"):
        connect_shared_memory(str(tmp_path / "kv"))
    monkeypatch.undo()
    for end in (channel, listener, memory):
        end.close()
    assert open_sockets() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_the_kernel_says_who_another_user_is() -> None:
    """The check would compare something else than the user of the other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    assert shared_memory._user_behind(ours) == 0
    ours.close()
    theirs.close()
    path = f"\0phasesplit-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(path)
            os._exit(0)
        connection = listening.accept()[0]
        assert os.waitpid(child, 0)[1] == 0
        assert shared_memory._user_behind(connection) == 65534
        connection.close()
