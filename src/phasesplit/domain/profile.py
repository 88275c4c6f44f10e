"""How long one iteration takes: piecewise-linear phase times of one model on one machine."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PhaseTimes:
    """Times of prompt, token and mixed iterations.

    With B prompt tokens in the batch, prompt i of it computing c_i tokens behind h_i tokens already in its KV cache,
    n requests in decode and S tokens of context over those n requests:

    - prefill iteration: f(B) + prompt_pair_s x sum(c_i x c_i / 2 + c_i x h_i)
    - decode iteration:  g(n) + token_context_s x S
    - mixed iteration:  max(f(B + n), g(n)) + the prompt's pair term + token_context_s x S

    where f interpolates (`prompt_knots_tokens`, `prompt_knots_s`) and g (`token_knots_requests`, `token_knots_s`), both
    linearly, their first and last segments extended beyond the ends and never below zero. The matrix products of a
    mixed iteration run once over all its tokens (hence f(B + n)), attention apart for each phase (hence the sums).
    In an iteration of the published rules the pair and context terms are 0 and the mixed time is 1.1 x f(B + n).

    Attributes:
        source: Where the times come from, as a report prints it ("measured: ...", "roofline: ...").
        prompt_knots_tokens: float64 (p,), increasing, p >= 2.
        prompt_knots_s: float64 (p,).
        token_knots_requests: float64 (t,), increasing, t >= 2.
        token_knots_s: float64 (t,), at zero context.
        prompt_pair_s: Seconds for each pair of a prompt token and a token that it attends to, >= 0.
        token_context_s: Seconds for each token of context that a decode iteration reads, >= 0.
        measured_prompt_tokens: Largest B inside the data that the times rest on (beyond it they are extrapolated).
        measured_requests: Largest n inside that data.
        mean_error: Mean relative error against the measurements it was fitted to; NaN where there are none.
    """

    source: str
    prompt_knots_tokens: NDArray[np.float64]
    prompt_knots_s: NDArray[np.float64]
    token_knots_requests: NDArray[np.float64]
    token_knots_s: NDArray[np.float64]
    prompt_pair_s: float
    token_context_s: float
    measured_prompt_tokens: float
    measured_requests: float
    mean_error: float

    def prompt_time_s(self, prompt_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the time of an iteration that computes one whole prompt of so many tokens, alone."""
        tokens = np.asarray(prompt_tokens, dtype=np.float64)
        return (
            extended_interp(tokens, self.prompt_knots_tokens, self.prompt_knots_s) + self.prompt_pair_s * tokens**2 / 2
        )

    def token_time_s(self, requests: ArrayLike, context_tokens: ArrayLike) -> NDArray[np.float64]:
        """Return the time of a decode iteration over so many requests with so many tokens of context in all."""
        count = np.asarray(requests, dtype=np.float64)
        base = extended_interp(count, self.token_knots_requests, self.token_knots_s)
        return base + self.token_context_s * np.asarray(context_tokens, dtype=np.float64)

    def scaled(self, prompt_factor: float, token_factor: float) -> "PhaseTimes":
        """Return the times of the same machine made slower or faster in each phase (a power cap, a lower clock).

        Args:
            prompt_factor: Factor on prefill times, > 0.
            token_factor: Factor on decode times, > 0.
        """
        if prompt_factor == 1.0 and token_factor == 1.0:
            return self
        return replace(
            self,
            source=f"{self.source}; prompt times x {prompt_factor:g}, token times x {token_factor:g}, assumed",
            prompt_knots_s=self.prompt_knots_s * prompt_factor,
            token_knots_s=self.token_knots_s * token_factor,
            prompt_pair_s=self.prompt_pair_s * prompt_factor,
            token_context_s=self.token_context_s * token_factor,
        )


def extended_interp(x: ArrayLike, knots_x: NDArray[np.float64], knots_y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return piecewise-linear interpolation with the first and last segments extended, never below zero.

    Args:
        x: Where to look up, any shape.
        knots_x: (k,) increasing, k >= 2.
        knots_y: (k,).
    """
    at = np.asarray(x, dtype=np.float64)
    segment = np.searchsorted(knots_x[1:-1], at, side="right")
    slopes = np.diff(knots_y) / np.diff(knots_x)
    return np.maximum(knots_y[segment] + slopes[segment] * (at - knots_x[segment]), 0.0)
