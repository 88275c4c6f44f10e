"""SLOs as a person writes them: `splitwise*1.5`, `ttft_p99<2s,itl_p99<100ms`, `goodput(ttft<2s,tpot<50ms)>=95%`."""

import re

from phasesplit.domain.slo import GOODPUT_RATIO, SPLITWISE, Limit, Slo, is_slowdown
from phasesplit.errors import SpecError

NAMED_SLOS = {"splitwise": SPLITWISE, "none": Slo("none", ())}
"""SLOs that have a name."""

_SLOWDOWNS = {name: name for name in ("ttft_slowdown", "itl_slowdown", "e2e_slowdown")}
_OF_A_REQUEST = {"ttft": "ttft_s", "tpot": "itl_mean_s", "itl_max": "itl_max_s", "e2e": "e2e_s", **_SLOWDOWNS}
_ON_PERCENTILES = {**_OF_A_REQUEST, "itl": "itl_s", "queue": "queue_s"}
# A request is good only if all of its gaps are, that is its largest.
_IN_GOODPUT = {**_OF_A_REQUEST, "itl": "itl_max_s"}

# The paper says TBT for ITL; an SLO may, too.
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
