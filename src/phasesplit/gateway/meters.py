"""What the gateway counts. Plain numbers, so that counting a token costs next to nothing; `metrics` shows them.

`RequestStages` has the instants of one choice, from which metrics, traces and the record of each finished choice are
made. `Meters` has the counts of all.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasesplit.gateway.live_request import LiveRequest
    from phasesplit.gateway.request_states import Event


STAGES = ("queue", "prefill", "transfer", "wait", "decode")
"""What a choice goes through, in order."""


@dataclass(slots=True)
class RequestStages:
    """Instants of one choice, those of the last attempt that began from nothing.

    Attempts that went on behind its output add their tokens, no stages: the pause before them is a gap between tokens.

    Attributes:
        arrival_unix_s: Its arrival, seconds since 1970; all others are seconds after it, None where never reached.
        assigned_s: Its pair was chosen.
        prefill_started_s: Its prefill phase began to run.
        first_token_s: Its first token was here.
        kv_ready_s: All its KV was on its decode machine; None too where that was lost before.
        second_token_s: Its second token was here.
        last_token_s: Its last token was here.
        longest_gap_s: The longest time between two tokens.
    """

    arrival_unix_s: float
    assigned_s: float | None = None
    prefill_started_s: float | None = None
    first_token_s: float | None = None
    kv_ready_s: float | None = None
    second_token_s: float | None = None
    last_token_s: float | None = None
    longest_gap_s: float | None = None

    def forget_attempt(self) -> None:
        """Forget what an attempt reached that has been given up."""
        self.assigned_s = self.prefill_started_s = self.first_token_s = self.kv_ready_s = None
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

    def prefill_took(self, prefill_s: float, at_s: float) -> None:
        """Set when the prefill phase began, from how long it took by its machine's report.

        Args:
            prefill_s: Seconds until the first token was out there.
            at_s: When that was reported, seconds after the arrival; the first token may have come another way before.
        """
        end_s = at_s if self.first_token_s is None else self.first_token_s
        self.prefill_started_s = min(end_s, max(self.assigned_s or 0.0, end_s - prefill_s))

    def durations(self) -> dict[str, float]:
        """Return the seconds of each stage that was gone through, see `intervals`."""
        return {stage: end_s - start_s for stage, (start_s, end_s) in intervals(self.record()).items()}

    def record(self) -> dict[str, Any]:
        """Return the instants as JSON has them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def intervals(instants: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return start and end of each stage that a choice went through, seconds after its arrival; none overlap.

    Queue is until the prefill phase runs, prefill until the first token. Transfer is what of it the first token did not
    hide; wait is from there to the second token, decode to the last.

    Args:
        instants: The instants of a `RequestStages`, by name.
    """
    names = ("prefill_started_s", "first_token_s", "kv_ready_s", "second_token_s", "last_token_s")
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


LATENCIES_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0,
    40.0, 80.0, 160.0, 320.0, 600.0,
)  # fmt: skip
"""Upper bounds of the buckets of all latencies, seconds."""


class Histogram:
    """Counts of latencies by bucket.

    Attributes:
        sum_s: All latencies together.
    """

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(LATENCIES_S) + 1)

    def add(self, seconds: float) -> None:
        """Count a latency."""
        self._counts[bisect_left(LATENCIES_S, seconds)] += 1
        self.sum_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper bound of each bucket, and how many latencies are not above it."""
        total, found = 0, []
        for bound, count in zip((*map(str, LATENCIES_S), "+Inf"), self._counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


class Meters:
    """All counts of one gateway.

    Attributes:
        outcomes: Choices that have ended, by how.
        responses: Answers, by path and HTTP status.
        absorbed_events: Events that came too late or twice, by event.
        retries: Attempts given up for another pair.
        continued: Of them, those whose output was kept, so that another pair went on behind it.
        prompt_tokens: Prompt tokens of completed choices.
        output_tokens: Output tokens, those of attempts that were given up included.
        ttft: Seconds to the first token.
        itl: Seconds between tokens.
        e2e: Seconds to the last token, of completed choices.
        stages: Seconds in each stage, of completed choices.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.responses: Counter[tuple[str, int]] = Counter()
        self.absorbed_events: Counter[str] = Counter()
        self.retries = 0
        self.continued = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.ttft = Histogram()
        self.itl = Histogram()
        self.e2e = Histogram()
        self.stages = {stage: Histogram() for stage in STAGES}

    def absorbed(self, event: "Event") -> None:
        """Count an event that changed nothing."""
        self.absorbed_events[str(event)] += 1

    def token(self, gap_s: float | None) -> None:
        """Count a token, and the seconds since the one before where there was one."""
        self.output_tokens += 1
        if gap_s is not None:
            self.itl.add(gap_s)

    def ended(self, choice: "LiveRequest") -> None:
        """Count a choice that has ended."""
        self.outcomes[choice.outcome] += 1
        stages = choice.stages
        if stages.first_token_s is not None:
            self.ttft.add(stages.first_token_s)
        if choice.outcome == "completed":
            self.prompt_tokens += len(choice.spec.prompt_ids)
            self.e2e.add(stages.last_token_s or 0.0)
            for stage, seconds in stages.durations().items():
                self.stages[stage].add(seconds)
