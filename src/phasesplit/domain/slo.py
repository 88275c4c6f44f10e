"""Service-level objectives: limits on percentiles, and whether a run met them.

`parse_slo` reads them as a person writes them: `splitwise*1.5`, `ttft_p99<2s,itl_p99<100ms`,
`goodput(ttft<2s,tpot<50ms)>=95%`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.latency import Distribution
from phasesplit.domain.profile import PhaseTimes
from phasesplit.errors import SpecError

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
class LimitFinding:
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
    findings: tuple[LimitFinding, ...]
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
        findings.append(LimitFinding(limit, value, metric.count == 0 or value < limit.below))
    return SloVerdict(slo, tuple(findings), complete)


def alone_s(
    reference: PhaseTimes, prompt_tokens: NDArray[np.int32], output_tokens: NDArray[np.int32], *, published: bool
) -> tuple[Floats, Floats, Floats]:
    """Return TTFT, mean ITL and E2E of requests that have a reference machine to themselves, in seconds, (n,) each.

    Decode of a lone request is decode_time_s(1, context) summed over its growing context. The published simulator
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
    ttft_s = reference.prefill_time_s(prompt)
    # The i-th further token reads prompt + i tokens of context, i = 1 .. gaps: on the mean, prompt + (gaps + 1) / 2.
    itl_s = reference.decode_time_s(prompt, 0) if published else reference.decode_time_s(1, prompt + (gaps + 1) / 2)
    e2e_s = ttft_s + itl_s * gaps
    return ttft_s, np.where(gaps > 0, itl_s, np.nan), e2e_s


NAMED_SLOS = {"splitwise": SPLITWISE, "none": Slo("none", ())}
"""SLOs that have a name."""

_SLOWDOWNS = {name: name for name in ("ttft_slowdown", "itl_slowdown", "e2e_slowdown")}
_OF_A_REQUEST = {"ttft": "ttft_s", "tpot": "itl_mean_s", "itl_max": "itl_max_s", "e2e": "e2e_s", **_SLOWDOWNS}
_ON_PERCENTILES = {**_OF_A_REQUEST, "itl": "itl_s", "queue": "queue_s"}
# A request is good only if all of its gaps are, that is its largest.
_IN_GOODPUT = {**_OF_A_REQUEST, "itl": "itl_max_s"}

# The paper says ITL for ITL; an SLO may, too.
_PAPERS_NAMES = {"tbt": "itl", "tbt_max": "itl_max", "tbt_slowdown": "itl_slowdown"}

_EXAMPLE = "ttft_p99<2s,itl_p99<100ms,goodput(ttft<2s,tpot<50ms)>=95%"
_SCALED = re.compile(r"(?P<slo>\w+|\([^*]+\))\*(?P<factor>[^*()]*)")
_GOODPUT = re.compile(r"goodput\((?P<each>[^()]*)\)>=(?P<share>[\d.]+)%")
_LIMIT = re.compile(r"(?P<metric>\w+?)(?:_p(?P<percentile>[\d.]+))?<(?P<number>[\d.]+)(?P<unit>[a-z]*)")
_LARGEST = 1e6


def parse_slo(text: str, where: str = "SLO") -> Slo:
    """Return the SLO that a text describes.

    Args:
        text: A name from `NAMED_SLOS`; or limits with commas between them: `METRIC_pPERCENTILE<VALUE`, with a unit (ms
            or s) for times and none for slowdowns, and perhaps a share of requests that must each keep all of some
            limits, `goodput(METRIC<VALUE,...)>=PERCENT%`. A factor loosens or tightens all limits: `splitwise*1.5`,
            `(ttft_p99<2s,itl_p99<100ms)*0.5`. `itl` is every gap between tokens (in a goodput the request's largest),
            `tpot` the mean gap of a request; the paper's `tbt` is understood for `itl`.
        where: How the person knows the place the text came from, for the message.

    Raises:
        SpecError: The text is none of these, or a number is not allowed.
    """
    bare = "".join(text.split())
    if bare in NAMED_SLOS:
        return NAMED_SLOS[bare]
    scaled = _SCALED.fullmatch(bare)
    if scaled:
        inner = scaled["slo"].removeprefix("(").removesuffix(")")
        return parse_slo(inner, where).scaled(_number(f"{where}, factor", scaled["factor"], _LARGEST))
    if "<" not in bare:
        names = " or ".join(NAMED_SLOS)
        raise SpecError.bad(where, text, f"{names}, with a factor (splitwise*1.5) or limits ({_EXAMPLE})")
    limits: list[Limit] = []
    each: tuple[tuple[str, float], ...] = ()
    for part in _split(bare):
        if part.startswith("goodput"):
            if each:
                raise SpecError.bad(where, part, "one goodput in an SLO")
            each, limit = _goodput(part, where)
        else:
            limit = _limit(part, where)
        if any((limit.metric, limit.percentile) == (other.metric, other.percentile) for other in limits):
            raise SpecError.bad(where, part, "one limit on the same percentile of the same metric")
        limits.append(limit)
    return Slo(bare, tuple(limits), each)


def _split(text: str) -> list[str]:
    """Return the parts between commas, those inside parentheses left alone."""
    return re.split(r",(?![^(]*\))", text)


def _goodput(text: str, where: str) -> tuple[tuple[tuple[str, float], ...], Limit]:
    found = _GOODPUT.fullmatch(text)
    if not found:
        raise SpecError.bad(where, text, "goodput(METRIC<VALUE,...)>=PERCENT%, such as goodput(ttft<2s,tpot<50ms)>=95%")
    each: dict[str, float] = {}
    for part in found["each"].split(","):
        one = _LIMIT.fullmatch(part)
        if not one or one["percentile"]:
            raise SpecError.bad(f"{where}, goodput", part, "METRIC<VALUE without a percentile, such as ttft<2s")
        metric = _metric(one["metric"], _IN_GOODPUT, f"{where}, goodput")
        if metric in each:
            raise SpecError.bad(f"{where}, goodput", part, "one limit on a metric")
        each[metric] = _value(one, metric, where)
    percent = _number(f"{where}, goodput", found["share"], 100.0)
    return tuple(each.items()), Limit(GOODPUT_RATIO, percent, 1.0)


def _limit(text: str, where: str) -> Limit:
    found = _LIMIT.fullmatch(text)
    if not found or not found["percentile"]:
        raise SpecError.bad(where, text, f"METRIC_pPERCENTILE<VALUE, such as {_EXAMPLE.split(',')[0]}")
    metric = _metric(found["metric"], _ON_PERCENTILES, where)
    return Limit(
        metric, _number(f"{where}, {text}, percentile", found["percentile"], 100.0), _value(found, metric, where)
    )


def _metric(name: str, known: dict[str, str], where: str) -> str:
    named = _PAPERS_NAMES.get(name, name)
    if named not in known:
        raise SpecError.unknown(f"{where}, metric", name, known)
    return known[named]


def _value(found: re.Match[str], metric: str, where: str) -> float:
    units = {"": 1.0} if is_slowdown(metric) else {"s": 1.0, "ms": 1e-3}
    if found["unit"] not in units:
        allowed = "a factor without a unit" if is_slowdown(metric) else "a number with ms or s, such as 100ms"
        raise SpecError.bad(f"{where}, {found['metric']}", found["number"] + found["unit"], allowed)
    return _number(f"{where}, {found['metric']}", found["number"], _LARGEST) * units[found["unit"]]


def _number(where: str, text: str, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not 0 < value <= most:
        raise SpecError.bad(where, text, f"a number above 0, at most {most:,.0f}")
    return value
