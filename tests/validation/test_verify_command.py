"""`verify`: the whole loop on a tiny model, and what people are told when it cannot be closed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phasesplit.cli import run
from phasesplit.engine.fetch import model_path
from phasesplit.errors import SpecError
from phasesplit.io.cluster_file import load_served_cluster
from phasesplit.launcher.local_cluster import Surroundings, worker_commands, worker_environment
from phasesplit.scheduler.rules import Batching
from phasesplit.validation.verify_page import verify_report
from phasesplit.validation.verify_view import measure_profile

pytestmark = [pytest.mark.alone, pytest.mark.slow]

CLUSTER = """\
name: here
model: tiny
pools:
  - {role: prefill, count: 1}
  - {role: decode, count: 1}
serve: {kv_memory: 16MB}
"""
METRICS = [f"{metric} {share}" for metric in ("TTFT", "ITL", "E2E") for share in ("p50", "p90", "p99")]


def test_workers_have_the_share_of_a_core_that_the_file_gives_them(tmp_path: Path) -> None:
    """Workers of a shared core would be as fast as the system happens to let them."""
    path = tmp_path / "cluster.yaml"
    path.write_text(CLUSTER.replace("16MB", "16MB, core_share: 0.4"))
    cluster = load_served_cluster(path)
    around = Surroundings(gateway="http://127.0.0.1:1", model=Path("m"), model_name="m", sockets="s")
    commands = [list(command(1)) for command in worker_commands(cluster, around).values()]
    assert [command[command.index("--core-share") + 1] for command in commands] == ["0.4", "0.4"]
    path.write_text(CLUSTER.replace("16MB", "16MB, core_share: 0"))
    with pytest.raises(SpecError, match=r"core_share.* 0, allowed is a number from 0\.01 to 1"):
        load_served_cluster(path)


def test_vllm_machines_have_the_threads_and_the_bounds_of_batches_that_the_file_gives_them(tmp_path: Path) -> None:
    """Each server would take all cores, and batches would be larger than those that were simulated."""
    path = tmp_path / "cluster.yaml"
    vllm = "engine: vllm\nrules: {batch_prompt_tokens: 512, batch_requests: 8}\n"
    path.write_text(vllm + CLUSTER.replace("16MB", "16MB, vllm: {threads: 3, arguments: [--max-num-seqs, '4']}"))
    cluster = load_served_cluster(path)
    around = Surroundings(gateway="http://127.0.0.1:1", model=Path("m"), model_name="m", sockets="s")
    (command, _) = worker_commands(cluster, around).values()
    words = list(command(1))
    assert words[words.index("--") + 1 :] == [
        "--max-num-batched-tokens", "512", "--max-num-seqs", "8", "--max-num-seqs", "4",
    ]  # fmt: skip
    assert cluster.rules.batching is Batching.CHUNKED
    assert worker_environment(cluster)["OMP_NUM_THREADS"] == "3"
    path.write_text(vllm + CLUSTER.replace("16MB", "16MB, vllm: {threads: 0}"))
    with pytest.raises(SpecError, match=r"threads.* 0, allowed is a whole number from 1 to 1024"):
        load_served_cluster(path)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "cluster.yaml"
    path.write_text(CLUSTER)
    return path


@pytest.fixture(scope="module")
def profile(cluster: Path) -> Path:
    """A profile of this machine, taken too fast to be any good."""
    path = cluster.with_name("profile.json")
    measure_profile(path, load_served_cluster(cluster), model_path("tiny", print), "1s", quiet=True)
    return path


def verifying(cluster: Path, profile: Path, count: int, *options: str) -> "subprocess.Popen[str]":
    command = [
        sys.executable, "-m", "phasesplit", "verify", str(cluster), "azure-conversation", "--rate", "5", "--count",
        str(count), "--clip", "64:8", "--profile", str(profile), *options,
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers_of(parent: int) -> list[str]:
    """Return the command lines of workers that a process has started."""
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                lines.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
    return [line for line in lines if f"--parent {parent} " in line]


def test_the_loop_closes_and_leaves_nothing_behind(cluster: Path, profile: Path, tmp_path: Path) -> None:
    """Somebody who verifies a cluster would get no comparison, one of other requests, or workers that stay."""
    report = tmp_path / "report.html"
    process = verifying(cluster, profile, 12, "--json", "--html", str(report))
    out, err = process.communicate(timeout=110)
    assert process.returncode == 0, err
    found = json.loads(out)
    assert (found["trace"]["requests"], found["compared"], found["errors"]) == (12, 12, {})
    assert [one["name"] for one in found["latencies"]] == METRICS
    assert set(found["kv_blocks"]) == {"prefill-0", "decode-0"}
    for side in ("predicted", "measured"):
        whole_s = sum(one[side] for one in found["stages"])
        assert 0 < whole_s < 10
        assert all(one[side] >= 0 for one in found["stages"] if one["name"] != "front end")
    assert {one["measured"] > 0 for one in found["latencies"]} == {True}
    assert workers_of(process.pid) == []
    page = report.read_text()
    assert page == verify_report([found])
    assert not re.search(r"(?:src|href)=[\"']?(?:https?:)?//|@import|<script", page)


def test_an_interrupted_loop_leaves_nothing_behind(cluster: Path, profile: Path) -> None:
    """Ctrl-C would leave workers that compute on, or be taken for a failure."""
    process = verifying(cluster, profile, 500)
    assert process.stderr is not None
    while "replaying" not in process.stderr.readline():
        assert process.poll() is None
    assert len(workers_of(process.pid)) == 2
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("phasesplit: interrupted\n")
    assert workers_of(process.pid) == []


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(arguments) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    return caught.err.removeprefix("phasesplit: ").rstrip()


def test_wrong_input_is_refused_before_anything_runs(
    cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody would wait for a profile and a cluster to be told of a typing mistake."""
    assert told(capsys, "verify", "no.yaml", "azure-conversation").startswith("no.yaml: cannot be read")
    assert told(capsys, "verify", str(cluster), "azure").startswith("TRACE (no such file): unknown name")
    assert told(capsys, "verify", str(cluster), "azure-conversation", "--clip", "64").startswith("--clip: got '64'")
    nan = told(capsys, "verify", str(cluster), "azure-conversation", "--profile-time", "nan")
    assert nan.startswith("--profile-time: got 'nan'"), "before a machine is started to be measured"
    vllm = tmp_path / "vllm.yaml"
    vllm.write_text(f"engine: vllm\n{CLUSTER}")
    with monkeypatch.context() as one_core:
        one_core.setattr(os, "sched_getaffinity", lambda _: {0})
        assert told(capsys, "verify", str(vllm), "azure-conversation").startswith("2 vLLM machines on 1 cores")
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    assert str(wrong) in told(capsys, "verify", str(cluster), "azure-conversation", "--profile", str(wrong))
    absent = str(tmp_path / "no" / "report.html")
    assert "--html" in told(capsys, "verify", str(cluster), "azure-conversation", "--html", absent)
    assert not os.path.exists(absent)
