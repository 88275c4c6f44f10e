"""Predicted against measured: figures side by side, stage by stage, and which stage explains the difference."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.latency import Distribution, Exact
from phasesplit.measuring.placements import Misplaced, Pairs, fitting_names, misplaced, renamed
from phasesplit.measuring.stages import FIRST, STAGES

Floats = NDArray[np.float64]

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
class Figure:
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
    latencies: tuple[Figure, ...]
    totals: tuple[Figure, ...]
    stages: tuple[Figure, ...]
    explanations: tuple[Explanation, ...]
    misplaced: tuple[Misplaced, ...]

    @property
    def missed(self) -> tuple[Figure, ...]:
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
        Figure(name=name, unit="s", predicted=_mean(predicted.stages_s[name][both]),
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


def _quantiles(name: str, predicted: Distribution, measured: Distribution) -> list[Figure]:
    return [
        Figure(
            name=f"{name} p{100 * share:g}",
            unit="s",
            predicted=predicted.quantile(share),
            measured=measured.quantile(share),
            goal=goal,
        )
        for share, goal in GOALS.items()
    ]


def _totals(predicted: Side, measured: Side) -> tuple[Figure, ...]:
    def rate(side: Side, count: float) -> float:
        return count / side.wall_s if side.wall_s else math.nan

    completed = [int((~np.isnan(side.e2e_s)).sum()) for side in (predicted, measured)]
    figures = [
        Figure(name="requests completed", unit="per_s", predicted=rate(predicted, completed[0]),
               measured=rate(measured, completed[1])),
        Figure(name="output tokens", unit="per_s", predicted=rate(predicted, predicted.output_tokens),
               measured=rate(measured, measured.output_tokens)),
    ]  # fmt: skip
    figures += [
        Figure(name=f"{name} busy", unit="share", predicted=predicted.busy[name], measured=measured.busy[name])
        for name in predicted.busy
        if name in measured.busy
    ]
    figures += [
        Figure(name=f"pool moves, {kind}", unit="count", predicted=predicted.moves.get(kind, 0),
               measured=measured.moves.get(kind, 0))
        for kind in dict.fromkeys([*predicted.moves, *measured.moves])
    ]  # fmt: skip
    return tuple(figures)


def _explanation(metric: str, stages: Sequence[Figure]) -> Explanation:
    differences = {figure.name: figure.predicted - figure.measured for figure in stages}
    total_s = sum(differences.values())
    measured_s = sum(figure.measured for figure in stages)
    if math.isnan(total_s) or abs(total_s) <= _EQUAL_SHARE * measured_s:
        return Explanation(metric=metric, difference_s=total_s, stage=None, stage_s=0.0)
    stage = max(differences, key=lambda name: math.copysign(1, total_s) * differences[name])
    return Explanation(metric=metric, difference_s=total_s, stage=stage, stage_s=differences[stage])
