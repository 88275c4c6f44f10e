"""Rebuild the shipped phase-time tables from ../shared/data, and fit the roofline's constants to them.

The rows of h100-80gb-pcap are no measurements but copies of h100-80gb, prompt times x 1.3, and are left out.
"""

import csv
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import mean, median

import numpy as np

from phasesplit.domain import roofline
from phasesplit.io.catalog import WHOLE, calibration_errors, slice_errors

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT.parent / "shared" / "data" / "splitwise-sim" / "perf_model.csv"
SHIPPED = ROOT / "src" / "phasesplit" / "profiles" / "phase_times"
MACHINES = {"a100-80gb": "dgx-a100", "h100-80gb": "dgx-h100"}
NOTICE = (
    "# From perf_model.csv of github.com/Mutinifni/splitwise-sim, commit 8f99e7dc.\n"
    "# Copyright (c) 2024 Pratyush Patel, MIT licence (see NOTICE). Rebuild: python scripts/build_profiles.py\n"
)

LARGEST_OVER_PARTS = 2.0
"""A run whose end-to-end time is a larger multiple of its phases' times was not one batch, and is left out."""

Key = tuple[str | int, ...]
Times = list[tuple[float, float]]


def medians(key_columns: tuple[str, ...], *, whole: bool) -> dict[Key, tuple[int, float, float]]:
    """Return runs, median prompt seconds and median token seconds for each model, machine and key.

    Args:
        key_columns: What makes a measured point.
        whole: Only runs on all accelerators of a machine.
    """
    runs: dict[Key, Times] = defaultdict(list)
    with PUBLISHED.open(newline="") as file:
        for row in csv.DictReader(file):
            if (whole and row["tensor_parallel"] != str(WHOLE)) or row["hardware"] not in MACHINES:
                continue
            parts_ms = float(row["prompt_time"]) + (int(row["token_size"]) - 1) * float(row["token_time"])
            if float(row["e2e_time"]) > LARGEST_OVER_PARTS * parts_ms:
                continue
            row["batch_tokens"] = str(int(row["prompt_size"]) * int(row["batch_size"]))
            key = (row["model"], MACHINES[row["hardware"]], *(int(row[column]) for column in key_columns))
            runs[key].append((float(row["prompt_time"]), float(row["token_time"])))
    return {
        key: (len(times), median(prompt for prompt, _ in times) / 1e3, median(token for _, token in times) / 1e3)
        for key, times in sorted(runs.items())
    }


def write(name: str, what: str, key_columns: tuple[str, ...], header: str, *, whole: bool) -> None:
    """Write one table of medians."""
    rows = medians(key_columns, whole=whole)
    with (SHIPPED / name).open("w", newline="") as file:
        file.write(f"# {what}\n{NOTICE}{header}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([*key, *values] for key, values in rows.items())
    print(f"{name}: {len(rows)} rows")


def print_slices() -> None:
    """Print how far the roofline is from the runs on a part of a machine's accelerators."""
    for (model, machine, tensor_parallel), error in slice_errors().items():
        print(
            f"roofline: {model} on {machine}/tp{tensor_parallel}: mean error {error.prompt_mean:.0%} prompt"
            f" (worst {error.prefill_worst:.0%}), {error.decode_mean:.0%} token (worst {error.decode_worst:.0%})"
        )


def fit_roofline() -> None:
    """Print the constants of the roofline with the least mean error over the four pairs, on a grid."""
    errors = {}
    grid = product(np.arange(0.20, 0.61, 0.02), np.arange(0.50, 1.01, 0.05), np.arange(200e-6, 401e-6, 20e-6))
    for compute, memory, overhead_s in grid:
        roofline.COMPUTE_EFFICIENCY = float(compute)
        roofline.MEMORY_EFFICIENCY = float(memory)
        roofline.ENGINE_2023_OVERHEAD_PER_LAYER_S = float(overhead_s)
        pairs = calibration_errors().values()
        prompt, token = mean(pair.prompt_mean for pair in pairs), mean(pair.decode_mean for pair in pairs)
        errors[(compute, memory, overhead_s)] = ((prompt + token) / 2, prompt, token)
    compute, memory, overhead_s = min(errors, key=lambda constants: errors[constants])
    _, prompt, token = errors[(compute, memory, overhead_s)]
    print(
        f"roofline: compute efficiency {compute:.2f}, memory efficiency {memory:.2f}, {overhead_s * 1e6:.0f} us a layer"
    )
    print(f"roofline: mean error {prompt:.1%} prompt, {token:.1%} token")


if __name__ == "__main__":
    if not PUBLISHED.exists():
        sys.exit(f"{PUBLISHED} is not there: the tables can only be rebuilt next to the published data")
    write(
        "measured.csv",
        "Median over the runs of each measured point.",
        ("tensor_parallel", "prompt_size", "batch_size", "token_size"),
        "model,machine,tensor_parallel,prompt_tokens,batch_requests,output_tokens,runs,prefill_s,decode_s",
        whole=False,
    )
    write(
        "published.csv",
        f"Median over all runs of equal prompt size x batch size on {WHOLE} GPUs, as the published simulator takes it.",
        ("batch_tokens",),
        "model,machine,batch_tokens,runs,prefill_s,decode_s",
        whole=True,
    )
    print_slices()
    fit_roofline()
