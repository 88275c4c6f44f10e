"""A plan from start to end: reads what is asked, opens workers, and lets a planner search.

The command line calls `make_plan` and `simulate_days`; Python programs call `plan`, which does both.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from phasesplit import _jit
from phasesplit.errors import InfeasibleError, WorkerLostError
from phasesplit.planner.capacity import capacity
from phasesplit.planner.days import Ahead, days_ahead
from phasesplit.planner.designs import designs_of
from phasesplit.planner.drift import Day, simulate_day
from phasesplit.planner.drive import MemoryJournal, Workers, drive
from phasesplit.planner.journal import FileJournal
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.misses import nearest_miss
from phasesplit.planner.plan import Plan, PlanStep
from phasesplit.planner.planner import Planner
from phasesplit.planner.pool import InThisProcess, open_pool
from phasesplit.planner.probe import Prober, Question
from phasesplit.planner.problem import Problem
from phasesplit.planner.problem_file import read_problem
from phasesplit.planner.question import Asked

OnStep = Callable[[PlanStep], None]
OnAhead = Callable[[Ahead], None]
OnDay = Callable[[Day], None]


def plan(
    file: str | Path | None = None,
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    resume: str | Path | None = None,
    thorough: bool = True,
    on_step: OnStep | None = None,
    **asked: Any,
) -> Plan:
    """Return which cluster to build for a workload, and whether to split it.

    Example: `plan(model="llama-3.1-70b", machines=["dgx-h100"], workload="azure-coding", rate=20, minimize="cost")`

    Args:
        file: YAML file that asks; see `phasesplit plan`.
        workers: How many processes simulate; by default one for each core.
        ray_address: Ray cluster to simulate on instead.
        resume: Journal of answers, which a later call with the same question goes on from.
        thorough: Look also at what one more of each buys and where the verdict flips.
        on_step: Called after every simulation.
        asked: Fields of `plan_schema.PlanSpec`; they override the file.

    Raises:
        SpecError: The question is not allowed.
        InfeasibleError: No design keeps the SLO; the nearest miss and what binds is named.
    """
    question = read_problem(file, asked, flag="")
    made = make_plan(
        question, workers=workers, ray_address=ray_address, resume=resume, thorough=thorough, on_step=on_step
    )
    if made.best is None and made.complete:
        raise InfeasibleError(nearest_miss(made))
    simulate_days(made, question, workers=workers, ray_address=ray_address)
    return made


def make_plan(
    asked: Asked,
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    resume: str | Path | None = None,
    thorough: bool = True,
    mapped: bool = False,
    on_step: OnStep | None = None,
) -> Plan:
    """Return the plan for a question; interrupted, what is known by then.

    Args:
        asked: The question.
        workers: As for `plan`.
        ray_address: As for `plan`.
        resume: As for `plan`.
        thorough: As for `plan`.
        mapped: Look also at the counts around the winner's.
        on_step: As for `plan`.

    Raises:
        SpecError: The question, the journal or the Ray cluster is not usable.
    """
    with nullcontext(MemoryJournal()) if resume is None else FileJournal(resume, asked.problem) as journal:
        problem = asked.problem
        if asked.baseline is not None:
            problem = asked.at(_held_by_baseline(asked.baseline))
        with _workers(problem, workers, ray_address) as pool:
            planner = Planner(
                problem=problem, workers=pool, journal=journal, on_step=on_step, thorough=thorough, mapped=mapped
            )
            return planner.make()


def simulate_days(
    made: Plan,
    asked: Asked,
    *,
    workers: int | None = None,
    ray_address: str | None = None,
    on_ahead: OnAhead | None = None,
    on_day: OnDay | None = None,
) -> None:
    """Let the best split and the best unsplit design of a plan each serve a day under each policy, if that was asked.

    Interrupted, or when a worker is lost, the plan keeps the days that are done.

    Mutates: made.

    Args:
        made: The plan.
        asked: Its question.
        workers: As for `plan`.
        ray_address: As for `plan`.
        on_ahead: Called once it is known which days there will be.
        on_day: Called after every day, in the order in which they end.

    Raises:
        SpecError: The Ray cluster is not usable.
    """
    if asked.day is None or made.best is None or not made.complete:
        return
    done: dict[int, Day] = {}
    try:
        ahead = days_ahead(made, asked.day)
        made.day_notes = list(ahead.notes)
        if on_ahead is not None:
            on_ahead(ahead)
        with open_pool(partial(simulate_day, made.problem), count=workers, ray_address=ray_address) as pool:
            left = list(enumerate(ahead.questions))
            running: dict[Future[Day], int] = {}
            while left or running:
                # No more at once than there are workers: one of this process answers while it is asked.
                while left and len(running) < pool.width:
                    place, question = left.pop(0)
                    running[pool.submit(question)] = place
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    day = done[running.pop(future)] = future.result()
                    if on_day is not None:
                        on_day(day)
    except (KeyboardInterrupt, WorkerLostError) as end:
        # The plan itself is worth more than its days.
        made.days_complete = False
        if isinstance(end, WorkerLostError):
            made.day_notes.append(str(end))
    made.days = [done[place] for place in sorted(done)]


@contextmanager
def _workers(problem: Problem, count: int | None, ray_address: str | None) -> Iterator[Workers]:
    prober = Prober(problem)
    if not _jit.CACHE_IS_WARM:
        # Compiled here once: otherwise every worker compiles for itself.
        first = designs_of(problem)[0]
        counts = LowerBounds(problem).least(first, 1.0)
        prober(Question(first, counts, 1.0, problem.seeds[0]))
    with open_pool(prober, count=count, ray_address=ray_address) as pool:
        yield pool


def _held_by_baseline(problem: Problem) -> float:
    """Return the rate that machines hold unsplit, as today's engines serve.

    Raises:
        InfeasibleError: They keep the SLO at no rate.
    """
    offer = problem.offers[0]
    one = next(one for one in designs_of(problem) if not one.kind.is_split)
    counts = ((offer.existing or 0) * offer.machine.instances_per_server,)
    search = capacity(LowerBounds(problem), one, counts, problem.seeds)
    found = drive({one: search}, InThisProcess(Prober(problem)), MemoryJournal())[one]
    if not found.rate_per_s:
        raise InfeasibleError(f"the baseline, {counts[0]} x {offer.machine.name} unsplit, keeps the SLO at no rate")
    return float(found.rate_per_s)
