"""Phase times fitted to measurements: known truths come back, noise stays out, the paper's data are met."""

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from phasesplit.domain.profile import Measurements, profile_times, relative_errors
from phasesplit.errors import SpecError
from phasesplit.io.catalog import measured_pairs, measurements, read_profile
from phasesplit.io.specs import load_machine, load_model
from refusals import assert_refused

PERF_MODEL = Path(__file__).resolve().parents[3] / "shared" / "data" / "splitwise-sim" / "perf_model.csv"
PROMPT_SIZES = [128, 256, 512, 1024, 2048, 4096, 8192]
BATCH_SIZES = [1, 2, 4, 8, 16, 32, 64]

# model, machine: prefill phase ms for PROMPT_SIZES, decode phase ms for BATCH_SIZES at 512-token prompts, as printed in
# the published profile (medians of 5 runs)
PUBLISHED_MEDIANS = {
    ("bloom-176b", "dgx-a100"): (
        [79.7, 99.2, 173.8, 289.2, 540.4, 1348, 3593],
        [48.8, 50.0, 51.0, 53.0, 57.3, 65.4, 96.6],
    ),
    ("bloom-176b", "dgx-h100"): (
        [48.3, 51.2, 75.5, 132.6, 253.1, 688.7, 1535],
        [36.1, 36.9, 38.1, 38.1, 40.6, 45.8, 63.8],
    ),
    ("llama2-70b", "dgx-a100"): (
        [65.3, 66.8, 94.3, 154.5, 274.2, 661.2, 1550],
        [44.9, 44.6, 45.8, 46.5, 50.4, 53.0, 71.6],
    ),
    ("llama2-70b", "dgx-h100"): (
        [58.2, 51.7, 53.4, 77.9, 136.8, 390.3, 844.9],
        [29.8, 30.3, 31.8, 32.5, 34.2, 38.6, 50.2],
    ),
}


def _synthetic(pair_s: float, context_s: float) -> Measurements:
    """Return noiseless measurements of f(B) = 0.05 + 1e-4 B and g(n) = 0.03 + 1e-3 n, on the design of the paper."""
    points = [(size, 1, 128) for size in PROMPT_SIZES]
    points += [(512, batch, 128) for batch in BATCH_SIZES[1:]]
    points += [(512, 1, output) for output in (256, 1024, 8192)]
    prompt, batch, output = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    return Measurements(
        source="synthetic",
        prompt_tokens=prompt,
        batch_requests=batch,
        output_tokens=output,
        prefill_s=0.05 + 1e-4 * batch * prompt + pair_s * batch * prompt**2 / 2,
        decode_s=0.03 + 1e-3 * batch + context_s * batch * (prompt + output / 2),
        runs=np.ones(prompt.size),
    )


@pytest.mark.parametrize(("pair_s", "context_s"), [(3e-9, 2e-7), (0.0, 0.0)])
def test_a_known_truth_comes_back(pair_s: float, context_s: float) -> None:
    """The fit would mix up what the batch, the attention pairs and the context each cost."""
    times = profile_times(_synthetic(pair_s, context_s))
    assert times.prefill_pair_s == pytest.approx(pair_s, abs=1e-15)
    assert times.decode_context_s == pytest.approx(context_s, abs=1e-13)
    assert times.prefill_time_s([700, 5000]) == pytest.approx(
        [0.12 + pair_s * 700**2 / 2, 0.55 + pair_s * 5000**2 / 2], rel=1e-6
    )
    assert times.decode_time_s([20, 64], [40_000, 0]) == pytest.approx([0.05 + context_s * 40_000, 0.094], rel=1e-6)
    assert times.mean_error == pytest.approx(0.0, abs=1e-9)


def test_noise_does_not_make_more_work_faster() -> None:
    """A noisy measurement would make a larger prompt or batch take less time."""
    noisy = _synthetic(0.0, 0.0)
    noisy.prefill_s[0] = 0.08
    noisy.decode_s[noisy.batch_requests == 4] = 0.02
    times = profile_times(noisy)
    assert (np.diff(times.prefill_knots_s) >= 0).all()
    assert (np.diff(times.decode_knots_s) >= 0).all()
    # pooled with their neighbours: 0.08 with 0.0756, and 0.031, 0.032 with 0.02
    assert times.prefill_knots_s[:2] == pytest.approx((0.08 + 0.0756) / 2)
    assert times.decode_knots_s[0] == pytest.approx(times.decode_knots_s[2])
    assert times.decode_knots_s[3] == pytest.approx(0.038)


def test_one_outlier_does_not_tilt_the_context_term() -> None:
    """One bad run would change what every token of context costs."""
    noisy = _synthetic(0.0, 2e-7)
    noisy.decode_s[noisy.prompt_tokens == 2048] *= 1.5
    assert profile_times(noisy).decode_context_s == pytest.approx(2e-7, rel=0.05)


