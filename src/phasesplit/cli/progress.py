"""How far a simulation is, on standard error, once it has taken long enough to make one wonder."""

import time
from types import TracebackType
from typing import Any, Self

_QUIET_S = 2.0


class Progress:
    """Shows requests ended and model time; to be called as `simulate(on_progress=...)`, and closed at the end.

    Args:
        shown: Whether to show anything at all.
    """

    def __init__(self, *, shown: bool) -> None:
        self._shown = shown
        self._since_s = time.monotonic()
        self._status: Any = None

    def __call__(self, requests: int, model_s: float) -> None:
        """Show that so many requests have ended by that model time."""
        if not self._shown or time.monotonic() - self._since_s < _QUIET_S:
            return
        if self._status is None:
            from rich.console import Console

            self._status = Console(stderr=True, highlight=False).status("")
            self._status.start()
        per_s = requests / (time.monotonic() - self._since_s)
        self._status.update(f"{requests:,} requests done, {per_s:,.0f} a second; model time {model_s:,.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()
