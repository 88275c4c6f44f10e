"""What a simulation found: distributions, shares of time, the timeline, what it cost, and what to beware of."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.cluster import Cluster
from phasesplit.domain.latency import Binned, Distribution, edges
from phasesplit.domain.money import Bill, bill
from phasesplit.domain.slo import Slo, SloVerdict, judge
from phasesplit.scheduling.autoscaling import Policy
from phasesplit.scheduling.ledger import COUNTERS
from phasesplit.scheduling.pools import POOL_NAMES
from phasesplit.scheduling.rules import Rules
from phasesplit.simulation.fleet import Fleet
from phasesplit.simulation.misses import Misses
from phasesplit.simulation.overload import Overload, find_overload
from phasesplit.simulation.records import STATUS_NAMES, KeepAll, KeepSums, Records
from phasesplit.simulation.setup import State
from phasesplit.simulation.warnings import warnings_of

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

COUNTS = tuple(
    name for name in (COUNTERS.names or ()) if name not in ("free_slot", "live", "chosen_prompt", "chosen_token")
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PoolUse:
    """How the machines of one pool of the cluster were used, from the first arrival to the last token.

    Machine time is the time that machines are switched on.

    Attributes:
        name: Role, count and machine, as on the command line.
        prompt_share: Share of machine time in prefill iterations.
        token_share: Share in decode iterations.
        mixed_share: Share in mixed iterations.
        kv_share: Mean share of KV blocks in use, growth of a step counted at its end.
        mean_batch: Mean requests in the batch over iterations, NaN without any.
        times: Where its phase times come from.
        machine_hours: Hours that its machines were switched on, all together.
    """

    name: str
    prompt_share: float
    token_share: float
    mixed_share: float
    kv_share: float
    mean_batch: float
    times: str
    machine_hours: float

    @property
    def busy_share(self) -> float:
        """Share of machine time in any iteration."""
        return self.prompt_share + self.token_share + self.mixed_share


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Timeline:
    """The pools over time.

    Attributes:
        time_s: (t,) times of the samples.
        samples: (t, 4, 5): pools (prompt, token, mixed, unsplit) x fields of `world.SAMPLE_FIELDS`.
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
    state: State,
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
    for field in ("layerwise", "serialized", "refilled", "events", "steps_beyond_prompt", "steps_beyond_requests"):
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
            prompt_s=machines["busy_prompt_s"],
            mixed_s=machines["busy_mixed_s"],
            token_s=machines["busy_token_s"],
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
                prompt_share=float(own["busy_prompt_s"].sum()) / time_s,
                token_share=float(own["busy_token_s"].sum()) / time_s,
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
