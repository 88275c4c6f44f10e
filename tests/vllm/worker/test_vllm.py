"""`phasesplit serve` over two real vLLM servers, as a client sees it. `make test-vllm` runs this."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_cluster import ANSWER_S, ARGUMENTS, START_S, VllmCluster, serving
from vllm_machines import MODEL_VARIABLE, prompt_of

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    """Return a cluster of a prefill machine and a decode machine."""
    with serving(tmp_path_factory.mktemp("cluster"), {"prefill": 1, "decode": 1}) as running:
        yield running


def test_answers_are_those_of_vllm_alone(cluster: VllmCluster) -> None:
    """Wrong if a request that two vLLM servers share gives another text than one of them."""
    for tokens in (1, 40, 127, 128, 129, 700):
        prompt = prompt_of(tokens, tokens)
        split = cluster.complete(prompt, 12)
        assert split["choices"][0]["text"] == cluster.text(prompt, 12, "decode-0"), tokens
        assert split["usage"]["completion_tokens"] == 12


def test_the_decode_machine_fetched_every_prompt(cluster: VllmCluster) -> None:
    """Wrong if prompts are silently computed a second time where tokens are made."""
    before = cluster.facts("decode-0")["transfers"]
    lengths = (300, 301, 302)
    for tokens in lengths:
        cluster.text(prompt_of(tokens, 1000 + tokens), 4)

    def is_counted() -> bool:
        now = cluster.facts("decode-0")["transfers"]
        assert now["missed"] == before["missed"]
        # The last position of each prompt is computed again in order to sample.
        return bool(now["fetched_tokens"] - before["fetched_tokens"] >= sum(lengths) - len(lengths))

    cluster.until(is_counted, f"prompts were not fetched, before {before}", within_s=120.0)


def test_first_and_second_token_agree_when_sampled(cluster: VllmCluster) -> None:
    """Wrong if the prefill machine's first token and the decode machine's, both drawn, break a text in two."""
    prompt = prompt_of(64, 2)
    texts = {cluster.text(prompt, 16, temperature=1.5, seed=5) for _ in range(3)}
    assert len(texts) == 1


def test_facts_come_from_vllm(cluster: VllmCluster) -> None:
    """Wrong if the gateway schedules by figures that nobody measures."""
    for machine in cluster.machines().values():
        facts = machine["facts"]
        assert facts["capacity_blocks"] > 100
        assert facts["block_tokens"] == 32
        assert facts["context_tokens"] == 2048
        assert 0 <= facts["figures_age_s"] < 30


def test_a_killed_prefill_machine_is_invisible(cluster: VllmCluster) -> None:
    """Wrong if a client sees that the machine which computes its prompt was killed in mid-transfer."""
    prompt, before = prompt_of(1500, 3), cluster.counted("phasesplit_retries_total")
    answers: list[str] = []
    client = threading.Thread(target=lambda: answers.append(cluster.text(prompt, 8)))
    client.start()
    is_prefilling = 'phasesplit_live_requests{state="prefilling"}'
    cluster.until(lambda: cluster.counted(is_prefilling) == 1, "the prefill phase does not begin")
    time.sleep(0.5)  # some of its layers have left
    cluster.kill("prefill-0")
    client.join(ANSWER_S)
    assert answers == [cluster.text(prompt, 8, "decode-0")]
    assert cluster.counted("phasesplit_retries_total") > before, "it was killed too late"


def test_machines_that_differ_are_refused(cluster: VllmCluster, tmp_path: Path) -> None:
    """Wrong if a machine whose KV the others would misread joins, or its error does not name the setting to change."""
    others = {
        "block_tokens: 64 against 32": ("--block-tokens", "64", "--", *ARGUMENTS),
        "dtype: 'bfloat16' against 'float32'": ("--", *ARGUMENTS, "--dtype", "bfloat16"),
    }
    command = [
        sys.executable, "-m", "phasesplit", "vllm-worker", "--join", cluster.url, "--key-file", str(cluster.key_file),
        "--name", "another", "--home", "decode", "--model", cluster.model, "--model-name", cluster.name,
        "--kv-memory", "300MB",
    ]  # fmt: skip
    started = []
    try:
        for number, (why, options) in enumerate(others.items()):
            with (tmp_path / str(number)).open("w") as log:
                process = subprocess.Popen(
                    [*command, *options], env=cluster.environment, stdout=subprocess.DEVNULL, stderr=log
                )
            started.append((process, Path(log.name), why))
        for process, path, why in started:
            assert process.wait(START_S) == 2, path.read_text()[-4000:]
            last = path.read_text().splitlines()[-1]
            assert re.search(rf"its KV differs from that of (prefill|decode)-0 in {re.escape(why)}", last), last
    finally:
        for process, *_ in started:
            process.kill()
            process.wait()
    assert "another" not in cluster.machines()


def test_a_killed_prefill_machine_comes_back(cluster: VllmCluster) -> None:
    """Wrong if a cluster shrinks with each crash until nothing is left."""
    cluster.until(lambda: cluster.machines()["prefill-0"]["state"] == "serving", "it does not come back", START_S)
    before = cluster.facts("decode-0")["transfers"]
    prompt = prompt_of(200, 9)
    assert cluster.text(prompt, 4) == cluster.text(prompt, 4, "decode-0")
    assert cluster.facts("decode-0")["transfers"]["missed"] == before["missed"]
