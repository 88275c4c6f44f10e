"""What the gateway expects of the future: how long outputs get, how fast prompts are computed, how much may wait."""

from dataclasses import dataclass
from typing import NamedTuple

from phasesplit.errors import SpecError

SOON_S = 1.0
"""The earliest that a client is asked to come back."""


class OutputLength:
    """The running mean of output lengths, which rules count on before they know better.

    It begins at `START` with the weight of ten outputs, and always weighs the last thousand outputs most.
    Source: ours; the published simulator knows the true lengths.
    """

    START = 128

    def __init__(self) -> None:
        self._mean = float(self.START)
        self._weight = 10

    def add(self, output_tokens: int) -> None:
        """Take the length of a finished output, >= 1."""
        self._weight = min(self._weight + 1, 1_000)
        self._mean += (output_tokens - self._mean) / self._weight

    def expected(self, most_output_tokens: int) -> int:
        """Return the length to expect of an output that ends at `most_output_tokens` at the latest, in tokens, >= 1."""
        return max(1, min(round(self._mean), most_output_tokens))


class PrefillRate:
    """How many prompt tokens per second a machine computes while it has prompts.

    The last minute or so of such time counts. Prompts that were given up count with their time, not with their tokens:
    the rate is rather too low.

    There is a rate once `TRUSTED_TOKENS` have been computed: a machine's first prompts may be slow, and requests that
    are turned away because of them would never show that it is fast. Until then machines are taken to be like the
    others, and where none is known, only the pending tokens are bounded (`Backlog.most_pending_tokens`). All tokens
    ever computed count for that: a machine so slow that a minute of it is fewer gets its rate too, only later.
    """

    TRUSTED_TOKENS = 1_000
    _REMEMBERED_S = 60.0

    def __init__(self) -> None:
        self._prompts = 0
        self._since_s = 0.0
        self._tokens = 0.0
        self._busy_s = 0.0
        self._ever_tokens = 0

    def begin(self, now_s: float) -> None:
        """Take in a prompt that waits or runs."""
        if self._prompts == 0:
            self._since_s = now_s
        self._prompts += 1

    def end(self, tokens: int, now_s: float) -> None:
        """Take out a prompt, of which so many tokens have been computed."""
        self._busy_s += max(0.0, now_s - self._since_s)
        self._since_s = now_s
        self._prompts -= 1
        self._tokens += tokens
        self._ever_tokens += tokens
        if self._busy_s > self._REMEMBERED_S:
            self._tokens /= 2
            self._busy_s /= 2

    def per_s(self) -> float | None:
        """Return the rate, None where too little has been measured."""
        if self._ever_tokens < self.TRUSTED_TOKENS or not (self._tokens and self._busy_s):
            return None
        return self._tokens / self._busy_s


class NoCapacity(NamedTuple):
    """Nothing can take the request now.

    Attributes:
        reason: Why, with figures.
        retry_after_s: Seconds after which it may be tried again, > 0.
    """

    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """How much prompt work may wait in the cluster before requests are turned away.

    Attributes:
        most_wait_s: Seconds of work, by the measured rate.
        most_pending_tokens: Prompt tokens that wait or run, whatever the rate.

    Raises:
        SpecError: A bound is not positive.
    """

    most_wait_s: float = 30.0
    most_pending_tokens: int = 1 << 18

    def __post_init__(self) -> None:
        for name in ("most_wait_s", "most_pending_tokens"):
            if not 0 < getattr(self, name) < float("inf"):
                raise SpecError.bad(f"backlog, {name}", getattr(self, name), "a positive number")

    def turned_away(self, pending_tokens: int, prompt_tokens: int, wait_s: float | None) -> NoCapacity | None:
        """Return why a prompt may not join those that are pending; None: it may.

        Where nothing is pending, any prompt may.

        Args:
            pending_tokens: Prompt tokens that wait or run, >= 0.
            prompt_tokens: Of the prompt.
            wait_s: How long it would wait, None where that is unknown.
        """
        if pending_tokens == 0:
            return None
        if wait_s is not None and wait_s > self.most_wait_s:
            reason = f"prompts wait {wait_s:.1f} s, allowed is {self.most_wait_s:g} s"
            # A rate that is measured while machines hang says little: nobody is sent away for long because of it.
            return NoCapacity(reason, max(SOON_S, min(wait_s - self.most_wait_s, self.most_wait_s)))
        if pending_tokens + prompt_tokens > self.most_pending_tokens:
            reason = (
                f"{pending_tokens} prompt tokens are pending, with this one's {prompt_tokens} there may be"
                f" {self.most_pending_tokens}"
            )
            return NoCapacity(reason, max(SOON_S, (wait_s or 0.0) / 2))
        return None
