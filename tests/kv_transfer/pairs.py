"""Two endpoints in this process, joined by a transport, with a clock that tests move; and one in its own process."""

import json
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from invariants import check_blocks
from kv_transfer.wires import BLOCKS, LAYOUT, needles
from phasesplit.kv_transfer.block_pool import BlockPool, Holding, Use
from phasesplit.kv_transfer.channel import wait_readable
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import KvLayout, PeerInfo
from phasesplit.kv_transfer.messages import Clock, TransferTimeouts
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from waiting import eventually

WAYS = ["shared-memory", "tcp"]
OVER = (OutboundState.COMPLETED, OutboundState.FAILED)


class Machine:
    """An endpoint with its memory."""

    def __init__(
        self,
        name: str,
        way: str,
        folder: str,
        clock: Clock = time.monotonic,
        *,
        epoch: int = 1,
        layout: KvLayout = LAYOUT,
        blocks: int = BLOCKS,
        timeouts: TransferTimeouts | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.memory = SharedPool(layout, blocks)
        self.free = BlockPool(blocks)
        self.endpoint = KvEndpoint(
            PeerInfo(machine=name, epoch=epoch, layout=layout),
            self.memory,
            self.free,
            directory=folder if way == "shared-memory" else None,
            tcp=("127.0.0.1", 0) if way == "tcp" else None,
            nixl=("127.0.0.1", 0) if way == "nixl" else None,
            clock=clock,
            timeouts=timeouts or TransferTimeouts(),
            poison=True,
            secret=secret,
        )
        self.incoming = self.endpoint.incoming
        self.outgoing = self.endpoint.outgoing

    @property
    def pool(self) -> NDArray[np.uint8]:
        """The blocks."""
        return self.memory.blocks

    def close(self) -> None:
        """Give back every handle."""
        self.endpoint.close()
        self.memory.close()


class Pair:
    """A prefill machine and a decode machine."""

    def __init__(
        self,
        way: str,
        *,
        timeouts: TransferTimeouts | None = None,
        theirs: KvLayout = LAYOUT,
        secrets: tuple[bytes | None, bytes | None] = (None, None),
    ) -> None:
        self.way = way
        self.now_s = 0.0
        self.timeouts = timeouts
        self.folder = tempfile.TemporaryDirectory(prefix="kv")
        self.prefill = self.start("prefill-0", layout=theirs, secret=secrets[0])
        self.decode = self.start("decode-0", secret=secrets[1])
        self.prefill.pool[:] = needles(theirs, BLOCKS)
        self.idle = False
        self.sources: dict[str, Holding] = {}  # the prefill machine's blocks of what was offered

    def start(self, name: str, *, epoch: int = 1, layout: KvLayout = LAYOUT, secret: bytes | None = None) -> Machine:
        """Return a machine with the clock of this pair."""
        return Machine(
            name,
            self.way,
            self.folder.name,
            lambda: self.now_s,
            epoch=epoch,
            layout=layout,
            timeouts=self.timeouts,
            secret=secret,
        )

    def step(self) -> None:
        """Move what can move at both machines."""
        self.prefill.endpoint.poll()
        self.decode.endpoint.poll()

    def settle(self) -> None:
        """Move until nothing moves, with a moment for the kernel."""
        for _ in range(8):
            self.step()
            wait_readable([*self.prefill.endpoint.descriptors(), *self.decode.endpoint.descriptors()], 0.001)

    def connect(self) -> None:
        """Open the channel from the prefill machine to the decode machine, without an order."""
        self.prefill.outgoing._link("decode-0", self.decode.endpoint.address, self.decode.epoch)

    def order(self, key: str) -> None:
        """Tell the prefill machine where the KV of a request goes."""
        self.prefill.outgoing.await_offer(key, "decode-0", self.decode.endpoint.address, self.decode.epoch)

    def offered(self, key: str, tokens: int = 16, *, wants_note: bool = True) -> tuple[int, ...]:
        """Order, expect and open a request; return the prefill machine's blocks."""
        self.decode.incoming.expect(key, tokens, "prefill-0", wants_note=wants_note)
        self.order(key)
        eventually(lambda: self.prefill.outgoing.state(key) is OutboundState.OFFERED, self.step)
        self.sources[key] = self.prefill.free.hold(key, Use.SEND, LAYOUT.blocks_for(tokens))
        self.prefill.outgoing.open(key, self.sources[key].blocks)
        return self.sources[key].blocks

    def until_over(self, key: str) -> None:
        """Move until the prefill machine knows the end of a transfer, and its blocks may be used again."""
        out = self.prefill.outgoing
        eventually(lambda: out.state(key) in OVER and out.may_free(key), self.step)

    def until_free(self) -> None:
        """Move until no transfer holds blocks at the decode machine."""
        eventually(lambda: not self.decode.incoming.held() and self.decode.free.used == 0, self.step)

    def close(self) -> None:
        """Give back every handle."""
        for machine in (self.prefill, self.decode):
            check_blocks(machine.free, machine.incoming._receiver.leases)
        self.prefill.close()
        self.decode.close()
        self.folder.cleanup()


OpenPair = Callable[..., Pair]
"""Opens a pair with settings of `Pair`; the test closes none."""


def be_a_prefill_machine(way: str, address: dict[str, object], layers: int) -> None:
    """Order the request `r` for decode-0 in epoch 1, send so many layers of it, then go on driving until killed."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        here = Machine("prefill-0", way, folder, timeouts=TransferTimeouts(heartbeat_s=0.05))
        here.pool[:] = needles(LAYOUT, BLOCKS)
        here.outgoing.await_offer("r", "decode-0", address, 1)
        say("here")
        eventually(lambda: here.outgoing.state("r") is OutboundState.OFFERED, here.endpoint.poll)
        here.outgoing.open("r", tuple(range(4)))
        for layer in range(layers):
            here.outgoing.send_layer("r", layer)
        drive_for_ever(here)


def be_a_decode_machine(way: str) -> None:
    """Say the address, expect the request `r` of prefill-0, then go on driving until killed."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        here = Machine("decode-0", way, folder)
        here.incoming.expect("r", 16, "prefill-0")
        say(json.dumps(here.endpoint.address))
        eventually(lambda: here.incoming.state("r") is InboundState.RECEIVING, here.endpoint.poll)
        say("receiving")
        drive_for_ever(here)


def say(word: str) -> None:
    """Let the process that started this one know."""
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def drive_for_ever(machine: Machine) -> None:
    """Drive a machine until the process is killed."""
    while True:
        machine.endpoint.poll()
        wait_readable(list(machine.endpoint.descriptors()), 0.02)


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        be_a_prefill_machine(sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))
    be_a_decode_machine(sys.argv[2])
