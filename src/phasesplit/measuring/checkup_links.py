"""How the processes of a cluster reach one another on this machine, and how clients reach them."""

import fcntl
import mmap
import os
import socket
from pathlib import Path

from phasesplit.measuring.checkup import Finding, State

_MARK = b"phasesplit"
_ANSWER_S = 0.5
_LONGEST_SOCKET_PATH = 107
"""Bytes. Source: Linux, unix(7): sun_path has 108, the last of them zero."""
_LONGEST_NAME = "0123456789ab.9999999999999.kv"


def shared_memory() -> Finding:
    """Return whether KV can move through shared memory: it is tried, from one mapping to another one."""
    from phasesplit.serving.sockets import socket_directory

    try:
        file = os.memfd_create("phasesplit-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(file, "r+b") as memory, socket_directory() as directory:
            os.ftruncate(memory.fileno(), mmap.PAGESIZE)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            path = Path(directory) / _LONGEST_NAME
            if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
                return Finding("shared memory", State.STOPS, f"{directory}: too long a path for sockets",
                               "set TMPDIR to a shorter one")  # fmt: skip
            _through_socket(path, memory.fileno())
    except (AttributeError, OSError) as problem:
        return Finding("shared memory", State.STOPS, f"workers cannot share memory for KV: {problem}")
    return Finding("shared memory", State.OK, "KV moves through memory that workers share (memfd, Unix sockets)")


def _through_socket(path: Path, memory: int) -> None:
    """Hand a memory's descriptor through a socket, write to it there, and look whether that is seen here."""
    kind = socket.SOCK_SEQPACKET
    with socket.socket(socket.AF_UNIX, kind) as listening, socket.socket(socket.AF_UNIX, kind) as sending:
        listening.bind(str(path))
        listening.listen(1)
        sending.connect(str(path))
        taken, _ = listening.accept()
        with taken, mmap.mmap(memory, mmap.PAGESIZE) as here:
            socket.send_fds(sending, [_MARK], [memory])
            _, files, _, _ = socket.recv_fds(taken, len(_MARK), 1)
            try:
                with mmap.mmap(files[0], mmap.PAGESIZE) as there:
                    there[: len(_MARK)] = _MARK
            finally:
                os.close(files[0])
            if here[: len(_MARK)] != _MARK:
                raise OSError("what is written there is not seen here")


def loopback() -> Finding:
    """Return whether processes of this machine reach one another over TCP."""
    from phasesplit.files.serve_files import ServedCluster

    host = ServedCluster().host
    try:
        with socket.create_server((host, 0)) as listening:
            listening.settimeout(_ANSWER_S)
            with socket.create_connection(listening.getsockname()[:2], _ANSWER_S) as sending:
                taken, _ = listening.accept()
                with taken:
                    taken.settimeout(_ANSWER_S)
                    sending.sendall(_MARK)
                    came = taken.recv(len(_MARK)) == _MARK
    except OSError as problem:
        return Finding("loopback", State.STOPS, f"no TCP on {host}: {problem.strerror or problem}")
    if not came:
        return Finding("loopback", State.STOPS, f"TCP on {host} loses bytes")
    return Finding("loopback", State.OK, f"TCP on {host}, ports are given")


def port() -> Finding:
    """Return whether the gateway's port is free."""
    from phasesplit.files.serve_files import ServedCluster

    cluster = ServedCluster()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trying.bind((cluster.host, cluster.port))
    except OSError as problem:
        return Finding("port", State.STOPS, f"{cluster.port} on {cluster.host}: {problem.strerror or problem}",
                       "phasesplit serve --port 0, which takes a free one")  # fmt: skip
    return Finding("port", State.OK, f"{cluster.port} on {cluster.host} is free")


CHECKS = (("shared memory", shared_memory), ("loopback", loopback), ("port", port))
