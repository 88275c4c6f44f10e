"""The prefill machine's half of an endpoint: KV that leaves, by the key of its request.

1. `Outgoing.await_offer` takes an order. It finds the `PeerLink` to the receiver in that epoch, or makes one:
   `open_channel` chooses the transport, and the link's `Sender` begins the handshake.
2. `state` is OFFERED when the receiver's blocks are known; `open` names ours.
3. `send_layer` or `send_all`, and `note`, give the sender what is final and move what the channel takes at once.
4. `poll` moves the rest on every link, fails links whose peer does not answer, drops those of an earlier epoch once the
   peer has shown a later one, and counts what was sent.
5. When the transfer is COMPLETED or FAILED and `may_free` is true, `forget` drops it.

`sender` describes the same transfer from inside one link.
"""

import contextlib
import logging
import select
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.channel import Channel, Condition
from phasesplit.kv_transfer.chooser import Mode
from phasesplit.kv_transfer.handshake import Identity
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import Clock, ReservedBlocks, TransferTimeouts
from phasesplit.kv_transfer.nixl_channel import NixlMemory, connect_nixl
from phasesplit.kv_transfer.sender import Payload, Sender, drive_sender
from phasesplit.kv_transfer.shared_memory import connect_shared_memory
from phasesplit.kv_transfer.tcp import connect_tcp
from phasesplit.kv_transfer.transfer_states import OutboundState

Address = Mapping[str, Any]
"""Where a machine listens: boot_id (text), unix (path or None), tcp and nixl ([host, port] or None each)."""

