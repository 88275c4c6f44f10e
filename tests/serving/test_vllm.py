"""`phasesplit serve` over two real vLLM servers, as a client sees it. `make test-vllm` runs this."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from vllm_machines import MODEL_VARIABLE, prompt_of

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.timeout(900),
]

_START_S = 400.0
_CLUSTER = """
model: {model}
engine: vllm
pools:
  - {{role: prompt, count: 1}}
  - {{role: token, count: 1}}
serve:
  port: 0
  kv_memory: 1GB
  stalled: 60 s
  keys: {{admin: {{file: admin.key}}, join: {{file: join.key}}}}
  vllm:
    python: {python}
    arguments: [--dtype, float32, --enforce-eager, --max-model-len, "2048"]
"""
_KEY = "an-admin-key"


class Cluster:
    """A cluster that serves."""

    def __init__(self, directory: Path) -> None:
        model = os.environ[MODEL_VARIABLE]
        (directory / "admin.key").write_text(_KEY)
        (directory / "join.key").write_text("a-join-key")  # so that the machines prove it to one another as well
        file = directory / "cluster.yaml"
        file.write_text(_CLUSTER.format(model=model, python=sys.executable))
        self.log = directory / "log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "phasesplit", "serve", str(file)], stdout=log, stderr=log, env=environment
            )
        self.url = ""
        end_s = time.monotonic() + _START_S
        while not self.url:
            assert time.monotonic() < end_s, self.log.read_text()[-4000:]
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            for line in self.log.read_text().splitlines():
                if line.startswith("phasesplit serves"):
                    self.url = line.split()[4]
            time.sleep(0.5)

    def machines(self) -> dict[str, dict[str, Any]]:
        """Return the machines by name."""
        answer = httpx.get(f"{self.url}/admin/pools", headers={"Authorization": f"Bearer {_KEY}"})
        return {machine["name"]: machine for machine in answer.raise_for_status().json()["machines"]}

    def complete(self, prompt: list[int], most: int, url: str | None = None, **fields: Any) -> dict[str, Any]:
        """Return the answer to a prompt, from the cluster or from one machine."""
        model = Path(os.environ[MODEL_VARIABLE]).name.lower()
        body = {"model": model, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True} | fields
        answer = httpx.post(f"{url or self.url}/v1/completions", json=body, timeout=300.0)
        return dict(answer.raise_for_status().json())

    def text(self, *given: Any, **fields: Any) -> str:
        """Return the text of an answer."""
        return str(self.complete(*given, **fields)["choices"][0]["text"])

    def worker_pid(self, name: str) -> int:
        """Return the process that computes for a machine."""
        commands, parents = {}, {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                commands[int(place.name)] = (place / "cmdline").read_text().replace("\0", " ")
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        family = {pid for pid, text in commands.items() if "vllm-worker" in text and f"--name {name} " in text}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        (found,) = (pid for pid in family if commands[pid].startswith("VLLM::Worker"))
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a cluster of a prompt machine and a token machine."""
    served = Cluster(tmp_path_factory.mktemp("cluster"))
    yield served
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(timeout=60) == 0


def test_answers_are_those_of_vllm_alone(cluster: Cluster) -> None:
    """Wrong if a request that two vLLM servers share gives another text than one of them."""
    token = cluster.machines()["token-0"]["url"]
    for tokens in (1, 40, 127, 128, 129, 700):
        prompt = prompt_of(tokens, tokens)
        split = cluster.complete(prompt, 12)
        assert split["choices"][0]["text"] == cluster.text(prompt, 12, token), tokens
        assert split["usage"]["completion_tokens"] == 12


def test_the_token_machine_fetched_every_prompt(cluster: Cluster) -> None:
    """Wrong if prompts are silently computed a second time where tokens are made."""
    before = cluster.machines()["token-0"]["facts"]["transfers"]
    lengths = (300, 301, 302)
    for tokens in lengths:
        cluster.text(prompt_of(tokens, 1000 + tokens), 4)
    end_s = time.monotonic() + 10
    while time.monotonic() < end_s:
        now = cluster.machines()["token-0"]["facts"]["transfers"]
        if now["fetched_tokens"] - before["fetched_tokens"] >= sum(lengths) - len(lengths):
            break
        time.sleep(0.2)
    else:
        pytest.fail(f"{before} {now}")
    assert now["missed"] == before["missed"]


def test_first_and_second_token_agree_when_sampled(cluster: Cluster) -> None:
    """Wrong if the prompt machine's first token and the token machine's, both drawn, break a text in two."""
    prompt = prompt_of(64, 2)
    texts = {cluster.text(prompt, 16, temperature=1.5, seed=5) for _ in range(3)}
    assert len(texts) == 1


def test_facts_come_from_vllm(cluster: Cluster) -> None:
    """Wrong if the gateway schedules by figures that nobody measures."""
    for machine in cluster.machines().values():
        facts = machine["facts"]
        assert facts["capacity_blocks"] > 100
        assert facts["block_tokens"] == 32
        assert facts["context_tokens"] == 2048
        assert 0 <= facts["figures_age_s"] < 30


def test_a_killed_prompt_machine_is_invisible(cluster: Cluster) -> None:
    """Wrong if a client sees that the machine which computes its prompt was killed in mid-transfer."""
    prompt = prompt_of(1500, 3)
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(cluster.text(prompt, 8)))
    asking.start()
    time.sleep(1.0)
    os.kill(cluster.worker_pid("prompt-0"), signal.SIGKILL)
    asking.join(timeout=300)
    assert answers == [cluster.text(prompt, 8, cluster.machines()["token-0"]["url"])]
    end_s = time.monotonic() + _START_S
    while cluster.machines()["prompt-0"]["state"] != "serving":
        assert time.monotonic() < end_s, "the machine does not come back"
        time.sleep(1)
    assert cluster.text(prompt_of(50, 9), 4)
