"""`phasesplit serve` over two real vLLM servers that serve whole requests. `make test-vllm` runs this."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vllm_cluster import VllmCluster, serving
from vllm_machines import MODEL_VARIABLE, prompt_of

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    """Return a cluster of two machines that move no KV."""
    with serving(tmp_path_factory.mktemp("cluster"), {"unsplit": 2}, "none") as running:
        yield running


def test_whole_requests_are_answered_right(cluster: VllmCluster) -> None:
    """Wrong if a cluster without a connector mixes up requests, or leaves a machine idle."""
    before = {name: cluster.facts(name)["tokens"] for name in cluster.machines()}
    prompts = [prompt_of(tokens, tokens) for tokens in (1, 40, 128, 300)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        texts = list(clients.map(lambda prompt: cluster.text(prompt, 12), prompts))
    for name, tokens in before.items():
        cluster.until(lambda name=name, tokens=tokens: cluster.facts(name)["tokens"] > tokens, f"{name} is idle")  # type: ignore[misc]
    assert texts == [cluster.text(prompt, 12, "unsplit-0") for prompt in prompts]


def test_a_stream_goes_on_when_its_machine_is_killed(cluster: VllmCluster) -> None:
    """Wrong if a client's stream breaks off, or goes on with a gap, a repetition or other tokens."""
    prompt, most = prompt_of(100, 5), 60
    undisturbed = cluster.text(prompt, most)
    pieces: list[str] = []
    for event in cluster.events(prompt, most):
        (choice,) = event["choices"]
        pieces.append(choice["text"])
        if len(pieces) == 10:
            (busy,) = {lease["machine"] for lease in cluster.get("/debug/kv")["leases"]}
            cluster.kill(busy)
    assert "".join(pieces) == undisturbed
    assert choice["finish_reason"] == "length"
    assert cluster.counted("phasesplit_continued_total") == 1
