"""TCP: frames go from the sender's pool to the kernel, and from the kernel into the receiver's pool, without a copy."""

import errno
import os
import socket

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.channel import Condition, Place
from phasesplit.kv_transfer.messages import HEADER_BYTES, Message, MessageKind, unpack

_POLL_BYTES = 64 * 1024 * 1024  # after so many, other channels have their turn
_POLL_MESSAGES = 1_000  # the same
_DISCARD_BYTES = 256 * 1024


class TcpChannel:
    """One end of a TCP connection.

    Args:
        connection: A connected socket; the channel owns it.
        brings_bytes: Whether the bytes of a frame come along with its message; else another way puts them in place.
    """

    def __init__(self, connection: socket.socket, *, brings_bytes: bool = True) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self._brings_bytes = brings_bytes
        self._unsent: list[memoryview] = []
        self._header = bytearray(HEADER_BYTES)
        self._message: Message | None = None
        self._text = bytearray()
        self._wanted = memoryview(self._header)
        self._discard = 0
        self._waste: memoryview | None = None
        self.condition = Condition.OPEN
        self.why = ""

    def offer(self, message: Message, payload: NDArray[np.uint8] | None) -> bool:
        """See `Channel.offer`; at most one message is partly sent, and its payload is read until it is."""
        if self.condition is not Condition.OPEN or not self.flush():
            return False
        self._unsent = [memoryview(message.pack())]
        if payload is not None:
            self._unsent.append(payload.data)
        self.flush()
        return True

    def flush(self) -> bool:
        """See `Channel.flush`."""
        while self._unsent and self.condition is Condition.OPEN:
            try:
                sent = self._socket.sendmsg(self._unsent)
            except BlockingIOError:
                return False
            except OSError as error:
                self._end(Condition.LOST, error)
                break
            while self._unsent and sent >= len(self._unsent[0]):
                sent -= len(self._unsent.pop(0))
            if sent:
                self._unsent[0] = self._unsent[0][sent:]
        return True

    def poll(self, place: Place) -> list[Message]:
        """See `Channel.poll`."""
        come: list[Message] = []
        budget_bytes = _POLL_BYTES
        while self.condition is Condition.OPEN and budget_bytes > 0 and len(come) < _POLL_MESSAGES:
            try:
                got = self._socket.recv_into(self._wanted)
            except BlockingIOError:
                break
            except OSError as error:
                self._end(Condition.LOST, error)
                break
            if not got:
                whole = self._message is None and len(self._wanted) == HEADER_BYTES
                self._end(Condition.CLOSED if whole else Condition.LOST)
                break
            budget_bytes -= got
            self._wanted = self._wanted[got:]
            if not len(self._wanted):
                self._step(place, come)
        return come

    def cut(self) -> None:
        """See `Channel.cut`; what the peer sends from now on goes nowhere."""
        self._end(Condition.CLOSED)

    def close(self) -> None:
        """See `Channel.close`."""
        self._end(Condition.CLOSED)

    def fileno(self) -> int:
        """See `Channel.fileno`; -1 when the channel has ended."""
        return self._socket.fileno()

    def _step(self, place: Place, come: list[Message]) -> None:
        """Take note that what was wanted is there, and say what is wanted next."""
        if self._message is None:
            try:
                self._message = unpack(self._header)
            except TransferError:
                self._end(Condition.DAMAGED)
                return
            self._aim(self._message, place)
        elif self._discard:
            self._discard_more()
        if len(self._wanted):
            return
        message = self._message
        if message.kind is not MessageKind.FRAME:
            message = unpack(self._header, bytes(self._text))
        come.append(message)
        self._message = None
        self._wanted = memoryview(self._header)

    def _aim(self, message: Message, place: Place) -> None:
        """Say where the bytes behind a header go."""
        if message.kind is not MessageKind.FRAME:
            self._text = bytearray(message.length_bytes)
            self._wanted = memoryview(self._text)
            return
        if not self._brings_bytes:
            return
        target = place(message)
        if target is not None:
            self._wanted = target.data
        else:
            self._discard = message.length_bytes
            self._discard_more()

    def _discard_more(self) -> None:
        if self._waste is None:
            self._waste = memoryview(bytearray(_DISCARD_BYTES))
        self._wanted = self._waste[: min(self._discard, _DISCARD_BYTES)]
        self._discard -= len(self._wanted)

    def _end(self, condition: Condition, error: OSError | None = None) -> None:
        if self.condition is Condition.OPEN:
            self.condition, self.why = condition, (error.strerror or "") if error else ""
        self._unsent = []
        self._wanted = memoryview(b"")
        self._socket.close()


class TcpListener:
    """Takes connections.

    Args:
        host: Address to listen at; by default no other host reaches it.
        port: Port, by default any free one.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._socket = socket.create_server((host, port))
        self._socket.setblocking(False)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def accept(self) -> TcpChannel | None:
        """Return the next connection, or None if there is none now, or no handle is left for it."""
        connection = self.accept_socket()
        return TcpChannel(connection) if connection else None

    def accept_socket(self) -> socket.socket | None:
        """Return the next connection as a socket, or None; see `accept`."""
        try:
            return self._socket.accept()[0]
        except OSError:
            return None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when there is a connection."""
        return self._socket.fileno()

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def connect_tcp(address: tuple[str, int]) -> TcpChannel:
    """Return a channel to a listener. Whether anybody listens there shows later, by the channel's condition.

    Args:
        address: Host and port; a host that is a name is looked up, which may wait.

    Raises:
        OSError: There is no way to such an address.
    """
    return TcpChannel(connecting_socket(address))


def connecting_socket(address: tuple[str, int]) -> socket.socket:
    """Return a socket that is being connected; see `connect_tcp`."""
    family, kind, protocol, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    number = connection.connect_ex(target)
    if number not in (0, errno.EINPROGRESS):
        connection.close()
        raise OSError(number, os.strerror(number))
    return connection
