"""Addresses that a person writes (`http://HOST:PORT`), and what keeps one from answering, in words."""

import errno
import socket
from urllib.parse import SplitResult, urlsplit

from phasesplit.errors import SpecError

_MOST_PORT = 65_535


def http_address(text: str, where: str, allowed: str = "an address such as http://127.0.0.1:8080") -> SplitResult:
    """Return the parts of an address.

    Args:
        text: The address.
        where: The option or argument that it was given with.
        allowed: What is, where it is none.

    Raises:
        SpecError: It is no address of http or https, or its port is wrong.
    """
    try:
        parts = urlsplit(text)
        name = parts.hostname or ""
        name.encode("idna")  # the resolver does not explain a name that cannot be one
    except ValueError:
        raise SpecError.bad(where, text, allowed) from None
    if parts.scheme not in ("http", "https") or not name or any(one.isspace() for one in text):
        raise SpecError.bad(where, text, allowed)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        written = parts.netloc.rpartition("@")[2].rpartition(":")[2]
        raise SpecError.bad(f"{where} {text}, port", written, f"a whole number from 1 to {_MOST_PORT}")
    return parts


def unreached(problem: BaseException) -> str:
    """Return why an address was not reached, as a phrase that follows it."""
    if isinstance(problem, TimeoutError):
        return "does not answer"
    if isinstance(problem, socket.gaierror):
        return f"no host of this name is found ({problem.strerror})"
    number = getattr(problem, "errno", None)
    if number == errno.ECONNREFUSED:
        return "nothing listens there (connection refused)"
    if number in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no way leads to this host"
    return f"cannot be reached ({getattr(problem, 'strerror', None) or str(problem) or type(problem).__name__})"
