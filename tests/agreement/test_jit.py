"""Compiled and interpreted kernels: the same source must give the same bytes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from doubles import tiny_cluster, tiny_trace
from driving import done_rows, drive
from phasesplit._jit import COMPILED_PACKAGES
from phasesplit.domain.cluster import Cluster
from phasesplit.scheduler.rules import Batching, Placement, Rules, Transfer
from phasesplit.simulator.setup import RunState

AGREEMENT = Path(__file__).parent
SOURCES = AGREEMENT.parents[1] / "src" / "phasesplit"
SHORT = [(0.02 * number, 30 + 37 * number % 250, 2 + 11 * number % 50) for number in range(150)]
LONG = [(2.5 * at_s, 10 * prompt_tokens, output_tokens) for at_s, prompt_tokens, output_tokens in SHORT]

Setting = tuple[Cluster, Rules, list[tuple[float, int, int]]]

SETTINGS: dict[str, Setting] = {
    "default": (
        tiny_cluster(("prefill", 2), ("decode", 2), capacity_tokens=700, decode_context_s=1e-5, prefill_pair_s=1e-7),
        Rules(
            batch_prompt_tokens=200,
            spill_tokens=300,
            repurpose_after_s=0.5,
            kv_headroom=0.0,
            block_tokens=4,
            layerwise_from_tokens=100,
        ),
        SHORT,
    ),
    "chunked": (
        tiny_cluster(("prefill", 1), ("decode", 1), ("mixed", 1), capacity_tokens=480, decode_context_s=1e-5),
        Rules(batching=Batching.CHUNKED, batch_prompt_tokens=64, transfer=Transfer.LAYERWISE, kv_headroom=0.0),
        SHORT,
    ),
    "unsplit": (
        tiny_cluster(("unsplit", 2), capacity_tokens=480, decode_s_per_request=1e-3),
        Rules(prefill_placement=Placement.TWO_CHOICES, kv_headroom=0.0, seed=5),
        SHORT,
    ),
    "published": (
        tiny_cluster(("prefill", 2), ("decode", 2), capacity_tokens=9_000, hbm_share=1.0, prefill_s_per_token=1e-4),
        Rules.as_published(),
        LONG,
    ),
    "published unsplit": (
        tiny_cluster(("unsplit", 2), capacity_tokens=20_000, hbm_share=1.0, prefill_s_per_token=1e-4),
        Rules.as_published(),
        LONG,
    ),
}


def final_state(name: str) -> RunState:
    cluster, rules, rows = SETTINGS[name]
    return drive(cluster, rules, tiny_trace(*rows))


def outcome(name: str) -> dict[str, str]:
    """Return what a run leaves behind, in hexadecimal: records, gaps, time by batch size, counts."""
    state = final_state(name)
    found = {"done": done_rows(state), "gaps": state.world.gaps, "batch_s": state.world.batch_s}
    found |= {"counters": state.ledger.counters, "clock": state.world.clock, "samples": state.world.samples}
    return {part: array.tobytes().hex() for part, array in found.items()}


@pytest.mark.parametrize("name", SETTINGS)
def test_interpreted_kernel_gives_the_same_bytes(name: str) -> None:
    """Compiled code would compute something else than the source says: an overflow, a rounding, a stale cache."""
    code = f"import json, test_jit; print(json.dumps(test_jit.outcome({name!r})))"
    paths = os.pathsep.join([str(AGREEMENT), str(AGREEMENT.parent)])
    environment = {**os.environ, "PHASESPLIT_JIT": "0", "PYTHONPATH": paths}
    command = [sys.executable, "-W", "error", "-c", code]
    ran = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    interpreted = json.loads(ran.stdout)
    for part, written in outcome(name).items():
        assert interpreted[part] == written, part


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("default", ("preemptions", "evictions", "prefill_to_mixed", "decode_to_mixed", "returns", "repurposed")),
        ("chunked", ("evictions",)),
        ("unsplit", ("evictions",)),
        ("published", ("preemptions", "prefill_to_mixed", "decode_to_mixed", "returns", "one_machine")),
        ("published unsplit", ("preemptions",)),
    ],
)
def test_settings_reach_the_rules_that_they_compare(name: str, counts: tuple[str, ...]) -> None:
    """The comparison would say nothing of a rule, because no case uses it."""
    counters = final_state(name).ledger.counters
    assert {count: int(counters[count][0]) for count in counts if counters[count][0] == 0} == {}


def test_the_cache_depends_on_the_sources_of_all_compiled_code() -> None:
    """Compiled code would be taken from the cache although a function that it calls has been edited."""
    compiles = re.compile("^from phasesplit._jit import .*jit", re.MULTILINE)
    using = [path for path in SOURCES.rglob("*.py") if compiles.search(path.read_text(encoding="utf-8"))]
    assert {path.relative_to(SOURCES).parts[0] for path in using} <= set(COMPILED_PACKAGES)
    assert all((SOURCES / package).is_dir() for package in COMPILED_PACKAGES)
