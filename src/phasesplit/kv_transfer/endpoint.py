"""Everything that moves KV to and from one machine: where it listens, what it sends, what it takes in.

1. A `KvEndpoint` opens its listeners; `address` says where others reach it.
2. `incoming.expect` on the decode machine and `outgoing.await_offer` on the prefill machine name a request by its key.
3. `poll` moves what can move: handshake, offers, frames, completions.
4. `outgoing` says when the prefill machine's blocks are free, `incoming` when the KV is whole on the decode machine.

One thread drives it and no call waits, so the thread that computes can own it. The protocol: `docs/transfer.md`.
"""

import contextlib
import hashlib
import os
import time
from typing import Any

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import BlockPool
from phasesplit.kv_transfer.incoming import Incoming, Listener
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import Clock, TransferTimeouts
from phasesplit.kv_transfer.nixl_channel import NixlListener, NixlMemory, nixl_agent
from phasesplit.kv_transfer.outgoing import Outgoing, boot_id
from phasesplit.kv_transfer.shared_memory import SharedMemoryListener, SharedPool
from phasesplit.kv_transfer.tcp import TcpListener

_NAME_DIGITS = 12


class KvEndpoint:
    """The transfers of one machine.

    Args:
        info: What this machine says of itself.
        pool: Memory of its KV blocks; the engine's cache lies in `pool.blocks`.
        free: Which of the blocks are free; the engine draws from it too.
        directory: Where the Unix socket is made, for senders on this host; None: there are none.
        tcp: Host, as a number, to listen at and to put into the address, and port (0: any free one); None: no TCP.
        nixl: The same for NIXL; None: no NIXL. Where both ends have it, it goes before TCP.
        clock: Returns the instant.
        timeouts: How long to wait for what.
        poison: Fill blocks with `receiver.POISON` when they are freed, so that a late reader is found out.
        secret: The cluster's key, >= 1 byte, which both ends of a channel prove to know before they talk; None: there
            is none, and whoever can connect is believed. Machines with and without one refuse one another.

    Attributes:
        info: As above.
        free: As above.
        incoming: KV that arrives here.
        outgoing: KV that leaves.

    Raises:
        OSError: It cannot listen there, or the directory is not this user's alone (mode 0700).
        ImportError: NIXL is asked for and not installed.
        TransferError: The pool is not that of the layout, or the key is empty.
    """

    def __init__(
        self,
        info: PeerInfo,
        pool: SharedPool,
        free: BlockPool,
        *,
        directory: str | None = None,
        tcp: tuple[str, int] | None = None,
        nixl: tuple[str, int] | None = None,
        clock: Clock = time.monotonic,
        timeouts: TransferTimeouts = TransferTimeouts(),  # noqa: B008 - frozen
        poison: bool = False,
        secret: bytes | None = None,
    ) -> None:
        if secret == b"":
            raise TransferError("the cluster's key is empty, allowed is one byte or more")
        self.info = info
        self.free = free
        self._address: dict[str, Any] = {"boot_id": boot_id(), "unix": None, "tcp": None, "nixl": None}
        with contextlib.ExitStack() as undo:
            listeners: list[Listener] = []
            if directory is not None:
                # A path of a socket has 107 bytes at most, and names of machines may be long.
                machine = hashlib.sha256(info.machine.encode()).hexdigest()[:_NAME_DIGITS]
                path = os.path.join(directory, f"{machine}.{info.epoch}.kv")
                listeners.append(SharedMemoryListener(path, pool))
                undo.callback(listeners[-1].close)
                self._address["unix"] = path
            if tcp is not None:
                over_tcp = TcpListener(*tcp)
                listeners.append(over_tcp)
                undo.callback(over_tcp.close)
                self._address["tcp"] = list(over_tcp.address)
            self._memory = None
            if nixl is not None:
                agent = nixl_agent(f"{info.machine}.{info.epoch}")
                self._memory = NixlMemory(agent, pool.blocks)
                undo.callback(self._memory.close)
                over_nixl = NixlListener(self._memory, *nixl)
                listeners.append(over_nixl)
                undo.callback(over_nixl.close)
                self._address["nixl"] = list(over_nixl.address)
            self.outgoing = Outgoing(info, pool.blocks, clock, timeouts, self._memory, secret)
            self.incoming = Incoming(info, pool, free, listeners, clock, timeouts, poison=poison, secret=secret)
            undo.pop_all()

    @property
    def address(self) -> dict[str, Any]:
        """Where others reach this machine, as JSON can say it: boot_id, unix (path), tcp and nixl."""
        return dict(self._address)

    def poll(self) -> None:
        """Move what can move without waiting; call it when a descriptor is ready, and at the latest each second."""
        self.incoming.poll()
        self.outgoing.poll()

    def descriptors(self) -> dict[int, int]:
        """Return what to wait for: file descriptors, with the events of `select.poll`."""
        waits = self.incoming.descriptors() | self.outgoing.descriptors()
        waits.pop(-1, None)
        return waits

    def close(self) -> None:
        """Listen no more, and give back every handle; what goes on has failed. The pool stays open."""
        self.outgoing.close()
        self.incoming.close()
        if self._memory is not None:
            self._memory.close()
