"""Predicted figures next to measured ones: latencies, stages, placements, and which stage explains a difference.

A request has the same stages in a simulation and in the records of a gateway:

- queue: until its prefill runs,
- prefill: until its first token,
- transfer: the part of the KV transfer that the second token had to wait for,
- wait: from complete KV until the iteration of the second token,
- decode: until the last token,
- front end: what the client sees beyond these, which is HTTP and its own reading.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.latency import Distribution, Exact

Pairs = Sequence[tuple[str, str] | None]
"""Names of prefill and decode machine of each request; None where it went nowhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misplaced:
    """A request that the cluster placed elsewhere than predicted.

    Attributes:
        row: Its row in the trace.
        predicted: Prefill and decode machine.
        measured: The same.
    """

    row: int
    predicted: tuple[str, str]
    measured: tuple[str, str]


def fitting_names(machines: Sequence[str], predicted: Pairs, measured: Pairs) -> dict[str, str]:
    """Return machines by the names under which most predicted placements agree with those measured.

    Machines of one home are alike, and which of two idle ones comes first depends on what was served before; so names
    are exchanged, but only within a home, which is what stands before the number: `prefill-0`.

    Args:
        machines: All names.
        predicted: What the simulation says.
        measured: What the cluster did, requests in the same order.
    """
    met: Counter[tuple[str, str]] = Counter()
    for one, other in zip(predicted, measured, strict=True):
        if one is not None and other is not None:
            met.update([(one[0], other[0]), (one[1], other[1])])
    # First those that met, most often first; then the others, under their own names where those are free.
    wanted = [pair for pair, _ in met.most_common()] + [(name, name) for name in machines]
    wanted += [(old, name) for old in machines for name in machines]
    new: dict[str, str] = {}
    for old, name in wanted:
        if old not in new and name not in new.values() and _home(old) == _home(name):
            new[old] = name
    return new


def renamed(pairs: Pairs, names: Mapping[str, str]) -> Pairs:
    """Return pairs with other names of machines."""
    return [None if pair is None else (names[pair[0]], names[pair[1]]) for pair in pairs]


def misplaced(predicted: Pairs, measured: Pairs) -> tuple[Misplaced, ...]:
    """Return the requests that went elsewhere than predicted, in order.

    Args:
        predicted: What the simulation says.
        measured: What the cluster did, requests in the same order.
    """
    return tuple(
        Misplaced(row=row, predicted=one, measured=other)
        for row, (one, other) in enumerate(zip(predicted, measured, strict=True))
        if one is not None and other is not None and one != other
    )


def _home(name: str) -> str:
    return name.rpartition("-")[0]


Floats = NDArray[np.float64]

QUEUE, PREFILL, TRANSFER, WAIT, DECODE, FRONT = (
    "queue", "prefill", "exposed transfer", "wait", "decode", "front end",
)  # fmt: skip
STAGES = (QUEUE, PREFILL, TRANSFER, WAIT, DECODE, FRONT)
"""All of them; together they are the E2E latency that a client sees."""
FIRST = (QUEUE, PREFILL, FRONT)
"""Those of the TTFT; the front end counts once, with the first token."""


def simulated_stages(columns: Mapping[str, NDArray[Any]], overheads_s: Mapping[str, float]) -> dict[str, Floats]:
    """Return the stages of simulated requests, in seconds, (n,) each; NaN for one that did not complete.

    A simulation knows when the first decode iteration of a request begins, not when it ends: its length is taken to be
    the mean of the request's decode iterations.

    Args:
        columns: `Result.columns` of a simulation.
        overheads_s: Stage to seconds that the simulation knows nothing of, for each request.
    """
    several = columns["output_tokens"] > 1
    transfer_s, idle_s = (np.where(several, columns[name], 0.0) for name in ("transfer_exposed_s", "decode_queue_s"))
    computing_s = columns["e2e_s"] - columns["ttft_s"] - transfer_s - idle_s
    step_s = np.where(several, computing_s / np.maximum(columns["output_tokens"] - 1, 1), 0.0)
    stages = {
        QUEUE: columns["queue_s"],
        PREFILL: columns["ttft_s"] - columns["queue_s"],
        TRANSFER: transfer_s,
        WAIT: idle_s + step_s,
        DECODE: computing_s - step_s,
        FRONT: np.zeros(several.shape),
    }
    return {stage: values + overheads_s.get(stage, 0.0) for stage, values in stages.items()}


def queue_in_prefill(stages_s: Mapping[str, Floats]) -> dict[str, Floats]:
    """Return the same stages as they look where no machine reports when a prefill begins."""
    return {**stages_s, QUEUE: np.zeros_like(stages_s[QUEUE]), PREFILL: stages_s[QUEUE] + stages_s[PREFILL]}


