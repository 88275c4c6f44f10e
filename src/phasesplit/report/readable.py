"""Quantities as people read them: three digits and a unit that fits; "–" where there is no value."""

import math

from phasesplit.simulator.result import Result

NONE = "–"

METRIC_NAMES = {
    "ttft_s": "TTFT",
    "itl_s": "ITL, all gaps",
    "itl_mean_s": "TPOT",
    "itl_max_s": "ITL, largest of a request",
    "e2e_s": "E2E",
    "queue_s": "prefill queue",
    "transfer_exposed_s": "exposed transfer",
    "decode_queue_s": "decode queue",
    "ttft_slowdown": "TTFT slowdown",
    "itl_slowdown": "ITL slowdown",
    "e2e_slowdown": "E2E slowdown",
    "goodput_ratio": "goodput",
}
"""What people call the metrics of a result; other names stand for themselves."""

_PREFIXES = ((1e-6, "µ"), (1e-3, "m"), (1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"))
_DECADES_S = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0, 600.0, 3_600.0, 36_000.0, 360_000.0)
_ABLATION_S = (
    *(step * 10.0**power for power in range(-6, 1) for step in (1, 2, 5)),
    *(10.0, 20.0, 60.0, 120.0, 300.0, 600.0, 1_200.0, 3_600.0, 7_200.0, 18_000.0, 36_000.0, 72_000.0, 360_000.0),
)
_FACTORS = (
    *(10.0**power for power in range(-6, 10)),
    *(step * 10.0**power for power in range(-6, 10) for step in (2, 5)),
    *(1.5, 3.0, 7.0, 1.2),
)
_LEAST_SPACE = 0.19


def number(value: float) -> str:
    """Return three significant digits, whole from a thousand on."""
    if math.isnan(value):
        return NONE
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def seconds(value_s: float) -> str:
    """Return a duration in µs, ms, s, min or h."""
    if math.isnan(value_s):
        return NONE
    for least_s, unit in ((7_200.0, "h"), (100.0, "min"), (0.9995, "s"), (0.9995e-3, "ms")):
        if abs(value_s) >= least_s:
            size_s = {"h": 3_600.0, "min": 60.0, "s": 1.0, "ms": 1e-3}[unit]
            return f"{number(value_s / size_s)} {unit}"
    return f"{number(value_s * 1e6)} µs" if value_s else "0 s"


def measure(metric: str, value: float) -> str:
    """Return a value of a metric: a duration, or a slowdown as a factor."""
    return seconds(value) if metric.endswith("_s") else number(value)


def against(metric: str, value: float, limit: float) -> str:
    """Return "value of limit", with more digits than three where the two would read the same."""
    shown, allowed = measure(metric, value), measure(metric, limit)
    if shown == allowed and value != limit:
        shown = f"{value:.5g}{' s' if metric.endswith('_s') else ''}"
    return f"{shown} of {allowed}"


def percent(share: float) -> str:
    """Return a share as a percentage, a decimal where that tells more, or as a multiple from ten times on."""
    if math.isnan(share):
        return NONE
    if 0 < share < 0.0005:
        return "<0.1 %"
    if share >= 9.995:
        return f"{number(share)} times"
    if 0.995 <= share < 1.005 and share != 1:
        apart = min(share, 0.999) if share < 1 else max(share, 1.001)
        return f"{100 * apart:.1f} %"
    return f"{100 * share:.{1 if 0 < share < 0.0995 else 0}f} %"


def with_prefix(value: float, unit: str) -> str:
    """Return a quantity of that unit with the prefix that leaves one to three digits before the point."""
    if math.isnan(value):
        return NONE
    size, prefix = _PREFIXES[2]
    for candidate, name in _PREFIXES:
        if value and abs(value) >= 0.9995 * candidate:
            size, prefix = candidate, name
    return f"{number(value / size)} {prefix}{unit}"


def energy(value_j: float) -> str:
    """Return joules in watt-hours."""
    return with_prefix(value_j / 3_600.0, "Wh")


def carbon(value_kg: float) -> str:
    """Return kilograms of CO2 equivalent in grams with a prefix, or in tonnes."""
    return with_prefix(value_kg / 1e3, "t CO₂e") if value_kg >= 1e3 else with_prefix(value_kg * 1e3, "g CO₂e")


def usd(value: float) -> str:
    """Return an amount of money with cents, or with three digits below a cent's precision."""
    if math.isnan(value):
        return NONE
    return f"${value:,.2f}" if value >= 1 or value == 0 else f"${value:.3g}"


def metric_name(metric: str) -> str:
    """Return what people call a metric."""
    return METRIC_NAMES.get(metric, metric)


def shortened(text: str, most: int) -> str:
    """Return a text of at most so many characters, its middle left out where it is longer."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 3
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def sentence(text: str) -> str:
    """Return words as a sentence: their first letter large, with a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def counted(count: int, thing: str) -> str:
    """Return "1 request" or "8,526 requests"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def load(result: Result) -> str:
    """Return what a cluster was asked to serve: how many requests of which trace, at which rate."""
    rate = f" at {number(result.rate_per_s)} a second" if result.rate_per_s else ""
    return f"{counted(result.requests, 'request')} of {result.trace}{rate}"


def time_ticks(low_s: float, high_s: float) -> list[float]:
    """Return round durations whose labels do not touch on a logarithmic axis of that range; the roundest go first."""
    return _apart(low_s, high_s, _DECADES_S + _ABLATION_S)


def factor_ticks(low: float, high: float) -> list[float]:
    """Return round factors whose labels do not touch on a logarithmic axis of that range; the roundest go first."""
    return _apart(low, high, _FACTORS)


def _apart(low: float, high: float, ablated_steps: tuple[float, ...]) -> list[float]:
    apart = (high / low) ** _LEAST_SPACE
    chosen: list[float] = []
    for tick in ablated_steps:
        if low <= tick <= high and all(max(tick / other, other / tick) >= apart for other in chosen):
            chosen.append(tick)
    return sorted(chosen)


def time_unit(span_s: float) -> tuple[str, float]:
    """Return the unit for a linear time axis of that span, and its size in seconds."""
    for unit, size_s in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0), ("s", 1.0)):
        if span_s > 4 * size_s:
            return unit, size_s
    return ("s", 1.0) if span_s > 0.5 else ("ms", 1e-3)
