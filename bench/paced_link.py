"""A link between two network namespaces of this machine that lets so many bytes a second through, whatever sends them.

It is a pair of virtual Ethernet devices with the kernel's token bucket filter at both ends. It needs Linux, iproute2,
and the right to make namespaces, which `unshare --user --map-root-user` gives where the system allows it. The
namespaces go with the process: nothing is left behind, and no other network of the machine is touched.
"""

import ctypes
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

DEVICE = "kv"
"""What both ends are called, each in its own namespace."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
NEW_NAMESPACES = 0x40000000 | 0x00020000
"""CLONE_NEWNET and CLONE_NEWNS of <sched.h>: network and mounts."""
MTU_BYTES = 9_000
BURST_BYTES = 1 << 18
"""More than the largest packet that the kernel hands over (64 KiB), or the filter has to cut it up."""
QUEUE_BYTES = 1 << 22
PIECE_BYTES = 1 << 18


class NoLinkError(Exception):
    """This system lets nobody make the link; the text says what it lacks."""


class PacedLink:
    """Two namespaces, each with a thread of this process in it, and the link between them.

    Raises:
        NoLinkError: The system refuses a namespace or a device, or has no iproute2.
    """

    def __init__(self) -> None:
        self._ends = [ThreadPoolExecutor(1, f"end {number}") for number in range(2)]
        for number in range(2):
            self.at(number, _leave)
            self._run(number, "mount", "--make-rslave", "/")
            self._run(number, "mount", "-t", "sysfs", "sysfs", "/sys")  # where UCX looks for devices
        far = f"/proc/{os.getpid()}/task/{self.at(1, threading.get_native_id)}/ns/net"
        self._run(0, "ip", "link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", far)
        for number, address in enumerate(ADDRESSES):
            self._run(number, "ip", "link", "set", DEVICE, "mtu", str(MTU_BYTES))
            self._run(number, "ip", "address", "add", f"{address}/30", "dev", DEVICE)
            self._run(number, "ip", "link", "set", "lo", "up")
            self._run(number, "ip", "link", "set", DEVICE, "up")

    def at(self, number: int, do: Callable[[], Result]) -> Result:
        """Do something at an end of the link: sockets that it opens and processes that it starts stay there."""
        return self._ends[number].submit(do).result()

    def pace(self, bytes_per_s: float | None) -> None:
        """Set the rate of each direction, headers included; None: as fast as the machine can."""
        filter_ = ["noqueue"]
        if bytes_per_s is not None:
            rate, burst, limit = f"{8 * bytes_per_s:.0f}bit", f"{BURST_BYTES}b", f"{QUEUE_BYTES}b"
            filter_ = ["tbf", "rate", rate, "burst", burst, "limit", limit]
        for number in range(2):
            self._run(number, "tc", "qdisc", "replace", "dev", DEVICE, "root", *filter_)

    def sent_bytes(self) -> int:
        """Return the bytes that have left end 0 so far."""
        devices = self.at(0, Path("/proc/thread-self/net/dev").read_text)
        counts = next(line.split(":")[1] for line in devices.splitlines() if line.strip().startswith(f"{DEVICE}:"))
        return int(counts.split()[8])  # eight columns of what came in, then bytes out

    def stream_bytes_per_s(self, size_bytes: int) -> float:
        """Return what a plain TCP stream from end 0 to end 1 gets, until the last byte has been read."""
        listener = self.at(1, lambda: socket.create_server((ADDRESSES[1], 0)))
        stream = self.at(0, lambda: socket.create_connection(listener.getsockname()))
        reader = threading.Thread(target=_read, args=(listener, size_bytes))
        reader.start()
        piece = bytes(PIECE_BYTES)
        began_s = time.monotonic()
        for start in range(0, size_bytes, PIECE_BYTES):
            stream.sendall(piece[: size_bytes - start])
        stream.recv(1)
        elapsed_s = time.monotonic() - began_s
        reader.join()
        stream.close()
        listener.close()
        return size_bytes / elapsed_s

    def _run(self, number: int, *words: str) -> None:
        try:
            done = self.at(number, lambda: subprocess.run(words, capture_output=True, text=True, check=False))
        except FileNotFoundError:
            raise NoLinkError(f"there is no command {words[0]}; it takes mount, and ip and tc of iproute2") from None
        if done.returncode:
            raise NoLinkError(f"`{' '.join(words)}` says: {done.stderr.strip()}")


def _leave() -> None:
    """Give the calling thread, and what it starts, namespaces of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_NAMESPACES):
        raise NoLinkError(f"this user may make no network namespace: {os.strerror(ctypes.get_errno())}")


def _read(listener: socket.socket, size_bytes: int) -> None:
    stream, _ = listener.accept()
    target = memoryview(bytearray(PIECE_BYTES))
    with stream:
        while size_bytes > 0:
            size_bytes -= stream.recv_into(target) or size_bytes
        stream.sendall(b"k")
