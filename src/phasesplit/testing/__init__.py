"""Doubles for tests: small clusters and traces, a clock that is moved by hand, machines that only pretend."""

from phasesplit.testing.clock import ManualClock
from phasesplit.testing.codec import ByteCodec
from phasesplit.testing.tiny import KV_BYTES_PER_TOKEN, LAYERS, tiny_cluster, tiny_trace
from phasesplit.testing.worker import FakeWire, FakeWorker, alphabet

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
