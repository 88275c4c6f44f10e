"""Lower bounds: what no cluster can do with less, from five resources, before anything is simulated.

1. `least_prefill_s`, `least_iteration_s` and their kin bound the phase times of a machine, whatever is in a batch.
2. `moments` has what bounds need of the lengths of prompts and outputs.
3. `load_of` bounds what a request per second takes of each resource of a machine.
4. `LowerBounds` bounds the machines of a design, the rate that they hold, and the latency of one request alone.

Every bound is safe in the long run: it takes each machine at the best it can ever reach. A short trace that happens to
be lighter than its workload may keep an SLO a little beyond; a cluster that only such luck saves is refused too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phasesplit.domain.cluster import Role
from phasesplit.domain.machine import kv_capacity_bytes, link_from, published_kv_bytes_per_token
from phasesplit.domain.profile import PhaseTimes, extended_interp
from phasesplit.domain.slo import alone_s
from phasesplit.domain.workload import LengthTable
from phasesplit.planner.designs import Counts, Design, DesignKind, servers_of
from phasesplit.planner.probe import limit_name
from phasesplit.planner.problem import AS_ASKED, Offer, Problem, Variation, scaled_lengths
from phasesplit.scheduler.rules import Batching

Floats = NDArray[np.float64]

MESSAGES_PER_S = 2e6
"""One-sided writes that a server's host can post a second, all network cards together.

