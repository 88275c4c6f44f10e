"""Small results to draw, from a full one to one with nothing in it."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from phasesplit.domain.request import Trace
from phasesplit.io.catalog import build_cluster
from phasesplit.io.workloads import load_workload
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

SPLIT = (("prefill", 2, "dgx-h100"), ("decode", 2, "dgx-h100"))


def short_trace(rate_per_s: float = 8.0, duration_s: float = 20.0) -> Trace:
    return load_workload("azure-conversation").trace(rate_per_s, duration_s, seed=1)


@cache
def simulated(pools: tuple[tuple[str, int, str], ...], *, model: str = "bloom-176b", keep: bool = True) -> Result:
    return simulate(build_cluster(model, list(pools)), short_trace(), keep=keep)


@cache
def one_request(output_tokens: int = 40) -> Result:
    lengths = np.array([output_tokens], np.int32)
    trace = Trace(
        name="one",
        arrival_s=np.zeros(1),
        prompt_tokens=np.array([500], np.int32),
        output_tokens=lengths,
        expected_tokens=lengths,
    )
    return simulate(build_cluster("bloom-176b", list(SPLIT)), trace)


CASES: dict[str, Callable[[], Result]] = {
    "split": lambda: simulated(SPLIT),
    "unsplit": lambda: simulated((("unsplit", 4, "dgx-h100"),)),
    "summary only": lambda: simulated(SPLIT, keep=False),
    "roofline": lambda: simulated(SPLIT, model="llama-3.1-70b"),
    "one request": one_request,
    "one token": lambda: one_request(1),
    "no reference": lambda: replace(simulated(SPLIT), slo=None),
    "nothing known": lambda: replace(
        one_request(),
        metrics={},
        slo=None,
        batch_share=np.zeros((4, 2)),
        columns=None,
        timeline=replace(one_request().timeline, time_s=np.zeros(0), samples=np.zeros((0, 4, 5))),
    ),
}
