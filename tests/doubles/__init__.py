"""Doubles for tests and benchmarks: small clusters and traces, a clock moved by hand, machines that only pretend."""

from doubles.clock import ManualClock
from doubles.codec import ByteCodec
from doubles.tiny import KV_BYTES_PER_TOKEN, LAYERS, tiny_cluster, tiny_trace
from doubles.worker import FakeWire, FakeWorker, alphabet

__all__ = [
    "KV_BYTES_PER_TOKEN",
    "LAYERS",
    "ByteCodec",
    "FakeWire",
    "FakeWorker",
    "ManualClock",
    "alphabet",
    "tiny_cluster",
    "tiny_trace",
]