def measured_stages(records: Sequence[Mapping[str, Any] | None], e2e_s: Floats) -> dict[str, Floats]:
    """Return the stages of requests that a cluster served, in seconds, (n,) each; NaN for one that did not complete.

    Machines report the start of a prefill and the arrival of KV apart from the tokens. A report that comes before or
    after the tokens that it lies between counts as simultaneous with them, so no stage is negative. Where one machine
    does both phases, there is no transfer. Where the start of prefill is not reported, prefill includes the queue.

    Args:
        records: The gateway's record of each, None where it has none.
        e2e_s: float64 (n,) E2E as the client saw it.
    """
    cuts = np.full((len(records), len(STAGES)), np.nan)
    for row, record in enumerate(records):
        if record is not None and record["outcome"] == "completed":
            cuts[row] = _cuts(record)
    stages = dict(zip(STAGES, np.diff(cuts, axis=1).T, strict=False))
    stages[FRONT] = e2e_s - cuts[:, -1]
    return stages


def _cuts(record: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the instants between the stages, from the arrival on, never going back."""
    first_s, last_s = float(record["first_token_s"]), float(record["last_token_s"])
    second_s = last_s if record["second_token_s"] is None else float(record["second_token_s"])
    started_s, ready_s = record["prefill_started_s"], record["kv_ready_s"]
    started_s = 0.0 if started_s is None else min(float(started_s), first_s)
    has_transfer = ready_s is not None and record["prefill_machine"] != record["decode_machine"]
    ready_s = min(max(float(ready_s), first_s), second_s) if has_transfer else first_s
    return 0.0, started_s, first_s, ready_s, second_s, last_s


GOALS = {0.5: 0.05, 0.9: 0.10, 0.99: 0.20}
"""How far a prediction may be from what is measured, by quantile. Source: ours."""
_EQUAL_SHARE = 0.01
"""Means that are this close need no explanation."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Side:
    """What was predicted, or measured, of one trace.

    Attributes:
        ttft_s: float64 (n,) of each request, NaN where it failed.
        e2e_s: The same.
        itl: Distribution of all gaps between tokens.
        stages_s: Stage to seconds, float64 (n,).
        pairs: Names of prefill and decode machine of each request; None where it failed.
        wall_s: From the first arrival to the last token.
        output_tokens: Tokens of all completed requests.
        busy: Machine to the share of that time in which it computed.
        moves: Moves of machines between pools, by kind.
    """

    ttft_s: Floats
    e2e_s: Floats
    itl: Distribution
    stages_s: Mapping[str, Floats]
    pairs: Pairs
    wall_s: float
    output_tokens: int
    busy: Mapping[str, float]
    moves: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedFigure:
    """One quantity, predicted and measured.

    Attributes:
        name: What it is.
        unit: `s`, `per_s`, `share` or `count`.
        predicted: Its value.
        measured: The same.
        goal: Largest relative error that is aimed at, None where none is.
    """

    name: str
    unit: str
    predicted: float
    measured: float
    goal: float | None = None

    @property
    def error(self) -> float:
        """Prediction over measurement, less 1; NaN where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured else math.nan

    @property
    def is_met(self) -> bool | None:
        """Whether the error is within the goal, None without one."""
        return None if self.goal is None else abs(self.error) <= self.goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The stage that makes most of the difference between two means.

    Attributes:
        metric: `TTFT` or `E2E`.
        difference_s: Predicted mean less measured mean.
        stage: The stage whose difference goes most in the same direction; None where the means agree.
        stage_s: That stage's difference.
    """

    metric: str
    difference_s: float
    stage: str | None
    stage_s: float

    def __str__(self) -> str:
        if self.stage is None:
            return f"{self.metric}: predicted and measured means agree within {_EQUAL_SHARE:.0%}"
        longer = "longer" if self.difference_s > 0 else "shorter"
        return (
            f"{self.metric}: predicted {1e3 * abs(self.difference_s):.1f} ms {longer} in the mean; most of it in "
            f"{self.stage} ({1e3 * self.stage_s:+.1f} ms)"
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Comparison:
    """Predicted against measured.

    Attributes:
        requests: Requests of the trace.
        compared: Those that completed on both sides; latencies and stages are of these.
        distributions: `ttft_s`, `itl_s`, `e2e_s` to what was predicted and what was measured.
        latencies: The same at p50, p90 and p99.
        totals: Throughput, utilisation of each machine, pool moves.
        stages: Mean time in each stage.
        explanations: Of the differences in TTFT and E2E.
        misplaced: Requests placed elsewhere than predicted, in order.
    """

    requests: int
    compared: int
    distributions: Mapping[str, tuple[Distribution, Distribution]]
    latencies: tuple[ComparedFigure, ...]
    totals: tuple[ComparedFigure, ...]
    stages: tuple[ComparedFigure, ...]
    explanations: tuple[Explanation, ...]
    misplaced: tuple[Misplaced, ...]

    @property
    def missed(self) -> tuple[ComparedFigure, ...]:
        """Latencies whose error is beyond its goal."""
        return tuple(figure for figure in self.latencies if figure.is_met is False)


def compare(predicted: Side, measured: Side) -> Comparison:
    """Return predicted against measured; requests that did not complete on both sides are left out of latencies.

    Args:
        predicted: What the simulation says.
        measured: What the cluster did, requests in the same order.
    """
    names = fitting_names(list(predicted.busy), predicted.pairs, measured.pairs)
    predicted = replace(
        predicted,
        pairs=renamed(predicted.pairs, names),
        busy=dict(sorted((names[name], share) for name, share in predicted.busy.items())),
    )
    both = ~(np.isnan(predicted.e2e_s) | np.isnan(measured.e2e_s) | np.isnan(measured.stages_s[STAGES[0]]))
    stages = tuple(
        ComparedFigure(name=name, unit="s", predicted=_mean(predicted.stages_s[name][both]),
               measured=_mean(measured.stages_s[name][both]))
        for name in STAGES
    )  # fmt: skip
    distributions: dict[str, tuple[Distribution, Distribution]] = {
        "ttft_s": (Exact(predicted.ttft_s[both]), Exact(measured.ttft_s[both])),
        "itl_s": (predicted.itl, measured.itl),
        "e2e_s": (Exact(predicted.e2e_s[both]), Exact(measured.e2e_s[both])),
    }
    by_stage = {figure.name: figure for figure in stages}
    return Comparison(
        requests=int(both.size),
        compared=int(both.sum()),
        distributions=distributions,
        latencies=tuple(
            figure
            for metric, (one, other) in distributions.items()
            for figure in _quantiles(metric.removesuffix("_s").upper(), one, other)
        ),
        totals=_totals(predicted, measured),
        stages=stages,
        explanations=(
            _explanation("TTFT", [by_stage[name] for name in FIRST]),
            _explanation("E2E", stages),
        ),
        misplaced=misplaced(predicted.pairs, measured.pairs),
    )


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else math.nan


def _quantiles(name: str, predicted: Distribution, measured: Distribution) -> list[ComparedFigure]:
    return [
        ComparedFigure(
            name=f"{name} p{100 * share:g}",
            unit="s",
            predicted=predicted.quantile(share),
            measured=measured.quantile(share),
            goal=goal,
        )
        for share, goal in GOALS.items()
    ]


def _totals(predicted: Side, measured: Side) -> tuple[ComparedFigure, ...]:
    def rate(side: Side, count: float) -> float:
        return count / side.wall_s if side.wall_s else math.nan

    completed = [int((~np.isnan(side.e2e_s)).sum()) for side in (predicted, measured)]
    figures = [
        ComparedFigure(name="requests completed", unit="per_s", predicted=rate(predicted, completed[0]),
               measured=rate(measured, completed[1])),
        ComparedFigure(name="output tokens", unit="per_s", predicted=rate(predicted, predicted.output_tokens),
               measured=rate(measured, measured.output_tokens)),
    ]  # fmt: skip
    figures += [
        ComparedFigure(name=f"{name} busy", unit="share", predicted=predicted.busy[name], measured=measured.busy[name])
        for name in predicted.busy
        if name in measured.busy
    ]
    figures += [
        ComparedFigure(name=f"pool moves, {kind}", unit="count", predicted=predicted.moves.get(kind, 0),
               measured=measured.moves.get(kind, 0))
        for kind in dict.fromkeys([*predicted.moves, *measured.moves])
    ]  # fmt: skip
    return tuple(figures)


def _explanation(metric: str, stages: Sequence[ComparedFigure]) -> Explanation:
    differences = {figure.name: figure.predicted - figure.measured for figure in stages}
    total_s = sum(differences.values())
    measured_s = sum(figure.measured for figure in stages)
    if math.isnan(total_s) or abs(total_s) <= _EQUAL_SHARE * measured_s:
        return Explanation(metric=metric, difference_s=total_s, stage=None, stage_s=0.0)
    stage = max(differences, key=lambda name: math.copysign(1, total_s) * differences[name])
    return Explanation(metric=metric, difference_s=total_s, stage=stage, stage_s=differences[stage])
