"""`phasesplit verify` step by step: a cluster runs a trace, the simulator predicts it, and both are compared.

1. Each worker gets cores of its own, as far as there are any.
2. The cluster starts, and its time beyond iterations and transfers is measured while it is idle (`Overheads`).
3. A process of its own sends the trace, and measures what clients see.
4. The simulator predicts the same requests from the profile and the overheads.
5. Both are compared, and warnings say what else may explain a difference.
"""

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phasesplit.domain.latency import Exact
from phasesplit.domain.profile import PhaseTimes
from phasesplit.domain.request import Trace
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.errors import InfeasibleError, SpecError
from phasesplit.io.cluster_file import ServedCluster
from phasesplit.launcher.supervisor import Log
from phasesplit.replay.client import LATE_S, USUAL_IDS, Prompts
from phasesplit.validation.comparison import (
    FRONT,
    PREFILL,
    QUEUE,
    Comparison,
    Side,
    compare,
    measured_stages,
    queue_in_prefill,
)
from phasesplit.validation.core_shares import CorePlan, core_plan, whole_core_plan
from phasesplit.validation.live import CLIENT, GATEWAY, Live, LiveRun, served
from phasesplit.validation.prediction import NO_OVERHEADS, Overheads, Predictor

if TYPE_CHECKING:
    from phasesplit.io.profile_schema import ProfileSpec


_ALONE, _CROWD = 6, 8
_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 16
_APART = 3.0
"""How many times as far apart the requests are as each should take."""
_LEAST_APART_S = 0.2
_USUAL = 0.25
_FEWEST_GAPS = 3
"""Fewest output tokens of a request that has a gap besides the first one."""


