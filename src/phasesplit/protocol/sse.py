"""Server-sent events: one JSON object an event, and the mark of a normal end; how they are written and read.

A stream that fails ends with an error event, and without the mark. Source: the WHATWG HTML standard, section 9.2; the
mark is OpenAI's.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import orjson

_DONE = b"[DONE]"
_LINE_BYTES = 1 << 24
"""Longest line of a machine's answer: log-probabilities of a whole prompt are one."""

CONTENT_TYPE = "text/event-stream; charset=utf-8"


class ByteReader(Protocol):
    """Who reads an answer, as aiohttp's StreamReader does."""

    async def readany(self) -> bytes:
        """Wait for bytes, and return all that are here; none at the end."""


def event(chunk: Mapping[str, Any]) -> bytes:
    """Return a chunk, or an error's body, as one event; JSON has no bare line break, so one line holds it."""
    return framed(orjson.dumps(chunk))


def framed(text: bytes) -> bytes:
    """Return a text without a line break as one event."""
    return b"data: " + text + b"\n\n"


DONE = framed(_DONE)
"""The last event of a stream that ended normally."""


async def answer_lines(content: ByteReader) -> AsyncIterator[bytes]:
    """Iterate over the whole lines of an answer as they come; many may come at once.

    Args:
        content: Who reads it.

    Raises:
        ValueError: A line is longer than 16 MiB.
    """
    rest = b""
    while part := await content.readany():
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) > _LINE_BYTES:
            raise ValueError("a line is too long")
        for line in lines:
            yield line.rstrip(b"\r")


def event_text(line: bytes) -> bytes | None:
    """Return what a line of a stream says, None for a line that says nothing: an empty one, a comment.

    Args:
        line: One line, with or without its line break.
    """
    return line[5:].strip() if line.startswith(b"data:") else None


def chunk_text(line: bytes) -> bytes | None:
    """Return the JSON object that a line of a stream holds, not parsed; None for all other lines, the mark among them.

    Args:
        line: See `event_text`.
    """
    text = event_text(line)
    return text if text is not None and text.startswith(b"{") else None


def is_done(text: bytes) -> bool:
    """Return whether an event's text is the mark of a normal end."""
    return text == _DONE
