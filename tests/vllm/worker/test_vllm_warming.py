"""The first requests of a vLLM server, and what its worker makes of them; the server and its connector only pretend."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from phasesplit import cli
from phasesplit.domain.machine import Link
from phasesplit.errors import SpecError
from phasesplit.io.cluster_file import load_served_cluster
from phasesplit.kv_transfer.chooser import threshold_tokens
from phasesplit.kv_transfer.layout import KvLayout
from phasesplit.launcher.listening import Listening
from phasesplit.launcher.local_cluster import Surroundings, worker_commands
from phasesplit.launcher.worker_process import WorkerPlace
from phasesplit.vllm.reports import Reports
from phasesplit.vllm.worker import vllm_worker_command
from phasesplit.vllm.worker.proxy import VllmProxy
from phasesplit.vllm.worker.state import VllmWorkerState, between
from phasesplit.vllm.worker.vllm_server import VllmServer, VllmSettings

S_PER_TOKEN = 2e-4
LAYOUT = KvLayout(model="m", layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=32, block_layout="any")
LINK = Link(bytes_per_s=1e9, latency_s=1e-3, per_layer_s=1e-4, streaming_slowdown=0.5)


class Server:
    """A server that takes its time for each token of a prompt."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.context_tokens = 2048
        self.s_per_token = S_PER_TOKEN
        self.refuses: Callable[[dict[str, Any]], int] = lambda _: 0

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append(body)
        self.keys.add(request.headers.get("authorization"))
        await asyncio.sleep(self.s_per_token * len(body["prompt"]))
        status = self.refuses(body)
        return JSONResponse({"error": {"message": "it\nbroke"}} if status else {"choices": []}, status or 200)

    def app(self) -> Starlette:
        async def metrics(_: Request) -> Response:
            return PlainTextResponse('vllm:cache_config_info{block_size="32",num_gpu_blocks="99"} 1.0\n')

        async def models(_: Request) -> Response:
            return JSONResponse({"data": [{"max_model_len": self.context_tokens}]})

        routes = [Route("/v1/completions", self.completions, methods=["POST"]), Route("/metrics", metrics)]
        return Starlette(routes=[*routes, Route("/v1/models", models)])


def settings_for(directory: Path, **changed: Any) -> VllmSettings:
    given = {"name": "n", "epoch": 1, "home": "prefill", "model": "dir", "models": ("m",), "sockets": str(directory)}
    return VllmSettings(**(given | changed))


@contextlib.asynccontextmanager
async def speaker_of(server: Server, directory: Path, **changed: Any) -> AsyncIterator[VllmWorkerState]:
    listening, settings = Listening("127.0.0.1", 0), settings_for(directory, **changed)
    await listening.start(server.app())
    process = VllmServer(settings, "")
    process.url = listening.url
    async with aiohttp.ClientSession() as session:
        worker = VllmWorkerState(settings, process, session, str(directory / "line"))
        try:
            await worker.start("http://here")
            yield worker
        finally:
            worker.close()
            await listening.stop()


