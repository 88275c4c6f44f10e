"""A worker announces itself to its gateway, and announces itself again when nobody listens to it.

`GatewayAddress` is the address that a person writes. `model_name` and `worker_name` are the names
that a worker has by default. `keep_announced` posts the announcement, and repeats it when the gateway is gone.
"""

import asyncio
import errno
import http.client
import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
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


_DEFAULT = "smollm2-135m-instruct"
_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def model_name(model: str) -> str:
    """Return the name of a model.

    Args:
        model: `default`, `tiny`, a path, or a hub's name.
    """
    if model.lower() in ("default", "smollm2-135m"):
        return _DEFAULT
    if model.lower() == "tiny":
        return "tiny"
    path = Path(model.removeprefix("hf:"))
    return (path.stem if path.suffix == ".gguf" else path.name).lower()


def worker_name(given: str | None, home: str) -> str:
    """Return the name of a worker: the one that a person gave it, or one of host, role and process.

    Raises:
        SpecError: It is none that may stand in logs, figures and paths.
    """
    if given is None:
        return f"{os.uname().nodename}-{home}-{os.getpid()}"
    if _WORKER.fullmatch(given) is None:
        raise SpecError.bad("--name", given, "1 to 128 letters, digits, and . _ - behind the first one")
    return given


_FIRST_WAIT_S, _MOST_WAIT_S = 0.05, 2.0
_REPEAT_S = 10.0
"""Also a worker that somebody listens to says so now and then: it may not be the gateway."""
_CALL_S = 5.0
_LOOK_S = 0.25
_LONGEST_ANSWER_BYTES = 1 << 16
_NOT_NOW = (408, 425, 429)
"""Answers from 400 on that say nothing about the worker; every other one below 500 is a refusal."""


class GatewayAddress(NamedTuple):
    """Where a gateway is.

    Attributes:
        scheme: `http` or `https`.
        host: Its host.
        port: Its port.
    """

    scheme: str
    host: str
    port: int

    @classmethod
    def from_text(cls, text: str, where: str = "--join") -> "GatewayAddress":
        """Return the gateway that a text names: `http://HOST:PORT`, `https://HOST` or `HOST:PORT`.

        Raises:
            SpecError: It is none of these.
        """
        allowed = "http://HOST:PORT of a gateway"
        parts = http_address(text if "://" in text else f"http://{text}", where, allowed)
        if parts.hostname is None or parts.path not in ("", "/"):
            raise SpecError.bad(where, text, allowed)
        return cls(parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))

    def own_host(self) -> str:
        """Return the address of this host that the gateway's network sees; nothing is sent."""
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self.host, self.port))
            except OSError as problem:
                raise SpecError(f"--join {self.host}: {unreached(problem)}") from None
            return str(probe.getsockname()[0])

    def post(self, path: str, content: dict[str, Any], key: str | None) -> tuple[int, str]:
        """Post JSON, and return status and body.

        Raises:
            OSError: The gateway cannot be reached.
        """
        kind = http.client.HTTPSConnection if self.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.host, self.port, timeout=_CALL_S)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        try:
            connection.request("POST", path, json.dumps(content), headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_LONGEST_ANSWER_BYTES).decode("utf-8", "replace")
        except http.client.HTTPException as problem:
            raise OSError(str(problem) or type(problem).__name__) from None
        finally:
            connection.close()


async def keep_announced(
    gateway: GatewayAddress,
    url: str,
    facts: Callable[[], dict[str, Any]],
    *,
    key: str | None,
    has_listener: Callable[[], bool],
    say: Callable[[str], None],
) -> None:
    """Announce a worker, and again whenever nobody listens to its events; endless, unless it is refused.

    A gateway that cannot be reached, or has trouble of its own, is tried again.

    Args:
        gateway: To whom.
        url: Where the worker can be reached.
        facts: Makes a snapshot of its facts.
        key: Join key, or None.
        has_listener: Whether somebody listens to its events.
        say: Called with what goes wrong twice in a row (a gateway may take a moment to start), once for each thing.

    Raises:
        SpecError: The gateway refuses the worker, for its key, its model or its name; asking again changes nothing.
    """
    place = f"{gateway.scheme}://{gateway.host}:{gateway.port}"
    wait_s, before, said = _FIRST_WAIT_S, "", ""
    while True:
        is_final, problem = await asyncio.to_thread(_announced, gateway, {"url": url, "facts": facts()}, key)
        if is_final:
            raise SpecError(f"{place} refuses this worker: {problem}")
        if problem and problem == before and problem != said:
            say(f"{place} does not take this worker: {problem}")
            said = problem
        before, said = problem, said if problem else ""
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _MOST_WAIT_S)
        quiet_s = 0.0
        while has_listener() and quiet_s < _REPEAT_S:
            wait_s = _FIRST_WAIT_S
            await asyncio.sleep(_LOOK_S)
            quiet_s += _LOOK_S


def _announced(gateway: GatewayAddress, content: dict[str, Any], key: str | None) -> tuple[bool, str]:
    """Announce once; return whether it was refused for good, and what went wrong, nothing where it was taken."""
    try:
        status, text = gateway.post("/workers", content, key)
    except OSError as problem:
        return False, unreached(problem)
    if status < 300:
        return False, ""
    is_final = 400 <= status < 500 and status not in _NOT_NOW
    try:
        return is_final, f"{status}, {json.loads(text)['error']['message']}"
    except (ValueError, KeyError, TypeError):
        return is_final, f"{status}, without a reason; what answers there may be no phasesplit gateway"
