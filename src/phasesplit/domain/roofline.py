"""Phase times of a model on a machine that nobody measured, from operations, bytes and a fixed overhead."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import Measurements, PhaseTimes, relative_errors

COMPUTE_EFFICIENCY = 0.40
"""Share of the peak 16-bit operations that matrix products reach.

Source: measured: python scripts/build_profiles.py (least mean error over the four measured pairs, one value for all).
"""

MEMORY_EFFICIENCY = 0.75
"""Share of the peak memory bandwidth that streaming weights and KV cache reaches. Source: as COMPUTE_EFFICIENCY."""

ENGINE_2023_OVERHEAD_PER_LAYER_S = 320e-6
"""What launching kernels and two all-reduces take per layer and iteration in the engine of the measured profiles.

Source: as COMPUTE_EFFICIENCY. It is most of a small decode iteration (BLOOM-176B on H100: 22 of 36 ms).
"""

MODERN_OVERHEAD_PER_LAYER_S = 40e-6
"""The same in an engine that replays CUDA graphs.

Source: assumed, not measured: two all-reduces of small messages over NVLink at about 12 us and about ten kernels at
1-2 us between starts. It gives 10 ms a token for Llama-3.1-70B on a DGX H100 at batch 1.
"""

CALIBRATED_PREFILL_ERROR = 0.22
"""Mean relative error of prefill times over the measured points of the four pairs. Source: as COMPUTE_EFFICIENCY."""

CALIBRATED_DECODE_ERROR = 0.10
"""Mean relative error of decode times over the measured points of the four pairs. Source: as COMPUTE_EFFICIENCY."""

_LARGEST_PROMPT_TOKENS = 65_536
_LARGEST_REQUESTS = 4_096


def roofline_times(
    model: Model, machine: Machine, *, overhead_per_layer_s: float = MODERN_OVERHEAD_PER_LAYER_S
) -> PhaseTimes:
    """Return phase times from the roofline, before the machine's time factors.

    - matrix products over B tokens: the longer of 2 x active parameters x B operations and of reading the weights
      (of a mixture of experts: those that B tokens reach), plus the overhead of every layer;
    - a pair of prompt tokens: 4 x layers x query heads x head width operations (scores and weighted sum);
    - a token of context: its KV bytes read once.

    Over machines without a fast link between accelerators the overhead is larger than the default.

    Args:
        model: The model.
        machine: The machine; the model runs tensor-parallel over all its accelerators.
        overhead_per_layer_s: Time per layer and iteration that no work hides, >= 0: the one setting that tells a
            modern engine (default) from the one of the measured profiles.

    Source: roofline model (Williams et al. 2009); operation counts as in Splitwise section II and Kaplan et al. 2020.
    """
    flops_per_s = machine.flops_per_s * COMPUTE_EFFICIENCY
    bytes_per_s = machine.hbm_bytes_per_s * MEMORY_EFFICIENCY
    flops_per_token = 2 * model.active_parameters
    # Where products turn from bound by bandwidth to bound by operations the curve has a corner: it needs a knot.
    corner = model.weights_bytes / bytes_per_s * flops_per_s / flops_per_token
    overhead_s = model.layers * overhead_per_layer_s

    def knots(largest: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        powers = 2.0 ** np.arange(int(np.log2(largest)) + 1)
        tokens = np.union1d(powers, [corner] if 1 < corner < largest else [])
        products_s = tokens * flops_per_token / flops_per_s
        streaming_s = model.expected_weights_bytes(tokens) / bytes_per_s
        return tokens, np.maximum(products_s, streaming_s) + overhead_s

    prompt_tokens, prefill_s = knots(_LARGEST_PROMPT_TOKENS)
    requests, decode_s = knots(_LARGEST_REQUESTS)
    return PhaseTimes(
        source=(
            f"roofline: efficiencies fitted on 4 measured pairs with a 2023 engine, mean error there"
            f" {CALIBRATED_PREFILL_ERROR:.0%} prefill, {CALIBRATED_DECODE_ERROR:.0%} decode;"
            f" overhead {overhead_per_layer_s * 1e6:g} us per layer, {_overhead_origin(overhead_per_layer_s)}"
        ),
        prefill_knots_tokens=prompt_tokens,
        prefill_knots_s=prefill_s,
        decode_knots_requests=requests,
        decode_knots_s=decode_s,
        prefill_pair_s=4 * model.layers * model.query_heads * model.head_dim / flops_per_s,
        decode_context_s=model.kv_bytes_per_token / bytes_per_s,
        measured_prompt_tokens=0.0,
        measured_requests=0.0,
        mean_error=(CALIBRATED_PREFILL_ERROR + CALIBRATED_DECODE_ERROR) / 2,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairError:
    """Relative error of the roofline on one measured pair of model and machine, over its measured points.

    Attributes:
        prefill_mean: Mean over the prefill times.
        prefill_worst: Largest of them.
        decode_mean: Mean over the decode times.
        decode_worst: Largest of them.
    """

    prefill_mean: float
    prefill_worst: float
    decode_mean: float
    decode_worst: float


def calibration_error(model: Model, machine: Machine, measurements: Measurements) -> PairError:
    """Return how far the roofline, with the overhead of the engine that was measured, is from measurements.

    Prompt batches that were measured with several output sizes count once.
    """
    times = roofline_times(model, machine, overhead_per_layer_s=ENGINE_2023_OVERHEAD_PER_LAYER_S)
    prompt, token = (np.abs(errors) for errors in relative_errors(times, measurements))
    batches = np.stack([measurements.prompt_tokens, measurements.batch_requests])
    _, once = np.unique(batches, axis=1, return_index=True)
    prompt = prompt[once]
    return PairError(
        prefill_mean=float(prompt.mean()),
        prefill_worst=float(prompt.max()),
        decode_mean=float(token.mean()),
        decode_worst=float(token.max()),
    )


def _overhead_origin(overhead_per_layer_s: float) -> str:
    origins = {
        ENGINE_2023_OVERHEAD_PER_LAYER_S: "as that engine's",
        MODERN_OVERHEAD_PER_LAYER_S: "assumed for an engine with CUDA graphs",
    }
    return origins.get(overhead_per_layer_s, "given")
