"""A circuit breaker: a machine that fails again and again is left alone, for longer each time, then tried once."""

from dataclasses import dataclass, fields

from phasesplit.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRule:
    """When a breaker opens, and for how long.

    Attributes:
        failures: Failures in a row that open it.
        open_s: Seconds that it stays open at first.
        growth: Factor from one opening to the next without a success in between, >= 1.
        most_open_s: Seconds that it stays open at most.

    Raises:
        SpecError: A bound is not positive, or the growth below 1.
    """

    failures: int = 3
    open_s: float = 1.0
    growth: float = 2.0
    most_open_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("growth", "failures") else 0
            if not (least <= value < float("inf") and value > 0):
                raise SpecError.bad(f"breaker, {field.name}", value, "a number >= 1" if least else "a positive number")


class Breaker:
    """The breaker of one machine: closed (all is well), open (left alone), half-open (one request may try it).

    Attributes:
        failures: Failures in a row.
        openings: Openings without a success since.
        until_s: While it is open: when one request may try the machine; None while it is closed.
    """

    def __init__(self, rule: BreakerRule) -> None:
        self.failures = 0
        self.openings = 0
        self.until_s: float | None = None
        self._rule = rule

    def failed(self, now_s: float) -> None:
        """Count a failure. What fails while the breaker is open was begun before, and says nothing new."""
        self.failures += 1
        half_open = self.until_s is not None and now_s >= self.until_s
        if half_open or (self.until_s is None and self.failures >= self._rule.failures):
            # The exponent is bounded, or the power overflows after a thousand openings.
            open_s = self._rule.open_s * self._rule.growth ** min(self.openings, 64)
            self.until_s = now_s + min(open_s, self._rule.most_open_s)
            self.openings += 1

    def succeeded(self) -> None:
        """Count a success, which closes the breaker."""
        self.failures = self.openings = 0
        self.until_s = None

    def open(self, now_s: float) -> bool:
        """Return whether the machine is to be left alone."""
        return self.until_s is not None and now_s < self.until_s
