"""A verification as JSON has it."""

import math
from typing import Any

from phasesplit.domain.latency import Distribution
from phasesplit.measuring.comparison import Figure
from phasesplit.measuring.cores import cores_text
from phasesplit.measuring.verify import Verification

_SHARES = [share / 100 for share in range(100)] + [0.995, 0.999, 1.0]
"""Of the distributions that are kept."""


def verification_record(found: Verification) -> dict[str, Any]:
    """Return a verification as JSON has it: values in base units, errors as shares, None where there is no value."""
    comparison, trace = found.comparison, found.trace
    return {
        "cluster": {"name": found.cluster.name, "pools": dict(found.cluster.pools), "model": found.cluster.model},
        "trace": {
            "name": trace.name,
            "requests": len(trace),
            "duration_s": trace.duration_s,
            "rate_per_s": trace.rate_per_s,
        },
        "profile": found.profile,
        "kv_blocks": dict(found.kv_blocks),
        "block_tokens": found.block_tokens,
        "cores": {name: cores_text(cores) for name, cores in found.plan.workers.items()},
        "front_cores": cores_text(found.plan.front),
        "core_share": found.plan.core_share,
        "front_end": {
            "added": found.adds_overheads,
            "iteration_s": found.overheads.iteration_s,
            "token_s": found.overheads.token_s,
            **{f"{stage.replace(' ', '_')}_s": value for stage, value in found.overheads.stages_s.items()},
        },
        "compared": comparison.compared,
        "distributions": {
            "shares": _SHARES,
            **{metric: _quantiles(*pair) for metric, pair in comparison.distributions.items()},
        },
        "latencies": [_figure(figure) for figure in comparison.latencies],
        "stages": [_figure(figure) for figure in comparison.stages],
        "totals": [_figure(figure) for figure in comparison.totals],
        "explanations": [
            {
                "metric": one.metric,
                "text": str(one),
                "difference_s": _number(one.difference_s),
                "stage": one.stage,
                "stage_difference_s": _number(one.stage_s),
            }
            for one in comparison.explanations
        ],
        "placements": {
            "differ": len(comparison.misplaced),
            "first": [
                {"request": one.row, "predicted": one.predicted, "measured": one.measured}
                for one in comparison.misplaced[:10]
            ],
        },
        "errors": dict(found.errors),
        "gateway_share": found.gateway_share,
        "client_share": found.client_share,
        "others_share": found.others_share,
        "core_wait_share": dict(found.waited),
        "warnings": list(found.warnings),
    }


def _quantiles(predicted: Distribution, measured: Distribution) -> dict[str, list[float | None]]:
    return {
        side: [_number(one.quantile(share)) for share in _SHARES]
        for side, one in (("predicted", predicted), ("measured", measured))
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "unit": figure.unit,
        "predicted": _number(figure.predicted),
        "measured": _number(figure.measured),
        "error": _number(figure.error),
        "goal": figure.goal,
        "met": figure.is_met,
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
