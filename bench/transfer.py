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

from phasesplit.transfer.channel import Channel, drive_receiver, drive_sender, wait_readable
from phasesplit.transfer.chooser import fit_link
from phasesplit.transfer.layout import Greeting, KvLayout
from phasesplit.transfer.messages import Reservation
from phasesplit.transfer.receiver import Receiver
from phasesplit.transfer.sender import FRAME_BYTES, Sender
from phasesplit.transfer.shared_memory import SharedMemoryListener, SharedPool, connect_shared_memory
from phasesplit.transfer.states import Departure
from phasesplit.transfer.tcp import TcpListener, connect_tcp
from speed import about_machine

# KV of Llama2-7B's shape in float16, but 8 layers: 16 tokens of a layer are 256 KiB.
LAYOUT = KvLayout(
    model="bench", layers=8, kv_heads=32, head_dim=128, dtype="float16", block_tokens=16, block_layout="k then v"
)
TOKENS = 1_024
SMALL = KvLayout(
    model="bench", layers=1, kv_heads=2, head_dim=64, dtype="float16", block_tokens=16, block_layout="k then v"
)
GOALS = {"shared memory": 0.70, "tcp": 0.80}
ROUNDS = 40


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


def small_transfers() -> None:
    """Print the time from the order to the completion of one block, beside the same bytes and one back over TCP."""
    print(f"\none block of {SMALL.block_bytes / 1024:.0f} KiB, from order to completion, 500 in a row")
    block = np.zeros(SMALL.block_bytes, np.uint8)
    with Peer("shared memory", SMALL, 16) as shared, Peer("tcp", SMALL, 16) as tcp, RawPeer(len(block)) as raw:
        ways = {"shared memory": shared.transfer, "tcp": tcp.transfer, "raw TCP": lambda: raw.stream(block)}
        times_s = np.array([[timed(way) for way in ways.values()] for _ in range(500)])
    for name, of_way in zip(ways, times_s.T, strict=True):
        low_s, p50_s, p99_s = np.quantile(of_way, [0.01, 0.5, 0.99])
        print(f"  {name:14} p1 {low_s * 1e6:5.0f} us   p50 {p50_s * 1e6:6.0f} us   p99 {p99_s * 1e6:6.0f} us")


def calibration() -> None:
    """Print the line through transfers of several sizes, from which the chooser's threshold follows."""
    print("\ncalibrated links")
    for name in GOALS:
        sizes_bytes, times_s = [], []
        for tokens in (16, 64, 256, 1_024):
            with Peer(name, LAYOUT, tokens) as peer:
                times_s.append(min(timed(peer.transfer) for _ in range(5)))
            sizes_bytes.append(LAYOUT.layers * LAYOUT.blocks_for(tokens) * LAYOUT.block_bytes)
        link = fit_link(sizes_bytes, times_s)
        print(f"  {name:14} {link.bytes_per_s / 1e9:6.2f} GB/s   latency {link.latency_s * 1e6:6.0f} us")


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
        self._sender = Sender(Greeting(machine="prompt", epoch=1, layout=layout), pool)
        self._blocks = tuple(range(blocks))
        self._tokens = tokens
        self._number = 0
        while self._sender.receiver is None:
            self._drive()
        self.transfer()  # touches every page once

    def transfer(self) -> None:
        """Send one prompt; the receiver reserves it again as soon as it has released the one before."""
        self._number += 1
        reservation = Reservation("token", 1, self._number, self._tokens, self._blocks)
        self._sender.open(reservation, self._blocks, time.monotonic() + 60.0)
        self._sender.send_all(reservation)
        while self._sender.state(reservation) not in (Departure.COMPLETED, Departure.FAILED):
            self._drive()
        if self._sender.state(reservation) is Departure.FAILED:
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
    receiver = Receiver(Greeting(machine="token", epoch=1, layout=layout), pool.blocks)
    listener = TcpListener() if transport == "tcp" else SharedMemoryListener(path, pool)
    held = receiver.reserve("r", tokens, "prompt", time.monotonic())
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
            held = receiver.reserve("r", tokens, "prompt", time.monotonic())
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
