"""Shared memory on one host: the sender copies blocks into the receiver's pool; only messages pass a Unix socket.

The pool is an anonymous file (memfd) whose descriptor goes to a sender with the WELCOME, so a peer that was refused
never sees it, and nothing is left behind by processes that are killed (`multiprocessing.shared_memory` leaves a name
in /dev/shm, and its tracker takes it from under those who still use it). A sender that has it belongs to the same user
and is trusted to write where its reservation says; the receiver checks the place and the bytes of each frame.

The copy comes before the message in program order, and the kernel's locks in `send` and `recv` order them for other
processors too.
"""

import contextlib
import fcntl
import mmap
import os
import socket
import stat
import struct

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.channel import Condition, Place
from phasesplit.kv_transfer.layout import KvLayout, PeerInfo
from phasesplit.kv_transfer.messages import HEADER_BYTES, LONGEST_TEXT_BYTES, Message, MessageKind, unpack

_BACKLOG = 64
_POLL_MESSAGES = 1_000  # after so many, other channels have their turn
_CREDENTIALS = struct.Struct("3i")  # process, user, group


class SharedPool:
    """A pool of KV blocks that other processes can write to once they are given its descriptor.

    Args:
        layout: The blocks.
        blocks: How many, >= 1.

    Raises:
        OSError: There is no memory for it.
    """

    def __init__(self, layout: KvLayout, blocks: int) -> None:
        size_bytes = layout.layers * blocks * layout.block_bytes
        self._file = os.memfd_create("phasesplit-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, size_bytes)
        # A pool that shrank under a process that has it mapped would kill it.
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        mapped = mmap.mmap(self._file, size_bytes)
        self.blocks = np.frombuffer(mapped, np.uint8).reshape(layout.layers, blocks, layout.block_bytes)

    def fileno(self) -> int:
        """Return the descriptor of the memory."""
        return self._file

    def close(self) -> None:
        """Close the descriptor; the memory lives until the last array over it is gone."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class SharedMemoryChannel:
    """One end.

    Args:
        connection: A connected Unix socket that keeps the borders of messages; the channel owns it.
        pool: The receiver's pool, at its end; None at the sender's.
    """

    def __init__(self, connection: socket.socket, pool: SharedPool | None = None) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._pool = pool
        self._target: NDArray[np.uint8] | None = None
        self._copied: Message | None = None
        self._is_cut = False
        self._buffer = bytearray(HEADER_BYTES + LONGEST_TEXT_BYTES)
        self.condition = Condition.OPEN
        self.why = ""

    def offer(self, message: Message, payload: NDArray[np.uint8] | None) -> bool:
        """See `Channel.offer`; the bytes are in the receiver's pool before the message is sent."""
        if self.condition is not Condition.OPEN or self._is_cut:
            return False
        if payload is not None and message is not self._copied:
            if self._target is None:
                self._end(Condition.DAMAGED)
                return False
            target = self._target[message.layer, message.first_block : message.first_block + message.blocks]
            np.copyto(target.reshape(-1), payload)
            self._copied = message
        try:
            if message.kind is MessageKind.WELCOME and self._pool is not None:
                socket.send_fds(self._socket, [message.pack()], [self._pool.fileno()])
            else:
                self._socket.send(message.pack())
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(Condition.LOST, error)
            return False
        self._copied = None
        return True

    def flush(self) -> bool:
        """See `Channel.flush`."""
        return True

    def poll(self, place: Place) -> list[Message]:
        """See `Channel.poll`; frames are in their place already."""
        del place
        come: list[Message] = []
        for _ in range(_POLL_MESSAGES):
            if self.condition is not Condition.OPEN:
                break
            try:
                packed, files = self._receive()
            except BlockingIOError:
                break
            except OSError as error:
                self._end(Condition.LOST, error)
                break
            try:
                if not packed:
                    self._end(Condition.CLOSED)
                    break
                if self._is_cut:
                    continue
                message = unpack(packed[:HEADER_BYTES], packed[HEADER_BYTES:])
                if message.kind is MessageKind.WELCOME and files and self._pool is None:
                    self._target = _mapped(files[0], message.text)
                come.append(message)
            except (TransferError, OSError, ValueError):
                # A peer that has the pool may write on until its own end closes.
                self.cut() if self._pool is not None else self._end(Condition.DAMAGED)
            finally:
                for file in files:
                    os.close(file)
        return come

    def cut(self) -> None:
        """See `Channel.cut`: only the peer's own end, or its death, proves that it writes no more."""
        self._is_cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """See `Channel.close`."""
        self._end(Condition.CLOSED)

    def fileno(self) -> int:
        """See `Channel.fileno`; -1 when the channel has ended."""
        return self._socket.fileno()

    def _receive(self) -> tuple[bytes, list[int]]:
        if self._pool is not None or self._target is not None:
            return bytes(self._buffer[: self._socket.recv_into(self._buffer)]), []
        packed, files, _, _ = socket.recv_fds(self._socket, HEADER_BYTES + LONGEST_TEXT_BYTES, 1)
        return packed, list(files)

    def _end(self, condition: Condition, error: OSError | None = None) -> None:
        if self.condition is Condition.OPEN:
            self.condition, self.why = condition, (error.strerror or "") if error else ""
        self._target = None
        self._socket.close()


class SharedMemoryListener:
    """Takes connections of processes on this host that belong to the same user.

    Args:
        path: Where the socket is made; must not exist, in a directory that no other user can enter.
        pool: The receiver's pool.

    Raises:
        OSError: The socket cannot be made there, or the directory is not ours alone.
    """

    def __init__(self, path: str, pool: SharedPool) -> None:
        _require_private(os.path.dirname(path) or ".")
        self._path = path
        self._pool = pool
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.bind(path)
            os.chmod(path, 0o600)
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        self._socket.setblocking(False)

    def accept(self) -> SharedMemoryChannel | None:
        """Return the next connection, or None if there is none of ours now, or no handle is left for it."""
        try:
            connection = self._socket.accept()[0]
        except OSError:
            return None
        if _user_behind(connection) != os.geteuid():
            connection.close()
            return None
        return SharedMemoryChannel(connection, self._pool)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when there is a connection."""
        return self._socket.fileno()

    def close(self) -> None:
        """Listen no more, and take the socket away."""
        self._socket.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)


def connect_shared_memory(path: str) -> SharedMemoryChannel:
    """Return a channel to a listener on this host.

    Raises:
        OSError: Nobody listens there, whoever does takes no connections, or is another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    try:
        connection.connect(path)
        if _user_behind(connection) != os.geteuid():
            raise PermissionError(f"another user listens at {path}")
    except OSError:
        connection.close()
        raise
    return SharedMemoryChannel(connection)


def _require_private(directory: str) -> None:
    """Raise PermissionError unless the directory is this user's, and no other can enter it."""
    found = os.stat(directory)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{directory}: belongs to user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}, "
            f"allowed is a directory of user {os.geteuid()} with mode 0700"
        )


def _user_behind(connection: socket.socket) -> int:
    """Return the user who made the other end, as the kernel says."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(packed)[1])


def _mapped(file: int, text: bytes) -> NDArray[np.uint8]:
    """Return the pool behind a descriptor, checked against what its owner says of it."""
    info = PeerInfo.from_text(text)
    shape = (info.layout.layers, info.blocks, info.layout.block_bytes)
    return np.frombuffer(mmap.mmap(file, int(np.prod(shape))), np.uint8).reshape(shape)