def idle_trace(times: PhaseTimes, longest_tokens: int) -> Trace:
    """Return a few short requests, each of which finds the cluster idle, and then some at once, in batches.

    Args:
        times: What iterations take.
        longest_tokens: Longest sequence that the cluster takes.
    """
    output_tokens = min(_OUTPUT_TOKENS, longest_tokens // 2)
    prompt_tokens = min(_PROMPT_TOKENS, longest_tokens - output_tokens)
    alone_s = float(times.prefill_time_s(prompt_tokens)) + output_tokens * float(times.decode_time_s(1, prompt_tokens))
    apart_s = max(_APART * alone_s, _LEAST_APART_S)
    count = _ALONE + _CROWD
    return Trace.from_columns(
        "idle",
        np.minimum(np.arange(count, dtype=np.float64), _ALONE) * apart_s,
        np.full(count, prompt_tokens, np.int32),
        np.full(count, output_tokens, np.int32),
    )


def idle_overheads(run: LiveRun, times: PhaseTimes, trace: Trace) -> Overheads:
    """Return what the requests of `idle_trace` took longer than their iterations, never below 0.

    Of each the lower quartile counts: whatever else this machine does only makes some of the requests slower. What an
    iteration takes longer with one request and with several is what each token adds, for each token is sent by itself.

    Args:
        run: Their replay.
        times: What iterations take.
        trace: The requests.
    """
    prompt_tokens, output_tokens = int(trace.prompt_tokens[0]), int(trace.output_tokens[0])
    seen_s = run.replay.columns()["ttft_s"]
    alone = [
        (record, float(first_s))
        for record, first_s in zip(run.records[:_ALONE], seen_s[:_ALONE], strict=True)
        if record is not None and record["outcome"] == "completed"
    ]
    one_s = _longer_s([record for record, _ in alone], times, prompt_tokens, output_tokens)
    decode_s = 0.0
    by_machine: dict[str, list[Mapping[str, Any]]] = {}
    for record in run.records[_ALONE:]:
        if record is not None and record["outcome"] == "completed":
            by_machine.setdefault(record["decode_machine"], []).append(record)
    for records in by_machine.values():
        if len(records) > 1:
            several_s = _longer_s(records, times, prompt_tokens, output_tokens, batch=len(records))
            decode_s = max(decode_s, (several_s - one_s) / (len(records) - 1))
    decode_s = min(decode_s, one_s)
    messages_s = _usual([record["first_token_s"] - (record["prefill_started_s"] or 0.0) for record, _ in alone])
    messages_s -= float(times.prefill_time_s(prompt_tokens)) + one_s
    # Times that were taken from outside have the front end in them: what is in the prompt's is not in the queue too.
    queue_s = _usual([record["prefill_started_s"] or 0.0 for record, _ in alone]) + min(messages_s, 0.0)
    front_s = _usual([first_s - record["first_token_s"] for record, first_s in alone])
    return Overheads(
        stages_s={
            QUEUE: max(queue_s, 0.0),
            PREFILL: max(messages_s, 0.0),
            FRONT: max(front_s, 0.0),
        },
        iteration_s=one_s - decode_s,
        decode_s=decode_s,
    )


def _longer_s(
    records: Sequence[Mapping[str, Any]], times: PhaseTimes, prompt_tokens: int, output_tokens: int, batch: int = 1
) -> float:
    """Return what the decode iterations of requests that were in one batch took longer than they should, >= 0."""
    if output_tokens < _FEWEST_GAPS:
        return 0.0
    gaps_s = [(record["last_token_s"] - record["second_token_s"]) / (output_tokens - 2) for record in records]
    context_tokens = batch * (prompt_tokens + output_tokens / 2)
    return max(_usual(gaps_s) - float(times.decode_time_s(batch, context_tokens)), 0.0)


def _usual(values: list[float]) -> float:
    return float(np.quantile(values, _USUAL)) if values else 0.0


_OTHERS_SHARE = 0.05
"""Share of the cores that others may have had before it is worth a warning."""
_WAITED_SHARE = 0.05
"""The same of what a worker waits for its core beyond what its share makes it wait, over what it computes."""
_TRUSTED_SHARE = 0.25
"""The same on the idle cluster, above which what was measured there is not its front end."""
_TRUSTED_ERROR = 0.1
"""Held-out error of a profile above which the host was not steady while it was taken.

Source: `make demo` on a shared two-core host, 5 and 8 % where predictions were of use, 32 % where they were not.
"""
_FRONT_SHARE = 0.5
"""Share of their own cores that gateway and client may have."""
_FEW = 100
"""Requests below which a p99 is no more than one of the largest values."""
_WARM_OUTPUT_TOKENS = 8

OnProgress = Callable[[str, int, int], None]
"""Called with what is done, how much of it is done, and how much there is."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Verification:
    """Predicted against measured, and what both rest on.

    Attributes:
        cluster: What ran.
        trace: What was asked of it.
        profile: Where iteration times come from.
        kv_blocks: Worker to KV blocks, the same in the simulation and in the cluster.
        block_tokens: Tokens of a block.
        plan: Which cores workers, gateway and client had, and how much of them.
        overheads: What was added to the simulation.
        adds_overheads: Whether they were.
        comparison: The comparison.
        errors: How many requests failed, by what the client received.
        gateway_share: Share of a core that the gateway had.
        client_share: The same of the process that sent.
        waited: Worker to the seconds that it had to wait for its core, beyond what its share leaves to others, for each
            second that it computed; empty where workers are several processes, which wait for one another.
        others_share: Share of all cores that other processes had.
        warnings: What a reader should know before trusting the figures.
    """

    cluster: ServedCluster
    trace: Trace
    profile: str
    kv_blocks: Mapping[str, int]
    block_tokens: int
    plan: CorePlan
    overheads: Overheads
    adds_overheads: bool
    comparison: Comparison
    errors: Mapping[str, int]
    gateway_share: float
    client_share: float
    waited: Mapping[str, float]
    others_share: float
    warnings: tuple[str, ...]


async def verify(
    cluster: ServedCluster,
    model: Path,
    traces: Sequence[Trace],
    profile: "ProfileSpec",
    profile_path: Path,
    *,
    adds_overheads: bool = True,
    seed: int = 0,
    afterwards: Callable[[Live], Awaitable[None]] | None = None,
    say: Callable[[str], None] = lambda _: None,
    log: Log = lambda _name, _line: None,
    on_progress: OnProgress = lambda _what, _done, _all: None,
) -> list[Verification]:
    """Run a cluster, replay traces against it one after the other, simulate each, and compare.

    Gateway and client have cores of their own, and so has each worker; where there are too few, each worker of the
    embedded engine has a fixed share of one, and the simulation knows.

    Args:
        cluster: What to run; nobody else should talk to it.
        model: Path of its model.
        traces: The requests, at least one trace.
        profile: What iterations take.
        profile_path: Where that is.
        adds_overheads: Whether what is measured on the idle cluster is added to the prediction.
        seed: Of the prompts.
        afterwards: Called with the cluster once all traces are through.
        say: Takes lines about the cluster.
        log: Takes lines of its workers' logs.
        on_progress: Called with how far it is.

    Raises:
        SpecError: The cluster cannot run, or its KV memory is not that of the simulation.
        InfeasibleError: No request was answered.
    """
    plan, cluster = on_cores(cluster)
    core_share = plan.core_share
    ids = _token_ids(cluster, model)
    on_progress("starting", 0, 1)
    async with served(cluster, model, say=say, log=log) as live:
        predictor = Predictor(cluster, profile, profile_path, threshold_tokens=_threshold_tokens(live))
        kv_blocks = check_kv(predictor.kv_blocks, live)
        _check_lengths(traces, live)
        times = predictor.times.scaled(1 / core_share, 1 / core_share)
        warm, quiet = warm_trace(traces, len(live.pids)), idle_trace(times, longest_tokens=_longest_tokens(live))
        with live.placed(plan):
            on_progress("warming up", 0, 1)
            await live.ask(warm, Prompts(ids=ids, seed=seed + 1))
            idle = await live.ask(
                quiet,
                Prompts(ids=ids, seed=seed + 2),
                lambda done: on_progress("measuring the front end", done, len(quiet)),
            )
            runs = []
            for number, trace in enumerate(traces):
                prompts, total = Prompts(ids=ids, seed=seed + 3 + number), len(trace)
                runs.append(
                    await live.ask(trace, prompts, lambda done, total=total: on_progress("replaying", done, total))  # type: ignore[misc]
                )
        if afterwards is not None:
            await afterwards(live)
    # The gateway lives in this process: simulating while it serves would slow it.
    on_progress("simulating", 0, 1)
    overheads, distrust = idle_overheads(idle, times, quiet), _distrust(idle, plan) if adds_overheads else []
    adds_overheads = adds_overheads and not distrust
    earlier = [*warm.output_tokens.tolist(), *quiet.output_tokens.tolist()]
    found = []
    for trace, run in zip(traces, runs, strict=True):
        predicted = predictor.predict(trace, overheads if adds_overheads else NO_OVERHEADS, core_share, earlier)
        earlier += trace.output_tokens.tolist()
        expected = predicted.side
        if not _reports_starts(run):
            expected = replace(expected, stages_s=queue_in_prefill(expected.stages_s))
        measured = measured_side(run, core_share * plan.cores_each)
        if np.isnan(measured.e2e_s).all():
            raise InfeasibleError(f"no request was answered; the first failed with: {run.replay.seen[0].error}")
        comparison = compare(expected, measured)
        found.append(
            Verification(
                cluster=cluster,
                trace=trace,
                profile=predictor.times.source,
                kv_blocks=kv_blocks,
                block_tokens=predictor.rules.block_tokens,
                plan=plan,
                overheads=overheads,
                adds_overheads=adds_overheads,
                comparison=comparison,
                errors=_errors(run),
                gateway_share=run.busy_s[GATEWAY] / run.replay.wall_s,
                client_share=run.busy_s[CLIENT] / run.replay.wall_s,
                waited=_waited(run, plan),
                others_share=run.others_share,
                warnings=(
                    *profile_doubts(profile),
                    *distrust,
                    *_doubts(run, comparison, plan),
                    *predicted.result.warnings,
                ),
            )
        )
    return found


def on_cores(cluster: ServedCluster) -> tuple[CorePlan, ServedCluster]:
    """Return where a cluster's processes compute, and the cluster whose workers know what is theirs.

    Args:
        cluster: The cluster.

    Raises:
        SpecError: Its vLLM machines are more than the cores.
    """
    if cluster.vllm is not None:
        plan = whole_core_plan(list(cluster.workers))
        threads = cluster.vllm.threads or plan.cores_each
        return plan, replace(cluster, vllm=replace(cluster.vllm, threads=threads))
    plan = core_plan(list(cluster.workers))
    plan = replace(plan, core_share=min(plan.core_share, cluster.core_share))
    return plan, replace(cluster, core_share=plan.core_share)


def _token_ids(cluster: ServedCluster, model: Path) -> range:
    """Return ids that are ordinary tokens of the model."""
    if cluster.vllm is not None:
        return USUAL_IDS
    vocabulary = open_checkpoint(model).config.vocab
    return range(vocabulary // 4, vocabulary * 3 // 4)  # special tokens stand at the ends


def check_kv(simulated: int, live: Live) -> dict[str, int]:
    """Return the KV blocks of each worker.

    Raises:
        SpecError: One has not as many as the simulation: latencies would differ for no other reason.
    """
    blocks = {name: int(facts["capacity_blocks"]) for name, facts in live.facts.items()}
    for name, measured in blocks.items():
        if measured != simulated:
            raise SpecError(
                f"KV memory differs: {name} has {measured:,} blocks, the simulation {simulated:,}; there is nothing to "
                "compare (was the profile taken of another model?)"
            )
    return blocks


def warm_trace(traces: Sequence[Trace], workers: int) -> Trace:
    """Return two requests for each worker, all at once, as long as the longest of some traces, with few tokens."""
    count = 2 * workers
    prompt_tokens = max(int(trace.prompt_tokens.max()) for trace in traces)
    output_tokens = min(_WARM_OUTPUT_TOKENS, *(int(trace.output_tokens.max()) for trace in traces))
    return Trace.from_columns(
        "warm-up",
        np.zeros(count),
        np.full(count, prompt_tokens, np.int32),
        np.full(count, output_tokens, np.int32),
    )


def measured_side(run: LiveRun, cores: float = 1.0) -> Side:
    """Return what was measured, as it is compared; a worker that computes on all of its cores is busy all the time.

    Args:
        run: What was measured.
        cores: Cores that each worker has, or its share of one.
    """
    columns = run.replay.columns()
    failed = columns["error"] != ""
    e2e_s = np.where(failed, np.nan, columns["e2e_s"])
    workers = [name for name in run.busy_s if name not in (GATEWAY, CLIENT)]
    return Side(
        ttft_s=np.where(failed, np.nan, columns["ttft_s"]),
        e2e_s=e2e_s,
        itl=Exact(run.replay.gaps_s),
        stages_s=measured_stages(run.records, e2e_s),
        pairs=[
            None if record is None or record["prefill_machine"] is None
            else (record["prefill_machine"], record["decode_machine"])
            for record in run.records
        ],
        wall_s=run.replay.wall_s,
        output_tokens=int(columns["output_tokens"][~failed].sum()),
        busy={name: run.busy_s[name] / (cores * run.replay.wall_s) for name in workers},
        moves=run.moves,
    )  # fmt: skip


def _threshold_tokens(live: Live) -> int | None:
    known = [facts.get("threshold_tokens") for facts in live.facts.values() if facts.get("home") != "decode"]
    senders = [tokens for tokens in known if tokens is not None]
    return int(np.median(senders)) if senders else None


def _longest_tokens(live: Live) -> int:
    return min(
        min(int(facts["context_tokens"]), int(facts["capacity_blocks"]) * int(facts["block_tokens"]))
        for facts in live.facts.values()
    )


def _check_lengths(traces: Sequence[Trace], live: Live) -> None:
    allowed = _longest_tokens(live)
    for trace in traces:
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        if longest > allowed:
            raise SpecError(
                f"{trace.name}: has a request of {longest:,} tokens, and {live.model} here takes {allowed:,} at most; "
                "shorten with --clip"
            )


def _reports_starts(run: LiveRun) -> bool:
    """Return whether any machine has reported when a prefill phase began."""
    return any(record is not None and record["prefill_started_s"] is not None for record in run.records)


def profile_doubts(profile: "ProfileSpec") -> list[str]:
    """Return why no prediction from a profile can be good, nothing where it holds on what it did not fit."""
    error = profile.errors["all"].mean if "all" in profile.errors else None
    if error is None or error <= _TRUSTED_ERROR:
        return []
    return [
        f"the profile is {error:.0%} off where it is checked, and no prediction is better than that: take it again "
        "while nothing else runs"
    ]


def _distrust(idle: LiveRun, plan: CorePlan) -> list[str]:
    """Return why what the idle cluster took says nothing of its front end, nothing where it does."""
    waited = max(_waited(idle, plan).values(), default=0.0)
    if waited > _TRUSTED_SHARE:
        why = f"the idle cluster waited {waited:.1f} s for its cores for each second it computed"
    elif plan.has_process_trees and idle.others_share > _TRUSTED_SHARE:
        why = f"other processes had {idle.others_share:.0%} of this machine's cores while the cluster was idle"
    else:
        return []
    return [f"{why}, so what was measured of its front end is not added to the prediction"]


def _errors(run: LiveRun) -> dict[str, int]:
    texts = [one.error for one in run.replay.seen if one.error]
    return {text: texts.count(text) for text in dict.fromkeys(texts)}


def _waited(run: LiveRun, plan: CorePlan) -> dict[str, float]:
    """Return how long each worker waited for its core beyond what its share leaves to others, over what it computed.

    Nothing for workers of several processes, which wait for one another.
    """
    if plan.has_process_trees:
        return {}
    usual = 1 / plan.core_share - 1
    return {name: max(0.0, waited_s / max(run.busy_s[name], 1e-3) - usual) for name, waited_s in run.waited_s.items()}


def _doubts(run: LiveRun, comparison: Comparison, plan: CorePlan) -> list[str]:
    doubts = []
    waited = {name: share for name, share in _waited(run, plan).items() if share > _WAITED_SHARE}
    if waited:
        each = ", ".join(f"{name} {share:.2f} s" for name, share in waited.items())
        doubts.append(f"workers waited for a core while something else had it, for each second they computed: {each}")
    if run.others_share > _OTHERS_SHARE:
        doubts.append(
            f"other processes had {run.others_share:.0%} of this machine's {os.cpu_count()} cores meanwhile, which the "
            "simulation does not know"
        )
    front_share = (run.busy_s[GATEWAY] + run.busy_s[CLIENT]) / (run.replay.wall_s * len(plan.front))
    if front_share > _FRONT_SHARE:
        doubts.append(
            f"gateway and client were busy for {front_share:.0%} of their {len(plan.front)} cores: that "
            "they wait for one another is not in the prediction"
        )
    if not _reports_starts(run):
        doubts.append("these machines do not report when a prefill phase begins: on both sides the queue is in it")
    late = run.replay.late
    if late.size and (count := int((late > LATE_S).sum())):
        doubts.append(f"{count} requests were sent more than {1e3 * LATE_S:.0f} ms late; latencies count from when due")
    left_out = comparison.requests - comparison.compared
    if left_out:
        doubts.append(f"{left_out} of {comparison.requests} requests did not complete on both sides and are left out")
    if comparison.compared < _FEW:
        doubts.append(
            f"a p99 of {comparison.compared} requests is one of the largest values: one request can change it"
        )
    retried = sum(record is not None and record["attempts"] > 1 for record in run.records)
    if retried:
        doubts.append(f"{retried} requests were tried more than once: a machine failed meanwhile")
    return doubts
