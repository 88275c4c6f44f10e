"""Addresses as people write them, and what is said of one that does not answer."""

import asyncio
import errno
import socket

import pytest

from phasesplit.errors import SpecError
from phasesplit.launcher.announcing import http_address, unreached
from phasesplit.replay.client import find_endpoint


@pytest.mark.parametrize("text", ["http://127.0.0.1:8080", "https://host", "http://[::1]:1", "http://a.b:65535/v1"])
def test_an_address_is_taken_as_it_is(text: str) -> None:
    """A server behind a prefix, or on IPv6, could not be asked."""
    assert http_address(text, "URL").geturl() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "http://127.0.0.1:99999",
            "URL http://127.0.0.1:99999, port: got '99999', allowed is a whole number from 1 to",
        ),
        ("http://127.0.0.1:0", "port: got '0', allowed is a whole number from 1 to 65535"),
        ("http://host:80a0", "port: got '80a0'"),
        ("http://key@host:-1", "port: got '-1'"),
        ("127.0.0.1:8080", "URL: got '127.0.0.1:8080', allowed is an address such as http://127.0.0.1:8080"),
        ("ftp://host", "URL: got 'ftp://host'"),
        ("http://", "URL: got 'http://'"),
        ("http://:80", "URL: got 'http://:80'"),
        ("http://[::1", "URL: got 'http://[::1'"),
        ("http://a..b", "URL: got 'http://a..b'"),
        ("http://a b", "URL: got 'http://a b'"),
    ],
)
def test_what_is_no_address_is_refused_before_anybody_is_asked(text: str, message: str) -> None:
    """A mistyped port would look like a server that is down, or end in a traceback of a library."""
    with pytest.raises(SpecError) as caught:
        http_address(text, "URL")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 9)"), "nothing listens there"),
        (socket.gaierror(-2, "Name or service not known"), "no host of this name is found (Name or service not known)"),
        (TimeoutError(), "does not answer"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no way leads to this host"),
        (OSError(errno.EPIPE, "Broken pipe"), "cannot be reached (Broken pipe)"),
        (ValueError(), "cannot be reached (ValueError)"),
    ],
)
def test_why_nobody_answers_is_said_in_words(problem: BaseException, words: str) -> None:
    """A person would not know whether the address is wrong or the server is down."""
    assert unreached(problem).startswith(words)


def test_an_endpoint_that_is_not_there_is_told_from_one_that_is_something_else() -> None:
    """A person would look for a server that runs, or wonder why a web page has no models."""

    async def serve_a_page(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 4\r\n\r\n<br>")
        writer.close()

    async def scenario() -> list[str]:
        server = await asyncio.start_server(serve_a_page, "127.0.0.1", 0)
        here = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        said = []
        for url in (here, "http://127.0.0.1:1", "http://no-such-host.invalid"):
            with pytest.raises(SpecError) as caught:
                await find_endpoint(url)
            said.append(str(caught.value).removeprefix(url))
        server.close()
        return said

    page, closed, unknown = asyncio.run(scenario())
    assert page == "/v1/models: answers with something else than JSON; no OpenAI-compatible API"
    assert closed == ": nothing listens there (connection refused)"
    assert unknown.startswith(": no host of this name is found")
