"""Where the two sides of a split request meet, on the decode machine.

Both legs are sent at once, and each knows only what the gateway said. The prefill machine calls when its prefill is
over: it hands over what vLLM's own connector needs to fetch the KV, where that one is used, and gets the token
machine's first token back. vLLM's decode machine computes the last position of the prompt again in order to sample, so
it is its token that the text goes on from, and in half precision the two may differ.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_REMEMBERED = 1_000
"""First tokens that are kept for a prefill machine that calls late."""


class Meeting:
    """One request's.

    Attributes:
        handover: What the prefill machine hands over.
        first: The decode machine's first choice object, None where it came to none.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.handover: asyncio.Future[dict[str, Any]] = loop.create_future()
        self.first: asyncio.Future[dict[str, Any] | None] = loop.create_future()
        self.guests = 0

    def hand_over(self, params: dict[str, Any]) -> None:
        """Let the decode machine go on."""
        if not self.handover.done():
            self.handover.set_result(params)

    def tell_first(self, choice: dict[str, Any] | None) -> None:
        """Let the prefill machine know the first token; only the first call counts."""
        if not self.first.done():
            self.first.set_result(choice)


class Meetings:
    """All that somebody is at, and the first tokens of the latest that have ended.

    A decode machine may end a short answer before the prefill machine calls.
    """

    def __init__(self) -> None:
        self._meetings: dict[str, Meeting] = {}
        self._firsts: dict[str, dict[str, Any]] = {}

    @contextmanager
    def at(self, key: str) -> Iterator[Meeting]:
        """Be at the meeting of a key; it ends when both sides have gone."""
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = Meeting()
            if key in self._firsts:
                meeting.tell_first(self._firsts.pop(key))
        meeting.guests += 1
        try:
            yield meeting
        finally:
            meeting.guests -= 1
            if not meeting.guests:
                del self._meetings[key]
                self._remember(key, meeting)

    def _remember(self, key: str, meeting: Meeting) -> None:
        first = meeting.first.result() if meeting.first.done() and not meeting.first.cancelled() else None
        if first is not None:
            self._firsts[key] = first
        if len(self._firsts) > _REMEMBERED:
            del self._firsts[next(iter(self._firsts))]
