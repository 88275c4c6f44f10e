"""When a choice reached what: the instants behind metrics, traces and the record that each finished choice leaves."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

STAGES = ("queue", "prefill", "transfer", "wait", "decode")
"""What a choice goes through, in order."""


@dataclass(slots=True)
class Stages:
    """Instants of one choice, those of the last attempt that began from nothing.

    Attempts that went on behind its output add their tokens, no stages: the pause before them is a gap between tokens.

    Attributes:
        arrival_unix_s: Its arrival, seconds since 1970; all others are seconds after it, None where never reached.
        assigned_s: Its pair was chosen.
        prompt_started_s: Its prompt phase began to run.
        first_token_s: Its first token was here.
        kv_ready_s: All its KV was on its token machine; None too where that was lost before.
        second_token_s: Its second token was here.
        last_token_s: Its last token was here.
        longest_gap_s: The longest time between two tokens.
    """

    arrival_unix_s: float
    assigned_s: float | None = None
    prompt_started_s: float | None = None
    first_token_s: float | None = None
    kv_ready_s: float | None = None
    second_token_s: float | None = None
    last_token_s: float | None = None
    longest_gap_s: float | None = None

    def forget_attempt(self) -> None:
        """Forget what an attempt reached that has been given up."""
        self.assigned_s = self.prompt_started_s = self.first_token_s = self.kv_ready_s = None
        self.second_token_s = self.last_token_s = self.longest_gap_s = None

    def token(self, place: int, at_s: float) -> float | None:
        """Take note of a token, and return the time since the one before.

        Args:
            place: Its place in the output, from 0.
            at_s: Seconds after the arrival.
        """
        gap_s = None if self.last_token_s is None or place == 0 else at_s - self.last_token_s
        if place == 0:
            self.first_token_s = at_s
        elif place == 1:
            self.second_token_s = at_s
        if gap_s is not None:
            self.longest_gap_s = max(gap_s, self.longest_gap_s or 0.0)
        self.last_token_s = at_s
        return gap_s

    def prompt_took(self, prompt_s: float, at_s: float) -> None:
        """Set when the prompt phase began, from how long it took by its machine's word.

        Args:
            prompt_s: Seconds until the first token was out there.
            at_s: When that was told, seconds after the arrival; the first token may have come on another way before.
        """
        end_s = at_s if self.first_token_s is None else self.first_token_s
        self.prompt_started_s = min(end_s, max(self.assigned_s or 0.0, end_s - prompt_s))

    def durations(self) -> dict[str, float]:
        """Return the seconds of each stage that was gone through, see `intervals`."""
        return {stage: end_s - start_s for stage, (start_s, end_s) in intervals(self.record()).items()}

    def record(self) -> dict[str, Any]:
        """Return the instants as JSON has them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def intervals(instants: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return start and end of each stage that a choice went through, seconds after its arrival; none overlap.

    Queue is until the prompt phase runs, prompt until the first token. Transfer is what of it the first token did not
    hide; wait is from there to the second token, decode to the last.

    Args:
        instants: The instants of a `Stages`, by name.
    """
    names = ("prompt_started_s", "first_token_s", "kv_ready_s", "second_token_s", "last_token_s")
    ends: list[float | None] = [0.0, *(instants[name] for name in names)]
    found: dict[str, tuple[float, float]] = {}
    latest_s = 0.0
    for stage, (start_s, end_s) in zip(STAGES, pairwise(ends), strict=True):
        if start_s is not None and end_s is not None:
            # The report that all KV is there may come before the first token.
            begin_s = max(start_s, latest_s)
            latest_s = max(begin_s, end_s)
            found[stage] = (begin_s, latest_s)
    return found
