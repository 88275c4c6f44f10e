"""The least that a request takes of each resource of a machine, with the machine at its best."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasesplit.domain.kv import kv_capacity_bytes, published_kv_bytes_per_token
from phasesplit.domain.link import link_from
from phasesplit.domain.profile import PhaseTimes, extended_interp
from phasesplit.domain.workload import LengthTable
from phasesplit.planning.problem import Offer, Problem

Floats = NDArray[np.float64]

MESSAGES_PER_S = 2e6
"""One-sided writes that a server's host can post a second, all network cards together.

Source: assumed, one core at half a microsecond a write; network cards themselves take over a hundred million.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Instances that a request per second keeps busy, at the least, of one offer and for each resource.

    Attributes:
        prompt: Of arithmetic, by the tokens of prompts and by the pairs that attend to one another.
        token: Of memory bandwidth, by decode with machines of this type alone, and nothing else, to itself.
        riding: Of either, by the tokens emitted and the context read, wherever a decode runs: beside prompts, on
            machines of several types.
        network: Of network bandwidth in one direction, if every KV cache moves.
        messages: Of network messages.
        kv: Of KV memory, by decode.
    """

    prompt: tuple[float, float]
    token: float
    riding: tuple[float, float]
    network: float
    messages: float
    kv: float


class Moments(NamedTuple):
    """Means over requests.

    Attributes:
        prompt: Prompt tokens.
        pairs: Pairs of a prompt token and a token that it attends to.
        gaps: Output tokens after the first.
        context: Tokens of context that decode reads.
        moved: Prompt tokens whose KV moves if the phases are on two machines.
        movers: Share of requests whose KV moves.
    """

    prompt: float
    pairs: float
    gaps: float
    context: float
    moved: float
    movers: float


def moments(table: LengthTable) -> Moments:
    """Return the moments of joint lengths."""
    weights = table.requests / table.requests.sum()
    prompt = table.prompt_tokens.astype(np.float64)
    gaps = table.output_tokens - 1.0
    return Moments(
        prompt=float(weights @ prompt),
        pairs=float(weights @ prompt**2) / 2,
        gaps=float(weights @ gaps),
        context=float(weights @ (gaps * (prompt + (gaps + 1) / 2))),
        moved=float(weights @ np.where(gaps > 0, prompt, 0.0)),
        movers=float(weights @ (gaps > 0)),
    )


def load_of(problem: Problem, offer: Offer, mean: Moments, link: float = 1.0) -> Load:
    """Return what a request per second takes of an offer at the least.

    Args:
        problem: The problem.
        offer: A machine on offer.
        mean: Moments of the traffic's lengths.
        link: Factor on the bandwidth of network cards.

    Only phase times, memory and the link's bandwidth count: a simulation knows nothing else.

    Source: ours; each term is its resource used without a pause, at the best batch.
    """
    times, machine, model, rules = offer.times, offer.machine, problem.model, problem.rules
    kv_bytes = published_kv_bytes_per_token(model) if rules.published else model.kv_bytes_per_token
    reserved = 1.0 - rules.hbm_share
    kv_tokens = max(kv_capacity_bytes(model, machine, reserved_share=reserved) / kv_bytes, 1e-9)
    per_token_s = least_prompt_s_per_token(times)
    # A token whose KV was evicted is emitted by computing its context again instead of reading it.
    context_s = min(times.token_context_s, per_token_s)
    # In the published rules prompts have no pairs, nor do mixed iterations read any context.
    pair_s, riding_context_s = (0.0, 0.0) if rules.published else (times.prompt_pair_s, context_s)
    per_gap_s = least_token_s_per_request(times, rules.batch_requests)
    # KV that was evicted is computed again, and that iteration emits a token too; so may any under the published rules.
    residence_s = min(least_iteration_s(times, rules.batch_requests), float(least_prompt_s(times, 1)))
    return Load(
        prompt=(per_token_s * mean.prompt, pair_s * mean.pairs),
        token=per_gap_s * mean.gaps + context_s * mean.context,
        riding=(min(per_token_s, per_gap_s) * mean.gaps, riding_context_s * mean.context),
        network=kv_bytes * mean.moved / (link_from(machine).bytes_per_s * link),
        messages=model.layers * mean.movers / MESSAGES_PER_S,
        kv=residence_s * mean.context / kv_tokens,
    )


def least_prompt_s_per_token(times: PhaseTimes) -> float:
    """Return the least time of an iteration for each token it computes, over all batches: min f(B) / B.

    f is linear between its knots, so the minimum is at one token, at a knot, or far out along the last segment.
    """
    tokens = _prompt_places(times)
    knots, time_s = times.prompt_knots_tokens, times.prompt_knots_s
    last_slope = (time_s[-1] - time_s[-2]) / (knots[-1] - knots[-2])
    return float(max(min((_f_s(times, tokens) / tokens).min(), last_slope), 0.0))


def least_prompt_s(times: PhaseTimes, prompt_tokens: ArrayLike, chunk_tokens: int | None = None) -> Floats:
    """Return the least time that computing a prompt takes, whatever is in the batch beside it; pairs left out.

    Args:
        times: Phase times.
        prompt_tokens: Any shape, >= 1.
        chunk_tokens: Tokens of a chunk at most; None: a prompt is computed in one iteration.
    """
    prompt = np.asarray(prompt_tokens, dtype=np.float64)
    places = _prompt_places(times)
    if chunk_tokens is None:
        return _least_beyond_s(times, places, prompt)
    # m chunks take at least m times the convex hull of f at their mean size; m is at least prompt / chunk_tokens.
    places = np.union1d(places[places <= chunk_tokens], [float(chunk_tokens)])
    time_s = _least_beyond_s(times, _prompt_places(times), places)
    largest = prompt / np.ceil(prompt / chunk_tokens)
    ratio = np.minimum.accumulate(_hull_at(places, time_s, places) / places)
    smaller = ratio[np.searchsorted(places, largest, side="right") - 1]
    least_s: Floats = prompt * np.minimum(smaller, _hull_at(places, time_s, largest) / largest)
    return least_s


def least_iteration_s(times: PhaseTimes, most_requests: int) -> float:
    """Return the least time of a decode iteration over any number of requests, contexts left out: min g(n)."""
    return float(times.token_time_s(_request_places(times, most_requests), 0).min())


def _f_s(times: PhaseTimes, tokens: Floats) -> Floats:
    return extended_interp(tokens, times.prompt_knots_tokens, times.prompt_knots_s)


def _least_beyond_s(times: PhaseTimes, places: Floats, tokens: Floats) -> Floats:
    """Return min f(B) over B >= tokens: measured times need not rise with the batch."""
    time_s = _f_s(times, places)
    if time_s[-1] < time_s[-2]:
        return np.zeros_like(tokens)
    beyond = np.append(np.minimum.accumulate(time_s[::-1])[::-1], np.inf)
    least_s: Floats = np.minimum(_f_s(times, tokens), beyond[np.searchsorted(places, tokens)])
    return least_s


def _prompt_places(times: PhaseTimes) -> Floats:
    """Return the numbers of tokens from 1 on between which f is linear."""
    knots = times.prompt_knots_tokens
    return np.union1d(knots[knots >= 1], [1.0])


def _request_places(times: PhaseTimes, most_requests: int) -> Floats:
    """Return the numbers of requests from 1 to the most between which g is linear."""
    knots = np.union1d(times.token_knots_requests, [1.0, float(most_requests)])
    return knots[(knots >= 1) & (knots <= most_requests)]


def least_token_s_per_request(times: PhaseTimes, most_requests: int) -> float:
    """Return the least time of a decode iteration for each token it emits, over all batches: min g(n) / n."""
    requests = _request_places(times, most_requests)
    return float((times.token_time_s(requests, 0) / requests).min())


def _hull_at(x: Floats, y: Floats, at: Floats) -> Floats:
    """Return the lower convex hull of points at some places within their range."""
    kept: list[int] = []
    for index in range(x.size):
        while len(kept) > 1:
            first, second = kept[-2], kept[-1]
            if (y[second] - y[first]) * (x[index] - x[first]) < (y[index] - y[first]) * (x[second] - x[first]):
                break
            kept.pop()
        kept.append(index)
    return np.interp(at, x[kept], y[kept])
