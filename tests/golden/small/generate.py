"""Writes the small golden files: synthetic requests served by the naive twin of the published rules.

PYTHONPATH=tests python tests/golden/small/generate.py
"""

import csv
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from naive.parts import Arrival, Machine, Model, Result, Role
from naive.published import simulate

FOLDER = Path(__file__).parent
KV_BYTES_PER_TOKEN = 1_000_000
PREFILL_S_PER_TOKEN = 1e-4
DECODE_S = 0.05
FAR_TOKENS = 1_000_000
COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s", "queue_s", "second_token_overhead_s",
    "prefill_instance", "decode_instance",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A cluster, and the pace of the requests that it cannot quite keep up with."""

    pools: tuple[tuple[Role, int], ...]
    capacity_tokens: int
    requests: int
    mean_gap_s: float
    longest_prompt_tokens: int
    longest_output_tokens: int
    seed: int


CASES = {
    "split": Case((("prefill", 2), ("decode", 2)), 12_000, 130, 0.06, 4_000, 60, 1),
    "decode_first": Case((("decode", 1), ("prefill", 3)), 30_000, 120, 0.04, 3_000, 80, 2),
    "full_decode_machine": Case((("prefill", 3), ("decode", 1)), 6_000, 90, 0.15, 2_500, 120, 3),
    "unsplit": Case((("unsplit", 2),), 20_000, 120, 0.1, 4_000, 60, 4),
}


def arrivals_of(case: Case) -> list[Arrival]:
    """Return a case's requests, short prompts more often than long ones."""
    draws = random.Random(case.seed)  # noqa: S311 - lengths, not secrets
    gaps_s = (round(draws.expovariate(1 / case.mean_gap_s), 4) for _ in range(case.requests))
    return [
        Arrival(
            round(at_s, 4),
            max(1, int(case.longest_prompt_tokens * draws.random() ** 2)),
            draws.randint(2, case.longest_output_tokens),
        )
        for at_s in accumulate(gaps_s)
    ]


def served(case: Case) -> tuple[list[Arrival], Result]:
    """Return a case's requests and what becomes of them."""
    prefill_knots = ((0, 0.0), (FAR_TOKENS, PREFILL_S_PER_TOKEN * FAR_TOKENS))
    decode_knots = ((0, DECODE_S), (FAR_TOKENS, DECODE_S))
    capacity_bytes = (case.capacity_tokens + 0.5) * KV_BYTES_PER_TOKEN
    machines = [
        Machine(role, prefill_knots, decode_knots, capacity_bytes) for role, count in case.pools for _ in range(count)
    ]
    arrivals = arrivals_of(case)
    return arrivals, simulate(arrivals, machines, Model(KV_BYTES_PER_TOKEN, 0))


def rows_of(case: Case) -> Iterator[list[str]]:
    """Yield the lines of a case's file."""
    arrivals, result = served(case)
    for arrival, outcome in zip(arrivals, result.outcomes, strict=True):
        times = (outcome.ttft_s, outcome.e2e_s, outcome.queue_s, outcome.second_token_overhead_s)
        yield [
            f"{arrival.arrival_s:.4f}",
            *map(str, (arrival.prompt_tokens, arrival.output_tokens)),
            *(f"{time_s:.9f}" for time_s in times),
            *map(str, (outcome.prefill_instance, outcome.decode_instance)),
        ]


def main() -> None:
    """Write a file for each case, and one with the counts of all."""
    counts: dict[str, dict[str, int]] = {}
    for name, case in CASES.items():
        with (FOLDER / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(rows_of(case))
        counts[name] = asdict(served(case)[1].counters)
    with (FOLDER / "counts.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", *next(iter(counts.values()))])
        writer.writerows([name, *row.values()] for name, row in counts.items())


if __name__ == "__main__":
    main()
