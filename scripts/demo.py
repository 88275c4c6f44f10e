"""The whole loop on this machine in two to five minutes: profile, plan, serve, replay, lose a worker, predict, compare.

Run by `make demo`; leaves out/demo.html, which opens without a network.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from phasesplit.domain.request import Trace
from phasesplit.engine.fetch import model_path
from phasesplit.errors import PhasesplitError
from phasesplit.io.cluster_file import ServedCluster
from phasesplit.io.profiles import read_profile_file
from phasesplit.io.trace_writers import write_trace
from phasesplit.io.workloads import load_workload
from phasesplit.replay.client import Prompts
from phasesplit.validation.core_shares import core_plan
from phasesplit.validation.live import Live, LiveRun
from phasesplit.validation.prediction import NO_OVERHEADS, Predictor
from phasesplit.validation.verify import Verification, profile_doubts
from phasesplit.validation.verify_command import verification_record
from phasesplit.validation.verify_page import write_verify_html
from phasesplit.validation.verify_view import placements, shown, shown_error, verified

OUT = Path("out")
PROFILE, MACHINE, TRACE, PAGE = (
    OUT / name for name in ("demo-profile.json", "demo-machine.yaml", "demo-trace.csv", "demo.html")
)
POOLS = {"split": {"prefill": 1, "decode": 1}, "unsplit": {"unsplit": 2}}
CLIP = (128, 32)
"""Longest prompt and output: two cores are few."""
PROFILE_TIMES = ("15s", "60s")
"""The second where the first is not enough: on a slow processor no prompt of the demo's length fits into it."""
LEAST_REPLAY_S, MOST_REPLAY_S, LOSS_S, KILL_AFTER_S = 15.0, 60.0, 8.0, 0.3
REPLAYED = 8
"""Requests for which a replay is made longer. A worker is killed KILL_AFTER_S after the middle one has arrived."""
LOAD = 0.4
"""Share of what the split can serve."""
STEPS = 6


def profile(model: Path) -> None:
    """Profile this machine, and once more with more time where the first profile is in doubt."""
    for budget in PROFILE_TIMES:
        phasesplit("profile", "engine", "--model", str(model), "--budget", budget,
                   "--output", str(PROFILE), "--machine", str(MACHINE))  # fmt: skip
        found = read_profile_file(PROFILE)
        doubts = profile_doubts(found)
        longest_tokens = found.times.prefill_knots_tokens[-1] if found.times else 0
        if longest_tokens < CLIP[0]:
            doubts.append(f"the longest prompt in it has {longest_tokens:.0f} tokens, the demo's have up to {CLIP[0]}")
        if not doubts:
            return
        print(f"Beware: {doubts[0]}")


def main() -> None:
    """Run the loop."""
    since_s = time.monotonic()
    OUT.mkdir(exist_ok=True)
    name, model = the_model()
    clusters = {kind: ServedCluster(name=kind, model=name, pools=pools) for kind, pools in POOLS.items()}
    step(2, f"profile this machine ({PROFILE_TIMES[0]}): how long prefill and decode iterations take")
    profile(model)
    rate = LOAD * capacity_per_s(clusters["split"])
    replay_s = min(max(LEAST_REPLAY_S, REPLAYED / rate), MOST_REPLAY_S)
    step(3, "plan: two workers of this machine, one for each phase or both for both?")
    trace = requests(rate, replay_s)
    write_trace(TRACE, trace)
    phasesplit("plan", "--model", str(PROFILE), "--existing", f"{MACHINE}=2", "--workload", str(TRACE), "--slo",
               "ttft_p90<2s,itl_p99<0.3s", "--duration", "60")  # fmt: skip
    trace_of_loss = requests(rate, min(max(LOSS_S, REPLAYED / rate), MOST_REPLAY_S))
    lost: list[LiveRun] = []

    async def lose_a_worker(live: Live) -> None:
        step(5, "kill the prefill worker while requests are served: do clients see it?")
        lost.append(await run_with_a_loss(live, trace_of_loss))

    step(4, f"serve and replay: {len(trace)} requests of conversation shape in {replay_s:.0f} s, unsplit, then split")
    found = {
        "unsplit": verified(clusters["unsplit"], model, [trace], PROFILE)[0],
        "split": verified(clusters["split"], model, [trace], PROFILE, afterwards=lose_a_worker)[0],
    }
    noted = loss(lost[0], trace_of_loss)
    print(noted)
    step(6, "predicted against measured")
    for verification in found.values():
        show(verification)
    write_verify_html(
        [verification_record(one) for one in found.values()],
        PAGE,
        heading="Split and unsplit on this machine: predicted against measured",
        notes=[noted],
    )
    print(f"\n{time.monotonic() - since_s:.0f} s in all. The report: {PAGE} (opens without a network).")
    print("Now with your own: phasesplit verify --help, phasesplit plan --help, phasesplit serve")


