"""Which iterations to time: a coarse grid, then where interpolation is worst, and some at random that only check."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from phasesplit.errors import SpecError
from phasesplit.profiling.fitting import Shape, Timed, fit_phase_times, is_knot, relative_error

_PREFILL_STEP, _REQUESTS_STEP = 4, 2
_SHORT_CONTEXT_TOKENS, _GAP_CONTEXT_TOKENS = 64, 256
_SHORTEST_PROMPT_TOKENS = 8
"""Of what is checked; between shorter prompts no gap is closed."""
NEEDED = 4
"""So many shapes of the coarse grid a fit cannot do without: two numbers of requests, two contexts each."""
_HALF_SPACING = 2.0
"""How much better a gap is than the two gaps around a knot left out: 4 times where the curve bends evenly, not at all
where it has a step; 2 stands between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a machine can be asked for.

    Attributes:
        longest_tokens: Longest sequence, >= 2.
        kv_tokens: Tokens of KV that have room, >= 2.
        most_prompt_tokens: Most prompt tokens of an iteration, >= 2.
        most_requests: Most requests in decode, >= 2.
        least_prompt_tokens: Fewest tokens of a prompt, >= 1.
        has_chunks: Whether a prompt's tokens can be timed behind others of it.
        has_mixed: Whether the phases can be timed in one iteration.
        has_free_context: Whether context is there for nothing; where it is not, its prompts are computed each time.
        tiled_rows: Up to so many rows each number is timed, >= 0: a machine that computes rows in tiles takes steps.
    """

    longest_tokens: int
    kv_tokens: int
    most_prompt_tokens: int
    most_requests: int
    least_prompt_tokens: int = 1
    has_chunks: bool = True
    has_mixed: bool = True
    has_free_context: bool = True
    tiled_rows: int = 0

    def __post_init__(self) -> None:
        for name in ("longest_tokens", "kv_tokens", "most_prompt_tokens", "most_requests"):
            if getattr(self, name) < 2:
                raise SpecError.bad(f"profile, {name.replace('_', ' ')}", getattr(self, name), "2 or more")

    @property
    def longest_prompt_tokens(self) -> int:
        """Longest prompt that an iteration computes whole."""
        return min(self.longest_tokens, self.kv_tokens, self.most_prompt_tokens)

    def context_tokens(self, requests: int) -> int:
        """Return the longest context that so many requests can all have."""
        return min(self.longest_tokens, self.kv_tokens // requests)

    def allow(self, shape: Shape) -> bool:
        """Return whether a shape lies within them."""
        length = max(shape.prompt_tokens + shape.behind_tokens, shape.context_tokens)
        return (
            shape.kv_tokens <= self.kv_tokens
            and length <= self.longest_tokens
            and shape.batch_tokens <= self.most_prompt_tokens
            and shape.requests <= self.most_requests
        )


def prompts_alone(bounds: Bounds) -> list[Shape]:
    """Return single prompts, each 4 times as long as the one before, shortest first."""
    sizes = _powers(bounds.least_prompt_tokens, bounds.longest_prompt_tokens, _PREFILL_STEP)
    return [Shape(prompts=1, prompt_tokens=tokens) for tokens in sizes]


def requests_together(bounds: Bounds) -> list[Shape]:
    """Return decode iterations at a short context, each of twice as many requests as the one before, fewest first."""
    counts = _powers(1, bounds.most_requests, _REQUESTS_STEP)
    return [Shape(requests=requests, context_tokens=_contexts(bounds, requests)[0]) for requests in counts]


def coarse_grid(bounds: Bounds) -> list[Shape]:
    """Return what else is timed first: decode iterations, then chunks behind others, and several prompts.

    Args:
        bounds: With `most_prompt_tokens` and `most_requests` as far as `prompts_alone` and `requests_together` went.
    """
    shapes: list[Shape] = []
    fewest, *between, most = _powers(1, bounds.most_requests, _REQUESTS_STEP)
    for requests in (fewest, most, *between):
        shapes += [Shape(requests=requests, context_tokens=context) for context in _contexts(bounds, requests)]
    whole = bounds.longest_prompt_tokens
    if bounds.has_chunks:
        longest = min(bounds.longest_tokens, bounds.kv_tokens)
        chunk = max(whole // 8, 1)
        shapes += [Shape(prompts=1, prompt_tokens=chunk, behind_tokens=longest * share // 8) for share in (2, 6)]
    shapes += [Shape(prompts=count, prompt_tokens=max(whole // 4, 1) // count) for count in (2, 8)]
    shapes.append(Shape(prompts=4, prompt_tokens=whole // 4))
    shapes = [shape for shape in shapes if not shape.prompts or shape.prompt_tokens >= bounds.least_prompt_tokens]
    return [shape for shape in dict.fromkeys(shapes) if bounds.allow(shape)]


def _contexts(bounds: Bounds, requests: int) -> list[int]:
    """Return a short and a long context that so many requests can have, the same where there is little room."""
    longest = bounds.context_tokens(requests)
    return sorted(max(context, 1) for context in {longest * 7 // 8, min(_SHORT_CONTEXT_TOKENS, longest // 2)})


def steps(bounds: Bounds) -> list[Shape]:
    """Return prefill and decode iterations of every number of rows up to `tiled_rows`."""
    shapes: list[Shape] = []
    for rows in range(1, bounds.tiled_rows + 1):
        context = max(min(_SHORT_CONTEXT_TOKENS, bounds.context_tokens(rows) // 2), 1)
        shapes += [Shape(requests=rows, context_tokens=context), Shape(prompts=1, prompt_tokens=rows)]
    shapes = [shape for shape in shapes if not shape.prompts or shape.prompt_tokens >= bounds.least_prompt_tokens]
    return [shape for shape in shapes if bounds.allow(shape)]


def held_out(bounds: Bounds, count: int, seed: int) -> list[Shape]:
    """Return random iterations: a third prompts or chunks, two fifths decode iterations, the rest mixed.

    Args:
        bounds: What can be asked for.
        count: How many, >= 0.
        seed: Of the draws.
    """
    draw = np.random.default_rng(seed)
    shapes: list[Shape] = []

    def between(low: int, high: int) -> int:
        """Return a whole number, each doubling as likely as the next."""
        return round(math.exp(draw.uniform(math.log(low), math.log(max(high, low)))))

    least = min(max(bounds.least_prompt_tokens, _SHORTEST_PROMPT_TOKENS), bounds.longest_prompt_tokens)
    for index in range(count):
        kind = ("prefill", "decode", "decode", "prefill", "mixed" if bounds.has_mixed else "decode")[index % 5]
        prompts = between(1, 4) if kind == "prefill" else int(kind == "mixed")
        tokens = between(least, max(bounds.longest_prompt_tokens // max(prompts, 1), least)) if prompts else 0
        has_chunk = kind == "prefill" and bounds.has_chunks and index % 2 == 1
        prompts = 1 if has_chunk else prompts
        room = min(bounds.longest_tokens, bounds.kv_tokens) - tokens
        behind = between(16, room) if has_chunk and room > 16 else 0
        requests = 0 if kind == "prefill" else between(1, bounds.most_requests)
        free = bounds.kv_tokens - prompts * (tokens + behind)
        context = between(16, min(bounds.longest_tokens, free // requests)) if requests else 0
        shape = Shape(
            prompts=prompts, prompt_tokens=tokens, behind_tokens=behind, requests=requests, context_tokens=context
        )
        if bounds.allow(shape):
            shapes.append(shape)
    return list(dict.fromkeys(shapes))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A gap between two knots.

    Attributes:
        error: How wrong the interpolation in it may be, as a share.
        width: Logarithm of the ratio of its ends: how likely one of the iterations to come lies in it.
        shape: What to time in order to close it.
    """

    error: float
    width: float
    shape: Shape