Source: assumed, one core at half a microsecond a write; network cards themselves take over a hundred million.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Instances that a request per second keeps busy, at the least, of one offer and for each resource.

    Attributes:
        prefill: Of arithmetic, by the tokens of prompts and by the pairs that attend to one another.
        decode: Of memory bandwidth, by decode on machines of this type alone that do nothing else.
        any_decode: Of either, by the tokens emitted and the context read, wherever decode runs: in iterations with
            prefill, or on machines of several types.
        network: Of network bandwidth in one direction, if every KV cache moves.
        messages: Of network messages.
        kv: Of KV memory, by decode.
    """

    prefill: tuple[float, float]
    decode: float
    any_decode: tuple[float, float]
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
    per_token_s = least_prefill_s_per_token(times)
    # A token whose KV was evicted is emitted by computing its context again instead of reading it.
    context_s = min(times.decode_context_s, per_token_s)
    # In the published rules prompts have no pairs, nor do mixed iterations read any context.
    pair_s, any_context_s = (0.0, 0.0) if rules.published else (times.prefill_pair_s, context_s)
    per_gap_s = least_decode_s_per_request(times, rules.batch_requests)
    # KV that was evicted is computed again, and that iteration emits a token too; so may any under the published rules.
    residence_s = min(least_iteration_s(times, rules.batch_requests), float(least_prefill_s(times, 1)))
    return Load(
        prefill=(per_token_s * mean.prompt, pair_s * mean.pairs),
        decode=per_gap_s * mean.gaps + context_s * mean.context,
        any_decode=(min(per_token_s, per_gap_s) * mean.gaps, any_context_s * mean.context),
        network=kv_bytes * mean.moved / (link_from(machine).bytes_per_s * link),
        messages=model.layers * mean.movers / MESSAGES_PER_S,
        kv=residence_s * mean.context / kv_tokens,
    )


def least_prefill_s_per_token(times: PhaseTimes) -> float:
    """Return the least time of an iteration for each token it computes, over all batches: min f(B) / B.

    f is linear between its knots, so the minimum is at one token, at a knot, or far out along the last segment.
    """
    tokens = _prefill_knots(times)
    knots, time_s = times.prefill_knots_tokens, times.prefill_knots_s
    last_slope = (time_s[-1] - time_s[-2]) / (knots[-1] - knots[-2])
    return float(max(min((_f_s(times, tokens) / tokens).min(), last_slope), 0.0))


def least_prefill_s(times: PhaseTimes, prompt_tokens: ArrayLike, chunk_tokens: int | None = None) -> Floats:
    """Return the least time that computing a prompt takes, whatever else is in the batch; pairs left out.

    Args:
        times: Phase times.
        prompt_tokens: Any shape, >= 1.
        chunk_tokens: Tokens of a chunk at most; None: a prompt is computed in one iteration.
    """
    prompt = np.asarray(prompt_tokens, dtype=np.float64)
    places = _prefill_knots(times)
    if chunk_tokens is None:
        return _least_beyond_s(times, places, prompt)
    # m chunks take at least m times the convex hull of f at their mean size; m is at least prompt / chunk_tokens.
    places = np.union1d(places[places <= chunk_tokens], [float(chunk_tokens)])
    time_s = _least_beyond_s(times, _prefill_knots(times), places)
    largest = prompt / np.ceil(prompt / chunk_tokens)
    ratio = np.minimum.accumulate(_hull_at(places, time_s, places) / places)
    smaller = ratio[np.searchsorted(places, largest, side="right") - 1]
    least_s: Floats = prompt * np.minimum(smaller, _hull_at(places, time_s, largest) / largest)
    return least_s


def least_iteration_s(times: PhaseTimes, most_requests: int) -> float:
    """Return the least time of a decode iteration over any number of requests, contexts left out: min g(n)."""
    return float(times.decode_time_s(_decode_knots(times, most_requests), 0).min())


def _f_s(times: PhaseTimes, tokens: Floats) -> Floats:
    return extended_interp(tokens, times.prefill_knots_tokens, times.prefill_knots_s)


def _least_beyond_s(times: PhaseTimes, places: Floats, tokens: Floats) -> Floats:
    """Return min f(B) over B >= tokens: measured times need not rise with the batch."""
    time_s = _f_s(times, places)
    if time_s[-1] < time_s[-2]:
        return np.zeros_like(tokens)
    beyond = np.append(np.minimum.accumulate(time_s[::-1])[::-1], np.inf)
    least_s: Floats = np.minimum(_f_s(times, tokens), beyond[np.searchsorted(places, tokens)])
    return least_s


def _prefill_knots(times: PhaseTimes) -> Floats:
    """Return the numbers of tokens from 1 on between which f is linear."""
    knots = times.prefill_knots_tokens
    return np.union1d(knots[knots >= 1], [1.0])


def _decode_knots(times: PhaseTimes, most_requests: int) -> Floats:
    """Return the numbers of requests from 1 to the most between which g is linear."""
    knots = np.union1d(times.decode_knots_requests, [1.0, float(most_requests)])
    return knots[(knots >= 1) & (knots <= most_requests)]


def least_decode_s_per_request(times: PhaseTimes, most_requests: int) -> float:
    """Return the least time of a decode iteration for each token it emits, over all batches: min g(n) / n."""
    requests = _decode_knots(times, most_requests)
    return float((times.decode_time_s(requests, 0) / requests).min())


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


_ROUNDING = 1e-9
_LIGHTER_TRACE = 0.97
"""On the rank of a percentile of requests alone: a trace may draw fewer long requests than its workload has."""


class Resource(StrEnum):
    """What a pool can run out of."""

    FLOPS = "FLOPs"
    """Arithmetic: the fewest seconds that computing the prompts takes."""
    HBM_BYTES = "HBM bytes"
    """Memory bandwidth: the fewest seconds that emitting the tokens takes."""
    NETWORK_BYTES = "network bytes"
    NETWORK_MESSAGES = "network messages"
    KV_CAPACITY = "KV capacity"
    """Memory: the KV of requests whose tokens come as fast as the machine can emit them."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A resource of some machines and how much of it is needed.

    Attributes:
        resource: The resource, or the limit that an idle machine already breaks.
        where: Which machines.
        share: Needed over available; above 1 the bottleneck is hit.
    """

    resource: str
    where: str
    share: float

    def __str__(self) -> str:
        if np.isinf(self.share):
            return f"{self.resource} of {self.where}: no number of machines suffices"
        return f"{self.resource} of {self.where}: {self.share:.2f} times what there is"


class LowerBounds:
    """The bounds of one problem under one variation.

    Args:
        problem: The problem.
        variation: How it is varied.
    """

    def __init__(self, problem: Problem, variation: Variation = AS_ASKED) -> None:
        self.problem = problem
        self.variation = variation
        self._lengths = scaled_lengths(problem.traffic.lengths, variation.ratio)
        self._moments = moments(self._lengths)
        self._loads: dict[int, Load] = {}

    def load(self, number: int) -> Load:
        """Return what a request per second takes of the offer of that number."""
        if number not in self._loads:
            self._loads[number] = load_of(self.problem, self.problem.offers[number], self._moments, self.variation.link)
        return self._loads[number]

    def least(self, design: Design, rate_per_s: float) -> Counts:
        """Return instances of each slot from which a search may start: for static designs none less can do.

        For elastic ones, whose machines may help one another, it is only a sensible place to begin (see `bottleneck`).
        """
        found = []
        for (role, number), step in zip(design.slots, servers_of(self.problem, design), strict=True):
            servers = np.ceil(self._needed(design, role, number) * rate_per_s / step - _ROUNDING)
            found.append(int(max(servers, 1) * step))
        return tuple(found)

    def rate_per_s(self, design: Design, counts: Counts) -> float:
        """Return a rate that the design cannot exceed with these counts, whatever the SLO."""
        # Every share is in proportion to the rate.
        return 1 / max(_ROUNDING, *(bottleneck.share for bottleneck in self.shares(design, counts, 1.0)))

    def bottleneck(self, design: Design, counts: Counts, rate_per_s: float) -> Bottleneck | None:
        """Return the bottleneck that the design hits with these counts at a rate, None if no bound forbids it."""
        nearest = max(self.shares(design, counts, rate_per_s), key=lambda bottleneck: bottleneck.share)
        return nearest if nearest.share > 1 + _ROUNDING else None

    def shares(self, design: Design, counts: Counts, rate_per_s: float) -> list[Bottleneck]:
        """Return what share of each resource of each pool is needed at the least, at a rate."""
        if design.kind == DesignKind.STATIC:
            return self._static_shares(design, counts, rate_per_s)
        return [self._shared_work(design, counts, rate_per_s), self._shared_kv(design, counts, rate_per_s)]

    def needs(self, design: Design, counts: Counts, rate_per_s: float) -> list[Bottleneck]:
        """Return what share of each resource the machines need at the least if each does what its role says."""
        if design.kind.is_split:
            return self._static_shares(design, counts, rate_per_s)
        (_, number), count = design.slots[0], counts[0]
        load = self.load(number)
        needs = {
            Resource.FLOPS: sum(load.prefill + load.any_decode),
            Resource.HBM_BYTES: load.decode,
            Resource.KV_CAPACITY: load.kv,
        }
        return [
            Bottleneck(resource, "the unsplit machines", rate_per_s * need / count) for resource, need in needs.items()
        ]

    def work_w(self, design: Design) -> float:
        """Return the power beyond idling that a request per second draws at the least, in watts per request/s."""
        least = []
        for role, number in design.slots:
            machine, load = self.problem.offers[number].machine, self.load(number)
            prefill = sum(load.prefill) * (machine.prefill_w - machine.idle_w)
            decode = sum(load.any_decode) * (min(machine.prefill_w, machine.decode_w) - machine.idle_w)
            helps = design.kind != DesignKind.STATIC
            least.append(
                (
                    prefill if helps or role == Role.PREFILL else np.inf,
                    decode if helps or role == Role.DECODE else np.inf,
                )
            )
        return float(min(one for one, _ in least) + min(other for _, other in least))

    def idle_bottleneck(self, design: Design) -> Bottleneck | None:
        """Return the limit that requests break even alone on the best machines of the design, None if there is none."""
        phases = [Role.PREFILL, Role.DECODE] if design.kind.is_split else [Role.UNSPLIT, Role.UNSPLIT]
        elastic = design.kind != DesignKind.STATIC
        usable = [
            [self.problem.offers[number] for role, number in design.slots if role == phase or elastic]
            for phase in phases
        ]
        rules = self.problem.rules
        chunked = design.kind == DesignKind.CHUNKED or (design.kind.is_split and rules.batching == Batching.CHUNKED)
        alone = self._alone(*usable, chunk_tokens=rules.batch_prompt_tokens if chunked else None)
        weights = self._lengths.requests.astype(np.float64)
        hit = None
        for limit in self.problem.slo.scaled(self.variation.tightness).limits:
            values = alone.get(limit.metric)
            if values is None:
                continue
            share = _quantile_below(values, weights, limit.percentile / 100) / limit.below
            if share > 1 and (hit is None or share > hit.share):
                names = sorted({offer.machine.name for side in usable for offer in side})
                hit = Bottleneck(f"{limit_name(limit)}, alone on an idle machine,", " and ".join(names), share)
        return hit

    def _needed(self, design: Design, role: Role, number: int) -> float:
        """Return instances of a slot that a request per second keeps busy if every slot does what its role says."""
        load = self.load(number)
        if role == Role.UNSPLIT:
            return max(sum(load.prefill + load.any_decode), load.kv)
        moving = (load.network, load.messages) if design.kind == DesignKind.STATIC else (0.0,)
        return max(sum(load.prefill), *moving) if role == Role.PREFILL else max(load.decode, load.kv, *moving)

    def _static_shares(self, design: Design, counts: Counts, rate_per_s: float) -> list[Bottleneck]:
        bottlenecks = []
        for role in (Role.PREFILL, Role.DECODE):
            group = [
                (count, self.load(number))
                for (own, number), count in zip(design.slots, counts, strict=True)
                if own == role and count
            ]
            needs: dict[Resource, list[tuple[float, ...]]] = {
                Resource.NETWORK_BYTES: [(load.network,) for _, load in group],
                Resource.NETWORK_MESSAGES: [(load.messages,) for _, load in group],
            }
            if role == Role.PREFILL:
                needs[Resource.FLOPS] = [load.prefill for _, load in group]
            else:
                needs[Resource.HBM_BYTES] = [load.any_decode if len(group) > 1 else (load.decode,) for _, load in group]
                needs[Resource.KV_CAPACITY] = [(load.kv,) for _, load in group]
            machines = [count for count, _ in group]
            bottlenecks += [
                Bottleneck(resource, f"the {role} machines", rate_per_s * _busy(machines, parts))
                for resource, parts in needs.items()
            ]
        return bottlenecks

    def _shared_work(self, design: Design, counts: Counts, rate_per_s: float) -> Bottleneck:
        """Return the share of machine time that is needed where every machine may do either phase."""
        machines, loads = self._used(design, counts)
        share = rate_per_s * _busy(machines, [load.prefill + load.any_decode for load in loads])
        prefill = sum(count * sum(load.prefill) for count, load in zip(machines, loads, strict=True))
        decode = sum(count * sum(load.any_decode) for count, load in zip(machines, loads, strict=True))
        return Bottleneck(Resource.FLOPS if prefill >= decode else Resource.HBM_BYTES, "all machines together", share)

    def _shared_kv(self, design: Design, counts: Counts, rate_per_s: float) -> Bottleneck:
        machines, loads = self._used(design, counts)
        share = rate_per_s * _busy(machines, [(load.kv,) for load in loads])
        return Bottleneck(Resource.KV_CAPACITY, "all machines together", share)

    def _used(self, design: Design, counts: Counts) -> tuple[list[int], list[Load]]:
        """Return counts and loads of the slots that have any machines."""
        used = [(count, self.load(number)) for (_, number), count in zip(design.slots, counts, strict=True) if count]
        return [count for count, _ in used], [load for _, load in used]

    def _alone(
        self, prefill: Sequence[Offer], decode: Sequence[Offer], *, chunk_tokens: int | None
    ) -> dict[str, Floats]:
        """Return the least latencies of each pair of lengths on an idle machine, by metric."""
        lengths, reference = self._lengths, self.problem.reference
        if self.problem.rules.published:
            return {}
        pairs = lengths.prompt_tokens.astype(np.float64) ** 2 / 2
        ttft_s = np.min(
            [
                least_prefill_s(offer.times, lengths.prompt_tokens, chunk_tokens) + offer.times.prefill_pair_s * pairs
                for offer in prefill
            ],
            axis=0,
        )
        gaps = lengths.output_tokens - 1.0
        context = lengths.prompt_tokens + (gaps + 1) / 2
        batch = self.problem.rules.batch_requests
        itl_s = np.min(
            [least_iteration_s(offer.times, batch) + offer.times.decode_context_s * context for offer in decode], axis=0
        )
        itl_s = np.where(gaps > 0, itl_s, np.nan)
        e2e_s = ttft_s + np.where(gaps > 0, itl_s * gaps, 0.0)
        found = {"ttft_s": ttft_s, "itl_mean_s": itl_s, "itl_max_s": itl_s, "e2e_s": e2e_s}
        if reference is not None:
            base = alone_s(reference, lengths.prompt_tokens, lengths.output_tokens, published=False)
            found |= {
                name: value / against
                for (name, value), against in zip(
                    {"ttft_slowdown": ttft_s, "itl_slowdown": itl_s, "e2e_slowdown": e2e_s}.items(), base, strict=True
                )
            }
        return found


def _busy(machines: Sequence[int], parts: Sequence[tuple[float, ...]]) -> float:
    """Return the share of their time for which machines are busy at the least, infinite if there are none.

    At any price of a machine's time on each type, a task costs no less than where it is cheapest, and all machines
    together offer no more than their time at that price; so every list of prices gives a bound. Those at which one
    task costs the same everywhere are tried: with two types the best is among them.

    Args:
        machines: Of each type.
        parts: Time that each of the tasks takes on a machine of each type, all tasks a second.

    Source: weak duality of linear programmes.
    """
    if not machines:
        return float("inf")
    bound = 0.0
    for same in zip(*parts, strict=True):
        if min(same) > 0:
            costs = (
                [part / price for part, price in zip(task, same, strict=True)] for task in zip(*parts, strict=True)
            )
            offered = sum(count / price for count, price in zip(machines, same, strict=True))
            bound = max(bound, sum(min(cost) for cost in costs) / offered)
    return bound


def _quantile_below(values: Floats, weights: Floats, q: float) -> float:
    """Return a value that at most a share q of the weight lies strictly below: a safe lower bound of the quantile."""
    known = ~np.isnan(values)
    if not known.any():
        return 0.0
    order = np.argsort(values[known])
    cumulative = np.cumsum(weights[known][order])
    index = int(np.searchsorted(cumulative, q * cumulative[-1] * _LIGHTER_TRACE))
    return float(values[known][order][min(index, order.size - 1)])
