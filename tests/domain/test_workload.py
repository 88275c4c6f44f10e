"""Arrival models, length tables, workloads, and what is said about a trace."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.domain.arrivals import (
    ArrivalModel,
    Diurnal,
    Gamma,
    Hyperexponential,
    OnOff,
    Poisson,
    Weibull,
    parse_arrivals,
)
from phasesplit.domain.request import Trace, count_windows, describe_trace, inter_arrival_cv
from phasesplit.domain.workload import LengthTable, Workload, resample, window_of
from phasesplit.errors import SpecError

BURSTY = Hyperexponential((0.9, 0.1), (0.01, 1.0))
MODELS: list[ArrivalModel] = [
    Poisson(),
    Gamma(2.0),
    Gamma(0.3),
    Weibull(2.0),
    BURSTY,
    OnOff(on_s=2.0, off_s=8.0),
    OnOff(on_s=2.0, off_s=8.0, off_share=0.2),
    Diurnal(amplitude=0.8, period_s=500.0),
]


def a_workload(arrivals: ArrivalModel = BURSTY) -> Workload:
    lengths = LengthTable(
        np.array([10, 10, 2000], dtype=np.int32), np.array([5, 500, 7], dtype=np.int32), np.array([3, 1, 4])
    )
    return Workload(name="w", lengths=lengths, arrivals=arrivals, rate_per_s=2.0, duration_s=100.0, source="a test")


def a_trace(requests: int = 40, seed: int = 0) -> Trace:
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, requests))])
    return Trace.from_columns(
        "t",
        np.cumsum(rng.exponential(size=requests)),
        rng.integers(1, 1000, requests).astype(np.int32),
        rng.integers(1, 1000, requests).astype(np.int32),
        prefix_offsets=offsets,
        prefix_ids=rng.integers(0, 9, int(offsets[-1])),
    )


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_a_model_keeps_the_mean_rate(model: ArrivalModel) -> None:
    """The planner would size a cluster for another load than the one asked for."""
    duration_s, rate = 20_000.0, 5.0
    times = model.arrivals(rate, duration_s, np.random.default_rng(3))
    assert times[0] >= 0
    assert times[-1] < duration_s
    assert (np.diff(times) >= 0).all()
    assert times.size == pytest.approx(rate * duration_s, rel=0.04)


@pytest.mark.parametrize("model", [model for model in MODELS if not isinstance(model, Diurnal)], ids=str)
def test_a_short_observation_has_the_mean_rate_too(model: ArrivalModel) -> None:
    """A bursty stream that always begins inside a burst would overload every short simulation."""
    counts = [model.arrivals(2.0, 3.0, np.random.default_rng(seed)).size for seed in range(400)]
    assert np.mean(counts) == pytest.approx(6.0, abs=5 * np.std(counts) / math.sqrt(400))


@pytest.mark.parametrize(
    ("model", "cv"),
    [
        (Poisson(), 1.0),
        (Gamma(3.0), 3.0),
        (Gamma(0.5), 0.5),
        (Weibull(2.5), 2.5),
        (Weibull(0.4), 0.4),
        (BURSTY, BURSTY.cv),
    ],
    ids=str,
)
def test_gaps_have_the_coefficient_of_variation_that_was_asked_for(model: ArrivalModel, cv: float) -> None:
    """Burstiness would differ from what the user set, and with it every latency percentile."""
    times = model.first(4.0, 400_000, np.random.default_rng(1))
    assert inter_arrival_cv(times) == pytest.approx(cv, rel=0.04)


def test_scaling_the_rate_of_a_renewal_model_scales_time_and_nothing_else() -> None:
    """At another rate the shape of the workload would change."""
    slow = BURSTY.first(1.0, 1_000, np.random.default_rng(5))
    fast = BURSTY.first(8.0, 1_000, np.random.default_rng(5))
    np.testing.assert_allclose(fast * 8.0, slow, rtol=1e-12)


def test_an_on_off_stream_is_silent_while_off() -> None:
    """Off periods would leak requests: the stream would be less bursty than set."""
    times = OnOff(on_s=1.0, off_s=50.0).arrivals(4.0, 50_000.0, np.random.default_rng(2))
    counted = count_windows(times, 1.0)
    assert counted.empty_share > 0.93
    assert counted.dispersion > 50


def test_a_diurnal_stream_peaks_when_told() -> None:
    """The daily peak would come at another hour."""
    model = Diurnal(amplitude=1.0, peak_s=25.0, period_s=100.0)
    times = model.arrivals(50.0, 1_000.0, np.random.default_rng(2)) % 100
    # The integral of (1 + cos(2 pi (t - 25) / 100)) / 100 from 0 to 50.
    assert (times < 50).mean() == pytest.approx(0.5 + 1 / math.pi, abs=0.01)


@pytest.mark.parametrize(
    "text", ["poisson", "gamma:cv=2", "weibull:cv=2", "on-off:on=5,off=60", "diurnal:amplitude=0.5"]
)
def test_every_example_of_an_arrival_model_is_understood(text: str) -> None:
    """The help would show settings that the program refuses."""
    assert isinstance(parse_arrivals(text), ArrivalModel)


@pytest.mark.parametrize(
    "text",
    ["poison", "gamma", "gamma:cv=x", "gamma:cv=-1", "gamma:vc=2", "on-off:on=5", "poisson:cv=2", "", "gamma:cv=nan"],
)
def test_a_wrong_arrival_model_is_one_line(text: str) -> None:
    """A typing error would end in a traceback, or be ignored."""
    with pytest.raises(SpecError) as caught:
        parse_arrivals(text, "--arrivals")
    assert "\n" not in str(caught.value)
    assert "arrivals" in str(caught.value)


@pytest.mark.parametrize("model", MODELS, ids=str)
@pytest.mark.parametrize("chunk", [1, 999, 70_000])
def test_chunks_together_are_one_trace(model: ArrivalModel, chunk: int) -> None:
    """Streaming ten million requests would simulate other requests than holding them in memory."""
    requests = 70_001 if chunk > 1 else 50
    workload = a_workload(model)
    chunks = list(workload.chunks(3.0, requests, 7, chunk=chunk))
    whole = next(workload.chunks(3.0, requests, 7, chunk=requests))
    assert {int(expected) for part in chunks for expected in part.expected_tokens} == {workload.expected_tokens}
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "expected_tokens"):
        joined = np.concatenate([getattr(part, column) for part in chunks])
        assert joined.tobytes() == getattr(whole, column).tobytes()


def test_a_trace_is_the_beginning_of_the_stream_of_its_seed() -> None:
    """Same seed, other bytes: a result could not be reproduced."""
    workload = a_workload()
    trace = workload.trace(3.0, 500.0, 11)
    again = workload.trace(3.0, 500.0, 11)
    streamed = next(workload.chunks(3.0, len(trace), 11))
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "expected_tokens"):
        assert getattr(trace, column).tobytes() == getattr(again, column).tobytes()
        assert getattr(trace, column).tobytes() == getattr(streamed, column).tobytes()
    other = workload.trace(3.0, 500.0, 12)
    assert other.arrival_s.tobytes() != trace.arrival_s.tobytes()


def test_lengths_are_drawn_jointly() -> None:
    """Long prompts would get the answers of short ones."""
    trace = a_workload().trace(50.0, 2_000.0, 1)
    pairs, counts = np.unique(np.stack([trace.prompt_tokens, trace.output_tokens]), axis=1, return_counts=True)
    assert pairs.T.tolist() == [[10, 5], [10, 500], [2000, 7]]
    np.testing.assert_allclose(counts / len(trace), [3 / 8, 1 / 8, 4 / 8], atol=0.01)


def test_other_arrivals_meet_the_same_lengths() -> None:
    """A comparison of arrival models would compare two samples of lengths as well."""
    own = a_workload().trace(5.0, 400.0, 1)
    poisson = a_workload().trace(5.0, 400.0, 1, arrivals=Poisson())
    shared = min(len(own), len(poisson))
    assert own.head(shared).prompt_tokens.tolist() == poisson.head(shared).prompt_tokens.tolist()
    assert own.head(shared).arrival_s.tolist() != poisson.head(shared).arrival_s.tolist()


@pytest.mark.parametrize(
    "asked",
    [
        {"rate_per_s": 0.0},
        {"rate_per_s": math.nan},
        {"duration_s": -1.0},
        {"seed": -1},
        {"rate_per_s": 1e9},
        {"duration_s": 1e-9},
    ],
    ids=str,
)
def test_a_trace_that_cannot_be_drawn_is_refused(asked: dict[str, float]) -> None:
    """A wrong number would give an empty, endless or default trace without a word."""
    with pytest.raises(SpecError):
        a_workload().trace(**asked)  # type: ignore[arg-type]


def test_oracle_lets_rules_see_the_true_lengths() -> None:
    """The setting would be named in results without having any effect."""
    trace = a_workload().trace(5.0, 100.0, oracle=True)
    assert trace.oracle
    assert trace.expected_tokens.tolist() == trace.output_tokens.tolist()


def test_windows_are_counted_with_their_empty_ones() -> None:
    """Burstiness would be computed from the seconds that have arrivals, and look mild."""
    counted = count_windows(np.array([10.0, 10.1, 10.2, 13.5, 14.5]), 1.0)
    counts = np.array([3, 0, 0, 1])
    assert counted.windows == 4
    assert counted.empty_share == 0.5
    assert counted.most == 3
    assert counted.peak_to_mean == 3.0
    assert counted.dispersion == pytest.approx(counts.var() / counts.mean())


@given(gaps=st.lists(st.integers(0, 40), min_size=2, max_size=60))
def test_windows_equal_a_plain_histogram(gaps: list[int]) -> None:
    """The sparse count would lose or double a window."""
    times = np.cumsum(np.array(gaps, dtype=np.float64)) / 8
    counted = count_windows(times, 1.0)
    since = times - times[0]
    windows = int(since[-1])
    assert counted.windows == windows
    if windows:
        counts = np.bincount(since.astype(int), minlength=windows)[:windows]
        assert counted.dispersion == pytest.approx(counts.var() / counts.mean())
        assert counted.empty_share == pytest.approx((counts == 0).mean())


def test_poisson_arrivals_are_described_as_poisson() -> None:
    """The yardstick of 1 for cv and dispersion would be off."""
    shape = describe_trace(a_workload(Poisson()).trace(4.0, 40_000.0, 2))
    assert shape.inter_arrival_cv == pytest.approx(1.0, abs=0.02)
    for counted in shape.windows:
        assert counted.dispersion == pytest.approx(1.0, abs=0.15)


def test_rank_correlation_sees_a_monotone_relation_with_ties() -> None:
    """Spearman's figure would be Pearson's under another name, or mistreat ties."""
    prompt = np.array([1, 2, 2, 3, 10], dtype=np.int32)
    trace = Trace.from_columns("t", np.arange(5.0), prompt, prompt**3)
    shape = describe_trace(trace)
    assert shape.spearman == pytest.approx(1.0)
    assert shape.pearson < 0.99


def test_seen_blocks_are_those_an_endless_cache_holds() -> None:
    """The promise of prefix caching would be misjudged."""
    ones = np.ones(3, dtype=np.int32)
    trace = Trace.from_columns(
        "t", np.arange(3.0), ones, ones, prefix_offsets=np.array([0, 2, 4, 5]), prefix_ids=np.array([1, 2, 1, 3, 1])
    )
    assert describe_trace(trace).prefix_seen_share == pytest.approx(2 / 5)


def test_keeping_the_pattern_scales_every_gap() -> None:
    """A resampled trace would lose the burstiness of the original."""
    trace = a_trace()
    faster = resample(trace, 7.0)
    assert faster.rate_per_s == pytest.approx(7.0)
    np.testing.assert_allclose(np.diff(faster.arrival_s) * 7.0, np.diff(trace.arrival_s) * trace.rate_per_s, rtol=1e-9)
    assert faster.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert faster.prefix_ids.tolist() == trace.prefix_ids.tolist()  # type: ignore[union-attr]


@settings(max_examples=40)
@given(
    requests=st.integers(2, 30),
    rate=st.floats(0.1, 50),
    rounds=st.floats(0.2, 6),
    seed=st.integers(0, 5),
    arrivals=st.sampled_from([None, Poisson(), Gamma(3.0)]),
)
def test_resampling_draws_whole_rows(
    requests: int, rate: float, rounds: float, seed: int, arrivals: ArrivalModel | None
) -> None:
    """A request would get the output or the prefix of another one."""
    trace = a_trace(requests, seed)
    duration_s = rounds * requests / rate

    def rows(of: Trace) -> list[tuple[int, int, tuple[int, ...]]]:
        starts, ids = of.prefix_offsets, of.prefix_ids
        assert starts is not None
        assert ids is not None
        blocks = [tuple(ids[a:b].tolist()) for a, b in itertools.pairwise(starts.tolist())]
        return list(zip(of.prompt_tokens.tolist(), of.output_tokens.tolist(), blocks, strict=True))

    try:
        drawn = resample(trace, rate, duration_s=duration_s, seed=seed, arrivals=arrivals)
    except SpecError:
        assert arrivals is not None, "a kept pattern begins with a request"
        return
    assert set(rows(drawn)) <= set(rows(trace))
    assert drawn.arrival_s[-1] < duration_s
    if arrivals is None:
        assert len(drawn) <= rounds * requests + requests
        assert rows(drawn)[:requests] == rows(trace)[: len(drawn)]


def test_a_resampled_trace_keeps_the_joint_distribution() -> None:
    """Correlation of prompt and output would be lost on the way to another rate."""
    trace = a_workload().trace(20.0, 500.0, 4)
    drawn = resample(trace, 50.0, duration_s=2_000.0, seed=1, arrivals=Poisson())
    assert describe_trace(drawn).pearson == pytest.approx(describe_trace(trace).pearson, abs=0.02)
    assert len(drawn) == pytest.approx(100_000, rel=0.02)


def test_a_window_is_cut_where_told() -> None:
    """Requests outside the window would be used, or the window would begin late."""
    ones = np.ones(5, dtype=np.int32)
    trace = Trace.from_columns("t", np.array([5.0, 6.0, 7.0, 8.0, 9.0]), ones, ones)
    cut = window_of(trace, 1.0, 3.0)
    assert cut.arrival_s.tolist() == [0.0, 1.0]
    with pytest.raises(SpecError):
        window_of(trace, 20.0, 30.0)


@pytest.mark.parametrize("column", ["prompt", "output"])
@pytest.mark.parametrize("value", [2**32 + 5, 1.5, math.nan, 0])
def test_a_length_that_does_not_fit_is_refused(column: str, value: float) -> None:
    """A huge or broken length would wrap around into another, believable one."""
    lengths = {"prompt": np.array([3, 4]), "output": np.array([3, 4])}
    lengths[column] = np.array([3, value])
    with pytest.raises(SpecError, match=f"request 1, {column}_tokens"):
        Trace.from_columns("t", np.arange(2.0), lengths["prompt"], lengths["output"])


@pytest.mark.parametrize(
    ("offsets", "ids"),
    [([0, 1], [1]), ([0, 2, 1], [1]), ([1, 1, 1], [1]), ([0, 1, 3], [1]), (None, [1]), ([0, 0, 0], None)],
)
def test_prefix_columns_that_do_not_fit_are_refused(offsets: list[int] | None, ids: list[int] | None) -> None:
    """A request would own blocks of another one, or the kernel read outside the column."""
    ones = np.ones(2, dtype=np.int32)
    with pytest.raises(SpecError, match="prefix_offsets"):
        Trace.from_columns(
            "t",
            np.arange(2.0),
            ones,
            ones,
            prefix_offsets=None if offsets is None else np.array(offsets),
            prefix_ids=None if ids is None else np.array(ids),
        )
