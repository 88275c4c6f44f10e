"""Predicted against measured on this machine: split and unsplit, from little load to past saturation, as one table.

Of embedded workers, docs/verify-table.md; of vLLM machines, docs/verify-table-vllm.md, where `--vllm` names the
environment that `make install-vllm` makes. `--quick` writes nothing.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from phasesplit.domain.request import Trace
from phasesplit.engine.fetch import model_path
from phasesplit.io.cluster_file import VLLM_RULES, ServedCluster, VllmOptions
from phasesplit.io.profile_schema import ProfileSpec
from phasesplit.io.profiles import read_profile_file
from phasesplit.io.workloads import load_workload
from phasesplit.profiling.record import host_facts
from phasesplit.validation.core_shares import cores_text
from phasesplit.validation.prediction import NO_OVERHEADS, Predictor
from phasesplit.validation.verify import Verification, on_cores
from phasesplit.validation.verify_view import measure_profile, shown, verified

ROOT = Path(__file__).resolve().parents[1]
TABLE, VLLM_TABLE = ROOT / "docs" / "verify-table.md", ROOT / "docs" / "verify-table-vllm.md"
CLUSTERS = {
    "split 1P+1T": {"prefill": 1, "decode": 1},
    "split 2P+1T": {"prefill": 2, "decode": 1},
    "unsplit 2": {"unsplit": 2},
}
VLLM_CLUSTERS = {
    "vLLM-CPU 1P+1T": {"prefill": 1, "decode": 1},
    "vLLM-CPU unsplit 2": {"unsplit": 2},
    "vLLM-CPU unsplit 1": {"unsplit": 1},
}
PAIRS = (("split 1P+1T", "unsplit 2"), ("vLLM-CPU 1P+1T", "vLLM-CPU unsplit 2"))
"""Split clusters, and what each is held against."""
VLLM_ARGUMENTS = ("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048")
SHARES = (0.2, 0.5, 0.8, 1.1)
"""Rates as shares of what 1P+1T can serve; one machine alone gets half of that."""
ORDERED = ("TTFT p50", "TTFT p90", "ITL p50", "ITL p90", "E2E p50", "E2E p90")
"""What split and unsplit are ordered by."""
CLIP = (128, 32)
"""Longest prompt and output: two cores are few."""
QUIET = 0.05
"""What a worker may wait for its core, over what it computes."""
_EVEN = 0.05
"""Split and unsplit that are this close have no order."""

Runs = dict[str, list[Verification]]
"""Cluster to what came of each rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What was measured of the clusters of one engine.

    Attributes:
        profile: The profile of its machines.
        most_per_s: What 1P+1T is predicted to serve.
        runs: What came of each cluster.
    """

    profile: ProfileSpec
    most_per_s: float
    runs: Runs


def main() -> None:
    """Measure and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", default="default", help="default, tiny, or the path of a model")
    options.add_argument("--vllm", type=Path, help="environment that has vLLM, and a model for it")
    options.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals of each trace")
    options.add_argument("--profile", type=Path, help="profile of this machine; by default it is measured first")
    options.add_argument("--profile-time", default="60s", help="how long that may take")
    options.add_argument("--quick", action="store_true", help="write no file")
    asked = options.parse_args()
    clusters = [ServedCluster(name=name, model=asked.model, pools=pools) for name, pools in CLUSTERS.items()]
    if asked.vllm is None:
        engine = measured(clusters, model_path(asked.model, print), asked)
    else:
        engine = measured(vllm_clusters(asked.vllm.absolute()), asked.vllm / "model", asked)
    found = engine.runs
    lines = [
        *head(engine, asked),
        *verdict(found),
        *errors(found),
        *goals(found),
        *order(found),
        *worst(found),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if not asked.quick:
        table = TABLE if asked.vllm is None else VLLM_TABLE
        table.write_text(text, encoding="utf-8")
        print(f"wrote {table.relative_to(ROOT)}", file=sys.stderr)


def vllm_clusters(environment: Path) -> list[ServedCluster]:
    """Return the clusters of vLLM machines; an environment is not resolved, for its interpreter is a link."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    vllm = VllmOptions(python=str(environment / "bin" / "python"), arguments=VLLM_ARGUMENTS)
    return [
        ServedCluster(
            name=name, model=str(environment / "model"), pools=pools, rules=VLLM_RULES, kv_bytes=10**9, stalled_s=60.0,
            vllm=vllm,
        )
        for name, pools in VLLM_CLUSTERS.items()
    ]  # fmt: skip


def measured(clusters: list[ServedCluster], model: Path, asked: argparse.Namespace) -> Engine:
    """Profile a machine, and verify clusters of it; the first one's capacity sets the rates."""
    with tempfile.TemporaryDirectory() as scratch:
        path = asked.profile or Path(scratch) / "profile.json"
        if asked.profile is None:
            measure_profile(path, clusters[0], model, asked.profile_time)
        most_per_s = capacity_per_s(clusters[0], path)
        runs = {}
        for cluster in clusters:
            part = min(1.0, sum(cluster.pools.values()) / 2)
            traces = [trace_at(share * part * most_per_s, asked.duration) for share in SHARES]
            runs[cluster.name] = verified(cluster, model, traces, path)
        return Engine(profile=read_profile_file(path), most_per_s=most_per_s, runs=runs)


def trace_at(rate_per_s: float, duration_s: float) -> Trace:
    """Return conversation-shaped requests at a rate, shortened to what two cores can serve."""
    trace = load_workload("azure-conversation").trace(rate_per_s, duration_s, 0)
    return Trace.from_columns(
        trace.name,
        trace.arrival_s,
        np.minimum(trace.prompt_tokens, CLIP[0]).astype(np.int32),
        np.minimum(trace.output_tokens, CLIP[1]).astype(np.int32),
    )


def capacity_per_s(cluster: ServedCluster, profile: Path) -> float:
    """Return the requests that a cluster is predicted to serve in a second when there is always one that waits."""
    predictor = Predictor(cluster, read_profile_file(profile), profile)
    share = on_cores(cluster)[0].core_share
    return predictor.predict(trace_at(200.0, 1.0), NO_OVERHEADS, share).result.throughput_per_s


def cores(run: Verification) -> str:
    """Return who computed where."""
    plan = run.plan
    own = ", ".join(f"{name} {plan.core_share:.0%} of core {cores_text(one)}" for name, one in plan.workers.items())
    return f"{own}; gateway and client {cores_text(plan.front)}"


def head(engine: Engine, asked: argparse.Namespace) -> list[str]:
    """Return what was measured where."""
    machine = host_facts(None)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return [
        "# Predicted against measured, in figures",
        "",
        f"Made by `python bench/verify.py{' --vllm .venv-vllm' if asked.vllm else ''}`; "
        "[verify.md](verify.md) says what is compared with what.",
        "",
        f"- Machine: {machine.processor}, {os.cpu_count()} cores, {machine.system}; Python "
        f"{platform.python_version()}, after commit {commit.stdout.strip() or 'unknown'}, "
        f"{datetime.now(UTC).date().isoformat()}.",
        f"- Work: azure-conversation, prompts of at most {CLIP[0]} and outputs of at most {CLIP[1]} tokens, "
        f"{asked.duration:g} s of arrivals; 100 % is what 1P+1T of the same engine is predicted to serve, and half of "
        "that for one machine.",
        *_basis(engine),
        "",
    ]


def _basis(engine: Engine) -> list[str]:
    spec, first = engine.profile, next(iter(engine.runs.values()))[0]
    held_out = spec.errors["all"].mean if "all" in spec.errors else None
    vllm = first.cluster.vllm
    kind = "Embedded engine" if vllm is None else f"vLLM ({' '.join(vllm.arguments)})"
    return [
        f"- {kind}: {spec.model.name}; profile taken in {spec.elapsed_s:.0f} s, held-out error "
        f"{'unknown' if held_out is None else f'{held_out:.1%}'}; 100 % is {engine.most_per_s:.2f} requests/s.",
        *(f"- Cores: {cluster}: {cores(runs[0])}." for cluster, runs in engine.runs.items()),
    ]


def verdict(found: Runs) -> list[str]:
    """Return how many runs had to share the workers' cores with what the simulation does not know."""
    runs = [run for own in found.values() for run in own]
    busy = sum(max(run.waited.values(), default=0.0) > QUIET for run in runs)
    if not busy:
        return []
    return [
        f"**Beware:** in {busy} of {len(runs)} runs the workers waited for their cores more than {QUIET:.0%} as long "
        "as they computed. The simulation does not know what else runs there: gateway, client, and other programs.",
        "",
    ]


def errors(found: Runs) -> list[str]:
    """Return the error of each figure in each run."""
    names = [figure.name for figure in next(iter(found.values()))[0].comparison.latencies]
    rows = ["## Errors", "", "Prediction / measurement - 1; bold: beyond the goal (p50 5 %, p90 10 %, p99 20 %)."]
    rows += [
        "Waited: how much longer a worker waited for its core than its share of it says, over what it computed.",
        "",
    ]
    rows += [
        "| cluster | rate | requests | " + " | ".join(names) + " | waited | most of it (E2E) |",
        "|---|--:|--:|" + "--:|" * (len(names) + 1) + "---|",
    ]
    for cluster, runs in found.items():
        for share, run in zip(SHARES, runs, strict=True):
            cells = [
                f"**{one.error:+.0%}**" if one.is_met is False else f"{one.error:+.0%}"
                for one in run.comparison.latencies
            ]
            explanation = run.comparison.explanations[-1]
            cause = "-" if explanation.stage is None else f"{explanation.stage} ({1e3 * explanation.stage_s:+.0f} ms)"
            rows.append(
                f"| {cluster} | {share:.0%} | {run.comparison.compared} | {' | '.join(cells)} | "
                f"{f'{max(run.waited.values()):.0%}' if run.waited else '-'} | {cause} |"
            )
    return [*rows, ""]


def goals(found: Runs) -> list[str]:
    """Return how many goals are met, by percentile, and why not all."""
    figures = [figure for runs in found.values() for run in runs for figure in run.comparison.latencies]
    rows = ["## Goals", "", "| percentile | goal | met | median error | worst error |", "|---|--:|--:|--:|--:|"]
    for percentile in ("p50", "p90", "p99"):
        own = [figure for figure in figures if figure.name.endswith(percentile)]
        sizes = [abs(figure.error) for figure in own]
        met = sum(figure.is_met is True for figure in own)
        rows.append(
            f"| {percentile} | {own[0].goal:.0%} | {met} of {len(own)} | {np.median(sizes):.0%} | {max(sizes):.0%} |"
        )
    texts = [text for runs in found.values() for run in runs for text in run.warnings]
    rows += ["", "What the runs themselves say of their figures:", ""]
    doubts = [re.sub(r"\d[\d.]*", "N", text) for text in texts]
    return [
        *rows,
        *(f"- {texts[doubts.index(doubt)]}{_also(doubts.count(doubt))}" for doubt in dict.fromkeys(doubts)),
        "",
    ]


def _also(count: int) -> str:
    return "" if count == 1 else f" (the like in {count} runs)"


def order(found: Runs) -> list[str]:
    """Return whether split against unsplit is ordered rightly at each rate."""
    rows = [
        "## Split against unsplit",
        "",
        "A split cluster over an unsplit one of as many machines, less 1: predicted / measured. Bold: predicted to be "
        "the other way round.",
        "",
        "| cluster | rate | " + " | ".join(ORDERED) + " |",
        "|---|--:|" + "--:|" * len(ORDERED),
    ]
    for one, other in PAIRS:
        for share, split, unsplit in zip(SHARES, found.get(one, ()), found.get(other, ()), strict=False):
            rows.append(f"| {one} | {share:.0%} | {' | '.join(_ordered(split, unsplit))} |")
    return [*rows, ""]


def _ordered(split: Verification, unsplit: Verification) -> list[str]:
    figures = [{figure.name: figure for figure in run.comparison.latencies} for run in (split, unsplit)]
    cells = []
    for name in ORDERED:
        own, others = (one[name] for one in figures)
        predicted, measured = own.predicted / others.predicted - 1, own.measured / others.measured - 1
        is_wrong = predicted * measured < 0 and min(abs(predicted), abs(measured)) > _EVEN
        text = f"{predicted:+.0%} / {measured:+.0%}"
        cells.append(f"**{text}**" if is_wrong else text)
    return cells


def worst(found: Runs) -> list[str]:
    """Return the figures that are furthest off."""
    cases = [
        (abs(figure.error), cluster, share, figure)
        for cluster, runs in found.items()
        for share, run in zip(SHARES, runs, strict=True)
        for figure in run.comparison.latencies
    ]
    rows = [
        "## Where it is worst",
        "",
        "| cluster | rate | | predicted | measured | error |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for _, cluster, share, figure in sorted(cases, key=lambda case: -case[0])[:10]:
        rows.append(
            f"| {cluster} | {share:.0%} | {figure.name} | {shown(figure, figure.predicted)} | "
            f"{shown(figure, figure.measured)} | {figure.error:+.0%} |"
        )
    return rows


if __name__ == "__main__":
    main()
