"""Times of the same iterations by source, as in docs/phase-times.md.

Usage: python scripts/compare_phase_times.py MODEL MACHINE [aiconfigurator[:engine[:version]]]
"""

import sys

from phasesplit.errors import SpecError
from phasesplit.io.catalog import compare_sources, time_sources
from phasesplit.io.specs import load_machine, load_model


def main() -> None:
    """Print a table in Markdown: milliseconds of each source, and its ratio to the roofline."""
    model, machine = load_model(sys.argv[1]), load_machine(sys.argv[2])
    source = sys.argv[3] if len(sys.argv) > 3 else "aiconfigurator"
    found = time_sources(model, machine, source=source)
    for times in found.times.values():
        print(times.source)
    for name, reason in found.absent.items():
        print(f"{name}: none ({reason})")
    names = list(found.times)
    print("\n| iteration | " + " | ".join(f"{name}, ms" for name in names) + " | ratio to the roofline |")
    print("|---|" + "---:|" * (len(names) + 1))
    for row in compare_sources(model, machine, source=source):
        cells = [f"{row.seconds[name] * 1e3:.1f}" if name in row.seconds else "" for name in names]
        ratios = ", ".join(f"{ratio:.2f}" for name, ratio in row.ratios.items() if name != "roofline")
        what = f"prefill of {row.size:,}" if row.phase == "prefill" else f"decode, batch {row.size}"
        print(f"| {what} | " + " | ".join(cells) + f" | {ratios} |")


if __name__ == "__main__":
    try:
        main()
    except SpecError as problem:
        sys.exit(f"error: {problem}")
