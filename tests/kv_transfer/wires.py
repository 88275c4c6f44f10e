"""Both ends of a transfer, joined by any transport, with a clock that tests move."""

import functools
import gc
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kv_transfer.in_memory import in_memory_pair
from phasesplit.kv_transfer.channel import Channel, Condition, wait_readable
from phasesplit.kv_transfer.layout import KvLayout, PeerInfo
from phasesplit.kv_transfer.messages import BlockRun, ReservedBlocks
from phasesplit.kv_transfer.nixl_channel import NixlListener, NixlMemory, connect_nixl, nixl_agent
from phasesplit.kv_transfer.receiver import POISON, Receiver, drive_receiver
from phasesplit.kv_transfer.sender import FRAME_BYTES, Sender, drive_sender
from phasesplit.kv_transfer.shared_memory import SharedMemoryListener, SharedPool, connect_shared_memory
from phasesplit.kv_transfer.tcp import TcpListener, connect_tcp
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from waiting import eventually

os.environ.setdefault("UCX_TLS", "tcp,posix,sysv,cma,self")  # NIXL's UCX, on machines without RDMA
os.environ.setdefault("UCX_LOG_LEVEL", "error")
TRANSPORTS = ["in-memory", "shared-memory", "tcp"] + (["nixl"] if importlib.util.find_spec("nixl") else [])
LAYOUT = KvLayout(
    model="tiny", layers=3, kv_heads=2, head_dim=4, dtype="float32", block_tokens=4, block_layout="k then v"
)
BLOCKS = 16


