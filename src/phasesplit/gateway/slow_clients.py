"""A deadline for the heads of requests, which uvicorn lacks: clients that send a byte a minute are hung up on."""

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import H11Protocol

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

    class Bounded(base):  # type: ignore[misc]
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

    return Bounded


def _base() -> "type[H11Protocol]":
    if importlib.util.find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        return HttpToolsProtocol  # type: ignore[return-value]
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return H11Protocol
