"""The decode machine's half of an endpoint: KV that arrives, by the key of its request.

1. `Incoming.expect` takes blocks of the pool and offers them to the sender.
2. `poll` accepts connections and moves messages; the bytes of a frame go to their place in the pool.
3. `state` is READY when everything is there; `take` returns the blocks and the note.
4. `release` gives the blocks back, `abort` ends a transfer at any time before.

Channels whose other end has not said who it is are bounded in time and number. `receiver` describes the same transfer
from inside.
"""

import select
from dataclasses import dataclass

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import BlockPool
from phasesplit.kv_transfer.channel import Channel, Condition
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import Clock, TransferTimeouts
from phasesplit.kv_transfer.nixl_channel import NixlListener
from phasesplit.kv_transfer.receiver import Receiver, drive_receiver
from phasesplit.kv_transfer.shared_memory import SharedMemoryListener, SharedPool
from phasesplit.kv_transfer.tcp import TcpListener
from phasesplit.kv_transfer.transfer_states import InboundState

MOST_UNIDENTIFIED = 64
"""Most open channels whose other end has not said who it is; the oldest ones are closed."""

Listener = SharedMemoryListener | TcpListener | NixlListener


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a transfer brought.

    Attributes:
        blocks: Blocks in our pool; the i-th holds the i-th block of the prompt.
        note: What the sender wrote along with it.
    """

    blocks: tuple[int, ...]
    note: bytes


class Incoming:
    """Holds blocks for the KV of prompts, offers them to its senders, and takes it in.

    Args:
        info: What this machine says of itself.
        pool: Its KV blocks.
        free: Where blocks are taken from.
        listeners: Where senders connect; closed with this.
        clock: Returns the instant.
        timeouts: How long to wait for what.
        poison: Fill blocks with `receiver.POISON` when they are freed.
        secret: The cluster's key, or None.
    """

    def __init__(
        self,
        info: PeerInfo,
        pool: SharedPool,
        free: BlockPool,
        listeners: list[Listener],
        clock: Clock,
        timeouts: TransferTimeouts,
        *,
        poison: bool,
        secret: bytes | None = None,
    ) -> None:
        self._receiver = Receiver(info, pool.blocks, free, lease_s=timeouts.lease_s, poison=poison, secret=secret)
        self._listeners = listeners
        self._clock = clock
        self._timeouts = timeouts
        self._channels: dict[int, Channel] = {}
        self._unidentified: dict[int, float] = {}  # channels that have not said who they are, and until when they may
        self._last_channel = 0
        self._transfers: dict[str, int] = {}

    def expect(self, key: str, tokens: int, sender: str, *, wants_note: bool = True) -> None:
        """Hold the blocks of a prompt, and offer them to its sender as soon as it has a channel to us.

        Args:
            key: What both machines call the request.
            tokens: Tokens of the prompt, >= 1.
            sender: Machine that will send.
            wants_note: Whether the transfer is whole only with a note.

        Raises:
            NoRoomError: They do not fit now.
            TransferError: The key is expected already.
        """
        if key in self._transfers:
            raise TransferError(f"request {key} is expected already")
        reservation = self._receiver.reserve(key, tokens, sender, self._clock(), offer=True, wants_note=wants_note)
        self._transfers[key] = reservation.transfer
        self._move()

    def state(self, key: str) -> InboundState:
        """Return the state of a request's transfer; one that is not known has been released."""
        return self._receiver.state(self._transfers.get(key, 0))

    def why(self, key: str) -> str:
        """Return why a transfer failed, or the empty text."""
        return self._receiver.why(self._transfers.get(key, 0))

    def take(self, key: str) -> Delivery:
        """Return what a whole transfer brought; its blocks are the caller's until `release`.

        Raises:
            TransferError: It is not whole, has failed, or is not known.
        """
        transfer = self._transfers.get(key, 0)
        return Delivery(self._receiver.take(transfer), self._receiver.note(transfer))

    def release(self, key: str) -> None:
        """Give the blocks back; before the transfer is whole this aborts it. A second call changes nothing."""
        self._receiver.release(self._transfers.pop(key, 0), self._clock())
        self._move()

    def abort(self, key: str, why: str) -> None:
        """Abort a request in any state; a second call changes nothing.

        Its blocks are free as soon as the sender is known to write to them no more.
        """
        self._receiver.abort(self._transfers.pop(key, 0), self._clock(), why)
        self._move()

    def held(self) -> dict[str, int]:
        """Return how many blocks each request holds, those that were aborted and are not free yet too."""
        return {lease.key: lease.holding.count for lease in self._receiver.leases.held}

    def poll(self) -> None:
        """Take connections, and move what can move without waiting."""
        now_s = self._clock()
        for listener in self._listeners:
            for _ in range(MOST_UNIDENTIFIED):
                channel = listener.accept()
                if channel is None:
                    break
                self._last_channel += 1
                self._channels[self._last_channel] = channel
                self._unidentified[self._last_channel] = now_s + self._timeouts.answer_s
        self._move()
        self._sweep(now_s)

    def descriptors(self) -> dict[int, int]:
        """Return what to wait for: file descriptors, with the events of `select.poll`."""
        ends = [*self._listeners, *self._channels.values()]
        return {end.fileno(): select.POLLIN for end in ends if end.fileno() >= 0}

    def close(self) -> None:
        """Give back every handle."""
        for end in (*self._listeners, *self._channels.values()):
            end.close()

    def _move(self) -> None:
        """Send what is to be said, and take what has come, as far as goes without waiting."""
        drive_receiver(self._receiver, self._channels, self._clock())

    def _sweep(self, now_s: float) -> None:
        """Drop channels that have ended, and close those whose other end does not say who it is."""
        for number, until_s in list(self._unidentified.items()):
            if self._receiver.is_registered(number):
                del self._unidentified[number]
            elif now_s >= until_s:
                self._channels[number].close()
        # Those that came first have had the time to say who they are: a flood does not keep out who comes behind it.
        for number in list(self._unidentified)[:-MOST_UNIDENTIFIED]:
            self._channels[number].close()
        for number in [n for n, channel in self._channels.items() if channel.condition is not Condition.OPEN]:
            self._receiver.lost(number, now_s)
            self._channels.pop(number).close()
            self._unidentified.pop(number, None)
