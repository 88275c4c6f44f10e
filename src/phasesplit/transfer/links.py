"""The way from this machine to one receiver: which transport it takes, and when it counts as gone."""

import contextlib
import select
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phasesplit.transfer.channel import Channel, Condition, drive_sender
from phasesplit.transfer.nixl_channel import NixlMemory, connect_nixl
from phasesplit.transfer.sender import Sender
from phasesplit.transfer.shared_memory import connect_shared_memory
from phasesplit.transfer.tcp import connect_tcp

Address = Mapping[str, Any]
"""Where a machine listens: boot_id (text), unix (path or None), tcp and nixl ([host, port] or None each)."""

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


class Link:
    """A channel to one receiver in one epoch, with the sender that uses it. No call waits.

    Args:
        peer: The receiver's name.
        epoch: Its epoch.
        sender: The sending end, which looks for that receiver.
        address: Where the receiver listens.
        our_boot_id: Of this host.
        memory: Our pool, where NIXL is in use.
        now_s: The instant.
        patience_s: Time for the peer to answer the greeting, and to take the rest of a frame that nobody wants, > 0.
        heartbeat_s: Time between heartbeats, > 0.

    Attributes:
        is_logged: Whether operators were told that the channel is lost.
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
        *,
        patience_s: float,
        heartbeat_s: float,
    ) -> None:
        self.peer = peer
        self.epoch = epoch
        self.sender = sender
        self.is_logged = False
        self._channel: Channel | None = None
        self._patience_s = patience_s
        self._heartbeat_s = heartbeat_s
        self._next_heartbeat_s = now_s + heartbeat_s
        self._late_from_s = now_s + patience_s
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
            self._next_heartbeat_s = now_s + self._heartbeat_s
            self.sender.heartbeat()
        drive_sender(self.sender, self._channel, now_s)
        self._judge(now_s)
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

    def _judge(self, now_s: float) -> None:
        """Give the peer up where it does not do its part in time."""
        if self.sender.receiver is None:
            if now_s >= self._late_from_s:
                self.sender.lost(f"{self.peer} has not answered the greeting within {self._patience_s:g} s")
            return
        # Our blocks cannot be used again while part of a frame that nobody wants any more is left in the channel.
        if self.is_idle or not self.sender.is_sending_in_vain:
            self._late_from_s = now_s + self._patience_s
        elif now_s >= self._late_from_s:
            self.sender.lost(f"{self.peer} took nothing for {self._patience_s:g} s")
