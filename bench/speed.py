"""How fast the simulator is: requests per second by rules, growth with trace and cluster, memory, start-up.

Run with `make bench`. Absolute figures depend on the machine, so the machine and the commit are printed and every
figure is the best of several runs; ratios are what to compare. The trace of the first table is
../shared/data/splitwise-sim/rr_conv_70_2min where present, otherwise the shipped conversation workload like it.
"""

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from phasesplit.domain.arrivals import parse_arrivals
from phasesplit.domain.request import Trace
from phasesplit.io.catalog import build_cluster
from phasesplit.io.traces import read_trace
from phasesplit.io.workloads import load_workload
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

ROOT = Path(__file__).parent.parent
SHARED_TRACE = ROOT / "../shared/data/splitwise-sim/rr_conv_70_2min.csv.gz"
SPLIT = [("prefill", 25, "dgx-h100"), ("decode", 15, "dgx-h100")]
UNSPLIT = [("unsplit", 40, "dgx-h100")]
PUBLISHED_SIMULATOR_PER_S = (90, 540)
"""Requests per CPU second of the published simulator. Source: its results' own cpu_s column, summary.csv."""
QUANTILES = (0.5, 0.9, 0.95, 0.99)


def main() -> None:
    """Print all tables."""
    about_machine()
    rules_table()
    trace_growth()
    machine_growth()
    memory()
    start_up()


def about_machine() -> None:
    """Print what the figures were measured on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    print(
        f"machine: {model}, {os.cpu_count()} cores, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
    print(f"commit:  {commit.stdout.strip() or 'not a git checkout'}")


def rules_table() -> None:
    """Print requests per second by rules, all metrics included."""
    trace = shared_or_shipped()
    print(f"\nrequests per second, one core, warm, all metrics, {trace.name} ({len(trace):,} requests), best of 15")
    cases = [
        ("published, split 25 + 15", SPLIT, Rules.as_published(), 1_000_000),
        ("default, split 25 + 15", SPLIT, Rules(), 500_000),
        ("default, unsplit 40, chunked", UNSPLIT, Rules(), 300_000),
    ]
    for name, pools, rules, goal in cases:
        cluster = build_cluster("bloom-176b", pools, published=rules.published)
        speed = len(trace) / best_of(15, lambda c=cluster, r=rules: every_metric(simulate(c, trace, r)))
        bare = len(trace) / best_of(15, lambda c=cluster, r=rules: simulate(c, trace, r, keep=False))
        low, high = (speed / other for other in reversed(PUBLISHED_SIMULATOR_PER_S))
        print(
            f"  {name:30} {speed:12,.0f}   goal {goal:9,}  {speed / goal:5.2f} x goal"
            f"   {low:,.0f} to {high:,.0f} x the published simulator   (summary only {bare:,.0f})"
        )


def trace_growth() -> None:
    """Print the time of a request as the trace gets longer."""
    print("\ntime per request by length of the trace, default rules, split 25 + 15, 70 requests/s")
    cluster = build_cluster("bloom-176b", SPLIT)
    poisson = parse_arrivals("poisson")
    for requests in (10_000, 40_000, 160_000, 640_000):
        trace = load_workload("azure-conversation").trace(70, requests / 70, seed=1, arrivals=poisson)
        taken_s = best_of(3, lambda t=trace: simulate(cluster, t))
        print(f"  {len(trace):9,} requests   {taken_s / len(trace) * 1e6:6.2f} us")


def machine_growth() -> None:
    """Print the time of a request as the cluster gets larger, at the same load per machine."""
    print("\ntime per request by number of machines (5 prefill to 3 decode), 1.75 requests/s each, default rules")
    poisson = parse_arrivals("poisson")
    for machines in (8, 80, 800, 8_000):
        pools = [("prefill", machines * 5 // 8, "dgx-h100"), ("decode", machines * 3 // 8, "dgx-h100")]
        cluster = build_cluster("bloom-176b", pools)
        requests = max(20_000, machines * 40)
        trace = load_workload("azure-conversation").trace(
            1.75 * machines, requests / 1.75 / machines, seed=1, arrivals=poisson
        )
        taken_s = best_of(3, lambda c=cluster, t=trace: simulate(c, t, keep=False))
        print(f"  {machines:6,} machines   {len(trace):8,} requests   {taken_s / len(trace) * 1e6:6.2f} us")


def memory() -> None:
    """Print time and memory of ten million requests, summary only, in a process of its own."""
    print("\nten million requests, summary only, default rules, split 25 + 15 (own process)")
    code = (
        "from phasesplit.simulator.run import simulate;"
        "from phasesplit.io.workloads import load_workload; from phasesplit.io.catalog import build_cluster;"
        "from phasesplit.domain.arrivals import parse_arrivals;"
        f"r = simulate(build_cluster('bloom-176b', {SPLIT!r}), load_workload('azure-conversation')"
        ".chunks(70.0, 10_000_000, 1, arrivals=parse_arrivals('poisson')), keep=False); print(r.statuses['completed'])"
    )
    began = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    taken_s = time.perf_counter() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(
        f"  {int(ran.stdout):,} completed in {taken_s:.1f} s, peak memory {peak_bytes / 1e6:,.0f} MB (goal below 1,000)"
    )


def start_up() -> None:
    """Print how long a second process takes to its first result."""
    command = [
        sys.executable,
        "-c",
        "from phasesplit.cli import main; main()",
        "simulate",
        "--model",
        "bloom-176b",
        "--workload",
    ]
    command += ["azure-conversation", "--rate", "70", "--duration", "120", "--pool", "unsplit:40:dgx-h100"]
    taken_s = best_of(5, lambda: subprocess.run(command, capture_output=True, check=True))
    print(f"\nsecond process, two-minute trace, from start to finish: {taken_s:.2f} s (goal: below 1)")


def shared_or_shipped() -> Trace:
    """Return the published simulator's two-minute trace, or one like it from the shipped workload."""
    if SHARED_TRACE.exists():
        return read_trace(SHARED_TRACE)[0]
    return load_workload("azure-conversation").trace(70, 120, seed=0, arrivals=parse_arrivals("poisson"))


def every_metric(result: Result) -> None:
    """Ask for every quantile of every metric, so that nothing is left to be computed later."""
    for distribution in result.metrics.values():
        for q in QUANTILES:
            distribution.quantile(q)


def best_of(runs: int, call: Callable[[], object]) -> float:
    """Return the shortest time of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(runs):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


if __name__ == "__main__":
    main()
