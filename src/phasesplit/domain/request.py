"""A trace: the requests of a workload as columns."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.errors import SpecError


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trace:
    """Requests in order of arrival, one array per column, all of one length.

    Attributes:
        name: What the trace is called in reports.
        arrival_s: float64 (n,), non-decreasing, finite, >= 0; seconds since the start of the trace.
        prompt_tokens: int32 (n,), >= 1.
        output_tokens: int32 (n,), >= 1; the true output length, which no scheduling rule ever sees.
        expected_tokens: int32 (n,), >= 1; the output length that rules see. By default the trace's mean output,
            rounded, for every request; equal to `output_tokens` only when `oracle` says so.
        oracle: Whether `expected_tokens` are the true lengths; a result names it.
        prefix_offsets: int64 (n + 1,) or None; request i owns `prefix_ids[prefix_offsets[i]:prefix_offsets[i + 1]]`.
        prefix_ids: int64 or None; one id for each block of the prompt, equal ids mean equal prefix blocks.

    Raises:
        SpecError: A column has the wrong length or a value that is not allowed; the first such row is named.
    """

    name: str
    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    expected_tokens: NDArray[np.int32]
    oracle: bool = False
    prefix_offsets: NDArray[np.int64] | None = None
    prefix_ids: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        _check_columns(self)

    @classmethod
    def from_columns(
        cls,
        name: str,
        arrival_s: NDArray[np.float64],
        prompt_tokens: NDArray[np.int32],
        output_tokens: NDArray[np.int32],
        *,
        oracle: bool = False,
        prefix_offsets: NDArray[np.int64] | None = None,
        prefix_ids: NDArray[np.int64] | None = None,
    ) -> "Trace":
        """Return a trace whose rules see the mean output length, or the true one with `oracle`.

        Args:
            name: What the trace is called in reports.
            arrival_s: (n,) seconds since the start of the trace, non-decreasing, finite, >= 0.
            prompt_tokens: (n,) >= 1.
            output_tokens: (n,) >= 1.
            oracle: Let the rules see the true output length of each request.
            prefix_offsets: (n + 1,) or None, see the class.
            prefix_ids: Block ids or None, see the class.

        Raises:
            SpecError: A column has the wrong length or a value that is not allowed.
        """
        arrival = np.ascontiguousarray(arrival_s, dtype=np.float64)
        prompt = _whole_tokens(name, "prompt_tokens", prompt_tokens)
        output = _whole_tokens(name, "output_tokens", output_tokens)
        if oracle:
            expected = output.copy()
        else:
            mean = max(1, round(float(output.mean()))) if output.size else 1
            expected = np.full(output.shape, mean, dtype=np.int32)
        return cls(
            name=name,
            arrival_s=arrival,
            prompt_tokens=prompt,
            output_tokens=output,
            expected_tokens=expected,
            oracle=oracle,
            prefix_offsets=prefix_offsets,
            prefix_ids=prefix_ids,
        )

    def __len__(self) -> int:
        return int(self.arrival_s.size)

    @property
    def duration_s(self) -> float:
        """Seconds from the first to the last arrival; 0 for fewer than two requests."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) > 1 else 0.0

    @property
    def rate_per_s(self) -> float:
        """Mean arrival rate: (n - 1) / duration, 0 where the duration is 0."""
        return (len(self) - 1) / self.duration_s if self.duration_s > 0 else 0.0

    def head(self, count: int) -> "Trace":
        """Return the first `count` requests, expectations unchanged."""
        ids_end = None if self.prefix_offsets is None else int(self.prefix_offsets[: count + 1][-1])
        return Trace(
            name=self.name,
            arrival_s=self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            expected_tokens=self.expected_tokens[:count],
            oracle=self.oracle,
            prefix_offsets=None if self.prefix_offsets is None else self.prefix_offsets[: count + 1],
            prefix_ids=None if self.prefix_ids is None else self.prefix_ids[:ids_end],
        )


def _whole_tokens(name: str, column: str, values: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return values as int32; one that a conversion would change is an error, not another length."""
    given = np.asarray(values)
    with np.errstate(invalid="ignore"):
        tokens = np.ascontiguousarray(given, dtype=np.int32)
    if not np.array_equal(tokens, given):
        row = int(np.argmax(tokens != given))
        raise SpecError.bad(f"trace {name}, request {row}, {column}", given[row].item(), "a whole number below 2**31")
    return tokens


def _check_prefixes(trace: Trace, count: int) -> None:
    offsets, ids = trace.prefix_offsets, trace.prefix_ids
    if offsets is None and ids is None:
        return
    if (
        offsets is None
        or ids is None
        or offsets.shape != (count + 1,)
        or int(offsets[0]) != 0
        or int(offsets[-1]) != ids.size
        or bool((np.diff(offsets) < 0).any())
    ):
        raise SpecError(
            f"trace {trace.name}, prefix_offsets: allowed are {count + 1} numbers from 0 up to the number of prefix_ids"
        )


def _check_columns(trace: Trace) -> None:
    count = trace.arrival_s.shape[0]
    for column in ("prompt_tokens", "output_tokens", "expected_tokens"):
        values = getattr(trace, column)
        if values.shape != (count,):
            raise SpecError.bad(f"trace {trace.name}, column {column}", values.shape, f"{count} values")
        if count and int(values.min()) < 1:
            row = int(np.argmax(values < 1))
            raise SpecError.bad(
                f"trace {trace.name}, request {row}, {column}", int(values[row]), "a whole number of at least 1"
            )
    _check_prefixes(trace, count)
    if not count:
        return
    arrival = trace.arrival_s
    if not np.isfinite(arrival).all() or arrival[0] < 0:
        row = int(np.argmax(~np.isfinite(arrival) | (arrival < 0)))
        raise SpecError.bad(f"trace {trace.name}, request {row}, arrival_s", float(arrival[row]), "a finite time >= 0")
    steps = np.diff(arrival)
    if steps.size and float(steps.min()) < 0:
        row = int(np.argmax(steps < 0)) + 1
        raise SpecError.bad(
            f"trace {trace.name}, request {row}, arrival_s",
            float(arrival[row]),
            f"a time not before the previous request's ({float(arrival[row - 1])})",
        )
