"""One iteration's shape, how long it took in each run, and which of the runs count."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_SPIKE_DEVIATIONS = 5.0
_SPIKE_SHARE = 0.05
_NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution by its median absolute deviation."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shape:
    """What an iteration computes.

    Attributes:
        prompts: Prompts in the batch, all alike, >= 0.
        prompt_tokens: Tokens that each of them computes, >= 1 where there are any.
        behind_tokens: Tokens before those, whose KV is there, >= 0.
        requests: Requests in decode, all alike, >= 0.
        context_tokens: Tokens that each of them attends to, >= 1 where there are any.
    """

    prompts: int = 0
    prompt_tokens: int = 0
    behind_tokens: int = 0
    requests: int = 0
    context_tokens: int = 0

    @property
    def phase(self) -> str:
        """`prompt`, `token` or `mixed`."""
        return "prompt" if not self.requests else "mixed" if self.prompts else "token"

    @property
    def batch_tokens(self) -> int:
        """Prompt tokens of the batch."""
        return self.prompts * self.prompt_tokens

    @property
    def pairs(self) -> float:
        """Pairs of a prompt token and a token that it attends to, as `domain.profile.PhaseTimes` counts them."""
        return self.prompts * self.prompt_tokens * (self.prompt_tokens / 2 + self.behind_tokens)

    @property
    def context(self) -> int:
        """Tokens that decode attends to, over all its requests."""
        return self.requests * self.context_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV has to have room."""
        return self.prompts * (self.prompt_tokens + self.behind_tokens) + self.context

    def __str__(self) -> str:
        behind = f" behind {self.behind_tokens:,}" if self.behind_tokens else ""
        prompt = f"{self.prompts} x {self.prompt_tokens:,} prompt tokens{behind}" if self.prompts else ""
        token = f"{self.requests} requests at context {self.context_tokens:,}" if self.requests else ""
        return " with ".join(part for part in (prompt, token) if part)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An iteration with the times of its runs.

    The host takes the processor away now and then, for 100 ms at a time. A run longer than the median by more than 5
    robust standard deviations, and by more than 5 %, is such a spike: it is counted and left out. Nothing makes a run
    shorter than it is, so short ones stay.

    Attributes:
        shape: What was computed.
        runs_s: Seconds of every run, spikes among them, at least one.
        is_held_out: Whether it only checks the fit.
    """

    shape: Shape
    runs_s: tuple[float, ...]
    is_held_out: bool = False

    @cached_property
    def kept_s(self) -> Floats:
        """Runs that count, (k,), k >= 1."""
        runs_s = np.array(self.runs_s)
        middle_s = float(np.median(runs_s))
        deviation_s = _NORMAL_MAD * float(np.median(np.abs(runs_s - middle_s)))
        return runs_s[runs_s <= middle_s + max(_SPIKE_DEVIATIONS * deviation_s, _SPIKE_SHARE * middle_s)]

    @cached_property
    def median_s(self) -> float:
        """Median of the runs that count."""
        return float(np.median(self.kept_s))

    @property
    def spread_s(self) -> float:
        """Half the distance between the quartiles of the runs that count."""
        low_s, high_s = np.quantile(self.kept_s, [0.25, 0.75])
        return float(high_s - low_s) / 2

    @property
    def rejected(self) -> int:
        """Runs that were spikes."""
        return len(self.runs_s) - self.kept_s.size

    @property
    def doubt(self) -> float:
        """Relative standard error of the median; 1 over the number of runs below four, where none can be told.

        Source: 1.25 standard deviations over the root of the number, for a normal distribution.
        """
        if self.kept_s.size < 4:
            return 0.05 / self.kept_s.size
        return 1.25 * (self.spread_s / 0.6745) / math.sqrt(self.kept_s.size) / self.median_s

    def with_runs(self, runs_s: tuple[float, ...]) -> "Timed":
        """Return the same with more runs."""
        return replace(self, runs_s=self.runs_s + runs_s)
