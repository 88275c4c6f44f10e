"""How fast KV moves: shared memory against a copy in memory, TCP against a raw TCP stream, and one small transfer.

Run with `python bench/transfer.py`. Both ends are processes of their own with a core each, as on machines. What is
compared is measured in turns; figures are the best of many rounds, because a shared machine changes from second to
second, and the share is printed for the median round too.
"""

import contextlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from phasesplit.kv_transfer.block_pool import BlockPool
from phasesplit.kv_transfer.calibration import link_text, measure_link
from phasesplit.kv_transfer.channel import Channel, wait_readable
from phasesplit.kv_transfer.chooser import Mode, threshold_tokens
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import KvLayout, PeerInfo
from phasesplit.kv_transfer.messages import ReservedBlocks
from phasesplit.kv_transfer.receiver import Receiver, drive_receiver
from phasesplit.kv_transfer.sender import FRAME_BYTES, Sender, drive_sender
from phasesplit.kv_transfer.shared_memory import SharedMemoryListener, SharedPool, connect_shared_memory
from phasesplit.kv_transfer.tcp import TcpListener, connect_tcp
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from speed import about_machine

# KV of Llama2-7B's shape in float16, but 8 layers: 16 tokens of a layer are 256 KiB.
LAYOUT = KvLayout(
    model="bench", layers=8, kv_heads=32, head_dim=128, dtype="float16", block_tokens=16, block_layout="k then v"
)
TOKENS = 1_024
SMALL = KvLayout(
    model="bench", layers=1, kv_heads=2, head_dim=64, dtype="float16", block_tokens=16, block_layout="k then v"
)
SMOL = KvLayout(
    model="bench", layers=30, kv_heads=3, head_dim=64, dtype="float32", block_tokens=32, block_layout="k then v"
)
PROMPT_TOKENS_PER_S = 1_000
FAST_TOKENS_PER_S = 8_000
EXPOSED_BLOCKS = SMOL.blocks_for(4_096)
EXPOSED_ROUNDS = 3
GOALS = {"shared memory": 0.70, "tcp": 0.80}
ROUNDS = 30


def main() -> None:
    """Print all figures."""
    about_machine()
    stay_on(0)
    size_bytes = LAYOUT.layers * LAYOUT.blocks_for(TOKENS) * LAYOUT.block_bytes
    print(
        f"\none transfer of {size_bytes / 2**20:.0f} MiB, {LAYOUT.block_bytes / 2**10:.0f} KiB blocks, best of {ROUNDS}"
    )
    with (
        Peer("shared memory", LAYOUT, TOKENS) as shared,
        Peer("tcp", LAYOUT, TOKENS) as tcp,
        RawPeer(size_bytes) as raw,
    ):
        source = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
        target = np.zeros_like(source)
        ways: dict[str, Callable[[], object]] = {
            "copy in memory": lambda: np.copyto(target, source),
            "shared memory": shared.transfer,
            "raw TCP stream": lambda: raw.stream(source),
            "tcp": tcp.transfer,
        }
        rounds_s = [{name: timed(way) for name, way in ways.items()} for _ in range(ROUNDS)]
        taken_s = {name: min(each[name] for each in rounds_s) for name in ways}
    for name, floor in (("shared memory", "copy in memory"), ("tcp", "raw TCP stream")):
        share = taken_s[floor] / taken_s[name]
        median = statistics.median(each[floor] / each[name] for each in rounds_s)
        print(
            f"  {name:14} {size_bytes / taken_s[name] / 1e9:6.2f} GB/s   {floor:14} "
            f"{size_bytes / taken_s[floor] / 1e9:6.2f} GB/s   {share:5.0%} "
            f"(median round {median:.0%})   goal {GOALS[name]:.0%}"
        )
    small_transfers()
    calibration()
    exposed_times()


