"""One sentence for each panel that says what to see in it, from the result's own figures."""

from collections.abc import Callable

import numpy as np

from phasesplit.figures import readable
from phasesplit.figures.panels import metric_of
from phasesplit.figures.stages import STAGES, mean_split
from phasesplit.figures.timeline import KV_SHARE, MACHINES, RUNNING, WAITING, pools_seen
from phasesplit.scheduling.pools import POOL_NAMES
from phasesplit.simulation.result import Result

_SHORT_RUN = "The run was too short for samples of the pools."


def _tail(metric: str, what: str) -> Callable[[Result], str]:
    def caption(result: Result) -> str:
        values = metric_of(result, metric)
        if not values.count:
            return f"No value of {readable.metric_name(metric)} is defined in this run."
        if values.count == 1:
            return f"There is one value, {readable.seconds(values.largest)}."
        median, tail = (readable.seconds(values.quantile(q)) for q in (0.5, 0.99))
        return f"Half of {what} within {median}; one in a hundred takes longer than {tail}."

    return caption


def _slo(result: Result) -> str:
    known = [] if result.slo is None else [f for f in result.slo.findings if not np.isnan(f.value)]
    if not known:
        return "There is nothing to compare with limits."
    tightest = max(known, key=lambda finding: finding.value / finding.limit.below)
    limit = tightest.limit
    name = f"{readable.metric_name(limit.metric)} p{limit.percentile:g}"
    taken = readable.percent(tightest.value / limit.below)
    return f"The tightest limit is that on {name}: the run takes up {taken} of it."


def _machines(result: Result) -> str:
    pools = pools_seen(result)
    if not pools:
        return _SHORT_RUN
    machines = result.timeline.samples[:, :, MACHINES]
    if (machines == machines[0]).all():
        return "No machine changed its pool for longer than a sample."
    most = int(machines[:, POOL_NAMES.index("mixed")].max())
    return f"Machines move between pools as load shifts; at most {most} of {result.cluster.machines} were mixed."


def _most(field: int, shown: str, nothing: str) -> Callable[[Result], str]:
    def caption(result: Result) -> str:
        pools = pools_seen(result)
        if not pools:
            return _SHORT_RUN
        values = result.timeline.samples[:, pools, field].max(axis=0)
        if not values.any():
            return nothing
        highest = float(values.max())
        amount = readable.percent(highest) if field == KV_SHARE else f"{highest:,.0f}"
        return shown.format(amount, POOL_NAMES[pools[int(values.argmax())]])

    return caption


def _start(result: Result) -> str:
    split = mean_split(result)
    if split is None:
        return "No request completed."
    stages = split.stage_s[:4]
    longest = int(stages.argmax())
    share = readable.percent(float(stages[longest] / stages.sum())) if stages.sum() else "all"
    name = "exposed transfer" if STAGES[longest][0] == "transfer" else STAGES[longest][0]
    return f"Before the token phase, the mean request spends {share} of its time in the {name}."


def _whole(result: Result) -> str:
    split = mean_split(result)
    if split is None:
        return "No request completed."
    total_s = float(split.stage_s.sum())
    waits = (
        readable.percent(float(split.stage_s[0] + split.stage_s[2] + split.stage_s[3]) / total_s) if total_s else "none"
    )
    return f"The mean request takes {readable.seconds(total_s)}, {waits} of it waiting or in transfer."


def _batches(result: Result) -> str:
    sizes = np.arange(result.batch_share.shape[1])
    parts = [
        f"{readable.number(float((share * sizes).sum()))} in the {name} pool"
        for name, share in zip(POOL_NAMES, result.batch_share, strict=True)
        if share.any()
    ]
    return f"Averaged over busy time, a batch holds {', '.join(parts)}." if parts else "No machine was ever busy."


def _use(result: Result) -> str:
    busiest = max(result.pools, key=lambda pool: pool.busy_share)
    share = readable.percent(busiest.busy_share)
    return f"The busiest pool is {busiest.name}: its machines compute for {share} of the time."


CAPTIONS: dict[str, Callable[[Result], str]] = {
    "ttft": _tail("ttft_s", "the requests get their first token"),
    "itl": _tail("itl_s", "the tokens follow the one before"),
    "e2e": _tail("e2e_s", "the requests end"),
    "slo": _slo,
    "machines": _machines,
    "running": _most(
        RUNNING, "The most requests running in one pool are {}, in the {} pool.", "No sample saw a request running."
    ),
    "waiting": _most(
        WAITING, "The most requests waiting in one pool are {}, in the {} pool.", "No sample saw a request waiting."
    ),
    "kv": _most(KV_SHARE, "KV memory is fullest at {}, in the {} pool.", "No sample saw KV memory in use."),
    "start": _start,
    "whole": _whole,
    "batches": _batches,
    "use": _use,
}
"""Captions by the name of the panel."""