_log = logging.getLogger(__name__)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what two processes of one host, and no others, have in common; the empty text where there is no such."""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def open_channel(address: Address, our_boot_id: str, memory: NixlMemory | None = None) -> Channel:
    """Return a channel to an address: through shared memory on the same host, else by NIXL, else over TCP.

    Two containers of a host may not see one another's sockets: then the next way is taken there too.

    Args:
        address: Where the receiver listens.
        our_boot_id: Of this host.
        memory: Our pool, where NIXL is in use.

    Raises:
        OSError: No way is open.
        ValueError, TypeError, OverflowError: This is no address.
    """
    path, nixl, tcp = address.get("unix"), address.get("nixl") if memory else None, address.get("tcp")
    if path and our_boot_id and address.get("boot_id") == our_boot_id:
        try:
            return connect_shared_memory(str(path))
        except OSError:
            if not (nixl or tcp):
                raise
    if nixl and memory:
        return connect_nixl(_host_and_port(nixl), memory)
    if tcp:
        return connect_tcp(_host_and_port(tcp))
    raise OSError("it is on another host, and listens at no TCP port")


def _host_and_port(pair: Sequence[Any]) -> tuple[str, int]:
    host, port = pair
    return str(host), int(port)


class PeerLink:
    """A channel to one receiver in one epoch, with the sender that uses it. No call waits.

    Args:
        peer: The receiver's name.
        epoch: Its epoch.
        sender: The sending end, which looks for that receiver.
        address: Where the receiver listens.
        our_boot_id: Of this host.
        memory: Our pool, where NIXL is in use.
        now_s: The instant.
        timeouts: How long to wait for what; `answer_s` bounds the handshake, and how long the peer may take for the
            rest of a frame that nobody wants.

    Attributes:
        is_logged: Whether the log says that the channel is lost.
    """

    def __init__(
        self,
        peer: str,
        epoch: int,
        sender: Sender,
        address: Address,
        our_boot_id: str,
        memory: NixlMemory | None,
        now_s: float,
        timeouts: TransferTimeouts,
    ) -> None:
        self.peer = peer
        self.epoch = epoch
        self.sender = sender
        self.is_logged = False
        self._channel: Channel | None = None
        self._timeouts = timeouts
        self._next_heartbeat_s = now_s + timeouts.heartbeat_s
        self._deadline_s = now_s + timeouts.answer_s
        try:
            self._channel = open_channel(address, our_boot_id, memory)
        except (OSError, ValueError, TypeError, OverflowError) as error:
            sender.lost(f"{peer} is not reachable: {error}")

    @property
    def is_idle(self) -> bool:
        """Whether no byte of our blocks is still to be read by the channel."""
        return self._channel is None or self._channel.flush()

    def poll(self, now_s: float) -> None:
        """Move what can move without waiting."""
        if self._channel is None or self.sender.lost_because:
            return
        if now_s >= self._next_heartbeat_s:
            self._next_heartbeat_s = now_s + self._timeouts.heartbeat_s
            self.sender.heartbeat()
        drive_sender(self.sender, self._channel, now_s)
        self._check_deadline(now_s)
        if self.sender.lost_because:
            self._channel.close()

    def descriptor(self) -> tuple[int, int]:
        """Return what to wait for: a file descriptor, -1 where there is none, and the events of `select.poll`."""
        if self._channel is None or self._channel.condition is not Condition.OPEN:
            return -1, 0
        waits = self.sender.head() is not None or not self._channel.flush()
        return self._channel.fileno(), select.POLLIN | (select.POLLOUT if waits else 0)

    def close(self, why: str) -> None:
        """Give back every handle; transfers that go on have failed. A second call changes nothing."""
        self.sender.lost(why)
        if self._channel is not None:
            self._channel.close()

    def _check_deadline(self, now_s: float) -> None:
        """End the channel where the peer does not do its part in time."""
        answer_s = self._timeouts.answer_s
        if self.sender.receiver is None:
            if now_s >= self._deadline_s:
                self.sender.lost(f"{self.peer} has not answered the handshake within {answer_s:g} s")
            return
        # Our blocks cannot be used again while part of a frame that nobody wants any more is left in the channel.
        if self.is_idle or not self.sender.is_sending_unwanted:
            self._deadline_s = now_s + answer_s
        elif now_s >= self._deadline_s:
            self.sender.lost(f"{self.peer} took nothing for {answer_s:g} s")


@dataclass(slots=True)
class Sent:
    """What has left so far.

    Attributes:
        transfers: Transfers that were completed, by how they went.
        failed: Transfers that were ordered and failed or were aborted.
        size_bytes: Bytes of completed transfers.
        exposed_s: Sum over completed transfers of the time from the last layer given to the receiver's completion.
        last_exposed_s: That of the latest one.
    """

    transfers: Counter[Mode] = field(default_factory=Counter)
    failed: int = 0
    size_bytes: int = 0
    exposed_s: float = 0.0
    last_exposed_s: float = 0.0


@dataclass(slots=True)
class _Order:
    """One request whose KV leaves."""

    link: PeerLink
    mode: Mode = Mode.LAYERWISE
    given_s: float = 0.0
    is_counted: bool = False


class Outgoing:
    """Sends the KV of prompts to the machines that have offered blocks for it; one channel to each of them.

    Args:
        info: What this machine says of itself.
        pool: KV blocks, uint8 (layers, blocks, block bytes), contiguous; only read.
        clock: Returns the instant.
        timeouts: How long to wait for what.
        memory: The pool, where NIXL is in use.
        secret: The cluster's key, or None.
    """

    def __init__(
        self,
        info: PeerInfo,
        pool: Payload,
        clock: Clock,
        timeouts: TransferTimeouts,
        memory: NixlMemory | None = None,
        secret: bytes | None = None,
    ) -> None:
        self._info = info
        self._pool = pool
        self._clock = clock
        self._timeouts = timeouts
        self._boot_id = boot_id()
        self._memory = memory
        self._secret = secret
        self._links: dict[Identity, PeerLink] = {}
        self._orders: dict[str, _Order] = {}
        self.sent = Sent()

    def disconnect(self, peer: str) -> None:
        """Close the channel to a machine and forget it; what goes on has failed. A second call changes nothing."""
        for link in self._to(peer):
            self._drop(link, "the channel was closed")

    def await_offer(self, key: str, peer: str, address: Address, epoch: int) -> None:
        """Take an order: the KV of a request will go to a machine, which offers blocks for it, or has already.

        Args:
            key: What both machines call the request.
            peer: Name of the receiver. The channel to it is opened unless there is one.
            address: Where it listens; its host is a number, for looking up a name may wait.
            epoch: Its epoch. Once the machine itself has shown a later epoch than before, the channel of the earlier
                one ends.

        Raises:
            TransferError: The epoch is stale, or the key was ordered before.
        """
        if key in self._orders:
            raise TransferError(f"request {key} was ordered before")
        link = self._link(peer, address, epoch)
        link.sender.await_offer(key, self._clock() + self._timeouts.transfer_s)
        self._orders[key] = _Order(link)

    def state(self, key: str) -> OutboundState:
        """Return the state of a request's transfer; one that is not known has failed."""
        order = self._orders.get(key)
        return order.link.sender.state(key) if order else OutboundState.FAILED

    def why(self, key: str) -> str:
        """Return why a transfer failed, or the empty text."""
        order = self._orders.get(key)
        return order.link.sender.why(key) if order else "nothing was ordered under this key"

    def offer_for(self, key: str) -> ReservedBlocks | None:
        """Return what waits for a request's KV, or None before the offer is here."""
        order = self._orders.get(key)
        return order.link.sender.offer(key) if order else None

    def open(self, key: str, blocks: tuple[int, ...]) -> None:
        """Begin a transfer that is offered.

        Args:
            key: The request.
            blocks: Our blocks, in the order of its tokens; as many as are reserved.

        Raises:
            TransferError: There is no such offer, it was withdrawn, or the blocks do not fit it.
        """
        sender = self._find(key).link.sender
        reservation = sender.offer(key)
        if reservation is None:
            raise TransferError(f"request {key}: {sender.why(key) or 'no blocks are offered for it'}")
        sender.open(reservation, blocks, self._clock() + self._timeouts.transfer_s)

    def send_layer(self, key: str, layer: int, first: int = 0, end: int | None = None) -> None:
        """Send blocks of a layer that are final, as far as goes without waiting; `poll` sends the rest.

        Args:
            key: A request that was opened; nothing happens where its transfer has failed since.
            layer: The layer.
            first: First block of the request.
            end: One behind the last, by default all.

        Raises:
            TransferError: It was not opened, there are no such blocks, or they were sent before.
        """
        order = self._find(key)
        order.link.sender.send(key, layer, first, end)
        self._push(order)

    def send_all(self, key: str) -> None:
        """Send every layer: a serialized transfer. See `send_layer`."""
        order = self._find(key)
        order.mode = Mode.SERIALIZED
        order.link.sender.send_all(key)
        self._push(order)

    def note(self, key: str, text: bytes) -> None:
        """Send a short text along with a transfer that was opened, once; the receiver gets it with the blocks.

        Raises:
            TransferError: It was not opened, wants no note, has one already, or the text is longer than 64 KiB.
        """
        order = self._find(key)
        order.link.sender.note(key, text)
        order.link.poll(self._clock())

    def may_free(self, key: str) -> bool:
        """Return whether no byte of a request's blocks will be read any more."""
        order = self._orders.get(key)
        return order is None or order.link.sender.may_free(key, channel_idle=order.link.is_idle)

    def abort(self, key: str, why: str) -> None:
        """Abort a request in any state, and decline its offer when it comes; a second call changes nothing."""
        order = self._orders.get(key)
        for link in [order.link] if order else self._links.values():
            link.sender.abort(key, why)
            link.poll(self._clock())

    def forget(self, key: str) -> None:
        """Drop what is known of a request; one that goes on is aborted. Its blocks must be free to go (`may_free`)."""
        order = self._orders.get(key)
        if order is None:
            return
        self.abort(key, "forgotten")
        self._count(key, order)
        del self._orders[key]
        order.link.sender.forget(key)

    def poll(self) -> None:
        """Move what can move without waiting."""
        now_s = self._clock()
        for link in tuple(self._links.values()):
            link.poll(now_s)
            if link.sender.lost_because and not link.is_logged:
                link.is_logged = True
                _log.warning("no KV goes to %s in epoch %d: %s", link.peer, link.epoch, link.sender.lost_because)
        shown = self._shown_epochs()
        for link in tuple(self._links.values()):
            if link.epoch < shown.get(link.peer, 0):
                self._drop(link, f"{link.peer} was started again")
        for key, order in self._orders.items():
            self._count(key, order)

    def descriptors(self) -> dict[int, int]:
        """Return what to wait for: file descriptors, with the events of `select.poll`."""
        return dict(link.descriptor() for link in self._links.values())

    def close(self) -> None:
        """Give back every handle; what goes on has failed."""
        for link in self._links.values():
            link.close("this machine has stopped")

    def _link(self, peer: str, address: Address, epoch: int) -> PeerLink:
        # An order may name any epoch, so only what the machine itself has shown ends anything.
        shown = self._shown_epochs().get(peer, 0)
        if epoch < shown:
            raise TransferError(f"epoch {epoch} of {peer} is stale, the latest is {shown}")
        known = self._links.get((peer, epoch))
        if known is not None and not known.sender.lost_because:
            return known
        for link in self._to(peer):
            if link.sender.lost_because:
                self._drop(link, link.sender.lost_because)
        link = self._links[peer, epoch] = PeerLink(
            peer,
            epoch,
            Sender(self._info, self._pool, secret=self._secret, expected=(peer, epoch)),
            address,
            self._boot_id,
            self._memory,
            self._clock(),
            self._timeouts,
        )
        link.poll(self._clock())
        return link

    def _to(self, peer: str) -> list[PeerLink]:
        """Return the channels to a machine, one for each epoch."""
        return [link for link in self._links.values() if link.peer == peer]

    def _shown_epochs(self) -> dict[str, int]:
        """Return the latest epoch that each machine has shown in a handshake."""
        shown: dict[str, int] = {}
        for link in self._links.values():
            if link.sender.receiver is not None:
                shown[link.peer] = max(link.epoch, shown.get(link.peer, 0))
        return shown

    def _drop(self, link: PeerLink, why: str) -> None:
        link.close(why)
        del self._links[link.peer, link.epoch]

    def _find(self, key: str) -> _Order:
        order = self._orders.get(key)
        if order is None:
            raise TransferError(f"request {key}: nothing was ordered under this key")
        return order

    def _push(self, order: _Order) -> None:
        order.given_s = self._clock()
        order.link.poll(order.given_s)

    def _count(self, key: str, order: _Order) -> None:
        """Add a transfer that has ended to what was sent, once."""
        state = order.link.sender.state(key)
        if order.is_counted or state not in (OutboundState.COMPLETED, OutboundState.FAILED):
            return
        order.is_counted = True
        reservation = order.link.sender.offer(key)
        if state is OutboundState.FAILED or reservation is None:
            self.sent.failed += 1
            return
        layout = self._info.layout
        self.sent.transfers[order.mode] += 1
        self.sent.size_bytes += layout.layers * layout.block_bytes * len(reservation.blocks)
        self.sent.last_exposed_s = self._clock() - order.given_s
        self.sent.exposed_s += self.sent.last_exposed_s
