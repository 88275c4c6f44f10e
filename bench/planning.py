"""How fast a plan is: one search over 1,600 pool sizes, by pruning and by trying all, and the default plan.

Run with `make bench`, on a machine that does nothing else: all cores are used. The trace of the search is
../shared/data/splitwise-sim/rr_conv_70 where present (42,218 requests), otherwise as many of the shipped conversation
workload.
"""

import subprocess
import sys
import time
from itertools import product
from pathlib import Path

from phasesplit.domain.arrivals import parse_arrivals
from phasesplit.domain.request import Trace
from phasesplit.io.catalog import phase_times, reference_times
from phasesplit.io.specs import load_machine, load_model
from phasesplit.io.traces import read_trace
from phasesplit.io.workloads import load_workload
from phasesplit.planner.designs import DesignKind, design
from phasesplit.planner.drive import MemoryJournal, drive
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.pool import open_pool
from phasesplit.planner.probe import Prober, Question
from phasesplit.planner.problem import AS_ASKED, Measure, Offer, Problem, Traffic
from phasesplit.planner.search import CountSearch
from speed import about_machine

ROOT = Path(__file__).parent.parent
SHARED_TRACE = ROOT / "../shared/data/splitwise-sim/rr_conv_70.csv.gz"
REQUESTS = 42_218
MOST = 40
SEARCH_GOAL_S = 60.0
PLAN_GOAL_S, FIRST_LINE_GOAL_S = 10.0, 2.0
PLAN = "--model llama-3.1-70b --machines dgx-h100,dgx-a100 --workload azure-conversation --rate 70"
PLAN += " --slo splitwise --minimize cost"


def main() -> None:
    """Print all tables."""
    about_machine()
    one_search()
    default_plan()


def one_search() -> None:
    """Print the time of one search over all sizes of two pools, pruned, and of trying every one."""
    trace = shared_or_shipped()
    problem = pools_problem(trace)
    splits = design(problem, DesignKind.ELASTIC, [0, 0])
    rate = problem.traffic.rate_per_s
    print(f"\ncheapest of {MOST} x {MOST} pool sizes, bloom-176b on dgx-h100, elastic, {len(trace):,} requests")
    prober = Prober(problem)
    prober(Question(splits, (MOST, MOST), rate, 0))  # compiles, where nothing is compiled yet
    with open_pool(prober) as workers:
        began = time.perf_counter()
        count_search = CountSearch(
            problem=problem,
            lower_bounds=LowerBounds(problem),
            design=splits,
            rate_per_s=rate,
            measure=Measure.COST,
            variation=AS_ASKED,
            seeds=problem.seeds,
            width=workers.width,
        )
        found = drive({0: count_search.run()}, workers, MemoryJournal())[0]
        taken_s = time.perf_counter() - began
        print(
            f"  pruned     {found.counts}  {found.value:8.2f} USD/h   {found.probes:5,} simulations"
            f"  {taken_s:6.1f} s   goal below {SEARCH_GOAL_S:.0f} s, {workers.width} workers"
        )
        began = time.perf_counter()
        cells = list(product(range(1, MOST + 1), repeat=2))
        futures = [workers.submit(Question(splits, cell, rate, 0)) for cell in cells]
        holding = [cell for cell, future in zip(cells, futures, strict=True) if future.result().holds]
        taken_s = time.perf_counter() - began
    best = min(holding, key=lambda cell: (count_search.taken(cell), cell))
    print(
        f"  all tried  {best}  {count_search.taken(best):8.2f} USD/h   {len(cells):5,} simulations"
        f"  {taken_s:6.1f} s   goal below {SEARCH_GOAL_S:.0f} s, {len(holding):,} keep the SLO"
    )


def pools_problem(trace: Trace) -> Problem:
    """Return the paper's question: BLOOM-176B on DGX H100, for the recorded trace as it is."""
    model, machine = load_model("bloom-176b"), load_machine("dgx-h100")
    return Problem(
        model=model,
        offers=(Offer(machine=machine, times=phase_times(model, machine)),),
        traffic=Traffic(source=trace, rate_per_s=trace.rate_per_s, duration_s=len(trace) / trace.rate_per_s),
        reference=reference_times(model, load_machine("dgx-a100")),
        seeds=(0,),
        most_servers=2 * MOST,
    )


def default_plan() -> None:
    """Print how long the default plan takes, as a process of its own, and when its first line comes."""
    command = [sys.executable, "-c", "from phasesplit.cli import main; main()", "plan", *PLAN.split()]
    print(f"\nphasesplit plan {PLAN}")
    for run in range(3):
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            process.stdout.read(1)
            first_s = time.perf_counter() - began
            process.stdout.read()
        taken_s = time.perf_counter() - began
        print(
            f"  run {run + 1}: first output after {first_s:.2f} s (goal below {FIRST_LINE_GOAL_S:.0f}),"
            f" all after {taken_s:.2f} s (goal below {PLAN_GOAL_S:.0f}), exit status {process.returncode}"
        )


def shared_or_shipped() -> Trace:
    """Return the published simulator's ten-minute trace, or one like it from the shipped workload."""
    if SHARED_TRACE.exists():
        return read_trace(SHARED_TRACE)[0]
    drawn = load_workload("azure-conversation").chunks(70, REQUESTS, arrivals=parse_arrivals("poisson"))
    return next(drawn)


if __name__ == "__main__":
    main()