def the_model() -> tuple[str, Path]:
    """Return name and path of the small model, or of the random tiny one where the small one cannot be had."""
    step(1, "fetch the small model (SmolLM2-135M-Instruct, 98 MB, once)")
    try:
        return "default", model_path("default", print)
    except PhasesplitError as problem:
        print(f"It cannot be had here ({problem}).")
        print("The demo goes on with `tiny`: a random model that writes nonsense; everything else is as it is.")
        return "tiny", model_path("tiny", print)


def capacity_per_s(cluster: ServedCluster) -> float:
    """Return the requests that a cluster is predicted to serve in a second when there is always one that waits."""
    predictor = Predictor(cluster, read_profile_file(PROFILE), PROFILE)
    share = core_plan(predictor.names).core_share
    return predictor.predict(requests(200.0, 1.0), NO_OVERHEADS, share).result.throughput_per_s


def requests(rate_per_s: float, duration_s: float) -> Trace:
    """Return conversation-shaped requests, shortened to what two cores can serve."""
    trace = load_workload("azure-conversation").trace(rate_per_s, duration_s, 0)
    return Trace.from_columns(
        f"azure-conversation, clipped to {CLIP[0]}:{CLIP[1]}",
        trace.arrival_s,
        np.minimum(trace.prompt_tokens, CLIP[0]).astype(np.int32),
        np.minimum(trace.output_tokens, CLIP[1]).astype(np.int32),
    )


async def run_with_a_loss(live: Live, trace: Trace) -> LiveRun:
    """Replay a trace and kill the prefill worker."""

    async def kill() -> None:
        await asyncio.sleep(kill_s(trace))
        os.kill(live.pids["prefill-0"], signal.SIGKILL)

    killing = asyncio.create_task(kill())
    run = await live.ask(trace, Prompts(seed=9))
    await killing
    return run


def kill_s(trace: Trace) -> float:
    """Return when in a replay the worker is killed: while a request is new to it, at any rate."""
    return float(trace.arrival_s[len(trace) // 2]) + KILL_AFTER_S


def loss(run: LiveRun, trace: Trace) -> str:
    """Return what clients saw of the loss of a worker."""
    failed = [one.error for one in run.replay.seen if one.error]
    again = sum(record is not None and record["attempts"] > 1 for record in run.records)
    text = (
        f"The prefill worker was killed {kill_s(trace):.1f} s into a replay of {len(run.replay.seen)} requests: "
        f"{len(failed)} of them failed, {again} were computed again; the slowest answer took "
        f"{max((one.end_s - one.due_s for one in run.replay.completed), default=0.0):.1f} s."
    )
    return text if not failed else f"{text} The first failure: {failed[0]}."


def show(found: Verification) -> None:
    """Print a verification in few lines."""
    comparison = found.comparison
    print(f"\n{found.cluster.name}: {comparison.compared} requests")
    for figure in comparison.latencies:
        if not figure.name.endswith("p99"):
            print(
                f"  {figure.name}  predicted {shown(figure, figure.predicted):>11}  measured "
                f"{shown(figure, figure.measured):>11}  error {shown_error(figure):>7}"
            )
    for line in [*map(str, comparison.explanations), *placements(found), *(f"Beware: {one}" for one in found.warnings)]:
        print(f"  {line}")


def step(number: int, text: str) -> None:
    """Print what comes next."""
    print(f"\n[{number}/{STEPS}] {text}", flush=True)


def phasesplit(*arguments: str) -> None:
    """Run a command of this package, and end where it fails."""
    print(f"$ phasesplit {' '.join(arguments)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "phasesplit", *arguments]).returncode  # noqa: S603
    if code:
        sys.exit(code)


if __name__ == "__main__":
    try:
        main()
    except PhasesplitError as problem:
        sys.exit(f"demo: {problem}")
