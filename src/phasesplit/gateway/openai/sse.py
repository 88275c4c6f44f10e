"""Server-sent events: one JSON object an event, and the mark of a normal end.

A stream that fails ends with an error event, and without the mark. Source: the WHATWG HTML standard, section 9.2; the
mark is OpenAI's.
"""

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended normally."""

CONTENT_TYPE = "text/event-stream; charset=utf-8"


def event(chunk: dict[str, Any]) -> bytes:
    """Return a chunk, or an error's body, as one event; JSON has no bare line break, so one line holds it."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
