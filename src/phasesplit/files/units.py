"""Quantities as people write them ("80 GB", "400 Gb/s", "10.2 kW") in base units."""

import re
from collections.abc import Mapping
from difflib import get_close_matches

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}


def _with_prefixes(unit: str, scale: float = 1.0, *, binary: bool = False) -> dict[str, float]:
    prefixes = _DECIMAL | (_BINARY if binary else {})
    return {f"{prefix}{unit}": size * scale for prefix, size in prefixes.items()}


_BYTES = _with_prefixes("B", binary=True)
_BITS_PER_S = _with_prefixes("b/s", 1 / 8) | _with_prefixes("bit/s", 1 / 8) | _with_prefixes("bps", 1 / 8)
UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": _BYTES,
    "bytes_per_s": {f"{unit}/s": size for unit, size in _BYTES.items()} | _BITS_PER_S,
    "flops_per_s": _with_prefixes("FLOP/s") | _with_prefixes("FLOPS") | _with_prefixes("FLOPs"),
    "w": _with_prefixes("W"),
    "usd_per_hour": {"USD/h": 1.0, "USD/hour": 1.0, "$/h": 1.0, "$/hour": 1.0},
    "kg_co2e": {"kg": 1.0, "t": 1e3, "kgCO2e": 1.0, "tCO2e": 1e3, "kg CO2e": 1.0, "t CO2e": 1e3},
    "kg_co2e_per_hour": {
        "kg/h": 1.0, "t/h": 1e3, "kgCO2e/h": 1.0, "tCO2e/h": 1e3, "kg CO2e/h": 1.0, "t CO2e/h": 1e3,
    },
    "s": {
        "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0, "d": 86_400.0, "days": 86_400.0,
        "years": 365 * 86_400.0,
    },
    "count": {},
    "ratio": {},
}  # fmt: skip
"""Kind of quantity to the units it may be written in and their size in the base unit."""

_NUMBER_AND_UNIT = re.compile(r"\s*([-+]?(?:[\d_]*\.?\d+|\d+\.)(?:[eE][-+]?\d+)?|[-+]?\.?(?:inf|nan))\s*(.*?)\s*", re.I)


def quantity(value: object, kind: str, *, most: float, or_zero: bool = False) -> float:
    """Return a quantity in its base unit.

    Args:
        value: A number, already in the base unit, or text with a number and, unless in the base unit, a unit.
        kind: A key of `UNITS`.
        most: Largest value that is believed.
        or_zero: Whether it may be 0.

    Raises:
        ValueError: What is allowed, as a phrase that follows "allowed is".
    """
    units = UNITS[kind]
    example = f" or text with a unit ({', '.join(list(units)[1:4] or units)})" if units else ""
    bounds = f"from 0 to {most:g}" if or_zero else f"above 0 and at most {most:g}"
    allowed = f"a number {bounds}{example}"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(allowed)
    if isinstance(value, str):
        match = _NUMBER_AND_UNIT.fullmatch(value)
        if match is None:
            raise ValueError(allowed)
        number, unit = float(match[1].replace("_", "")), match[2]
        if unit and unit not in units:
            raise ValueError(_about_unit(unit, kind, units))
        value = number * units[unit] if unit else number
    # Compared before it is converted: a whole number of hundreds of digits has no float.
    if not (0 < value <= most or (or_zero and value == 0)):
        raise ValueError(allowed)
    return float(value)


def _about_unit(unit: str, kind: str, units: Mapping[str, float]) -> str:
    if not units:
        return f"a plain number without a unit (not {unit!r})"
    other = next((name for name, table in UNITS.items() if unit in table), None)
    reason = f"{unit!r} is a unit of {other}" if other else f"{unit!r} is not a unit"
    near = get_close_matches(unit, units, n=3, cutoff=0.3) or list(units)[:4]
    return f"a unit of {kind} such as {', '.join(near)} ({reason})"
