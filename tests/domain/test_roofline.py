"""Roofline phase times: the bounds they follow, and how far they are from what was measured."""

from dataclasses import replace

import numpy as np
import pytest

from phasesplit.domain.roofline import (
    CALIBRATED_DECODE_ERROR,
    CALIBRATED_PREFILL_ERROR,
    COMPUTE_EFFICIENCY,
    MEMORY_EFFICIENCY,
    roofline_times,
)
from phasesplit.io.catalog import calibration_errors
from phasesplit.io.specs import load_machine, load_model


def test_error_is_what_the_source_says() -> None:
    """The error printed beside roofline results would not be the one measured on the four pairs."""
    errors = calibration_errors().values()
    assert len(errors) == 4
    prefill = float(np.mean([error.prefill_mean for error in errors]))
    decode = float(np.mean([error.decode_mean for error in errors]))
    assert prefill == pytest.approx(CALIBRATED_PREFILL_ERROR, abs=0.005)
    assert decode == pytest.approx(CALIBRATED_DECODE_ERROR, abs=0.005)
    assert max(error.prefill_worst for error in errors) < 0.55
    assert max(error.decode_worst for error in errors) < 0.50
    source = roofline_times(load_model("qwen3-32b"), load_machine("h200")).source
    assert f"{CALIBRATED_PREFILL_ERROR:.0%} prefill, {CALIBRATED_DECODE_ERROR:.0%} decode" in source


def test_large_prompts_are_bound_by_operations() -> None:
    """A large prompt would take another time than its operations at the stated share of the peak."""
    model, machine = load_model("llama-3.1-70b"), load_machine("h200")
    times = roofline_times(model, machine, overhead_per_layer_s=0.0)
    operations = 2 * model.active_parameters * 8192 + 4 * 80 * 64 * 128 * 8192**2 / 2
    assert float(times.prefill_time_s(8192)) == pytest.approx(operations / machine.flops_per_s / COMPUTE_EFFICIENCY)


def test_small_batches_are_bound_by_bandwidth() -> None:
    """A decode iteration would take another time than reading weights and KV cache at the stated share of the peak."""
    model, machine = load_model("llama-3.1-70b"), load_machine("h200")
    times = roofline_times(model, machine, overhead_per_layer_s=0.0)
    read = model.weights_bytes + 5000 * model.kv_bytes_per_token
    assert float(times.decode_time_s(8, 5000)) == pytest.approx(read / machine.hbm_bytes_per_s / MEMORY_EFFICIENCY)


def test_the_corner_between_the_bounds_is_sharp() -> None:
    """Between two knots the time would lie above both bounds: the corner was cut off."""
    model, machine = load_model("qwen3-32b"), load_machine("dgx-h100")
    times = roofline_times(model, machine, overhead_per_layer_s=0.0)
    requests = np.arange(1.0, 1500.0)
    operations_s = 2 * model.active_parameters * requests / machine.flops_per_s / COMPUTE_EFFICIENCY
    bytes_s = model.weights_bytes / machine.hbm_bytes_per_s / MEMORY_EFFICIENCY
    assert times.decode_time_s(requests, 0) == pytest.approx(np.maximum(operations_s, bytes_s))


def test_overhead_is_paid_once_per_layer() -> None:
    """The one setting that tells a modern engine from the measured one would have another effect than it says."""
    model, machine = load_model("llama2-70b"), load_machine("h200")
    slow, fast = (roofline_times(model, machine, overhead_per_layer_s=each) for each in (300e-6, 0.0))
    assert slow.decode_time_s([1, 700], 0) - fast.decode_time_s([1, 700], 0) == pytest.approx(80 * 300e-6)
    assert slow.prefill_time_s([1, 7000]) - fast.prefill_time_s([1, 7000]) == pytest.approx(80 * 300e-6)


def test_mixture_of_experts_reads_more_as_the_batch_grows() -> None:
    """A mixture of experts would stream all experts for one request, or compute with all of them."""
    model, machine = load_model("mixtral-8x7b"), load_machine("dgx-h100")
    times = roofline_times(model, machine, overhead_per_layer_s=0.0)
    one, many = times.decode_time_s([1, 64], 0)
    assert one / many == pytest.approx(model.active_parameters / model.parameters, rel=0.01)
    dense = replace(model, active_parameters=model.parameters, experts=1, experts_per_token=1)
    assert float(times.prefill_time_s(8192)) < 0.4 * float(
        roofline_times(dense, machine, overhead_per_layer_s=0.0).prefill_time_s(8192)
    )
