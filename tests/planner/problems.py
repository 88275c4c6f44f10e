"""Problems so small that every cluster can be tried, and workers that answer in odd ways."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from doubles import tiny_cluster
from phasesplit.domain.arrivals import Poisson
from phasesplit.domain.machine import Link
from phasesplit.domain.request import Trace
from phasesplit.domain.slo import Limit, Slo
from phasesplit.domain.workload import LengthTable, Workload
from phasesplit.planner.drive import MemoryJournal, drive
from phasesplit.planner.probe import Answer, Prober, Question
from phasesplit.planner.problem import Measure, Offer, Problem, Traffic

MODEL = tiny_cluster().model
LENGTHS = LengthTable(np.array([40, 100, 300], np.int32), np.array([5, 12, 3], np.int32), np.array([5, 3, 2], np.int64))
LOOSE = Slo("loose", (Limit("e2e_s", 90.0, 5.0),))


def offer(
    name: str = "tiny",
    *,
    price: float = 1.0,
    power: float = 400.0,
    slices: int = 1,
    existing: int | None = None,
    variant_of: str = "",
    link: Link | None = None,
    **times: Any,
) -> Offer:
    """Return an offer of a `tiny_cluster` machine."""
    pool = tiny_cluster(("unsplit", 1), **times).pools[0]
    machine = replace(
        pool.machine,
        name=name,
        price_usd_per_hour=price,
        provisioned_w=power,
        instances_per_server=slices,
        link=link,
        # A server makes as much greenhouse gas as the energy of a few hours, so that both parts of it count.
        embodied_kg_co2e=2_000.0,
    )
    return Offer(machine=machine, times=pool.times, existing=existing, variant_of=variant_of)


def workload(lengths: LengthTable = LENGTHS) -> Workload:
    """Return a workload with Poisson arrivals."""
    return Workload(
        name="tiny", lengths=lengths, arrivals=Poisson(), rate_per_s=1.0, duration_s=60.0, source="made up for a test"
    )


def problem(
    *offers: Offer,
    rate: float = 8.0,
    duration_s: float = 40.0,
    source: Workload | Trace | None = None,
    slo: Slo = LOOSE,
    seeds: Sequence[int] = (0, 1),
    **fields: Any,
) -> Problem:
    """Return a problem over tiny machines; by default one type, an absolute limit and two seeds."""
    offers = offers or (offer(),)
    return Problem(
        model=MODEL,
        offers=offers,
        traffic=Traffic(source=source or workload(), rate_per_s=rate, duration_s=duration_s),
        slo=slo,
        reference=fields.pop("reference", offers[0].times),
        seeds=tuple(seeds),
        objective=fields.pop("objective", Measure.COST),
        **fields,
    )


def burst(*requests: tuple[int, int], rate_per_s: float = 1.0) -> Trace:
    """Return a trace of prompt and output tokens at equal distances."""
    prompt, output = zip(*requests, strict=True)
    arrival_s = np.arange(len(requests)) / rate_per_s
    return Trace.from_columns("burst", arrival_s, np.array(prompt, np.int32), np.array(output, np.int32))


class Answering:
    """Workers in this process that count what they are asked.

    Args:
        answer: Answers a question.
        width: As `Workers.width`.
    """

    def __init__(self, answer: Callable[[Question], Answer], width: int = 1) -> None:
        self.width = width
        self.asked: list[Question] = []
        self._answer = answer

    def submit(self, question: Question) -> "Future[Answer]":
        self.asked.append(question)
        future: Future[Answer] = Future()
        try:
            future.set_result(self._answer(question))
        except Exception as problem:
            future.set_exception(problem)
        return future


def searched(search: Any, answer: Callable[[Question], Answer], width: int = 1) -> Any:
    """Return what one search finds."""
    return drive({"it": search}, Answering(answer, width), MemoryJournal())["it"]


def holding(problem: Problem, design: Any, cells: Iterable[tuple[int, ...]], rate: float) -> dict[Any, list[Answer]]:
    """Return the counts that keep the SLO on every seed, with their answers: by trying all."""
    prober = Prober(problem)
    found = {}
    for counts in cells:
        answers = []
        for seed in problem.seeds:
            answers.append(prober(Question(design, counts, rate, seed)))
            if not answers[-1].holds:
                break
        else:
            found[counts] = answers
    return found
