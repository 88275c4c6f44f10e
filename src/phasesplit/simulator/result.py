"""The result of a simulation: latencies, shares of time, the timeline, the bill, and what to beware of.

- `Overload`: whether the cluster kept up with its arrivals. A growing backlog is named, never averaged over.
- `warnings_of`: what a reader should know before trusting the figures.
- `Misses`: which requests missed the SLO, hour by hour. Percentiles of a whole day hide when it was missed.
- `Result` itself, and `build_result`, which makes it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.cluster import Cluster
from phasesplit.domain.latency import Binned, Distribution, edges
from phasesplit.domain.money import Bill, bill
from phasesplit.domain.slo import GOODPUT_RATIO, Slo, SloVerdict, is_slowdown, judge
from phasesplit.scheduler.autoscaling import Policy
from phasesplit.scheduler.ledger import COUNTERS
from phasesplit.scheduler.pools import POOL_NAMES
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.fleet import Fleet
from phasesplit.simulator.records import METRICS, SLOWDOWNS, STATUS_NAMES, KeepAll, KeepSums, Metrics, Records, seconds
from phasesplit.simulator.setup import RunState
from phasesplit.simulator.world import COMPLETED

if TYPE_CHECKING:
    import pandas as pd


Floats = NDArray[np.float64]

GROWTH_SHARE = 0.02
"""A backlog that grows by more than this share of the arrivals is overload."""
GROWTH_RATIO = 1.15
"""Nor is it overload unless the requests in the system grow by this factor over the second half of the arrivals."""
WAITING_SHARE = 0.05
"""Nor unless more than this share of them waits: a system that is still filling up has more and more running."""
LEAST_BACKLOG = 20
"""Fewer requests in the system than this are not called a backlog, whatever their trend."""
FULL = 0.95
"""A pool that is busy, or whose KV memory is used, for more than this share binds."""
_LEAST_SAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Overload:
    """A backlog that grew while requests arrived.

    Attributes:
        growth_per_s: Requests by which it grew each second, over the second half of the arrivals.
        backlog: Requests in the system when the last one arrived.
        drain_s: Time from the last arrival to the end of the run.
        binding: The resource that binds, as a phrase ("compute of the prefill pool").
    """

    growth_per_s: float
    backlog: float
    drain_s: float
    binding: str

    def __str__(self) -> str:
        return (
            f"overloaded: the backlog grew by {self.growth_per_s:.3g} requests/s to {self.backlog:,.0f} when arrivals"
            f" ended and took {self.drain_s:.0f} s to drain; {self.binding} binds"
        )


def find_overload(
    time_s: Floats, samples: Floats, *, last_arrival_s: float, end_s: float, rate_per_s: float, pools: tuple[str, ...]
) -> Overload | None:
    """Return the overload that a timeline shows, None where the cluster kept up.

    The backlog's trend is the least-squares slope of the requests in the system over the second half of the arrivals;
    bursts that are worked off leave no trend.

    Args:
        time_s: (s,) times of the samples.
        samples: (s, pools, 5) fields of `world.SAMPLE_FIELDS`.
        last_arrival_s: Time of the last arrival.
        end_s: End of the run.
        rate_per_s: Mean arrival rate.
        pools: Names of the pools, in order.
    """
    during = time_s <= last_arrival_s
    if during.sum() < _LEAST_SAMPLES:
        return None
    time_s, samples = time_s[during], samples[during]
    waiting = samples[:, :, 3].sum(axis=1)
    present = samples[:, :, 2].sum(axis=1) + waiting
    half = time_s.size // 2
    centred = time_s[half:] - time_s[half:].mean()
    growth_per_s = float((centred * present[half:]).sum() / (centred**2).sum())
    middle = float(present[half:].mean())
    grown = growth_per_s * float(time_s[-1] - time_s[half])
    at_least = max(LEAST_BACKLOG, (GROWTH_RATIO - 1) * (middle - grown / 2))
    waits = float(waiting[half:].mean()) > WAITING_SHARE * middle
    if grown < at_least or growth_per_s < GROWTH_SHARE * rate_per_s or not waits:
        return None
    backlog = middle + grown / 2
    return Overload(
        growth_per_s=growth_per_s,
        backlog=backlog,
        drain_s=end_s - last_arrival_s,
        binding=_binding(samples[half:].mean(axis=0), pools),
    )


def _binding(means: Floats, pools: tuple[str, ...]) -> str:
    """Name the pool that is fullest: its KV memory where that is full, else its compute."""
    present = [pool for pool in range(len(pools)) if means[pool, 0] > 0]
    kv = max(present, key=lambda pool: means[pool, 4])
    if means[kv, 4] > FULL - 0.05:
        return f"KV memory of the {pools[kv]} pool"
    busy = max(present, key=lambda pool: (means[pool, 3] / means[pool, 0], means[pool, 1] / means[pool, 0]))
    return f"compute of the {pools[busy]} pool"


_RARELY = 0.001


def warnings_of(rules: Rules, *, oracle: bool, statuses: dict[str, int], counts: dict[str, int]) -> tuple[str, ...]:
    """Return the warnings, a sentence each.

    Args:
        rules: By which rules.
        oracle: Whether the trace gave the rules true output lengths.
        statuses: Requests by status.
        counts: Counts of the run.
    """
    found = []
    if rules.published:
        found.append(
            "published rules: decode time ignores the batch size, links never contend, and whole outputs are reserved"
            " by their true length; figures are for comparison with the published simulator only"
        )
    elif oracle:
        found.append("the rules saw the true output length of every request (an oracle)")
    if statuses["refused"]:
        found.append(
            f"{statuses['refused']:,} of the requests were refused: longer than the model's context, or than the KV"
            " memory of the smallest machine"
        )
    if statuses["unfinished"]:
        found.append(f"{statuses['unfinished']:,} requests never finished: stuck by the published rules")
    for count, what in (("steps_beyond_requests", "batch sizes"), ("steps_beyond_prompt", "prompt sizes")):
        share = counts[count] / max(counts["steps"], 1)
        if share > _RARELY and not rules.published:
            found.append(f"{share:.1%} of the steps used {what} beyond the measured ones: their times are extrapolated")
    if counts["recomputed"]:
        found.append(f"{counts['recomputed']:,} prompts were computed again because their KV never found room")
    return tuple(found)


_HOUR_S = 3_600.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Misses:
    """Requests that missed the SLO.

    A request misses it if one of its own values (TTFT, mean ITL, E2E, ...) reaches the limit that the SLO sets for the
    highest percentile of that metric (p99 of 2 s: 2 s), or one of the SLO's limits for each request; and if it was not
    served. Limits on gaps of all requests together (`itl_s`) are not looked at: a gap has no request of its own.

    Attributes:
        limits: Metric and limit; none where the SLO has no limit on a request's own values.
        requests_by_hour: int64 (h,), requests by the hour of their arrival, counted from the first arrival.
        missed_by_hour: int64 (h,), those of them that missed it.
    """

    limits: tuple[tuple[str, float], ...]
    requests_by_hour: NDArray[np.int64]
    missed_by_hour: NDArray[np.int64]

    @property
    def share(self) -> float:
        """Share of all requests that missed the SLO; NaN without limits."""
        return float(self.missed_by_hour.sum() / self.requests_by_hour.sum()) if self.limits else float("nan")

    @property
    def worst_hour_share(self) -> float:
        """The same for the hour where it is highest."""
        shares = self.missed_by_hour / np.maximum(self.requests_by_hour, 1)
        return float(shares.max()) if self.limits else float("nan")


class MissCounter:
    """Counts misses as requests end.

    Args:
        cluster: The cluster; slowdowns need its reference and are left out without one.
        slo: The SLO.
        start_s: Time of the first arrival.
    """

    def __init__(self, cluster: Cluster, slo: Slo, start_s: float) -> None:
        self._limits = _strictest(slo, slowdowns=cluster.reference is not None)
        self._metrics = Metrics(
            cluster.reference, published=False, slo=Slo("each request", (), self._limits), only=frozenset()
        )
        self._start_s = start_s
        self._counts = np.zeros((2, 0), np.int64)

    def add(self, done: NDArray[np.void]) -> None:
        """Take records of ended requests, DONE (d,)."""
        if not done.size:
            return
        missed = done["status"] != COMPLETED
        if self._limits:
            served = ~missed
            rows = done[served] if missed.any() else done  # copying all of them would take as long as judging them
            missed[served] = self._metrics.columns(rows, seconds(rows))[GOODPUT_RATIO] >= 1
        hours = ((done["arrival_s"] - self._start_s) // _HOUR_S).astype(np.int64)
        size = max(self._counts.shape[1], int(hours.max()) + 1)
        counts = np.stack([np.bincount(hours, minlength=size), np.bincount(hours[missed], minlength=size)])
        counts[:, : self._counts.shape[1]] += self._counts
        self._counts = counts

    def misses(self) -> Misses:
        """Return what has been counted."""
        return Misses(limits=self._limits, requests_by_hour=self._counts[0], missed_by_hour=self._counts[1])


def _strictest(slo: Slo, *, slowdowns: bool) -> tuple[tuple[str, float], ...]:
    """Return metric and limit of each metric that a request has a value of: that of the highest percentile."""
    limits: dict[str, float] = {}
    for limit in sorted(slo.limits, key=lambda limit: limit.percentile):
        limits[limit.metric] = limit.below
    for metric, below in slo.each:
        limits[metric] = min(below, limits.get(metric, below))
    return tuple(
        (metric, below)
        for metric, below in limits.items()
        if metric in (*METRICS, *SLOWDOWNS) and (slowdowns or not is_slowdown(metric))
    )


COUNTS = tuple(
    name for name in (COUNTERS.names or ()) if name not in ("free_slot", "live", "chosen_prefill", "chosen_decode")
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PoolUse:
    """How the machines of one pool of the cluster were used, from the first arrival to the last token.

    Machine time is the time that machines are switched on.

    Attributes:
        name: Role, count and machine, as on the command line.
        prefill_share: Share of machine time in prefill iterations.
        decode_share: Share in decode iterations.
        mixed_share: Share in mixed iterations.
        kv_share: Mean share of KV blocks in use, growth of a step counted at its end.
        mean_batch: Mean requests in the batch over iterations, NaN without any.
        times: Where its phase times come from.
        machine_hours: Hours that its machines were switched on, all together.
    """

    name: str
    prefill_share: float
    decode_share: float
    mixed_share: float
    kv_share: float
    mean_batch: float
    times: str
    machine_hours: float

    @property
    def busy_share(self) -> float:
        """Share of machine time in any iteration."""
        return self.prefill_share + self.decode_share + self.mixed_share


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Timeline:
    """The pools over time.

    Attributes:
        time_s: (t,) times of the samples.
        samples: (t, 4, 5): pools (prefill, decode, mixed, unsplit) x fields of `world.SAMPLE_FIELDS`.
    """

    time_s: Floats
    samples: Floats


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Autoscaling:
    """What a policy did, and who missed the SLO meanwhile.

    Attributes:
        policy: The policy.
        starts: Machines started, those taken back while they drained included.
        stops: Machines stopped, those that had not finished starting included.
        stale: Decisions for which the signal was too old to be acted on.
        misses: Requests that missed the SLO.
    """

    policy: Policy
    starts: int
    stops: int
    stale: int
    misses: Misses


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Result:
    """What a simulation found.

    Attributes:
        cluster: What was simulated.
        rules: By which rules.
        trace: Name of the trace.
        oracle: Whether the rules saw true output lengths (an oracle of the trace, or the published rules).
        requests: Requests in the trace.
        statuses: How many completed, were refused (longer than a machine's memory), or were left unfinished.
        first_arrival_s: Time of the first arrival.
        last_arrival_s: Time of the last arrival.
        end_s: Time of the last event.
        prompt_tokens: Prompt tokens of completed requests.
        output_tokens: Output tokens of completed requests.
        metrics: Distributions by name: `ttft_s`, `itl_s` (all gaps), `itl_mean_s` (each request's TPOT), `itl_max_s`,
            `e2e_s`, `queue_s`, `transfer_exposed_s`, `decode_queue_s`, and the slowdowns `ttft_slowdown`,
            `itl_slowdown`, `e2e_slowdown` where the cluster has a reference, and `goodput_ratio` where the SLO sets
            limits for each request. Less than all where the caller asked for less.
        slo: Whether the SLO was kept; None where it limits slowdowns and the cluster has no reference.
        pools: Use of each pool of the cluster.
        batch_share: (4, n + 1): share of busy time of each pool's machines with a batch of so many requests.
        timeline: The pools over time.
        counts: Steps, iterations, preemptions, evictions, pool moves, transfers by kind, events.
        overload: Set where the cluster did not keep up.
        bill: What it cost.
        autoscaling: What the policy did that changed the pools' sizes; None without one.
        warnings: What a reader should know before trusting the figures, a sentence each.
        columns: A row for each request, in order of arrival; None where rows were not kept.
    """

    cluster: Cluster
    rules: Rules
    trace: str
    oracle: bool
    requests: int
    statuses: dict[str, int]
    first_arrival_s: float
    last_arrival_s: float
    end_s: float
    prompt_tokens: int
    output_tokens: int
    metrics: dict[str, Distribution]
    slo: SloVerdict | None
    pools: tuple[PoolUse, ...]
    batch_share: Floats
    timeline: Timeline
    counts: dict[str, int]
    overload: Overload | None
    bill: Bill
    autoscaling: Autoscaling | None
    warnings: tuple[str, ...]
    columns: dict[str, NDArray[Any]] | None

    @property
    def rate_per_s(self) -> float:
        """Achieved mean arrival rate."""
        span_s = self.last_arrival_s - self.first_arrival_s
        return (self.requests - 1) / span_s if span_s > 0 else 0.0

    @property
    def machine_hours(self) -> dict[str, float]:
        """Hours that machines were switched on, by pool of the cluster."""
        return {pool.name: pool.machine_hours for pool in self.pools}

    @property
    def throughput_per_s(self) -> float:
        """Completed requests per second, from the first arrival to the end."""
        return self.statuses["completed"] / max(self.end_s - self.first_arrival_s, 1e-12)

    def to_pandas(self) -> "pd.DataFrame":
        """Return the columns as a pandas data frame; pandas is the extra `phasesplit[pandas]`.

        Raises:
            ValueError: Rows were not kept.
        """
        import pandas as pd

        if self.columns is None:
            raise ValueError("rows were not kept: simulate(..., keep=True)")
        return pd.DataFrame(self.columns)


def build_result(
    cluster: Cluster,
    rules: Rules,
    state: RunState,
    records: Records,
    *,
    slo: Slo,
    grid_kg_per_kwh: float,
    trace: tuple[str, bool, float, float, int],
    fleet: Fleet | None = None,
    misses: Misses | None = None,
) -> Result:
    """Return the result of a finished run.

    Args:
        cluster: The cluster.
        rules: The rules.
        state: Its columns after the run.
        records: What was kept of its requests.
        slo: What it is judged by.
        grid_kg_per_kwh: Carbon intensity of the electricity.
        trace: Name, whether it is an oracle, first and last arrival, number of requests.
        fleet: The machines that came and went, under an autoscaling policy.
        misses: The requests that missed the SLO, under such a policy.
    """
    name, oracle, first_s, last_s, requests = trace
    ledger, world = state.ledger, state.world
    machines = ledger.machines
    end_s = max(float(world.clock["now_s"][0]), last_s)
    statuses, tokens = _totals(records)
    metrics = records.metrics()
    metrics["itl_s"] = _all_gaps(world.gaps, records.longest_gap_s())
    duration_s = max(end_s - first_s, 1e-12)
    on_s = np.full(machines.size, duration_s) if fleet is None else fleet.finish(ledger, end_s)
    samples = int(world.clock["samples"][0])
    every_s = float(world.clock["sample_every_s"][0])
    time_s: Floats = first_s + every_s * np.arange(1, samples + 1, dtype=np.float64)
    busy_s = world.batch_s.sum(axis=1, keepdims=True)
    counts = {field: int(ledger.counters[field][0]) for field in COUNTS}
    for field in ("layerwise", "serialized", "recomputed", "events", "steps_beyond_prompt", "steps_beyond_requests"):
        counts[field] = int(world.clock[field][0])
    for field in ("steps", "iterations", "task_iterations"):
        counts[field] = int(machines[field].sum())
    span_s = last_s - first_s
    judged = cluster.reference is not None or not slo.needs_reference
    return Result(
        cluster=cluster,
        rules=rules,
        trace=name,
        oracle=oracle or rules.published,
        requests=requests,
        statuses=statuses,
        first_arrival_s=first_s,
        last_arrival_s=last_s,
        end_s=end_s,
        prompt_tokens=tokens[0],
        output_tokens=tokens[1],
        metrics=metrics,
        slo=judge(slo, metrics, complete=statuses["completed"] == requests) if judged else None,
        pools=tuple(_pool_uses(cluster, machines, duration_s, on_s)),
        batch_share=world.batch_s / np.where(busy_s > 0, busy_s, 1),
        timeline=Timeline(time_s=time_s, samples=world.samples[:samples].copy()),
        counts=counts,
        overload=find_overload(
            time_s,
            world.samples[:samples],
            last_arrival_s=last_s,
            end_s=end_s,
            rate_per_s=(requests - 1) / span_s if span_s > 0 else 0.0,
            pools=POOL_NAMES,
        ),
        bill=bill(
            cluster,
            duration_s=duration_s,
            prefill_s=machines["busy_prefill_s"],
            mixed_s=machines["busy_mixed_s"],
            decode_s=machines["busy_decode_s"],
            requests=statuses["completed"],
            output_tokens=tokens[1],
            grid_kg_per_kwh=grid_kg_per_kwh,
            on_s=on_s,
        ),
        autoscaling=None
        if fleet is None or misses is None
        else Autoscaling(policy=fleet.policy, starts=fleet.starts, stops=fleet.stops, stale=fleet.stale, misses=misses),
        warnings=warnings_of(rules, oracle=oracle, statuses=statuses, counts=counts),
        columns=_columns(records) if isinstance(records, KeepAll) else None,
    )


def _totals(records: Records) -> tuple[dict[str, int], tuple[int, int]]:
    """Return requests by status, and prompt and output tokens of completed ones."""
    if isinstance(records, KeepSums):
        by_status = records.status_counts
        tokens = (int(records.tokens[0]), int(records.tokens[1]))
    else:
        assert isinstance(records, KeepAll)  # noqa: S101 - the two kinds of records there are
        done = records.rows()
        by_status = np.bincount(done["status"], minlength=len(STATUS_NAMES))
        completed = done["status"] == 0
        tokens = (int(done["prompt_tokens"][completed].sum()), int(done["output_tokens"][completed].sum()))
    return dict(zip(STATUS_NAMES, by_status.tolist(), strict=True)), tokens


def _all_gaps(gaps: NDArray[np.int64], largest_s: float) -> Binned:
    """Return the distribution of all gaps between tokens; its mean follows from the bins' middles."""
    middles = edges(gaps.size)
    total_s = float((gaps * 0.5 * (middles[1:] + middles[:-1])).sum())
    return Binned(gaps.copy(), total_s, largest_s)


def _pool_uses(cluster: Cluster, machines: NDArray[np.void], duration_s: float, on_s: Floats) -> list[PoolUse]:
    uses = []
    first = 0
    for pool in cluster.pools:
        own = machines[first : first + pool.count]
        # The least value is for a pool that was never switched on: its machines were busy for no time at all.
        time_s = max(float((on_s[first : first + pool.count] / duration_s).sum()) * duration_s, 1e-12)
        first += pool.count
        iterations = int(own["iterations"].sum())
        uses.append(
            PoolUse(
                name=f"{pool.role}:{pool.count}:{pool.machine.name}",
                prefill_share=float(own["busy_prefill_s"].sum()) / time_s,
                decode_share=float(own["busy_decode_s"].sum()) / time_s,
                mixed_share=float(own["busy_mixed_s"].sum()) / time_s,
                kv_share=float((own["kv_block_s"] / own["capacity_blocks"]).sum()) / time_s,
                mean_batch=int(own["task_iterations"].sum()) / iterations if iterations else float("nan"),
                times=pool.times.source,
                machine_hours=time_s / 3600.0,
            )
        )
    return uses


def _columns(records: KeepAll) -> dict[str, NDArray[Any]]:
    done = records.rows()
    columns: dict[str, NDArray[Any]] = {
        "request_id": done["row"],
        "arrival_s": done["arrival_s"],
        "prompt_tokens": done["prompt_tokens"],
        "output_tokens": done["output_tokens"],
    }
    columns |= records.seconds()
    for field in ("prefill_machine", "decode_machine", "preemptions"):
        columns[field] = done[field]
    columns["status"] = np.array(STATUS_NAMES)[done["status"]]
    return columns
