"""Capacity is a rate that was held on every seed, next to one that was not."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.domain.slo import Limit, Slo
from phasesplit.planner.capacity import TOLERANCE, Capacity, capacity
from phasesplit.planner.designs import DesignKind, design
from phasesplit.planner.drive import MemoryJournal, drive
from phasesplit.planner.lower_bounds import LowerBounds
from phasesplit.planner.probe import Answer, Prober, Question
from phasesplit.planner.problem import Problem
from phasesplit.planner.search import Stopped
from planner.problems import Answering, offer, problem, searched

TIMES = {"decode_s": 0.02, "decode_s_per_request": 0.01, "decode_context_s": 1e-4, "nic_bytes_per_s": 1e11}


def found(made: Problem, kind: DesignKind, counts: tuple[int, ...], answer: Any = None, **options: Any) -> Capacity:
    chosen = design(made, kind, [0] * len(counts))
    return searched(capacity(LowerBounds(made), chosen, counts, made.seeds, **options), answer or Prober(made))


def answering(keeps: Callable[[float, int], bool]) -> Callable[[Question], Answer]:
    def answer(question: Question) -> Answer:
        holds = keeps(question.rate_per_s, question.seed)
        return Answer(holds, 0.5 if holds else 2.0, "ttft", (1.0,), 1.0, 1.0, (0.5,), (0.5,))

    return answer


@pytest.mark.parametrize(
    ("kind", "counts"), [(DesignKind.CHUNKED, (2,)), (DesignKind.STATIC, (1, 2)), (DesignKind.ELASTIC, (2, 1))]
)
def test_it_equals_a_dense_scan(kind: DesignKind, counts: tuple[int, ...]) -> None:
    """If wrong, the capacity is not where the SLO breaks."""
    made = problem(offer(**TIMES), duration_s=40.0, slo=Slo("firm", (Limit("e2e_s", 90.0, 1.5),)))
    prober, chosen = Prober(made), design(made, kind, [0] * len(counts))
    one = found(made, kind, counts)
    assert one.rate_per_s > 0
    scanned = [
        rate
        for rate in np.geomspace(one.rate_per_s * 0.8, one.rate_per_s * 1.25, 24)
        if all(prober(Question(chosen, counts, float(rate), seed)).holds for seed in made.seeds)
    ]
    step = (1.25 / 0.8) ** (1 / 23)
    assert max(scanned) / step <= one.broken_per_s
    assert one.rate_per_s <= max(scanned) * step
    assert all(prober(Question(chosen, counts, one.rate_per_s, seed)).holds for seed in made.seeds)


def test_any_border_is_found_within_tolerance_and_was_held_on_every_seed() -> None:
    """If wrong, a capacity is reported that some seed does not hold, or bisection stops early or never."""

    @settings(max_examples=100, deadline=None)
    @given(st.floats(0.02, 1.2), st.floats(0.5, 2.0), st.one_of(st.none(), st.floats(0.01, 3.0)))
    def check(share: float, other: float, guess: float | None) -> None:
        made = problem(offer(**TIMES), duration_s=10_000.0)
        upper = LowerBounds(made).rate_per_s(design(made, DesignKind.CHUNKED, [0]), (2,))
        borders = (upper * share, upper * share * other)
        workers = Answering(answering(lambda rate, seed: rate <= borders[seed]))
        search = capacity(
            LowerBounds(made),
            design(made, DesignKind.CHUNKED, [0]),
            (2,),
            made.seeds,
            guess=guess and guess * upper,
        )
        one = drive({0: search}, workers, MemoryJournal())[0]
        least = min(*borders, upper)
        assert least * (1 - 2 * TOLERANCE) <= one.rate_per_s <= least
        assert least <= one.broken_per_s * (1 + 1e-12)
        assert len(one.answers) == len(made.seeds)
        assert all(answer.holds for answer in one.answers)
        assert one.probes == len(workers.asked) < 80

    check()


def test_it_ends_on_any_answers() -> None:
    """If wrong, answers that are not monotone keep a search going for ever, or make it report what was not held."""

    @settings(max_examples=100, deadline=None)
    @given(st.randoms(use_true_random=False))
    def check(random: Any) -> None:
        made = problem(offer(**TIMES))
        held: dict[float, list[bool]] = {}

        def keeps(rate: float, _seed: int) -> bool:
            held.setdefault(rate, []).append(random.random() < 0.5)
            return held[rate][-1]

        one = found(made, DesignKind.CHUNKED, (2,), answering(keeps))
        assert one.rate_per_s == 0 or (all(held[one.rate_per_s]) and len(held[one.rate_per_s]) == 2)
        assert not one.broken_per_s or one.broken_per_s > one.rate_per_s

    check()


def test_a_cluster_that_holds_nothing_has_no_capacity() -> None:
    """If wrong, the search goes on to rates at which no request comes, and fails or calls that holding."""
    made = problem(offer(**TIMES), slo=Slo("hopeless", (Limit("ttft_s", 50.0, 1e-6),)))
    one = found(made, DesignKind.CHUNKED, (2,))
    assert one.rate_per_s == 0
    assert one.answers == ()
    assert one.bottleneck == "TTFT p50"
    assert one.probes < 20


def test_a_pool_without_machines_has_no_capacity() -> None:
    """If wrong, an empty pool is simulated."""
    made = problem(offer(**TIMES))
    one = found(made, DesignKind.STATIC, (3, 0))
    assert (one.rate_per_s, one.probes) == (0.0, 0)


@pytest.mark.parametrize("kind", [DesignKind.CHUNKED, DesignKind.WHOLE, DesignKind.STATIC])
def test_a_backlog_that_grows_is_not_held_however_short_the_trace(kind: DesignKind) -> None:
    """If wrong, a loose limit on a short trace lets an overloaded cluster pass."""
    counts = (2, 2) if kind.is_split else (2,)
    made = problem(offer(**TIMES), duration_s=20.0, slo=Slo("none", (Limit("e2e_s", 50.0, 1e6),)))
    chosen = design(made, kind, [0] * len(counts))
    upper = LowerBounds(made).rate_per_s(chosen, counts)
    one = found(made, kind, counts)
    assert 0 < one.rate_per_s <= upper
    answer = Prober(made)(Question(chosen, counts, upper * 1.3, 0))
    assert answer.values[0] < 1e6  # the limit alone is kept
    assert not answer.holds
    assert answer.bottleneck.startswith("a backlog that grows")


def test_a_rate_of_no_interest_ends_the_search_at_once() -> None:
    """If wrong, looking whether a cluster beats the best so far costs as much as finding its capacity."""
    made = problem(offer(**TIMES))
    upper = LowerBounds(made).rate_per_s(design(made, DesignKind.CHUNKED, [0]), (2,))
    border = answering(lambda rate, _seed: rate < upper / 2)
    one = found(made, DesignKind.CHUNKED, (2,), border, at_least=upper * 0.6)
    assert (one.rate_per_s, one.probes) == (0.0, 1)
    one = found(made, DesignKind.CHUNKED, (2,), border, at_least=upper * 0.4)
    assert upper * 0.49 < one.rate_per_s < upper * 0.5
    one = found(made, DesignKind.CHUNKED, (2,), border, at_least=upper)
    assert (one.rate_per_s, one.probes) == (0.0, 0)


def test_stopped_it_ends() -> None:
    """If wrong, an interrupted capacity keeps a plan from ending."""
    made = problem(offer(**TIMES))
    search = capacity(LowerBounds(made), design(made, DesignKind.CHUNKED, [0]), (2,), made.seeds)
    next(search)
    with pytest.raises(Stopped):
        search.throw(Stopped())
