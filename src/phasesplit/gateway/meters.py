"""What the gateway counts. Plain numbers, so that counting a token costs next to nothing; `metrics` shows them."""

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

from phasesplit.gateway.stages import STAGES

if TYPE_CHECKING:
    from phasesplit.gateway.request import LiveRequest
    from phasesplit.gateway.states import Event

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
            self.prompt_tokens += len(choice.order.prompt_ids)
            self.e2e.add(stages.last_token_s or 0.0)
            for stage, seconds in stages.durations().items():
                self.stages[stage].add(seconds)
