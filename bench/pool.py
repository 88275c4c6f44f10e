"""How soon workers answer, what a question costs in addition to its answer, and what a second core is worth.

Run with `python bench/pool.py`; with `ray` on the command line, on a local Ray cluster as well. The machine should
be idle: the ways to start processes differ by less than what another busy program takes from them.
"""

import multiprocessing
import operator
import os
import pickle
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from phasesplit.domain.arrivals import parse_arrivals
from phasesplit.io.catalog import build_cluster
from phasesplit.io.workloads import load_workload
from phasesplit.planner.pool import open_pool
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

SIMULATIONS = 40
SECONDS = 300
SMALL_QUESTIONS = 2000
ROUNDS = 5

_answer: Callable[[Any], Any]


def main() -> None:
    """Print all figures."""
    answer = simulation()
    simulated_s = best(lambda: timed(lambda: [answer(Rules(seed=n)) for n in range(SIMULATIONS)]))
    sent, received = (len(pickle.dumps(value)) for value in (answer, answer(Rules())))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; answer {sent:,} bytes, result {received:,} bytes")
    print(
        f"in this process: {SIMULATIONS} simulations of {simulated_s / SIMULATIONS * 1e3:.1f} ms: {simulated_s:.2f} s"
    )

    print("\nfrom opening to the first answer of each of two workers, that simulates; kernel in the disk cache")
    forkserver_s = first_answers(multiprocessing_pool(answer, "forkserver"))  # once: it stays for the next pool
    print(f"  multiprocessing, forkserver {forkserver_s:5.2f} s")
    print(f"  multiprocessing, spawn      {best(lambda: first_answers(multiprocessing_pool(answer, 'spawn'))):5.2f} s")
    print(f"  open_pool                {best(lambda: first_answers(open_pool(answer, count=2))):5.2f} s")

    report("two processes", partial(open_pool, count=2), answer, simulated_s)
    if "ray" in sys.argv[1:]:
        print(f"\nRay, local: {best(lambda: first_answers(open_pool(answer, count=2, ray_address='local'))):.2f} s")
        report("two Ray workers", partial(open_pool, count=2, ray_address="local"), answer, simulated_s)


def report(name: str, open_them: Callable[..., Any], answer: Callable[[Rules], Result], alone_s: float) -> None:
    """Print what a question costs and what the second worker is worth."""
    with open_them(operator.neg) as workers:
        asked_s = best(lambda: timed(lambda: answered(workers, range(SMALL_QUESTIONS))))
    print(f"\n{name}: {asked_s / SMALL_QUESTIONS * 1e6:.0f} us for each question that takes no time, both at work")
    with open_them(answer) as workers:
        began_s = time.perf_counter()
        answered(workers, [Rules(seed=n) for n in range(SIMULATIONS)])
        cold_s = time.perf_counter() - began_s
        taken_s = best(lambda: timed(lambda: answered(workers, [Rules(seed=n) for n in range(SIMULATIONS)])))
        began_s = time.perf_counter()
    print(f"  {SIMULATIONS} simulations: {taken_s:.2f} s ({cold_s:.2f} s when new), speed-up {alone_s / taken_s:.2f}")
    print(f"  closed in {time.perf_counter() - began_s:.2f} s")


def simulation() -> Callable[[Rules], Result]:
    """Return what simulates a fixed cluster and trace by the rules that are asked for, and the kernel loaded."""
    cluster = build_cluster("bloom-176b", [("prefill", 25, "dgx-h100"), ("decode", 15, "dgx-h100")])
    trace = load_workload("azure-conversation").trace(70, SECONDS, seed=0, arrivals=parse_arrivals("poisson"))
    answer = partial(simulate, cluster, trace, keep=False)
    answer(Rules())
    return answer


def multiprocessing_pool(answer: Callable[[Any], Any], way: str) -> ProcessPoolExecutor:
    """Return the standard library's workers, started in one of its ways."""
    context = multiprocessing.get_context(way)
    if way == "forkserver":
        context.set_forkserver_preload(["phasesplit.simulator.run"])
    return ProcessPoolExecutor(2, context, initializer=_install, initargs=(answer,))


def _install(answer: Callable[[Any], Any]) -> None:
    global _answer  # how ProcessPoolExecutor is told what all questions share
    _answer = answer


def _ask(question: Any) -> Any:
    return _answer(question)


def first_answers(workers: AbstractContextManager[Any]) -> float:
    """Return how many seconds two workers take from here to an answer each."""
    began_s = time.perf_counter()
    with workers as pool:
        ask = partial(pool.submit, _ask) if isinstance(pool, ProcessPoolExecutor) else pool.submit
        for future in [ask(Rules(seed=n)) for n in range(2)]:
            future.result()
        return time.perf_counter() - began_s


def answered(workers: Any, questions: Any) -> list[Any]:
    """Return the answers to all questions."""
    return [future.result() for future in [workers.submit(question) for question in questions]]


def timed(call: Callable[[], object]) -> float:
    """Return how long a call takes in seconds."""
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def best(measure: Callable[[], float]) -> float:
    """Return the least of several measurements."""
    return min(measure() for _ in range(ROUNDS))


if __name__ == "__main__":
    main()
