"""Events of streams: what one side writes, the other reads."""

import asyncio
from collections.abc import Sequence

import orjson
import pytest

from phasesplit.protocol.sse import DONE, answer_lines, chunk_text, event, event_text, framed, is_done


class Parts:
    """An answer that comes in parts.

    Args:
        parts: The parts, none of them empty.
    """

    def __init__(self, parts: Sequence[bytes]) -> None:
        self._parts = [*parts, b""]

    async def readany(self) -> bytes:
        return self._parts.pop(0)


async def read(parts: Sequence[bytes]) -> list[bytes]:
    return [line async for line in answer_lines(Parts(parts))]


def test_event_is_one_line() -> None:
    """A line break in the text would end the event in its middle."""
    sent = event({"text": "a\n\nb\r漢"})
    assert (sent[:6], sent[-2:], sent[:-2].count(b"\n") + sent.count(b"\r")) == (b"data: ", b"\n\n", 0)
    assert orjson.loads(sent[6:]) == {"text": "a\n\nb\r漢"}
    assert sent == framed(orjson.dumps({"text": "a\n\nb\r漢"}))
    assert DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_what_is_written_is_read(size: int) -> None:
    """A chunk would be lost or read twice where a machine's answer is cut."""
    stream = event({"a": 1}) + b": still here\r\n\r\n" + event({"b": "x\ny"}) + DONE
    lines = asyncio.run(read([stream[at : at + size] for at in range(0, len(stream), size)]))
    chunks = [orjson.loads(text) for line in lines if (text := chunk_text(line)) is not None]
    assert chunks == [{"a": 1}, {"b": "x\ny"}]
    texts = [text for line in lines if (text := event_text(line)) is not None]
    assert [is_done(text) for text in texts] == [False, False, True]


def test_line_without_end_is_refused() -> None:
    """A machine that sends one endless line would fill the gateway's memory."""
    with pytest.raises(ValueError, match="too long"):
        asyncio.run(read([b"x" * (1 << 24), b"xx"]))
