"""`phasesplit serve` over two real vLLM servers, KV moving by vLLM's own NixlConnector. `make test-vllm` runs this."""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from vllm_cluster import VllmCluster, serving
from vllm_machines import MODEL_VARIABLE, prompt_of

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None, reason="!!! NIXL is not installed: connector nixl !!!"
    ),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    """Return a cluster of a prefill machine and a decode machine."""
    pools, tls = {"prefill": 1, "decode": 1}, "tcp,posix,sysv,cma,self"
    with serving(tmp_path_factory.mktemp("cluster"), pools, "nixl", UCX_TLS=tls) as running:
        yield running


def test_pulled_prompts_are_answered_right_and_not_computed_again(cluster: VllmCluster) -> None:
    """Wrong if vLLM's own connector, behind our gateway, gives another text or fetches nothing."""
    before = cluster.facts("decode-0")["transfers"]
    prompts = [prompt_of(tokens, tokens) for tokens in (1, 31, 32, 33, 300, 700)]
    texts = [cluster.text(prompt, 12) for prompt in prompts]
    lengths = sum(len(prompt) for prompt in prompts)

    def since(figure: str) -> int:
        return int(cluster.facts("decode-0")["transfers"][figure] - before[figure])

    cluster.until(lambda: since("prompt_tokens") >= lengths, "the prompts are not counted")
    # The last position of a prompt is computed again in order to sample; vLLM counts it on either side.
    assert 0 <= since("prompt_tokens") - since("fetched_tokens") <= len(prompts)
    assert texts == [cluster.text(prompt, 12, "decode-0") for prompt in prompts]