def test_too_few_points() -> None:
    """A profile with one batch size would give a flat line instead of an error."""
    full = _synthetic(0.0, 0.0)
    with pytest.raises(SpecError) as caught:
        profile_times(full.select(full.batch_requests == 1))
    assert_refused(caught.value, "batch sizes in requests")
    with pytest.raises(SpecError) as caught:
        profile_times(full.select(np.array([0])))
    assert_refused(caught.value, "batch sizes in prompt tokens")


@pytest.mark.parametrize("pair", PUBLISHED_MEDIANS)
def test_the_paper_s_medians_are_met(pair: tuple[str, str]) -> None:
    """The default would not follow the measurements that the paper rests on, beyond what isotonic pooling changes."""
    shipped = measurements(*pair)
    assert shipped is not None
    times = profile_times(shipped)
    prefill_ms, decode_ms = PUBLISHED_MEDIANS[pair]
    assert times.prefill_time_s(PROMPT_SIZES) * 1e3 == pytest.approx(prefill_ms, rel=0.08)
    assert times.prefill_time_s(PROMPT_SIZES[3:]) * 1e3 == pytest.approx(prefill_ms[3:], rel=0.02)
    context = np.array(BATCH_SIZES) * (512 + 64)
    assert times.decode_time_s(BATCH_SIZES, context) * 1e3 == pytest.approx(decode_ms, rel=0.03)
    assert times.measured_requests == 64
    assert times.measured_prompt_tokens == 32_768
    assert times.mean_error < 0.03


def test_all_measured_pairs_are_checked() -> None:
    """A pair could be shipped that no test above holds against its source."""
    assert set(measured_pairs()) == set(PUBLISHED_MEDIANS)


@pytest.mark.shared
@pytest.mark.skipif(not PERF_MODEL.exists(), reason="needs ../shared/data")
@pytest.mark.parametrize("degree", [2, 4, 8])
@pytest.mark.parametrize("pair", PUBLISHED_MEDIANS)
def test_shipped_medians_are_those_of_the_data(pair: tuple[str, str], degree: int) -> None:
    """The shipped table would have drifted from the published data."""
    shipped = measurements(*pair, degree)
    if pair[0] == "bloom-176b" and degree < 8:
        assert shipped is None  # too large for so few accelerators
        return
    assert shipped is not None
    hardware = {"dgx-a100": "a100-80gb", "dgx-h100": "h100-80gb"}[pair[1]]
    runs = defaultdict(list)
    with PERF_MODEL.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["hardware"], row["tensor_parallel"]) == (pair[0], hardware, str(degree)):
                key = tuple(float(row[column]) for column in ("prompt_size", "batch_size", "token_size"))
                runs[key].append((float(row["prompt_time"]), float(row["token_time"])))
    if degree == 2:
        del runs[(512.0, 64.0, 128.0)]  # 15 times as long from end to end as its phases: not one batch
    assert len(runs) == shipped.runs.size
    for index in range(shipped.runs.size):
        key = (shipped.prompt_tokens[index], shipped.batch_requests[index], shipped.output_tokens[index])
        prefill_ms, decode_ms = np.median(np.array(runs[key]), axis=0)
        assert shipped.runs[index] == len(runs[key])
        assert shipped.prefill_s[index] == pytest.approx(prefill_ms / 1e3, rel=1e-12)
        assert shipped.decode_s[index] == pytest.approx(decode_ms / 1e3, rel=1e-12)


@pytest.mark.shared
@pytest.mark.skipif(not PERF_MODEL.exists(), reason="needs ../shared/data")
def test_held_out_runs_are_predicted() -> None:
    """The fit would not predict runs it did not see (80:20) with the mean error below 3 % that the paper claims.

    It holds for each phase over the four pairs. The prefill phase of Llama2-70B alone is at 4 to 5 %: its runs scatter
    by 10-20 % at small prompts, and on A100 batches of 4,096 tokens and more were slower than single prompts.
    """
    errors: dict[tuple[str, str], tuple[float, float]] = {}
    for pair in measured_pairs():
        runs = read_profile(PERF_MODEL, load_model(pair[0]), load_machine(pair[1]))
        seeds: list[tuple[float, float]] = []
        for seed in range(10):
            order = np.random.default_rng(seed).permutation(runs.runs.size)
            cut = int(0.8 * order.size)
            held_out = runs.select(order[cut:])
            prompt, token = relative_errors(profile_times(runs.select(order[:cut])), held_out)
            seeds.append((float(np.abs(prompt).mean()), float(np.abs(token).mean())))
        errors[pair] = tuple(np.mean(seeds, axis=0))
    assert np.max(list(errors.values()), axis=0) == pytest.approx([0.045, 0.020], abs=0.005), errors
    prefill_error, decode_error = np.mean(list(errors.values()), axis=0)
    assert prefill_error < 0.03, errors
    assert decode_error < 0.015, errors
