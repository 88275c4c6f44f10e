"""A study whose simulations are made up, so that all of it is done at once."""

from concurrent.futures import Future
from functools import cache
from typing import Any

from phasesplit.planner.probe import Answer
from phasesplit.planner.study.ablation import AblationStep
from phasesplit.planner.study.reproduce_command import load_stock
from phasesplit.planner.study.reproduction import Findings, reproduce
from phasesplit.planner.study.study import Ask, Bench

PER_MACHINE_PER_S = 1.0
LESS_AT_EACH_STEP = 0.1


def made_up(ask: Ask) -> Any:
    """Return what a cluster does that holds the same rate on every machine, a tenth less at each later step."""
    share = 1 - LESS_AT_EACH_STEP * ask.place.ablation_step / max(AblationStep)
    most_per_s = PER_MACHINE_PER_S * share * sum(ask.question.counts)
    if ask.backlog:
        return most_per_s
    holds = ask.question.rate_per_s < most_per_s
    worst = ask.question.rate_per_s / most_per_s
    return Answer(holds, worst, "TTFT p50", (worst,) * 9, 1000.0 * ask.question.rate_per_s, 1.0, (0.5,) * 2, (0.5,) * 2)


class MadeUp:
    """Workers that answer at once."""

    width = 1

    def submit(self, ask: Ask) -> "Future[Any]":
        future: Future[Any] = Future()
        future.set_result(made_up(ask))
        return future


@cache
def made_up_findings(*, thorough: bool = True) -> Findings:
    return reproduce(Bench(load_stock(), 60.0, (0, 1)), MadeUp(), thorough=thorough)
