"""The story of one request: what happened to it, in order, with times and reasons.

It is for a person who asks why a request took so long or failed. Metrics count, and records say how a request ended; a
story says what came before. It keeps at most `MOST_EVENTS` entries: a run of tokens is one entry, and what does not fit
is left out of the middle, since the beginning and the end explain most.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

MOST_EVENTS = 64
"""Entries of one story."""
MOST_STORIES = 1_000
"""Stories of ended requests that a gateway keeps."""

_REASON_CHARACTERS = 300
_RUNS = frozenset({"token"})
"""Events of which those in a row are one entry."""


@dataclass(slots=True)
class StoryEntry:
    """One event, or a run of the same one.

    Attributes:
        at_s: When it happened first, seconds after the arrival of the request.
        event: What happened: an event of `states.Event`, "arrived" or "waits".
        state: The state of the request afterwards.
        attempt: The attempt that the request was at, 0 before the first.
        why: The reason, empty where there is none.
        changed: Whether it changed anything; False for what came too late or twice.
        count: How often it happened in a row, >= 1.
        until_s: When it happened last.
    """

    at_s: float
    event: str
    state: str
    attempt: int
    why: str
    changed: bool
    count: int
    until_s: float

    def shown(self) -> dict[str, Any]:
        """Return it as JSON has it; fields that say nothing are left out."""
        shown: dict[str, Any] = {
            "at_s": round(self.at_s, 6), "event": self.event, "state": self.state, "attempt": self.attempt,
        }  # fmt: skip
        if self.count > 1:
            shown |= {"count": self.count, "until_s": round(self.until_s, 6)}
        if self.why:
            shown["why"] = self.why
        return shown if self.changed else shown | {"ignored": True}

    def __str__(self) -> str:
        """Return it as a line of text."""
        times = f" x{self.count} until {self.until_s:.3f} s" if self.count > 1 else ""
        why = f": {self.why}" if self.why else ""
        ignored = "" if self.changed else " (ignored)"
        return f"{self.at_s:9.3f} s  attempt {self.attempt}  {self.event}{times} -> {self.state}{ignored}{why}"


class Story:
    """The events of one choice of a request.

    Attributes:
        name: The choice: the number of the request, "-", and its place among the choices.
        omitted: Entries left out of the middle.
    """

    __slots__ = ("_first", "_latest", "name", "omitted")

    def __init__(self, name: str) -> None:
        """Begin a story without events."""
        self.name = name
        self.omitted = 0
        self._first: list[StoryEntry] = []
        self._latest: deque[StoryEntry] = deque(maxlen=MOST_EVENTS // 2)

    def add(
        self, at_s: float, event: str, state: str, attempt: int, *, why: object = None, changed: bool = True
    ) -> None:
        """Add an event.

        Args:
            at_s: When, seconds after the arrival of the request.
            event: See `Entry`.
            state: See `Entry`.
            attempt: See `Entry`.
            why: The reason; its text is shortened to 300 characters.
            changed: See `Entry`.
        """
        if event in _RUNS:
            last = self._latest[-1] if self._latest else self._first[-1] if self._first else None
            if last is not None and (last.event, last.state, last.attempt, last.changed) == (
                event,
                state,
                attempt,
                changed,
            ):
                last.count += 1
                last.until_s = at_s
                return
        reason = "" if why is None else str(why)[:_REASON_CHARACTERS]
        entry = StoryEntry(at_s, event, state, attempt, reason, changed, 1, at_s)
        if len(self._first) < MOST_EVENTS - MOST_EVENTS // 2:
            self._first.append(entry)
            return
        self.omitted += len(self._latest) == self._latest.maxlen
        self._latest.append(entry)

    def entries(self) -> tuple[StoryEntry, ...]:
        """Return the entries that are kept, oldest first."""
        return (*self._first, *self._latest)

    def shown(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {"request": self.name, "omitted": self.omitted, "events": [entry.shown() for entry in self.entries()]}

    def __str__(self) -> str:
        """Return it as lines of text, for messages of tests and logs."""
        return "\n".join((f"request {self.name}", *map(str, self.entries())))


class Stories:
    """The stories of requests that have ended, the latest `MOST_STORIES` of them."""

    def __init__(self) -> None:
        self._ended: deque[Story] = deque(maxlen=MOST_STORIES)

    def keep(self, story: Story) -> None:
        """Keep the story of a request that has ended; the oldest one goes where there are too many."""
        self._ended.append(story)

    def of(self, name: str, live: Iterable[Story]) -> list[Story]:
        """Return the stories of a request, or of one choice of it, in the order of their arrival.

        Args:
            name: The request's number, the `id` of its answer, or the name of one choice.
            live: The stories of the requests that are served now.
        """
        number = name.removeprefix("chatcmpl-").removeprefix("cmpl-")
        found = [
            story for story in (*self._ended, *live) if story.name == number or story.name.rpartition("-")[0] == number
        ]
        return sorted(found, key=lambda story: int(story.name.rpartition("-")[2]))
