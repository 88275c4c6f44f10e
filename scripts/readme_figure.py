"""Draw docs/images/conversation-70.png: why phases are split.

The paper's conversation cluster (25 prefill and 15 decode DGX-H100) and as many unsplit machines serve the same trace
at 70 requests a second. Unsplit machines run whole prompts, as the paper's baseline does, or chunks of them, as today's
engines do. Run: python scripts/readme_figure.py
"""

from pathlib import Path
from typing import Any

from phasesplit.io.catalog import build_cluster
from phasesplit.io.workloads import load_workload
from phasesplit.report.page import colour, drawing, new_figure
from phasesplit.report.panels import draw_curves
from phasesplit.scheduler.rules import Batching, Rules
from phasesplit.simulator.result import Result
from phasesplit.simulator.run import simulate

TARGET = Path(__file__).resolve().parents[1] / "docs" / "images" / "conversation-70.png"
RATE_PER_S = 70.0
DURATION_S = 600.0


def results() -> list[tuple[str, str, Result]]:
    """Return what each curve is, its colour, and its result."""
    trace = load_workload("azure-conversation").trace(RATE_PER_S, DURATION_S, seed=1)
    split = build_cluster("bloom-176b", [("prefill", 25, "dgx-h100"), ("decode", 15, "dgx-h100")])
    unsplit = build_cluster("bloom-176b", [("unsplit", 40, "dgx-h100")])
    return [
        ("split, 25 prefill + 15 decode machines", "prefill", simulate(split, trace)),
        (
            "unsplit, 40 machines, whole prompts",
            "decode",
            simulate(unsplit, trace, Rules(unsplit_batching=Batching.WHOLE)),
        ),
        ("unsplit, 40 machines, chunked prompts", "unsplit", simulate(unsplit, trace)),
    ]


def draw(figure: Any, found: list[tuple[str, str, Result]]) -> None:
    """Draw time to first token and gaps between tokens side by side."""
    left, right = figure.subplots(1, 2)
    for axes, metric, name, of in (
        (left, "ttft_s", "TTFT: time to first token", "requests"),
        (right, "itl_s", "ITL: gaps between tokens", "gaps"),
    ):
        draw_curves(
            axes,
            [(_named(what, result), tint, result.metrics[metric]) for what, tint, result in found],
            name=name,
            of=of,
        )
    figure.suptitle(
        f"BLOOM-176B on 40 DGX-H100, conversation at {RATE_PER_S:g}/s: on unsplit machines, decode waits for prefill",
        x=0.012, ha="left", fontsize=10, fontweight="bold", color=colour("ink"),
    )  # fmt: skip


def _named(what: str, result: Result) -> str:
    return f"{what} (overloaded)" if result.overload else what


def main() -> None:
    """Draw and write the figure."""
    found = results()
    with drawing():
        figure = new_figure(9.6, 3.9, facecolor=colour("paper"))
        draw(figure, found)
        TARGET.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(TARGET, dpi=150, metadata={"Software": None})
    for what, _, result in found:
        ttft, itl = result.metrics["ttft_s"], result.metrics["itl_s"]
        print(f"{what}: TTFT p99 {ttft.quantile(0.99):.3f} s, ITL p99 {itl.quantile(0.99):.3f} s, {result.overload}")
    print(f"{TARGET.name}: {TARGET.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
