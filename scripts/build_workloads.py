"""Rebuild the shipped workloads from the Azure traces of 2023 in ../shared/data/azure, and print how well they fit.

Run it with `make workloads`. The same traces give the same bytes.
"""

import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.arrivals import ArrivalModel, Gamma, Hyperexponential
from phasesplit.domain.request import Trace
from phasesplit.domain.workload import LengthTable
from phasesplit.io.traces import read_trace

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "data" / "azure"
OUT = ROOT / "src" / "phasesplit" / "profiles" / "workloads"

SOURCE = (
    "Azure LLM inference trace 2023 ({file}), github.com/Azure/AzurePublicDataset, commit "
    "b469a113cedca53ddc3bdea71a143dc4b7d8700c; Patel et al., Splitwise: Efficient Generative LLM Inference Using "
    "Phase Splitting, ISCA 2024"
)
LICENCE = "CC BY 4.0, (c) Microsoft Corporation; changed: lengths counted as pairs, arrivals replaced by a fitted model"

COMPONENTS = 5
CHECK_RUNS = 40


def main() -> None:
    """Write one file for each workload, and a table of the fit to standard output."""
    if not TRACES.is_dir():
        sys.exit(f"{TRACES}: not found; put the Azure traces of 2023 there")
    for name, kind in (("azure-coding", "code"), ("azure-conversation", "conv")):
        file = f"AzureLLMInferenceTrace_{kind}.csv"
        trace, _ = read_trace(TRACES / file)
        gaps = np.diff(trace.arrival_s)
        cv = float(gaps.std() / gaps.mean())
        arrivals: dict[str, object]
        model: ArrivalModel
        if name == "azure-coding":
            fitted = fit_hyperexponential(gaps, cv)
            model = fitted
            arrivals = {"model": "hyperexponential", "weights": fitted.weights, "means": fitted.means}
        else:
            model = Gamma(round(cv, 4))
            arrivals = {"model": "gamma", "cv": model.cv}
        about = {
            "name": name,
            "source": SOURCE.format(file=file),
            "licence": LICENCE,
            "rate_per_s": round(trace.rate_per_s, 6),
            "duration_s": round(trace.duration_s, 3),
            "arrivals": arrivals,
        }
        write(name, trace, about)
        report(name, trace, model)


def fit_hyperexponential(gaps: NDArray[np.float64], cv: float) -> Hyperexponential:
    """Return the maximum-likelihood mixture of exponentials, its longest mean then set so that the cv is met.

    Likelihood hardly feels the few longest gaps that make the coefficient of variation, hence the second step.
    Source: expectation maximisation for mixtures (Dempster, Laird and Rubin, JRSS B 39, 1977).
    """
    means = np.geomspace(np.percentile(gaps, 10), np.percentile(gaps, 99.9), COMPONENTS)
    weights = np.full(COMPONENTS, 1 / COMPONENTS)
    for _ in range(3_000):
        share = weights / means * np.exp(-gaps[:, None] / means)
        share /= share.sum(axis=1, keepdims=True)
        weights = share.mean(axis=0)
        means = share.T @ gaps / share.sum(axis=0)
    low, high = 1.0, 10.0
    for _ in range(60):
        factor = (low + high) / 2
        longer = Hyperexponential(tuple(weights), (*means[:-1], means[-1] * factor))
        low, high = (factor, high) if longer.cv < cv else (low, factor)
    return Hyperexponential(
        tuple(round(float(w), 6) for w in longer.weights), tuple(float(f"{m:.6g}") for m in longer.means)
    )


def write(name: str, trace: Trace, about: dict[str, object]) -> None:
    """Write one workload: the counted length pairs and what they are."""
    lengths = LengthTable.counted(trace.prompt_tokens, trace.output_tokens)
    path = OUT / f"{name}.npz"
    np.savez_compressed(
        path,
        prompt_tokens=lengths.prompt_tokens.astype(np.uint16),
        output_tokens=lengths.output_tokens.astype(np.uint16),
        requests=lengths.requests.astype(np.uint16),
        about=np.array(json.dumps(about, indent=1)),
    )
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes, {lengths.requests.size:,} pairs")


def report(name: str, trace: Trace, model: ArrivalModel) -> None:
    """Print figures of the published arrivals next to the median of the model's, over runs of the same length."""
    seen = figures(trace.arrival_s, trace.duration_s)
    runs = [
        figures(model.arrivals(trace.rate_per_s, trace.duration_s, np.random.default_rng(seed)), trace.duration_s)
        for seed in range(CHECK_RUNS)
    ]
    print(f"{name}: {model}")
    for figure, value in seen.items():
        values = [run[figure] for run in runs]
        print(f"  {figure:28} published {value:8.3f}  model {np.median(values):8.3f} (sd {np.std(values):.3f})")


def figures(arrival_s: NDArray[np.float64], duration_s: float) -> dict[str, float]:
    """Return the figures of burstiness that the fit is judged by."""
    gaps = np.diff(arrival_s)
    per_second = np.bincount(arrival_s.astype(np.int64), minlength=int(duration_s))
    found = {
        "requests": float(arrival_s.size),
        "inter-arrival cv": float(gaps.std() / gaps.mean()),
        "share of empty seconds": float((per_second == 0).mean()),
        "most in one second": float(per_second.max()),
    }
    for window_s in (1, 10, 60):
        counts = np.bincount((arrival_s / window_s).astype(np.int64), minlength=int(duration_s / window_s))
        found[f"variance / mean per {window_s} s"] = float(counts.var() / counts.mean())
    return found


if __name__ == "__main__":
    main()
