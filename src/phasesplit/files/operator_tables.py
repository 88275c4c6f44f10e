"""Phase times of current engines on current accelerators from aiconfigurator's measured operator tables."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.errors import SpecError
from phasesplit.files.operator_engine import OperatorEngine, operator_engine

Floats = NDArray[np.float64]

PROMPT_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""Tokens of the prefill iterations that are asked for; matrix products were measured with up to so many rows.

Source: rows m of gemm_perf.parquet, h100_sxm, vllm 0.24.0, aiconfigurator-core 0.12.0.
"""

LONGEST_PROMPT_TOKENS = 16_384
"""Longest single prompt that is asked for: attention was measured up to it.

Source: column isl of context_attention_perf.parquet, the same tables.
"""

PROMPTS = (1, 4, 16)
"""Prompts that share them: with several, fewer pairs of tokens attend to one another."""

REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Requests of the decode iterations that are asked for."""

CONTEXT_TOKENS = (128, 512, 2048, 8192)
"""Context of each of them; only what fits into the machine's memory is asked for."""


def operator_times(
    model: Model, machine: Machine, *, backend: str = "vllm", version: str | None = None, config: Path | None = None
) -> PhaseTimes:
    """Return phase times fitted to a grid of iterations, before the machine's time factors.

    The package adds up the times of the operators of one iteration: matrix products, attention and all-reduces
    measured one by one on the accelerator, and formulae for what is small. Scheduler, sampling and the gaps between
    kernels are not in it, so a real engine takes longer. `mean_error` is how far the fit is from the package's own
    figures; how far those are from an engine, this package cannot know (docs/phase-times.md has published cases).

    Prompts: f(B) for each B of `PROMPT_TOKENS`, and one pair term for all of them. Tokens: g(n) for each n of
    `REQUESTS`, and one context term. Both by least squares of relative errors.

    Args:
        model: The model; its layers and weights must be those of a packaged one, or of `config`.
        machine: The machine or a slice of one; the model runs tensor-parallel over its accelerators.
        backend: The engine: vllm, sglang or trtllm.
        version: Version of the engine, or `current`, `previous` or `next`; by default `current`, the newest complete
            one. The package has tables for at most three.
        config: The model's Hugging Face config.json, or its folder, for a model that is not packaged.

    Raises:
        SpecError: The package is not installed, has no tables for the machine, engine, version or model, or the model
            does not fit into the machine's memory.

    Source: aiconfigurator, Apache-2.0 (NVIDIA; arXiv 2601.06288); the split into batch, pair and context terms: ours.
    """
    free_tokens = (machine.hbm_bytes - model.weights_bytes) / model.kv_bytes_per_token
    if free_tokens < REQUESTS[1] * CONTEXT_TOKENS[0]:
        raise SpecError.bad(
            f"model {model.name} on machine {machine.name}, weights",
            f"{model.weights_bytes / 1e9:,.1f} GB",
            f"less than the machine's memory of {machine.hbm_bytes / 1e9:,.1f} GB",
        )
    engine = operator_engine(model, machine, backend=backend, version=version, config=config)
    prompt = _prompt_fit(engine, min(LONGEST_PROMPT_TOKENS, model.max_context_tokens), free_tokens)
    token = _token_fit(engine, model.max_context_tokens, free_tokens)
    mean_error = float(np.concatenate([prompt.errors, token.errors]).mean())
    return PhaseTimes(
        source=(
            f"{engine.described}; {engine.measured_share():.0%} of the time from measured operators, nothing for the"
            f" engine around them, fitted within {mean_error:.1%}"
        ),
        prompt_knots_tokens=prompt.knots,
        prompt_knots_s=prompt.levels_s,
        token_knots_requests=token.knots,
        token_knots_s=token.levels_s,
        prompt_pair_s=prompt.slope_s,
        token_context_s=token.slope_s,
        measured_prompt_tokens=float(prompt.knots[-1]),
        measured_requests=float(token.knots[-1]),
        mean_error=mean_error,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """Times as a level for each knot and one slope: the slope's argument is pairs, or tokens of context.

    Attributes:
        knots: float64 (k,), increasing.
        levels_s: float64 (k,), non-decreasing.
        slope_s: Seconds for each unit of the argument, >= 0.
        errors: float64 (n,), relative error of each time that was fitted, >= 0.
    """

    knots: Floats
    levels_s: Floats
    slope_s: float
    errors: Floats


def _prompt_fit(engine: OperatorEngine, longest_tokens: float, most_tokens: float) -> _Fit:
    grid = [
        (tokens, prompts)
        for tokens in PROMPT_TOKENS
        for prompts in PROMPTS
        if tokens <= most_tokens and prompts <= tokens / prompts <= longest_tokens
    ]
    return _fit(
        np.array([tokens for tokens, _ in grid], dtype=np.float64),
        np.array([tokens**2 / prompts / 2 for tokens, prompts in grid]),
        np.array([engine.prompt_s(prompts, tokens // prompts) for tokens, prompts in grid]),
    )


def _token_fit(engine: OperatorEngine, longest_tokens: float, most_tokens: float) -> _Fit:
    grid = [
        (requests, context)
        for requests in REQUESTS
        for context in CONTEXT_TOKENS
        if requests * context <= most_tokens and context <= longest_tokens
    ]
    return _fit(
        np.array([requests for requests, _ in grid], dtype=np.float64),
        np.array([requests * context for requests, context in grid], dtype=np.float64),
        np.array([engine.token_s(requests, context) for requests, context in grid]),
    )


def _fit(group: Floats, argument: Floats, seconds: Floats) -> _Fit:
    """Return levels by group and their common slope, with the least sum of squared relative errors.

    Levels that fall with more work are noise of the tables (one request: 10.1 ms, two: 9.5 ms); they become the middle
    between the highest so far and the lowest still to come.
    """
    weight = 1 / seconds**2
    knots, index = np.unique(group, return_inverse=True)
    total = np.bincount(index, weight)
    mean_argument = np.bincount(index, weight * argument) / total
    mean_s = np.bincount(index, weight * seconds) / total
    off = argument - mean_argument[index]
    slope_s = max(float(np.sum(weight * off * seconds) / np.sum(weight * off**2)), 0.0)
    levels_s = mean_s - slope_s * mean_argument
    levels_s = (np.maximum.accumulate(levels_s) + np.minimum.accumulate(levels_s[::-1])[::-1]) / 2
    errors = np.abs((levels_s[index] + slope_s * argument) / seconds - 1)
    return _Fit(knots=knots, levels_s=levels_s, slope_s=slope_s, errors=errors)