def small_transfers() -> None:
    """Print the time from the order to the completion of one block, next to the same bytes and one back over TCP."""
    print(f"\none block of {SMALL.block_bytes / 1024:.0f} KiB, from order to completion, 500 in a row")
    block = np.zeros(SMALL.block_bytes, np.uint8)
    with Peer("shared memory", SMALL, 16) as shared, Peer("tcp", SMALL, 16) as tcp, RawPeer(len(block)) as raw:
        ways = {"shared memory": shared.transfer, "tcp": tcp.transfer, "raw TCP": lambda: raw.stream(block)}
        times_s = np.array([[timed(way) for way in ways.values()] for _ in range(500)])
    for name, of_way in zip(ways, times_s.T, strict=True):
        low_s, p50_s, p99_s = np.quantile(of_way, [0.01, 0.5, 0.99])
        print(f"  {name:14} p1 {low_s * 1e6:5.0f} us   p50 {p50_s * 1e6:6.0f} us   p99 {p99_s * 1e6:6.0f} us")


def calibration() -> None:
    """Print what a machine measures of the ways to itself when it starts, and how long that takes."""
    print("\nlinks as a machine measures them at its start, both ends on one core, with SmolLM2-135M's KV in float32")
    pool = SharedPool(SMOL, 64)
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        info = PeerInfo(machine="bench", epoch=1, layout=SMOL)
        endpoint = KvEndpoint(info, pool, BlockPool(64), directory=folder, tcp=("127.0.0.1", 0))
        for name, transport in (("shared memory", "unix"), ("tcp", "tcp")):
            began = time.perf_counter()
            link = measure_link(endpoint, transport=transport)
            took_s = time.perf_counter() - began
            threshold = threshold_tokens(SMOL, lambda tokens: tokens / PROMPT_TOKENS_PER_S, link)
            print(f"  {name:14} {link_text(link, threshold)} (at {PROMPT_TOKENS_PER_S} tokens/s; took {took_s:.2f} s)")
        endpoint.close()
    pool.close()


def exposed_times() -> None:
    """Print what is left of a transfer after the prefill phase, and how much longer that takes, in both modes.

    The prefill phase is made of matrix products, as many as make `FAST_TOKENS_PER_S`, so that sending costs it time.
    """
    print(f"\nafter a prefill phase at {FAST_TOKENS_PER_S} tokens/s, SmolLM2-135M's KV, medians of {EXPOSED_ROUNDS}")
    print("                 tokens   prefill phase      exposed          prefill phase longer by")
    print("                                            serialized layers   serialized layers")
    left, right = np.random.default_rng(0).random((2, 64, 64), np.float32)
    product_s = min(timed(lambda: [left @ right for _ in range(100)]) for _ in range(20)) / 100
    for name in GOALS:
        with DecodeMachine(name) as there, tempfile.TemporaryDirectory(prefix="kv") as folder:
            pool = SharedPool(SMOL, EXPOSED_BLOCKS)
            pool.blocks[:] = 1
            endpoint = KvEndpoint(
                PeerInfo(machine="prefill", epoch=1, layout=SMOL), pool, BlockPool(EXPOSED_BLOCKS), directory=folder
            )
            for tokens in (64, 256, 1_024, 4_096):
                products = max(1, round(tokens / FAST_TOKENS_PER_S / SMOL.layers / product_s))

                def compute(products: int = products) -> None:
                    for _ in range(products):
                        _ = left @ right

                plain_s, exposed_s, longer_s = [], {}, {}
                for number in range(EXPOSED_ROUNDS):
                    plain_s.append(timed(lambda: [compute() for _ in range(SMOL.layers)]))
                    for mode in Mode:
                        key = f"{name}.{tokens}.{mode.value}.{number}"
                        took_s = there.receive(endpoint, key, tokens, compute, mode)
                        exposed_s.setdefault(mode, []).append(endpoint.outgoing.sent.last_exposed_s)
                        longer_s.setdefault(mode, []).append(took_s - plain_s[-1])
                plain = statistics.median(plain_s)
                exposed = [statistics.median(exposed_s[mode]) * 1e3 for mode in Mode]
                longer = [statistics.median(longer_s[mode]) / plain for mode in Mode]
                print(
                    f"  {name:14} {tokens:6} {plain * 1e3:11.1f} ms {exposed[0]:11.1f} {exposed[1]:6.1f} ms"
                    f" {longer[0]:9.1%} {longer[1]:6.1%}"
                )
            endpoint.close()
            pool.close()


