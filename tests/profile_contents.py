"""A profile file's content, to be changed field by field."""

import json
from typing import Any

SIZES = {
    "layers": 30, "hidden": 576, "query_heads": 9, "kv_heads": 3, "head_dim": 64, "parameters": 134_500_000,
    "active_parameters": 134_500_000, "weights_bytes": 91_000_000, "value_bytes": 4, "max_context_tokens": 8_192,
}  # fmt: skip
CONTENT: dict[str, Any] = {
    "format": "phasesplit profile",
    "version": 1,
    "target": "engine",
    "taken": "2026-01-02T03:04:05+00:00",
    "versions": {"phasesplit": "0.1"},
    "machine": {
        "name": "some-core", "processor": "Some Core", "cores": 2, "threads": 1, "features": ["avx2"],
        "memory_bytes": 8e9, "system": "Linux",
    },
    "model": {"name": "smol", "digest": "ab", "sizes": SIZES},
    "settings": {"kv_bytes": 512_000_000},
    "ending": "reached",
    "elapsed_s": 60.0,
    "times": {
        "prefill_knots_tokens": [1, 64, 512], "prefill_knots_s": [0.008, 0.14, 1.1],
        "decode_knots_requests": [1, 6, 7, 32], "decode_knots_s": [0.0075, 0.02, 0.031, 0.09],
        "prefill_pair_s": 9e-7, "decode_context_s": 2e-6, "measured_prompt_tokens": 512, "measured_requests": 32,
    },
    "errors": {"all": {"count": 24, "mean": 0.021, "worst": 0.06, "worst_at": "somewhere"}},
    "iterations": [
        {
            "requests": 1, "context_tokens": 64, "median_s": 0.008, "spread_s": 0.0001, "runs": 3, "rejected": 0,
            "runs_s": [0.008, 0.008, 0.0081],
        },
    ],
    "kv": {"blocks": 347, "block_tokens": 32, "bytes_per_token": 46_080, "source": "--kv-memory"},
    "link": {
        "bytes_per_s": 8e9, "latency_s": 2e-4, "per_layer_s": 1e-5, "streaming_slowdown": 0.5, "source": "measured",
    },
}  # fmt: skip


def content(**changes: object) -> dict[str, Any]:
    """Return the content with fields changed; `a__b` is field b of a."""
    changed: dict[str, Any] = json.loads(json.dumps(CONTENT))
    for name, value in changes.items():
        place, _, inner = name.partition("__")
        if inner:
            changed[place][inner] = value
        else:
            changed[place] = value
    return changed
