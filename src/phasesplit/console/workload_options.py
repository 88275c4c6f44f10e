"""The requests that a command is to serve: from a trace file or a shipped workload, as its options say."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from phasesplit.console.options import LoadOptions, TraceFileOptions
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
        load: How many requests are wanted, and how fast; what is None is the source's own.
        arrivals: An arrival model as `parse_arrivals` reads it.
        seed: Of all that is drawn.
        oracle: Let the rules see true output lengths.
        file: How a trace file is read.
        place: The option or argument that names the source.

    Raises:
        SpecError: A number is not allowed, or options contradict one another.
    """

    source: str
    load: LoadOptions = field(default_factory=LoadOptions)
    arrivals: str | None = None
    seed: int = 0
    oracle: bool = False
    file: TraceFileOptions = field(default_factory=TraceFileOptions)
    place: str = "--workload"

    def __post_init__(self) -> None:
        check_numbers(rate_per_s=self.load.rate, duration_s=self.load.duration, seed=self.seed)
        if self.load.count is not None and not 1 <= self.load.count <= _MOST_REQUESTS:
            raise SpecError.bad("--count", self.load.count, f"a whole number from 1 to {_MOST_REQUESTS:,}")
        if self.load.count is not None and self.load.duration is not None:
            raise SpecError("--count and --duration: give one of the two")
        if self.is_file:
            return
        from phasesplit.io.workloads import workload_names

        if self.source not in workload_names():
            raise SpecError.unknown(f"{self.place} (no such file)", self.source, workload_names())
        for flag, given in (
            ("--format", self.file.layout), ("--columns", self.file.columns), ("--time-unit", self.file.time_unit),
            ("--skip-bad", self.file.skip_bad), ("--sort", self.file.sort),
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
        if self.load.count is not None:
            rate = self.load.rate or workload.rate_per_s
            stretches = workload.chunks(
                rate, self.load.count, self.seed, chunk=self.load.count, arrivals=model, oracle=self.oracle
            )
            return next(stretches), ""
        trace = workload.trace(self.load.rate, self.load.duration, self.seed, arrivals=model, oracle=self.oracle)
        return trace, ""

    def stretches(self) -> Iterator["Trace"]:
        """Yield the requests of a shipped workload in consecutive stretches of bounded size; the same as `trace`."""
        workload, model = self._workload()
        duration_s = math.inf if self.load.count else self.load.duration or workload.duration_s
        for stretch in workload.chunks(
            self.load.rate or workload.rate_per_s,
            self.load.count or _MOST_REQUESTS,
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
            format=self.file.layout,
            columns=self.file.columns,
            time_unit=self.file.time_unit,
            skip_bad=self.file.skip_bad,
            sort=self.file.sort,
            oracle=self.oracle,
        )
        dropped = f"{self.source}: {count}" if count.dropped else ""
        if self.load.rate is None and model is None:
            return self._as_recorded(trace), dropped
        return self._resampled(trace, model), dropped

    def _as_recorded(self, trace: "Trace") -> "Trace":
        """Return the trace's own requests at their own times, as many as were asked for."""
        if self.load.duration is not None:
            end_s = float(trace.arrival_s[0]) + self.load.duration
            return trace.head(int(trace.arrival_s.searchsorted(end_s)))
        if self.load.count is None:
            return trace
        if self.load.count > len(trace):
            raise SpecError.bad(
                "--count", self.load.count, f"at most the trace's {len(trace):,} requests, or --rate as well"
            )
        return trace.head(self.load.count)

    def _resampled(self, trace: "Trace", model: "ArrivalModel | None") -> "Trace":
        from phasesplit.domain.workload import resample

        rate = self.load.rate or trace.rate_per_s
        if self.load.count is None:
            return resample(trace, rate, duration_s=self.load.duration, seed=self.seed, arrivals=model)
        if model is not None:
            raise SpecError("--count and --arrivals: with a trace file give --duration instead of --count")
        rounds = -(-self.load.count // len(trace))
        # Half a mean gap more: the last round must be whole whatever the rounding.
        duration_s = (rounds * len(trace) + 0.5) / rate if rounds > 1 else None
        return resample(trace, rate, duration_s=duration_s, seed=self.seed).head(self.load.count)
