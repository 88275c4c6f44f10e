"""The requests that a command is to serve: from a trace file or a shipped workload, as its options say."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.domain.arrivals import ArrivalModel
    from phasesplit.domain.request import Trace
    from phasesplit.domain.workload import Workload

_LEAST, _MOST = 1e-6, 1e9
_MOST_REQUESTS = 200_000_000


def check_seed(seed: int) -> None:
    """Raise unless the number of --seed is allowed.

    Raises:
        SpecError: It is not.
    """
    if not 0 <= seed < 1 << 63:
        raise SpecError.bad("--seed", seed, "a whole number from 0 to 2^63 - 1")


def check_numbers(*, rate_per_s: float | None, duration_s: float | None, seed: int) -> None:
    """Raise unless the numbers of --rate, --duration and --seed are allowed.

    Raises:
        SpecError: One of them is not.
    """
    for flag, value in (("--rate", rate_per_s), ("--duration", duration_s)):
        if value is not None and not _LEAST <= value <= _MOST:
            raise SpecError.bad(flag, value, f"a positive finite number, from {_LEAST:g} to {_MOST:g}")
    check_seed(seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Options that say which requests arrive when.

    Attributes:
        source: A trace file, `-`, or the name of a shipped workload.
        rate_per_s: Mean rate wanted; None: the source's own.
        duration_s: Seconds wanted; None: the source's own.
        count: Requests wanted instead of a duration.
        arrivals: An arrival model as `parse_arrivals` reads it.
        seed: Of all that is drawn.
        oracle: Let the rules see true output lengths.
        layout: Layout of a trace file.
        columns: Map of a trace file's columns.
        time_unit: Unit of the mapped arrivals.
        skip_bad: Drop wrong rows of a trace file.
        sort: Sort a trace file's rows.
        place: The option or argument that names the source.

    Raises:
        SpecError: A number is not allowed, or options contradict one another.
    """

    source: str
    rate_per_s: float | None = None
    duration_s: float | None = None
    count: int | None = None
    arrivals: str | None = None
    seed: int = 0
    oracle: bool = False
    layout: str | None = None
    columns: str | None = None
    time_unit: str | None = None
    skip_bad: bool = False
    sort: bool = False
    place: str = "--workload"

    def __post_init__(self) -> None:
        check_numbers(rate_per_s=self.rate_per_s, duration_s=self.duration_s, seed=self.seed)
        if self.count is not None and not 1 <= self.count <= _MOST_REQUESTS:
            raise SpecError.bad("--count", self.count, f"a whole number from 1 to {_MOST_REQUESTS:,}")
        if self.count is not None and self.duration_s is not None:
            raise SpecError("--count and --duration: give one of the two")
        if self.is_file:
            return
        from phasesplit.io.workloads import workload_names

        if self.source not in workload_names():
            raise SpecError.unknown(f"{self.place} (no such file)", self.source, workload_names())
        for flag, given in (
            ("--format", self.layout), ("--columns", self.columns), ("--time-unit", self.time_unit),
            ("--skip-bad", self.skip_bad), ("--sort", self.sort),
        ):  # fmt: skip
            if given:
                raise SpecError(f"{flag}: only for a trace file, and {self.source} is a shipped workload")

    @property
    def is_file(self) -> bool:
        """Whether the source is a file (or standard input): a file of a workload's name wins."""
        return self.source == "-" or Path(self.source).exists() or bool(set(self.source) & set("./\\"))

    def trace(self) -> tuple["Trace", str]:
        """Return the requests, and what to say of rows that were dropped ("" when none were).

        Raises:
            SpecError: The source cannot be read, or has not what was asked for.
        """
        if self.is_file:
            return self._from_file()
        workload, model = self._workload()
        if self.count is not None:
            rate = self.rate_per_s or workload.rate_per_s
            stretches = workload.chunks(
                rate, self.count, self.seed, chunk=self.count, arrivals=model, oracle=self.oracle
            )
            return next(stretches), ""
        trace = workload.trace(self.rate_per_s, self.duration_s, self.seed, arrivals=model, oracle=self.oracle)
        return trace, ""

    def stretches(self) -> Iterator["Trace"]:
        """Yield the requests of a shipped workload in consecutive stretches of bounded size; the same as `trace`."""
        workload, model = self._workload()
        duration_s = math.inf if self.count else self.duration_s or workload.duration_s
        for stretch in workload.chunks(
            self.rate_per_s or workload.rate_per_s,
            self.count or _MOST_REQUESTS,
            self.seed,
            arrivals=model,
            oracle=self.oracle,
        ):
            kept = int(stretch.arrival_s.searchsorted(duration_s))
            yield stretch.head(kept)
            if kept < len(stretch):
                return

    def _workload(self) -> tuple["Workload", "ArrivalModel | None"]:
        from phasesplit.io.workloads import load_workload

        return load_workload(self.source), self._arrivals()

    def _arrivals(self) -> "ArrivalModel | None":
        from phasesplit.domain.arrivals import parse_arrivals

        return None if self.arrivals is None else parse_arrivals(self.arrivals, "--arrivals")

    def _from_file(self) -> tuple["Trace", str]:
        from phasesplit.io.traces import read_trace

        model = self._arrivals()
        trace, count = read_trace(
            self.source,
            format=self.layout,
            columns=self.columns,
            time_unit=self.time_unit,
            skip_bad=self.skip_bad,
            sort=self.sort,
            oracle=self.oracle,
        )
        dropped = f"{self.source}: {count}" if count.dropped else ""
        if self.rate_per_s is None and model is None:
            return self._as_recorded(trace), dropped
        return self._resampled(trace, model), dropped

    def _as_recorded(self, trace: "Trace") -> "Trace":
        """Return the trace's own requests at their own times, as many as were asked for."""
        if self.duration_s is not None:
            end_s = float(trace.arrival_s[0]) + self.duration_s
            return trace.head(int(trace.arrival_s.searchsorted(end_s)))
        if self.count is None:
            return trace
        if self.count > len(trace):
            raise SpecError.bad(
                "--count", self.count, f"at most the trace's {len(trace):,} requests, or --rate as well"
            )
        return trace.head(self.count)

    def _resampled(self, trace: "Trace", model: "ArrivalModel | None") -> "Trace":
        from phasesplit.domain.workload import resample

        rate = self.rate_per_s or trace.rate_per_s
        if self.count is None:
            return resample(trace, rate, duration_s=self.duration_s, seed=self.seed, arrivals=model)
        if model is not None:
            raise SpecError("--count and --arrivals: with a trace file give --duration instead of --count")
        rounds = -(-self.count // len(trace))
        # Half a mean gap more: the last round must be whole whatever the rounding.
        duration_s = (rounds * len(trace) + 0.5) / rate if rounds > 1 else None
        return resample(trace, rate, duration_s=duration_s, seed=self.seed).head(self.count)
