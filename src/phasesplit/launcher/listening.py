"""An ASGI application behind a socket, inside an event loop that somebody else runs.

`Listening` binds the socket at once and serves later. `bounded_protocol` gives the head of a request a deadline, which
uvicorn lacks: a client that sends a byte a minute is disconnected.
"""

import asyncio
import contextlib
import importlib.util
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import uvicorn

from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

_KEEP_ALIVE_S = 75
_BACKLOG = 2048


ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_ELSEWHERE = "192.0.2.1"
"""An address that no host has. Source: RFC 5737."""


def outward_host() -> str:
    """Return the address at which most other hosts reach this one, that of the default route; empty without one.

    Nothing is sent.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE, 9))
        return str(probe.getsockname()[0])
    return ""


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: whoever runs the process decides what Ctrl-C means."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


class Listening:
    """A socket that is bound at once, and served from `start` to `stop`.

    Attributes:
        host: Host it is bound to.
        port: Its port, also where any free one was asked for.
        url: `http://host:port`, with a host that a client on this machine can use.
    """

    def __init__(self, host: str, port: int, *, where: str = "--host, --port") -> None:
        """Bind a socket.

        Args:
            host: Name or address.
            port: 0 to 65,535; 0 takes any free one.
            where: What an error calls the place that host and port stand in.

        Raises:
            SpecError: The address is not one of this machine's, or is taken.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except (OSError, OverflowError) as problem:
            self._socket.close()
            why = getattr(problem, "strerror", None) or str(problem)
            raise SpecError(f"{where}: cannot listen on {host} port {port}: {why}") from None
        self._socket.listen(_BACKLOG)
        self.host, self.port = host, int(self._socket.getsockname()[1])
        reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
        self.url = f"http://{reachable}:{self.port}"
        self._server: _Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, app: Any, *, header_s: float | None = None) -> None:
        """Serve an ASGI application; returns once it accepts requests.

        Args:
            app: The application.
            header_s: Seconds within which the head of a request must be here; None: no matter how long it takes.
        """
        config = uvicorn.Config(
            app,
            http="auto" if header_s is None else bounded_protocol(header_s),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = _Server(config)
        self._task = asyncio.ensure_future(self._server.serve([self._socket]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.002)
        if self._task.done():
            await self._task
            raise SpecError(f"the server on {self.url} did not start")

    async def stop(self) -> None:
        """Accept no more connections, give those that are open a second, and end."""
        if self._server is None or self._task is None:
            self._socket.close()
            return
        self._server.should_exit = True
        await asyncio.wait([self._task])


_ANSWER = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nContent-Length: 139\r\n"
    b"Connection: close\r\n\r\n"
    b'{"error":{"message":"the head of the request did not arrive in time","type":"invalid_request_error",'
    b'"param":null,"code":"request_timeout"}}'
)


def bounded_protocol(header_s: float) -> "type[asyncio.Protocol]":
    """Return the protocol to give to uvicorn as `http`.

    Args:
        header_s: Seconds from a connection's opening, or from the first byte of a later request on it, within which the
            request's head must be complete.
    """
    base: Any = _base()

    class DeadlineProtocol(base):  # type: ignore[misc]
        """Uvicorn's protocol, with a deadline for heads."""

        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._expect_head()

        def data_received(self, data: bytes) -> None:
            self._expect_head()
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
                self._deadline = self.loop.call_later(header_s, self._hang_up)

        def _stop_waiting(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _hang_up(self) -> None:
            if not self.transport.is_closing():
                self.transport.write(_ANSWER)
                self.transport.close()

    return DeadlineProtocol


def _base() -> "type[H11Protocol]":
    if importlib.util.find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        return HttpToolsProtocol  # type: ignore[return-value]
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return H11Protocol