class DecodeMachine:
    """A machine in a process of its own that takes in one request after another."""

    def __init__(self, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kv")
        self._pipe, there = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=take_in, args=(name, self._folder.name, there)
        )
        self._process.start()
        self._address = self._pipe.recv()

    def receive(self, endpoint: KvEndpoint, key: str, tokens: int, compute: Callable[[], None], mode: Mode) -> float:
        """Let an endpoint compute and send a prompt; return the time of its prefill phase, in seconds."""
        out = endpoint.outgoing
        self._pipe.send((key, tokens))
        out.await_offer(key, "decode", self._address, 1)
        while out.state(key) is OutboundState.AWAITED:
            endpoint.poll()
        out.open(key, tuple(range(SMOL.blocks_for(tokens))))
        began = time.perf_counter()
        for layer in range(SMOL.layers):
            compute()
            if mode is Mode.LAYERWISE:
                out.send_layer(key, layer)
        took_s = time.perf_counter() - began
        if mode is Mode.SERIALIZED:
            out.send_all(key)
        while out.state(key) is OutboundState.SENT or out.state(key) is OutboundState.OPEN:
            wait_readable(list(endpoint.descriptors()), 0.001)
            endpoint.poll()
        if out.state(key) is not OutboundState.COMPLETED:
            raise SystemExit(f"transfer failed: {out.why(key)}")
        out.forget(key)
        self._pipe.recv()
        return took_s

    def __enter__(self) -> "DecodeMachine":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join()
        self._folder.cleanup()


def take_in(name: str, folder: str, parent: Connection) -> None:
    """Be the decode machine: hold room for what the parent says, until it says None."""
    stay_on(1)
    pool = SharedPool(SMOL, EXPOSED_BLOCKS)
    pool.blocks[:] = 1
    over_tcp = name == "tcp"
    endpoint = KvEndpoint(
        PeerInfo(machine="decode", epoch=1, layout=SMOL),
        pool,
        BlockPool(EXPOSED_BLOCKS),
        directory=None if over_tcp else folder,
        tcp=("127.0.0.1", 0) if over_tcp else None,
    )
    parent.send(endpoint.address)
    key = ""
    while True:
        wait_readable([*endpoint.descriptors(), parent.fileno()], 0.1)
        if parent.poll():
            order = parent.recv()
            if order is None:
                break
            key, tokens = order
            endpoint.incoming.expect(key, tokens, "prefill", wants_note=False)
        endpoint.poll()
        if key and endpoint.incoming.state(key) is InboundState.READY:
            endpoint.incoming.release(key)
            parent.send(key)
            key = ""
    endpoint.close()


def stay_on(place: int) -> None:
    """Keep this process on one of the machine's cores; a child inherits its parent's until it says otherwise."""
    with contextlib.suppress(OSError):  # a core that it may not use
        os.sched_setaffinity(0, {place % (os.cpu_count() or 1)})


def timed(way: Callable[[], object]) -> float:
    """Return how long a call takes, in seconds."""
    began = time.perf_counter()
    way()
    return time.perf_counter() - began


