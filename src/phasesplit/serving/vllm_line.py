"""The line to vLLM's connector: `phasesplit.vllm.reports` is its other end."""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable
from typing import Any

_LONGEST_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class ConnectorLine:
    """Listens for one connector.

    Args:
        path: Where; must not exist.
        hear: Takes each report.
    """

    def __init__(self, path: str, hear: Callable[[dict[str, Any]], None]) -> None:
        self._path, self._hear = path, hear
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._line: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Wait for the connector, and read what it reports until it ends."""
        self._task = asyncio.create_task(self._read())

    def abort(self, key: str) -> None:
        """Let the connector drop what it has of a key; nothing happens where there is no connector."""
        self._order({"abort": key})

    def set_threshold(self, tokens: int) -> None:
        """Let KV of prompts that begin from now on leave layer by layer if they have so many tokens, >= 0."""
        self._order({"threshold_tokens": tokens})

    def close(self) -> None:
        """Hang up: the connector's process ends then."""
        if self._task is not None:
            self._task.cancel()
        for end in (self._line, self._listener):
            if end is not None:
                end.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _order(self, order: dict[str, Any]) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(json.dumps(order).encode())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        self._line, _ = await loop.sock_accept(self._listener)
        while text := await loop.sock_recv(self._line, _LONGEST_BYTES):
            try:
                report = json.loads(text)
            except ValueError:
                _log.error("what the connector reports is not JSON: %d bytes, %s", len(text), text[:80])
                continue
            self._hear(report)
