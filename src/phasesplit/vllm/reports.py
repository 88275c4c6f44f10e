"""The connection between the process that computes and the worker process that reports for it to the gateway.

A Unix socket that keeps the borders of messages; each is a JSON object. The connector sends the machine's KV layout,
its address and its link as measured (`{"hello": ...}`), what happens to keys (`prefill_started`, `kv_ready`, `kv_left`,
`gone`, `missed`) and figures (`{"transfers": ...}`). The worker sends `{"abort": key}` and
`{"threshold_tokens": tokens}`.
"""

import json
import logging
import socket
from typing import Any

LONGEST_BYTES = 1 << 16
"""Longest message: an end reads so much at once."""
_log = logging.getLogger(__name__)


class Reports:
    """The connector's end.

    Args:
        path: Where the worker listens; None: there is none, and reports are dropped.

    Raises:
        OSError: Nobody listens there.
    """

    def __init__(self, path: str | None) -> None:
        self._socket: socket.socket | None = None
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._socket.connect(path)
            self._socket.setblocking(False)

    @property
    def is_connected(self) -> bool:
        """Whether there is a worker to report to."""
        return self._socket is not None

    def send(self, report: dict[str, Any]) -> None:
        """Send a report; one that cannot be sent now is lost, for computing does not wait for it.

        `orders` raises when the other end is gone.
        """
        if self._socket is None:
            return
        text = json.dumps(report).encode()
        if len(text) > LONGEST_BYTES:
            _log.error("a report of %d bytes is lost, allowed are %d: %s", len(text), LONGEST_BYTES, text[:80])
            return
        try:
            self._socket.send(text)
        except OSError as problem:
            _log.warning("a report is lost: %s: %s", problem, text[:80])

    def orders(self) -> list[dict[str, Any]]:
        """Return the worker's orders since the last call.

        Raises:
            ConnectionError: The other end is gone.
        """
        found: list[dict[str, Any]] = []
        while self._socket is not None:
            try:
                text = self._socket.recv(LONGEST_BYTES)
            except BlockingIOError:
                break
            if not text:
                raise ConnectionResetError("the process that reports for this machine is gone")
            found.append(json.loads(text))
        return found

    def fileno(self) -> int:
        """Return a descriptor to wait for, -1 if there is none."""
        return -1 if self._socket is None else self._socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