def needles(layout: KvLayout, blocks: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return a pool in which every block of every layer is different from any other."""
    shape = (layout.layers, blocks, layout.block_bytes)
    return np.random.default_rng(seed).integers(POISON + 1, 256, shape, dtype=np.uint8)


@functools.cache
def agent(name: str) -> object:
    """Return the NIXL agent of one end; its start is slow, so tests share it."""
    return nixl_agent(f"{name}-{os.getpid()}")


def connect(transport: str, address: str, memory: NixlMemory | None = None) -> Channel:
    """Return a channel to the text of an address."""
    if transport == "tcp":
        return connect_tcp(("127.0.0.1", int(address)))
    if transport == "nixl":
        assert memory is not None
        return connect_nixl(("127.0.0.1", int(address)), memory)
    return connect_shared_memory(address)


class Receiving:
    """A receiver that takes connections of a transport."""

    def __init__(
        self, transport: str, layout: KvLayout = LAYOUT, blocks: int = BLOCKS, *, epoch: int = 1, lease_s: float = 30.0
    ) -> None:
        self.transport = transport
        self.now_s = 0.0
        self.folder = tempfile.TemporaryDirectory(prefix="kv") if transport == "shared-memory" else None
        self.shared = SharedPool(layout, blocks) if transport == "shared-memory" else None
        shape = (layout.layers, blocks, layout.block_bytes)
        self.listener: TcpListener | SharedMemoryListener | NixlListener | None = None
        self.memories: list[NixlMemory] = []
        self.pool = self.shared.blocks if self.shared else np.zeros(shape, np.uint8)
        info = PeerInfo(machine="decode-0", epoch=epoch, layout=layout)
        self.receiver = Receiver(info, self.pool, lease_s=lease_s, poison=True)
        if transport == "tcp":
            self.listener = TcpListener()
        elif transport == "nixl":
            self.listener = NixlListener(self.registered("decode", self.pool))
        elif self.shared:
            self.listener = SharedMemoryListener(self.address, self.shared)
        self.channels: dict[int, Channel] = {}

    @property
    def address(self) -> str:
        """Where to connect, as text."""
        if self.folder:
            return f"{self.folder.name}/kv"
        return str(self.listener.address[1]) if isinstance(self.listener, TcpListener | NixlListener) else ""

    def registered(self, end: str, pool: NDArray[np.uint8]) -> NixlMemory:
        """Return a pool as memory of the NIXL agent of one end."""
        self.memories.append(NixlMemory(agent(end), pool))
        return self.memories[-1]

    def step(self, wait_s: float = 0.0) -> None:
        """Take connections, and move what can move."""
        if wait_s:
            handles = [channel.fileno() for channel in self.channels.values()]
            wait_readable([*handles, self.listener.fileno() if self.listener else -1], wait_s)
        while self.listener and (channel := self.listener.accept()):
            self.channels[len(self.channels)] = channel
        drive_receiver(self.receiver, self.channels, self.now_s)

    def bytes_of(self, reservation: ReservedBlocks) -> NDArray[np.uint8]:
        """Return what a transfer brought, (layers, blocks, block bytes)."""
        return self.pool[:, list(self.receiver.take(reservation.transfer))]

    def close(self) -> None:
        """Give back every handle."""
        for channel in self.channels.values():
            channel.close()
        if self.listener:
            self.listener.close()
        if self.shared:
            self.shared.close()
        for memory in self.memories:
            memory.close()
        if self.folder:
            self.folder.cleanup()


class Wire(Receiving):
    """A receiver and one sender, in this process, registered."""

    def __init__(
        self,
        transport: str,
        layout: KvLayout = LAYOUT,
        blocks: int = BLOCKS,
        *,
        theirs: KvLayout | None = None,
        sender_epoch: int = 1,
        lease_s: float = 30.0,
        frame_bytes: int = FRAME_BYTES,
        sending: Channel | None = None,
        receiving: Channel | None = None,
    ) -> None:
        super().__init__(transport, layout, blocks, lease_s=lease_s)
        if transport == "in-memory" and sending is None:
            sending, receiving = in_memory_pair()
        if receiving is not None:
            self.channels[0] = receiving
        self.source = needles(theirs or layout, blocks)
        memory = self.registered("prefill", self.source) if transport == "nixl" else None
        self.channel = sending or connect(transport, self.address, memory)
        info = PeerInfo(machine="prefill-0", epoch=sender_epoch, layout=theirs or layout)
        self.sender = Sender(info, self.source, frame_bytes=frame_bytes)
        eventually(lambda: self.sender.receiver is not None or bool(self.sender.lost_because), self.both)

    def both(self) -> None:
        """Move what can move at both ends."""
        drive_sender(self.sender, self.channel, self.now_s)
        self.step()

    def settle(self) -> None:
        """Move until nothing moves: twice what one message and its answer take, and a moment for the kernel."""
        if self.transport == "nixl":  # its first write waits until UCX has found a way
            eventually(lambda: self.channel.condition is not Condition.OPEN or self.channel.flush(), self.both)
        for _ in range(6):
            self.both()
            if self.transport in ("tcp", "nixl"):
                wait_readable([self.channel.fileno(), *[c.fileno() for c in self.channels.values()]], 0.002)

    def reserve(self, tokens: int, owner: str = "r") -> ReservedBlocks:
        """Hold room for a prompt of our sender, and open it there from the end of the pool backwards."""
        reservation = self.receiver.reserve(owner, tokens, "prefill-0", self.now_s)
        self.sender.open(reservation, self.sources(reservation), deadline_s=self.now_s + 1_000.0)
        return reservation

    def sources(self, reservation: ReservedBlocks) -> tuple[int, ...]:
        """Return the sender's blocks: neighbours, but other ones than the receiver's."""
        count = len(reservation.blocks)
        return tuple(range(self.source.shape[1] - count, self.source.shape[1]))

    def expected(self, reservation: ReservedBlocks) -> NDArray[np.uint8]:
        """Return the bytes that a transfer must bring."""
        return self.source[:, list(self.sources(reservation))]

    def finish(self, reservation: ReservedBlocks) -> None:
        """Move until both ends know that a transfer is whole."""
        eventually(
            lambda: (
                self.receiver.state(reservation.transfer) is InboundState.READY
                and self.sender.state(reservation) is OutboundState.COMPLETED
            ),
            self.both,
        )

    def close(self) -> None:
        """Give back every handle."""
        self.channel.close()
        super().close()


def send_in_another_process() -> None:
    """Be the sender of `python -m`-like use: argv is transport, address, layers to send, then wait to be killed."""
    transport, address, blocks_text, layers = sys.argv[1:5]
    blocks = tuple(int(text) for text in blocks_text.split(","))
    channel = connect(transport, address)
    sender = Sender(PeerInfo(machine="prefill-0", epoch=1, layout=LAYOUT), needles(LAYOUT, BLOCKS))
    reservation = ReservedBlocks("decode-0", 1, 1, len(blocks) * LAYOUT.block_tokens, blocks)
    eventually(lambda: sender.receiver is not None, lambda: drive_sender(sender, channel, 0.0))
    sender.open(reservation, blocks, 1_000.0)
    for layer in range(int(layers)):
        sender.send(reservation, layer)
    while channel.condition is Condition.OPEN:
        drive_sender(sender, channel, 0.0)
        wait_readable([channel.fileno()], 1.0)


def queued_bytes(sender: Sender) -> int:
    """Return how many bytes of blocks no channel has taken yet."""
    outbound = sender._queue
    return outbound._pool.shape[2] * sum(entry.blocks for entry in outbound._queue if isinstance(entry, BlockRun))


def open_files() -> int:
    """Return how many descriptors this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def none_left_open(before: int) -> bool:
    """Return whether no more descriptors are open than before; mapped memory has one of its own."""
    if open_files() > before:
        gc.collect()
    return open_files() <= before


def open_sockets() -> int:
    """Return how many sockets this process has open."""
    files = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(file.is_socket() for file in files)


if __name__ == "__main__":
    send_in_another_process()
