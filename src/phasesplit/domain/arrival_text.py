"""Arrival models as a person writes them: `poisson`, `gamma:cv=2`, `on-off:on=5,off=60`."""

from collections.abc import Callable

from phasesplit.domain.arrivals import ArrivalModel, Diurnal, Gamma, OnOff, Poisson, Weibull
from phasesplit.errors import SpecError

_MODELS: dict[str, tuple[Callable[..., ArrivalModel], dict[str, str], str]] = {
    "poisson": (Poisson, {}, "poisson"),
    "gamma": (Gamma, {"cv": "cv"}, "gamma:cv=2"),
    "weibull": (Weibull, {"cv": "cv"}, "weibull:cv=2"),
    "on-off": (OnOff, {"on": "on_s", "off": "off_s", "off-share": "off_share"}, "on-off:on=5,off=60"),
    "diurnal": (
        Diurnal,
        {"amplitude": "amplitude", "peak": "peak_s", "period": "period_s"},
        "diurnal:amplitude=0.5",
    ),
}
"""Name to model, its settings on the command line by field, and an example for messages."""


def parse_arrivals(text: str, where: str = "arrivals") -> ArrivalModel:
    """Return the arrival model that a text names; times are in seconds.

    Args:
        text: A name, then perhaps `:` and settings `name=number` with commas between them.
        where: How the person knows the place the text came from, for the message.

    Raises:
        SpecError: The model or a setting is unknown, missing or not a number that the model allows.
    """
    name, _, rest = text.strip().partition(":")
    if name not in _MODELS:
        raise SpecError.unknown(where, name, _MODELS)
    build, settings, example = _MODELS[name]
    values: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, _, number = part.partition("=")
        if key.strip() not in settings:
            raise SpecError.bad(where, part, f"settings as in {example}")
        try:
            values[settings[key.strip()]] = float(number)
        except ValueError:
            raise SpecError.bad(f"{where}, {key.strip()}", number, "a number") from None
    try:
        return build(**values)
    except TypeError:
        raise SpecError.bad(where, text, f"all settings, as in {example}") from None