class Peer:
    """A receiver in a process of its own, and the sender here."""

    def __init__(self, transport: str, layout: KvLayout, tokens: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kv")
        here, there = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(
            target=receive, args=(transport, layout, tokens, f"{self._folder.name}/kv", there)
        )
        self._process.start()
        address = here.recv()
        self._channel: Channel = connect_tcp(address) if transport == "tcp" else connect_shared_memory(address)
        blocks = layout.blocks_for(tokens)
        shape = (layout.layers, blocks, layout.block_bytes)
        pool = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
        self._sender = Sender(PeerInfo(machine="prefill", epoch=1, layout=layout), pool)
        self._blocks = tuple(range(blocks))
        self._tokens = tokens
        self._number = 0
        while self._sender.receiver is None:
            self._poll()
        self.transfer()  # touches every page once

    def transfer(self) -> None:
        """Send one prompt; the receiver reserves it again as soon as it has released the one before."""
        self._number += 1
        reservation = ReservedBlocks("decode", 1, self._number, self._tokens, self._blocks)
        self._sender.open(reservation, self._blocks, time.monotonic() + 60.0)
        self._sender.send_all(reservation)
        while self._sender.state(reservation) not in (OutboundState.COMPLETED, OutboundState.FAILED):
            self._poll()
        if self._sender.state(reservation) is OutboundState.FAILED:
            raise SystemExit(f"transfer failed: {self._sender.why(reservation)}")
        self._sender.forget(reservation)

    def _drive(self) -> None:
        """Wait until something can move, then move it."""
        if self._sender.head() is None:
            wait_readable([self._channel.fileno()], 1.0)
        drive_sender(self._sender, self._channel, time.monotonic())

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.join()
        self._folder.cleanup()


def receive(transport: str, layout: KvLayout, tokens: int, path: str, parent: Connection) -> None:
    """Be the receiver: hold room for one prompt at a time until the sender has gone."""
    stay_on(1)
    blocks = layout.blocks_for(tokens)
    pool = SharedPool(layout, blocks)
    receiver = Receiver(PeerInfo(machine="decode", epoch=1, layout=layout), pool.blocks)
    listener = TcpListener() if transport == "tcp" else SharedMemoryListener(path, pool)
    held = receiver.reserve("r", tokens, "prefill", time.monotonic())
    parent.send(listener.address if isinstance(listener, TcpListener) else path)
    wait_readable([listener.fileno()], 10.0)
    channel = listener.accept()
    if channel is None:
        raise SystemExit("nobody connected")
    while channel.fileno() >= 0:
        wait_readable([channel.fileno()], 1.0)
        drive_receiver(receiver, {0: channel}, time.monotonic())
        if receiver.layers_arrived(held.transfer) == layout.layers:
            receiver.release(held.transfer, time.monotonic())
            held = receiver.reserve("r", tokens, "prefill", time.monotonic())
    listener.close()


class RawPeer:
    """A process that reads a TCP stream into one buffer, piece by piece, and answers with a byte: TCP's floor."""

    def __init__(self, size_bytes: int) -> None:
        here, there = multiprocessing.get_context("spawn").Pipe()
        self._process = multiprocessing.get_context("spawn").Process(target=drain, args=(size_bytes, there))
        self._process.start()
        self._socket = socket.create_connection(here.recv())
        self.stream(np.zeros(size_bytes, np.uint8))

    def stream(self, source: np.ndarray) -> None:
        """Send all bytes and wait until they have been read."""
        for start in range(0, len(source), FRAME_BYTES):
            self._socket.sendall(source[start : start + FRAME_BYTES].data)
        self._socket.recv(1)

    def __enter__(self) -> "RawPeer":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.join()


def drain(size_bytes: int, parent: Connection) -> None:
    """Read streams of a size until the sender has gone."""
    stay_on(1)
    target = memoryview(np.zeros(size_bytes, np.uint8)).cast("B")
    with socket.create_server(("127.0.0.1", 0)) as server:
        parent.send(server.getsockname())
        connection = server.accept()[0]
    while True:
        got = 0
        while got < size_bytes:
            received = connection.recv_into(target[got : got + FRAME_BYTES])
            if not received:
                return
            got += received
        connection.sendall(b"k")


if __name__ == "__main__":
    main()