def candidates(timed: Sequence[Timed], bounds: Bounds) -> list[Candidate]:
    """Return the gaps between knots, wrong and wide ones first; how wrong is the error of a fit without their knots.

    Args:
        timed: What was timed.
        bounds: What can be asked for.
    """
    found = [*_prefill_gaps(timed), *_decode_gaps(timed, bounds)]
    return sorted(found, key=lambda one: -one.error * one.width)


def _prefill_gaps(timed: Sequence[Timed]) -> Iterator[Candidate]:
    knots = sorted(_alone(timed))
    errors = _left_out(timed, "prefill", knots)
    for low, high, error in _gaps(knots, errors):
        if high > _SHORTEST_PROMPT_TOKENS and (middle := _middle(low, high)) is not None:
            yield Candidate(error, math.log(high / low), Shape(prompts=1, prompt_tokens=middle))


def _decode_gaps(timed: Sequence[Timed], bounds: Bounds) -> Iterator[Candidate]:
    knots = sorted({one.shape.requests for one in timed if one.shape.phase == "decode" and not one.is_held_out})
    errors = _left_out(timed, "decode", knots)
    for low, high, error in _gaps(knots, errors):
        if (middle := _middle(low, high)) is not None:
            context = min(_GAP_CONTEXT_TOKENS, bounds.context_tokens(middle))
            shape = Shape(requests=middle, context_tokens=context)
            yield Candidate(error, math.log(high / low), shape)


def _alone(timed: Sequence[Timed]) -> set[int]:
    return {
        one.shape.prompt_tokens
        for one in timed
        if one.shape.phase == "prefill" and is_knot(one.shape) and not one.is_held_out
    }


def _left_out(timed: Sequence[Timed], phase: str, knots: Sequence[int]) -> dict[int, float]:
    """Return by each inner knot that ends a gap the relative error of a fit without it."""
    errors = {}
    for before, knot, after in zip(knots, knots[1:], knots[2:], strict=False):
        if after - before == 2:
            continue  # no number lies between it and the knots next to it

        def is_here(one: Timed, knot: int = knot) -> bool:
            size = one.shape.prompt_tokens if phase == "prefill" else one.shape.requests
            return one.shape.phase == phase and is_knot(one.shape) and size == knot and not one.is_held_out

        times = fit_phase_times([one for one in timed if not is_here(one)], "")
        errors[knot] = float(np.mean([abs(relative_error(times, one)) for one in timed if is_here(one)]))
    return errors


def _gaps(knots: Sequence[int], errors: dict[int, float]) -> Iterator[tuple[int, int, float]]:
    for low, high in pairwise(knots):
        ends = [errors[end] for end in (low, high) if end in errors]
        # With two knots nothing is known of the curve between them.
        yield low, high, max(ends) / _HALF_SPACING if ends else 1.0


def _middle(low: int, high: int) -> int | None:
    """Return a whole number between two others, by their ratio; None where there is none."""
    middle = round(math.sqrt(low * high))
    return min(max(middle, low + 1), high - 1) if high - low > 1 else None


def _powers(first: int, last: int, factor: int) -> list[int]:
    """Return numbers from `first` to `last`, both among them, each about `factor` times the one before."""
    steps = max(1, round(math.log(last / first, factor)))
    return sorted({round(first * (last / first) ** (step / steps)) for step in range(steps + 1)})
