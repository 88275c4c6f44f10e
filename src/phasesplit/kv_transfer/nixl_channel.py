"""NIXL (RDMA, or whatever UCX finds): one-sided writes into the receiver's pool; messages pass a TCP connection.

The receiver's registered memory goes to a sender with the WELCOME, so a peer that was refused cannot write. A
frame's message leaves when its write is complete at the receiver. Messages of the peer are not read while a write is on
its way, so the connection of a sender that was cut ends after its last write: its end proves that the sender stopped.

Needs the package `nixl`. Threads of UCX run next to ours; no call waits. The binding's errors have no common base.
"""

import base64
import contextlib
import importlib
import json
import socket
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.kv_transfer.channel import Condition, Place
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.messages import Message, MessageKind
from phasesplit.kv_transfer.tcp import TcpChannel, TcpListener, connecting_socket

_DRAM = "DRAM"


def nixl_agent(name: str) -> Any:
    """Return an agent with UCX below it; one is enough for a process, and its start takes a third of a second.

    Args:
        name: Unlike that of any other agent it meets: machine and epoch, say.

    Raises:
        ImportError: NIXL is not installed.
    """
    api = importlib.import_module("nixl._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


class NixlMemory:
    """A pool of KV blocks that an agent may read, and remote ones may write.

    Args:
        agent: From `nixl_agent`.
        pool: KV blocks, uint8 (layers, blocks, block bytes), contiguous.
    """

    def __init__(self, agent: Any, pool: NDArray[np.uint8]) -> None:
        self.agent = agent
        self.pool = pool
        self._registered: Any = agent.register_memory([(pool.ctypes.data, pool.nbytes, 0, "")], _DRAM)

    def card(self) -> dict[str, Any]:
        """Return what a sender must know to write here, as JSON can say it."""
        metadata: bytes = self.agent.get_agent_metadata()
        return {"metadata": base64.b64encode(metadata).decode(), "address": self.pool.ctypes.data}

    def close(self) -> None:
        """Give the memory back; a second call changes nothing."""
        if self._registered is not None:
            self.agent.deregister_memory(self._registered)
        self._registered = None


class NixlChannel:
    """One end.

    Args:
        connection: A connected TCP socket; the channel owns it.
        memory: The pool at this end.
        receives: Whether this is the receiver's end.
    """

    def __init__(self, connection: socket.socket, memory: NixlMemory, *, receives: bool) -> None:
        self._socket = connection
        self._control = TcpChannel(connection, brings_bytes=False)
        self._memory = memory
        self._receives = receives
        self._remote = ""
        self._strides = (0, 0, 0)  # address, bytes of a layer and of a block of the receiver's pool
        self._write: Any = None
        self._written: Message | None = None  # its write has begun, and the message has not left
        self._is_cut = False
        self._failed = ""

    @property
    def condition(self) -> Condition:
        """See `Channel.condition`."""
        return Condition.LOST if self._failed else self._control.condition

    @property
    def why(self) -> str:
        """See `Channel.why`."""
        return self._failed or self._control.why

    def offer(self, message: Message, payload: NDArray[np.uint8] | None) -> bool:
        """See `Channel.offer`; one frame at a time is on its way."""
        if self.condition is not Condition.OPEN or self._is_cut or not self.flush():
            return False
        if payload is not None:
            return self._begin(message, payload)
        if message.kind is MessageKind.WELCOME and self._receives:
            text = {"peer": message.text.decode(), **self._memory.card()}
            message = Message(MessageKind.WELCOME, text=json.dumps(text).encode())
        return self._control.offer(message, None)

    def flush(self) -> bool:
        """See `Channel.flush`."""
        if self._write is not None and not self._has_written():
            return False
        if self._written is not None and self._control.offer(self._written, None):
            self._written = None
        return self._control.flush() and self._written is None

    def poll(self, place: Place) -> list[Message]:
        """See `Channel.poll`; frames are in their place already."""
        del place
        self.flush()
        if self._write is not None:
            return []
        come = self._control.poll(lambda _: None)
        if self.condition is not Condition.OPEN:
            self._give_back()
        if self._is_cut:
            return []
        return [self._on_welcome(message) if message.kind is MessageKind.WELCOME else message for message in come]

    def cut(self) -> None:
        """See `Channel.cut`: only the end of the peer's connection proves that it writes no more."""
        self._is_cut = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """See `Channel.close`."""
        self._give_back()
        self._control.close()

    def fileno(self) -> int:
        """See `Channel.fileno`."""
        return self._control.fileno()

    def _begin(self, message: Message, payload: NDArray[np.uint8]) -> bool:
        """Begin to write a frame into the receiver's pool."""
        if not self._remote:
            self._end("the receiver has not said where its memory is")
            return False
        agent = self._memory.agent
        address, layer_bytes, block_bytes = self._strides
        there = address + message.layer * layer_bytes + message.first_block * block_bytes
        ours = agent.get_xfer_descs([(payload.ctypes.data, payload.nbytes, 0)], _DRAM)
        theirs = agent.get_xfer_descs([(there, payload.nbytes, 0)], _DRAM)
        try:
            self._write = agent.initialize_xfer("WRITE", ours, theirs, self._remote)
            agent.transfer(self._write)
        except Exception as error:
            self._end(str(error))
            return False
        self._written = message
        self.flush()
        return True

    def _has_written(self) -> bool:
        """Return whether no write is on its way."""
        try:
            state = self._memory.agent.check_xfer_state(self._write)
        except Exception as error:
            self._end(str(error))
            return True
        if state == "PROC":
            return False
        if state != "DONE":
            self._end(f"a write is in state {state}")
            return True
        self._memory.agent.release_xfer_handle(self._write)
        self._write = None
        return True

    def _on_welcome(self, message: Message) -> Message:
        """Take in where the receiver's memory is, and return the welcome without it."""
        try:
            card = json.loads(message.text)
            text = str(card["peer"]).encode()
            info = PeerInfo.from_text(text)
            block_bytes = info.layout.block_bytes
            self._strides = (int(card["address"]), info.blocks * block_bytes, block_bytes)
            name = self._memory.agent.add_remote_agent(base64.b64decode(card["metadata"]))
            self._remote = name.decode() if isinstance(name, bytes) else str(name)
        except Exception as error:
            self._end(f"not a welcome: {error}")
            return message
        return Message(MessageKind.WELCOME, text=text)

    def _give_back(self) -> None:
        """Stop what is on its way, and forget the receiver's memory."""
        agent = self._memory.agent
        if self._write is not None:
            with contextlib.suppress(Exception):  # it has ended, or NIXL ends it later
                agent.release_xfer_handle(self._write)
        self._write = self._written = None
        if self._remote:
            with contextlib.suppress(Exception):  # another channel to the same machine has forgotten it
                agent.remove_remote_agent(self._remote)
        self._remote = ""

    def _end(self, why: str) -> None:
        self._failed = self._failed or why
        self.close()


class NixlListener:
    """Takes connections.

    Args:
        memory: The receiver's pool.
        host: Address to listen at; by default no other host reaches it.
        port: Port, by default any free one.

    Raises:
        OSError: It cannot listen there.
    """

    def __init__(self, memory: NixlMemory, host: str = "127.0.0.1", port: int = 0) -> None:
        self._memory = memory
        self._listener = TcpListener(host, port)

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self._listener.address

    def accept(self) -> NixlChannel | None:
        """Return the next connection, or None if there is none now, or no handle is left for it."""
        connection = self._listener.accept_socket()
        return NixlChannel(connection, self._memory, receives=True) if connection else None

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when there is a connection."""
        return self._listener.fileno()

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


def connect_nixl(address: tuple[str, int], memory: NixlMemory) -> NixlChannel:
    """Return a channel to a listener; see `connect_tcp`.

    Args:
        address: Host and port.
        memory: The sender's pool.

    Raises:
        OSError: There is no way to such an address.
    """
    return NixlChannel(connecting_socket(address), memory, receives=False)
