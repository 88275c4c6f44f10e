"""Service-level objectives: limits on percentiles, and whether a run kept them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.latency import Distribution
from phasesplit.domain.profile import PhaseTimes

Floats = NDArray[np.float64]


GOODPUT_RATIO = "goodput_ratio"
"""Metric of a request: its largest share of a limit over `Slo.each`; below 1, it kept all of them."""


@dataclass(frozen=True, slots=True)
class Limit:
    """An upper limit on a percentile of a metric.

    Attributes:
        metric: Name of the metric in a result (`ttft_slowdown`, `e2e_s`).
        percentile: Of the requests, 0 to 100.
        below: The percentile's value must be below this.
    """

    metric: str
    percentile: float
    below: float


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that must all hold.

    Attributes:
        name: As in reports.
        limits: The limits.
        each: Metric and upper limit of what a request must keep to count as good; a limit on `GOODPUT_RATIO` says how
            many requests must.
    """

    name: str
    limits: tuple[Limit, ...]
    each: tuple[tuple[str, float], ...] = ()

    @property
    def metrics(self) -> frozenset[str]:
        """Names of the metrics that its limits are on."""
        return frozenset(limit.metric for limit in self.limits)

    @property
    def needs_reference(self) -> bool:
        """Whether any limit is on a slowdown, which only a cluster with a reference machine has."""
        return any(is_slowdown(metric) for metric in (*self.metrics, *(metric for metric, _ in self.each)))

    def scaled(self, factor: float) -> "Slo":
        """Return the SLO with every limit looser (factor > 1) or tighter (< 1); shares of requests stay."""
        composed = any(sign in self.name for sign in ",<*")
        return Slo(
            f"({self.name})*{factor:g}" if composed else f"{self.name}*{factor:g}",
            tuple(
                limit if limit.metric == GOODPUT_RATIO else replace(limit, below=limit.below * factor)
                for limit in self.limits
            ),
            tuple((metric, below * factor) for metric, below in self.each),
        )


def is_slowdown(metric: str) -> bool:
    """Return whether a metric compares with the reference machine."""
    return metric.endswith("_slowdown")


def goodput_ratio(values: Mapping[str, Floats], each: Iterable[tuple[str, float]]) -> Floats:
    """Return the largest share of a limit that each request takes up, (n,); an undefined metric takes up nothing.

    Args:
        values: Columns of the metrics in `each`, float64 (n,).
        each: Metric and limit, at least one.
    """
    shares = [np.nan_to_num(values[metric] / below, nan=0.0) for metric, below in each]
    largest: Floats = np.maximum.reduce(shares)
    return largest


SPLITWISE = Slo(
    "splitwise",
    tuple(
        Limit(f"{metric}_slowdown", percentile, below)
        for metric, bounds in {"ttft": (2.0, 3.0, 6.0), "itl": (1.25, 1.5, 5.0), "e2e": (1.25, 1.5, 5.0)}.items()
        for percentile, below in zip((50.0, 90.0, 99.0), bounds, strict=True)
    ),
)
"""The paper's nine limits on slowdowns over an idle DGX-A100. Source: Splitwise, section V, table VI."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One limit and what a run measured.

    Attributes:
        limit: The limit.
        value: The percentile's value, NaN where the metric is never defined (gaps, at one output token each).
        holds: Whether it is below the limit.
    """

    limit: Limit
    value: float
    holds: bool


@dataclass(frozen=True, slots=True)
class SloVerdict:
    """Whether a run kept an SLO.

    Attributes:
        slo: The SLO.
        findings: One for each of its limits, in order.
        complete: Whether every request was served; one that was refused or left unfinished breaks any SLO.
    """

    slo: Slo
    findings: tuple[Finding, ...]
    complete: bool

    @property
    def holds(self) -> bool:
        """Whether all limits hold and every request was served."""
        return self.complete and all(finding.holds for finding in self.findings)


def judge(slo: Slo, metrics: Mapping[str, Distribution], *, complete: bool) -> SloVerdict:
    """Return how a run's metrics compare with an SLO; nothing breaks a limit on a metric that is never defined."""
    findings = []
    for limit in slo.limits:
        metric = metrics[limit.metric]
        value = metric.quantile(limit.percentile / 100)
        findings.append(Finding(limit, value, metric.count == 0 or value < limit.below))
    return SloVerdict(slo, tuple(findings), complete)


def alone_s(
    reference: PhaseTimes, prompt_tokens: NDArray[np.int32], output_tokens: NDArray[np.int32], *, published: bool
) -> tuple[Floats, Floats, Floats]:
    """Return TTFT, mean ITL and E2E of requests that have a reference machine to themselves, in seconds, (n,) each.

    Decode of a lone request is token_time(1, context) summed over its growing context. The published simulator
    takes one decode time for all of it, looked up at the prompt's size. The mean ITL is NaN at one output token.

    Args:
        reference: Phase times of the model on the reference machine.
        prompt_tokens: (n,).
        output_tokens: (n,).
        published: Use the published look-up.

    Source: the slowdowns of Splitwise, section V; the sum over the growing context: ours.
    """
    prompt = prompt_tokens.astype(np.float64)
    gaps = output_tokens.astype(np.float64) - 1
    ttft_s = reference.prompt_time_s(prompt)
    # The i-th further token reads prompt + i tokens of context, i = 1 .. gaps: on the mean, prompt + (gaps + 1) / 2.
    itl_s = reference.token_time_s(prompt, 0) if published else reference.token_time_s(1, prompt + (gaps + 1) / 2)
    e2e_s = ttft_s + itl_s * gaps
    return ttft_s, np.where(gaps > 0, itl_s, np.nan), e2e_s