def warmed(
    server: Server, directory: Path, hello: dict[str, Any] | None = None, **changed: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a worker's facts after the first requests, and the orders to its connector, if it says hello."""

    async def all_of_it() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with speaker_of(server, directory, **changed) as worker:
            connector = Reports(str(directory / "line") if hello is not None else None)
            with contextlib.closing(connector):
                connector.send({"hello": hello})
                await worker.warm_up()
                return worker.facts(), connector.orders()

    return asyncio.run(all_of_it())


def greeting(threshold: int | None = None) -> dict[str, Any]:
    return {"layout": asdict(LAYOUT), "address": {}, "link": asdict(LINK), "threshold_tokens": threshold}


def test_the_threshold_follows_from_what_was_measured(tmp_path: Path) -> None:
    """Wrong if prompts leave layer by layer where it does not pay, or the facts name another threshold than is used."""
    server = Server()
    facts, orders = warmed(server, tmp_path, greeting())
    expected = threshold_tokens(LAYOUT, lambda tokens: S_PER_TOKEN * tokens, LINK)
    assert 100 < expected < 1000
    assert facts["threshold_tokens"] == expected
    assert orders == [{"threshold_tokens": facts["threshold_tokens"]}]
    assert facts["measured_link"] == asdict(LINK)
    assert f"layer by layer from {facts['threshold_tokens']:,} tokens" in facts["link"]


def test_slow_prefill_lowers_the_threshold(tmp_path: Path) -> None:
    """Wrong if the time of the prefill phase is not measured: a link slower than it shows the difference."""
    found = []
    for name, s_per_token in (("fast", 1e-6), ("slow", 1e-3)):
        server = Server()
        server.s_per_token = s_per_token
        (tmp_path / name).mkdir()
        slow = greeting() | {"link": asdict(Link(bytes_per_s=3e7, per_layer_s=2e-3, streaming_slowdown=0.1))}
        found.append(warmed(server, tmp_path / name, slow)[0]["threshold_tokens"])
    assert found[0] > 2 * found[1]


def test_every_kind_of_sampling_comes_first(tmp_path: Path) -> None:
    """Wrong if a client waits for what vLLM compiles at the first request of a kind."""
    server = Server()
    warmed(server, tmp_path, greeting())
    first, *others = server.seen
    assert (len(first["prompt"]), first["max_tokens"]) == (256, 4)
    assert any(body.get("temperature") == 1.0 and body.get("top_p") == 1.0 for body in server.seen)
    assert any(body.get("temperature") == 1.0 and body.get("top_p", 1.0) < 1.0 for body in server.seen)
    assert any("logprobs" in body for body in server.seen)
    measured = [body for body in others if len(body["prompt"]) > 1]
    assert {len(body["prompt"]) for body in measured} >= {64, 256}
    assert {body["max_tokens"] for body in measured} == {1}


def test_no_prefix_comes_twice(tmp_path: Path) -> None:
    """Wrong if vLLM's prefix cache makes prompts look faster than a client's will be."""
    server = Server()
    warmed(server, tmp_path, greeting())
    heads = [tuple(body["prompt"][:32]) for body in server.seen if len(body["prompt"]) > 1]
    assert len(heads) == len(set(heads)) > 4


@pytest.mark.parametrize("context_tokens", [2, 9, 100, 300])
def test_first_requests_fit_in(tmp_path: Path, context_tokens: int) -> None:
    """Wrong if a server with a short context does not come up, because it refuses what its own worker asks."""
    server = Server()
    server.context_tokens = context_tokens
    facts, _ = warmed(server, tmp_path, greeting())
    assert facts["threshold_tokens"] >= 1
    assert max(len(body["prompt"]) + body["max_tokens"] for body in server.seen) <= context_tokens


def test_a_slow_server_is_asked_little(tmp_path: Path) -> None:
    """Wrong if a worker on a slow processor comes up minutes later, for a figure that needs no precision."""
    server = Server()
    server.s_per_token = 3e-3
    warmed(server, tmp_path, greeting())
    assert sum(len(body["prompt"]) for body in server.seen) <= 2 + 256 + 64 + 256 + 64


def test_a_threshold_that_was_set_is_kept(tmp_path: Path) -> None:
    """Wrong if a measurement overrules what a person has set."""
    server = Server()
    facts, orders = warmed(server, tmp_path, greeting(77))
    assert (facts["threshold_tokens"], orders) == (77, [])
    assert facts["link"].endswith("layer by layer from 77 tokens")
    assert len(server.seen) == 3  # nothing is measured that nobody needs


@pytest.mark.parametrize("connector", ["phasesplit", "nixl"])
def test_without_our_connector_there_is_no_link(tmp_path: Path, connector: str) -> None:
    """Wrong if a worker whose KV moves by other means does not come up, or claims a link that nobody measured."""
    facts, _ = warmed(Server(), tmp_path, connector=connector)
    assert facts["threshold_tokens"] is facts["measured_link"] is None
    assert facts["link"] == ""


def test_log_probabilities_may_be_forbidden(tmp_path: Path) -> None:
    """Wrong if a server whose owner forbids log-probabilities counts as broken."""
    server = Server()
    server.refuses = lambda body: 400 if "logprobs" in body else 0
    assert warmed(server, tmp_path, greeting())[1]


@pytest.mark.parametrize("status", [400, 500])
def test_a_server_that_does_not_serve_is_no_worker(tmp_path: Path, status: int) -> None:
    """Wrong if a worker announces itself that can only fail, or the reason takes more than a line."""
    server = Server()
    server.refuses = lambda _: status
    with pytest.raises(SpecError, match=f"vLLM does not serve a prompt of 256 tokens: {status} .*broke") as problem:
        warmed(server, tmp_path, greeting())
    assert "\n" not in str(problem.value)


def test_a_server_that_hangs_is_no_worker(tmp_path: Path) -> None:
    """Wrong if a worker whose server never answers is waited for as long as nobody looks."""
    server = Server()
    server.s_per_token = 1.0
    with pytest.raises(SpecError, match=r"vLLM does not answer its first request within 0\.3 s"):
        warmed(server, tmp_path, greeting(), start_s=0.3)


def run_worker(server: Server, directory: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Run a worker until it is announced; return its facts then, with the keys that it calls its server and others by.

    `first_requests` is how many the server has had by then.
    """
    announced: list[dict[str, Any]] = []
    keys: dict[str, str] = {}

    class Process(VllmServer):
        async def start(self, _: aiohttp.ClientSession) -> None:
            self.listening = Listening("127.0.0.1", 0)
            await self.listening.start(server.app())
            self.url = self.listening.url

        async def stop(self) -> None:
            await self.listening.stop()

    class Proxy(VllmProxy):
        def __init__(self, worker: VllmWorkerState, peers: aiohttp.ClientSession) -> None:
            super().__init__(worker, peers)
            keys.update(own=worker.session.headers["Authorization"], others=peers.headers["Authorization"])

    def ready(facts: dict[str, Any]) -> None:
        announced.append(facts | keys | {"first_requests": len(server.seen)})
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)  # the worker takes it by then

    monkeypatch.setattr(vllm_worker_command, "VllmServer", Process)
    monkeypatch.setattr(vllm_worker_command, "VllmProxy", Proxy)
    place = WorkerPlace(host="127.0.0.1", port=0, gateway=None, join_key="a-key", key="a-key", drain_s=1.0)
    running = vllm_worker_command.run_vllm_worker(settings_for(directory), place, ready=ready, say=print)
    assert asyncio.run(running) == 0
    return announced


def test_a_worker_is_warm_when_it_is_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if the gateway sends requests to a worker whose server has not had its first ones."""
    (facts,) = run_worker(Server(), tmp_path, monkeypatch)
    assert facts["first_requests"] == 3
    assert facts["start_up_s"] > 0


def test_vllm_is_called_by_its_own_key_and_others_by_the_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a worker cannot ask its own server, or shows the server's key to other machines."""
    server = Server()
    (facts,) = run_worker(server, tmp_path, monkeypatch)
    assert server.keys == {facts["own"]}
    assert facts["others"] == "Bearer a-key"
    assert facts["own"] != facts["others"]


def test_times_between_those_measured() -> None:
    """Wrong if a prompt of another length than those measured is thought to take no time, or less than a shorter."""
    time_s = between({64: 0.2, 256: 0.6, 1024: 3.0})
    np.testing.assert_allclose(time_s(np.array([64.0, 160.0, 256.0, 640.0, 1024.0])), [0.2, 0.4, 0.6, 1.8, 3.0])
    np.testing.assert_allclose(time_s(np.array([2048.0])), [6.2])
    np.testing.assert_allclose(time_s(np.array([0.0, 32.0])), [0.2 / 3, 0.4 / 3])
    flat = between({64: 0.3, 256: 0.2})
    assert (np.diff(flat(np.arange(256.0, 5000.0))) >= 0).all()
    np.testing.assert_allclose(between({4: 0.2})(np.array([2.0, 8.0])), [0.1, 0.4])


@pytest.mark.parametrize(
    ("rules", "expected"),
    [("{layerwise_from_tokens: 300}", "300"), ("{transfer: layerwise}", "0"), ("{transfer: serialized}", str(1 << 31))],
)
def test_the_rules_of_a_cluster_reach_its_machines(tmp_path: Path, rules: str, expected: str) -> None:
    """Wrong if `transfer` and `layerwise_from_tokens` mean nothing where vLLM computes."""
    file, around = tmp_path / "cluster.yaml", Surroundings("http://g", tmp_path, "weights", "/run")
    file.write_text(f"model: ./weights\nengine: vllm\npools: [{{role: prefill, count: 1}}]\nrules: {rules}\n")
    words = list(worker_commands(load_served_cluster(file), around)["prefill-0"](9))
    assert words[words.index("--layerwise-from-tokens") + 1] == expected
    file.write_text("model: ./weights\nengine: vllm\npools: [{role: prefill, count: 1}]\n")
    assert "--layerwise-from-tokens" not in worker_commands(load_served_cluster(file), around)["prefill-0"](9)


def test_a_threshold_of_the_command_line(given: list[VllmSettings], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong if what a person sets does not reach the connector, or one that is no length is taken."""
    assert cli.run(["vllm-worker", "--model", "m", "--layerwise-from-tokens", "5"]) == 0
    assert '"threshold_tokens": 5' in " ".join(VllmServer(given[0], "")._command)
    assert cli.run(["vllm-worker", "--model", "m", "--layerwise-from-tokens", "-1"]) == 2
    assert "--layerwise-from-tokens: got -1, allowed is a whole number, 0 or more" in capsys.readouterr().err
