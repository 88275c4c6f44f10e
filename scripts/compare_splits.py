"""What a split does for real traces, at their own timestamps: the table of docs/real-traces.md.

Usage: python scripts/compare_splits.py [TRACE ...]; without arguments, the published traces in ../shared/data. For each
trace the smallest unsplit cluster (chunked prompts) and every split of the same number of machines are simulated; the
pages of the unsplit one and of the split with the shortest p99 E2E are left in out/.
"""

import sys
from pathlib import Path

from phasesplit.domain.request import Trace, describe_trace
from phasesplit.io.catalog import build_cluster
from phasesplit.io.traces import read_trace
from phasesplit.report import write_html
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

ROOT = Path(__file__).parent.parent
DATA = ROOT / "../shared/data"
OUT = ROOT / "out"
PUBLISHED = (
    ("azure/AzureLLMInferenceTrace_code.csv", "llama2-70b"),
    ("azure/AzureLLMInferenceTrace_conv.csv", "llama2-70b"),
    ("azure/AzureLLMInferenceTrace_code.csv", "llama-3.1-70b"),
    ("azure/AzureLLMInferenceTrace_conv.csv", "llama-3.1-70b"),
    ("mooncake/conversation_trace.jsonl.gz", "llama-3.1-70b"),
)
MACHINE = "dgx-h100"
MOST_MACHINES = 32
TTFT_P99_S = 10.0
"""A cluster whose p99 TTFT is above this, or that is overloaded, is too small."""


def main() -> None:
    """Print a table for each trace."""
    cases = [(Path(name), "llama-3.1-70b") for name in sys.argv[1:]] or [
        (DATA / name, model) for name, model in PUBLISHED
    ]
    for path, model in cases:
        trace, _ = read_trace(path)
        shape = describe_trace(trace)
        print(
            f"\n{path.name}, {model} on {MACHINE}: {len(trace):,} requests, {trace.rate_per_s:.2f}/s,"
            f" inter-arrival CV {shape.inter_arrival_cv:.1f},"
            f" {trace.prompt_tokens.mean():,.0f} prompt and {trace.output_tokens.mean():,.0f} output tokens on the mean"
        )
        machines = smallest(trace, model)
        print("  cluster               TTFT p50    p99   ITL p50    p99  p99.9   E2E p50     p99  moves  USD/Mtoken")
        whole = unsplit(trace, model, machines)
        show(f"unsplit {machines}", whole)
        splits = []
        for prefill in range(1, machines):
            pools = [("prefill", prefill, MACHINE), ("decode", machines - prefill, MACHINE)]
            splits.append(simulate(build_cluster(model, pools), trace))
            show(f"split {prefill}P {machines - prefill}T", splits[-1])
        OUT.mkdir(exist_ok=True)
        best = min(splits, key=lambda result: result.metrics["e2e_s"].quantile(0.99))
        write_html(whole, OUT / "unsplit.html")
        write_html(best, OUT / "split.html")
    print(f"\npages of the last trace: {OUT.name}/unsplit.html, {OUT.name}/split.html")


def unsplit(trace: Trace, model: str, machines: int) -> Result:
    """Return the result of an unsplit cluster with chunked prompts."""
    return simulate(build_cluster(model, [("unsplit", machines, MACHINE)]), trace)


def smallest(trace: Trace, model: str) -> int:
    """Return the smallest unsplit cluster that keeps up and has a p99 TTFT below the limit, at least two machines."""
    for machines in range(2, MOST_MACHINES + 1):
        result = unsplit(trace, model, machines)
        if result.overload is None and result.metrics["ttft_s"].quantile(0.99) < TTFT_P99_S:
            return machines
    return MOST_MACHINES


def show(name: str, result: Result) -> None:
    """Print a row."""
    ttft, itl, e2e = (result.metrics[metric] for metric in ("ttft_s", "itl_s", "e2e_s"))
    moves = result.counts["prefill_to_mixed"] + result.counts["decode_to_mixed"]
    print(
        f"  {name:20} {ttft.quantile(0.5):7.3f} s {ttft.quantile(0.99):6.2f} {itl.quantile(0.5) * 1e3:6.1f} ms"
        f" {itl.quantile(0.99) * 1e3:6.0f} {itl.quantile(0.999) * 1e3:6.0f}"
        f" {e2e.quantile(0.5):7.2f} s {e2e.quantile(0.99):7.1f} {moves:6} {result.bill.usd_per_million_tokens:10.2f}"
        f"{'  OVERLOADED' if result.overload else ''}"
        f"{'  refused ' + str(result.statuses['refused']) if result.statuses['refused'] else ''}"
    )


if __name__ == "__main__":
    main()
