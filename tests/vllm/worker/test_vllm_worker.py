"""The worker process of a vLLM machine, with a server that only pretends."""

import asyncio
import io
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from phasesplit import cli
from phasesplit.engine.server import protocol_app
from phasesplit.errors import SpecError
from phasesplit.io.cluster_file import load_served_cluster
from phasesplit.launcher.listening import Listening
from phasesplit.launcher.local_cluster import Surroundings, worker_commands
from phasesplit.launcher.worker_process import WorkerPlace
from phasesplit.vllm.worker import proxy
from phasesplit.vllm.worker.proxy import VllmProxy
from phasesplit.vllm.worker.state import Leg, OpenLegs, VllmWorkerState, read_figures
from phasesplit.vllm.worker.vllm_server import VllmServer, VllmSettings, command, environment, require_vllm
from phasesplit.vllm.worker.vllm_worker_command import run_vllm_worker
from waiting import eventually

METRICS = """# HELP vllm:num_requests_running Number of requests
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 1.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:generation_tokens_total{engine="0"} 70.0
vllm:prompt_tokens_total{engine="0"} 900.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 899.0
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 1.0
vllm:iteration_tokens_total_count{engine="0"} 40.0
vllm:num_preemptions_total{engine="0"} 0.0
vllm:cache_config_info{block_size="32",num_gpu_blocks="728",kv_cache_layout="None"} 1.0
"""


class FakeVllm:
    """Says token 5 and 6 to everything; a leg that sends KV says what `first` is."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.first = 5
        self.aborted = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.handover: dict[str, Any] | None = None
        self.metrics, self.metrics_status = METRICS, 200
        self.breaks = False
        self.headers: dict[str, str] = {}

    def refusal(self, request: Request) -> Response | None:
        is_known = request.headers.get("authorization") == self.headers["Authorization"]
        return None if is_known else JSONResponse({"error": "Unauthorized"}, 401)

    async def completions(self, request: Request) -> Response:
        if (refused := self.refusal(request)) is not None:
            return refused
        body = await request.json()
        self.seen.append(body)
        if not body.get("stream"):
            choice = {"index": 0, "text": "", "token_ids": [self.first], "finish_reason": "length", "logprobs": None}
            return JSONResponse({"choices": [choice], "kv_transfer_params": self.handover})
        return StreamingResponse(self._chunks(body), media_type="text/event-stream")

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[str]:
        try:
            await self.gate.wait()
            if self.breaks:
                yield 'data: {"choices": [{"index": 0, "token_ids": []}]}\n\n'
                raise ConnectionError
            for place, token in enumerate((5, 6)):
                choice = {"index": 0, "token_ids": [token], "finish_reason": "length" if place else None}
                if body.get("return_token_ids") and not place:
                    choice["prompt_token_ids"] = body["prompt"]
                yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            yield "data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.aborted += 1
            raise

    def app(self) -> Starlette:
        async def metrics(_: Request) -> Response:
            return PlainTextResponse(self.metrics, self.metrics_status)

        async def models(request: Request) -> Response:
            return self.refusal(request) or JSONResponse({"data": [{"max_model_len": 2048}]})

        return Starlette(
            routes=[
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/metrics", metrics),
                Route("/v1/models", models),
            ]
        )


class Side:
    """A worker with a fake vLLM."""

    def __init__(self, name: str, directory: Path, session: aiohttp.ClientSession, connector: str) -> None:
        self.vllm = FakeVllm()
        self.session = session
        settings = VllmSettings(
            name=name, epoch=7, home="mixed", model="m", models=("m",), sockets=str(directory), connector=connector
        )
        self.server = VllmServer(settings, "")
        self.vllm.headers = self.server.headers
        own = self.own_session = aiohttp.ClientSession(headers=self.server.headers)
        self.worker = VllmWorkerState(settings, self.server, own, str(directory / f"{name}.line"))
        self.listening, self._vllm_listening = Listening("127.0.0.1", 0), Listening("127.0.0.1", 0)

    async def start(self) -> None:
        await self._vllm_listening.start(self.vllm.app())
        self.server.url = self._vllm_listening.url
        await self.worker.start(self.listening.url)
        proxy = self.proxy = VllmProxy(self.worker, self.session)
        routes = [
            Route("/v1/completions", proxy, methods=["POST"]), Route("/handover", proxy.handover, methods=["POST"]),
        ]  # fmt: skip
        await self.listening.start(protocol_app(self.worker, routes))

    async def stop(self) -> None:
        self.worker.close()
        await self.own_session.close()
        await self.listening.stop()
        await self._vllm_listening.stop()

    async def post(self, kv: dict[str, Any], **fields: Any) -> tuple[int, str]:
        body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2, "kv_transfer_params": kv} | fields
        async with self.session.post(f"{self.listening.url}/v1/completions", json=body) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def sides(directory: Path, connector: str) -> AsyncIterator[tuple[Side, Side]]:
    async with aiohttp.ClientSession() as session:
        both = tuple(Side(name, directory, session, connector) for name in ("p", "d"))
        for side in both:
            await side.start()
        try:
            yield both[0], both[1]
        finally:
            for side in both:
                await side.stop()


def run(directory: Path, test: Callable[[Side, Side], Awaitable[None]], connector: str = "phasesplit") -> None:
    async def all_of_it() -> None:
        async with sides(directory, connector) as (prefill, decode):
            await test(prefill, decode)

    asyncio.run(all_of_it())


def to(decode: Side) -> dict[str, Any]:
    return {"do_remote_decode": True, "key": "k", "epoch": 7, "address": {"http": decode.listening.url}}


def by() -> dict[str, Any]:
    return {"do_remote_prefill": True, "key": "k", "epoch": 7}


def test_figures_are_read() -> None:
    """Wrong if the gateway gets another queue or fill level than vLLM's."""
    figures = read_figures(METRICS)
    assert (figures.blocks, figures.block_tokens, figures.used_share) == (728, 32, 0.25)
    assert (figures.running, figures.waiting, figures.awaiting_kv) == (2, 3, 1)
    assert (figures.tokens, figures.prompt_tokens, figures.fetched_tokens, figures.steps) == (70, 900, 899, 40)
    assert read_figures("") == type(figures)()


def test_what_is_held_and_pending() -> None:
    """Wrong if KV that waits to leave is forgotten with its answer, or never."""
    legs = OpenLegs()
    prefill, decode = Leg("a", 100, sends=True), Leg("b", 50, awaits=True)
    legs.begin(prefill)
    legs.begin(decode)
    assert legs.pending_tokens() == 101
    prefill.tokens = 1
    legs.end(prefill)
    decode.tokens = 7
    assert legs.held_tokens() == {"a": 100, "b": 57}
    assert (sorted(legs.keys()), len(legs)) == (["a", "b"], 2)
    legs.left("a")
    early = Leg("c", 9, sends=True)
    legs.begin(early)
    legs.left("c")
    early.tokens = 1
    legs.end(early)
    legs.end(decode)
    assert (legs.keys(), len(legs)) == ([], 0)


def test_the_client_gets_the_decode_machines_first_token(tmp_path: Path) -> None:
    """Wrong if the two machines' first tokens, which differ here, break the text in two."""

    async def test(prefill: Side, decode: Side) -> None:
        prefill.vllm.first = 99
        leg, stream = await asyncio.gather(prefill.post(to(decode), max_tokens=1), decode.post(by(), stream=True))
        choice = json.loads(leg[1])["choices"][0]
        assert (choice["token_ids"], choice["finish_reason"]) == ([5], "length")
        assert stream[1].count("token_ids") == 2

    run(tmp_path, test)


def test_a_first_token_waits_for_a_prefill_machine_that_calls_late(tmp_path: Path) -> None:
    """Wrong if a decode machine that ends a short answer first takes its first token with it."""

    async def test(prefill: Side, decode: Side) -> None:
        prefill.vllm.first = 99
        await decode.post(by(), stream=True)
        _, text = await prefill.post(to(decode), max_tokens=1)
        assert json.loads(text)["choices"][0]["token_ids"] == [5]

    run(tmp_path, test)


def test_a_decode_machine_that_says_nothing_does_not_hold_the_answer_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong if a prefill leg waits for ever for a machine that is slow or gone."""
    monkeypatch.setattr(proxy, "_AGREE_S", 0.2)

    async def test(prefill: Side, decode: Side) -> None:
        prefill.vllm.first = 99
        status, text = await asyncio.wait_for(prefill.post(to(decode), max_tokens=1), 5)
        assert (status, json.loads(text)["choices"][0]["token_ids"]) == (200, [99])
        status, text = await prefill.post(to(decode) | {"address": {"http": "http://127.0.0.1:1"}}, max_tokens=1)
        assert (status, json.loads(text)["choices"][0]["token_ids"]) == (200, [99])

    run(tmp_path, test)


def test_nixl_legs_go_one_after_the_other(tmp_path: Path) -> None:
    """Wrong if vLLM's own connector is asked to pull KV before it knows where from."""

    async def test(prefill: Side, decode: Side) -> None:
        prefill.vllm.handover = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 1}
        second = asyncio.create_task(decode.post(by(), stream=True))
        await asyncio.sleep(0.1)
        assert not decode.vllm.seen
        status, _ = await prefill.post(to(decode), max_tokens=1)
        assert status == 200
        assert (await second)[0] == 200
        assert prefill.vllm.seen[0]["kv_transfer_params"]["do_remote_decode"] is True
        assert decode.vllm.seen[0]["kv_transfer_params"] == prefill.vllm.handover
        assert prefill.worker.legs.keys() == []

    run(tmp_path, test, "nixl")


@pytest.mark.parametrize(
    ("kv", "connector", "status"),
    [({"epoch": 6}, "phasesplit", 409), ({"do_remote_decode": True, "key": "k"}, "none", 503), ([], "none", 200)],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, kv: Any, connector: str, status: int) -> None:
    """Wrong if a leg for an earlier start, or one that needs KV moved where none can, is computed all the same."""

    async def test(prefill: Side, _: Side) -> None:
        assert (await prefill.post(kv))[0] == status

    run(tmp_path, test, connector)


@pytest.mark.parametrize(("connector", "kv"), [("phasesplit", {"key": "w"}), ("nixl", None), ("none", None)])
def test_whole_requests_go_to_vllm_as_they_are(tmp_path: Path, connector: str, kv: Any) -> None:
    """Wrong if an unsplit request carries words that only split ones mean, or prompt log-probabilities are refused.

    Our connector gets its key, and reports when its prefill begins.
    """

    async def test(prefill: Side, _: Side) -> None:
        status, text = await prefill.post({"key": "w", "epoch": 7}, stream=True, prompt_logprobs=1, stream_options={})
        assert status == 200
        assert text.startswith("data: {")
        assert text.endswith("data: [DONE]\n\n")
        (seen,) = prefill.vllm.seen
        assert (seen["stream"], "stream_options" in seen) == (False, False)
        assert seen.get("kv_transfer_params") == kv

    run(tmp_path, test, connector)


def test_a_client_that_goes_away_ends_the_request(tmp_path: Path) -> None:
    """Wrong if vLLM goes on with a request that nobody waits for, or an order to drop it is not obeyed."""

    async def test(_: Side, decode: Side) -> None:
        decode.vllm.gate.clear()
        for how in ("closed", "ordered"):
            before = decode.vllm.aborted
            leg = asyncio.create_task(decode.post({"key": how, "epoch": 7}, stream=True))
            while not len(decode.worker.legs):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            if how == "closed":
                leg.cancel()
            else:
                async with decode.session.post(f"{decode.listening.url}/abort", json={"key": how}):
                    pass
            end = asyncio.get_running_loop().time() + 30
            while len(decode.worker.legs) or decode.vllm.aborted == before:
                assert asyncio.get_running_loop().time() < end
                await asyncio.sleep(0.02)
            await asyncio.gather(leg, return_exceptions=True)

    run(tmp_path, test)


def test_facts_are_vllms(tmp_path: Path) -> None:
    """Wrong if the gateway cannot place requests by what a vLLM machine says of itself."""

    async def test(prefill: Side, _: Side) -> None:
        facts = prefill.worker.facts()
        assert (facts["capacity_blocks"], facts["used_blocks"], facts["block_tokens"]) == (728, 182, 32)
        assert (facts["context_tokens"], facts["waiting_prompts"], facts["running"]) == (2048, 2, 2)
        assert facts["address"]["http"] == prefill.listening.url
        assert facts["figures_age_s"] < 5
        assert json.dumps(facts)

    run(tmp_path, test)


def test_figures_that_do_not_come_grow_old(tmp_path: Path) -> None:
    """Wrong if a page of an error is read as a machine that has nothing to do."""

    async def test(prefill: Side, _: Side) -> None:
        prefill.vllm.metrics, prefill.vllm.metrics_status = "no", 500
        since = asyncio.get_running_loop().time()
        while prefill.worker.facts()["figures_age_s"] < 1.0:
            assert asyncio.get_running_loop().time() < since + 30
            await asyncio.sleep(0.05)
        assert prefill.worker.facts()["capacity_blocks"] == 728

    run(tmp_path, test)


def test_a_server_without_figures_is_refused(tmp_path: Path) -> None:
    """Wrong if --disable-log-stats leads to a machine without KV, and a refusal that nobody understands."""

    async def test(prefill: Side, _: Side) -> None:
        prefill.vllm.metrics = "python_info 1.0\n"
        with pytest.raises(SpecError, match="it must run without --disable-log-stats"):
            await prefill.worker.start(prefill.listening.url)
        prefill.vllm.headers = {"Authorization": "Bearer another"}
        with pytest.raises(SpecError, match="vLLM does not say what it serves: ClientResponseError 401"):
            await prefill.worker.start(prefill.listening.url)

    run(tmp_path, test)


def test_long_prompts_get_through(tmp_path: Path) -> None:
    """Wrong if vLLM's first event, which repeats the prompt's ids, is too long a line for its worker."""

    async def test(prefill: Side, _: Side) -> None:
        ids = [100_000 + place for place in range(60_000)]
        status, text = await prefill.post({}, stream=True, prompt=ids, return_token_ids=True)
        events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        choices = [event["choices"][0] for event in events]
        assert (status, [choice["token_ids"] for choice in choices]) == (200, [[5], [6]])
        assert "prompt_token_ids" not in choices[0]

    run(tmp_path, test)


@pytest.mark.parametrize("how", ["too long a line", "not JSON", "broken off"])
def test_an_answer_that_cannot_be_read_is_a_failed_leg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Wrong if the gateway sees a server error of the worker, headers a second time, or an answer that ends well."""

    async def test(prefill: Side, _: Side) -> None:
        body = json.dumps({"prompt": [1], "stream": True}).encode()
        asked, sent = [{"type": "http.request", "body": body}], []

        async def receive() -> Any:
            return asked.pop() if asked else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        if how == "too long a line":
            monkeypatch.setattr("phasesplit.protocol.sse._LINE_BYTES", 10)
            monkeypatch.setattr(prefill.vllm, "_chunks", lambda _: _pieces("data: {and no end"))
        elif how == "not JSON":
            monkeypatch.setattr(prefill.vllm, "_chunks", lambda _: _pieces("data: {broken\n\n"))
        else:
            prefill.vllm.breaks = True
        await prefill.proxy({"type": "http"}, receive, send)
        starts = [message["status"] for message in sent if message["type"] == "http.response.start"]
        is_whole = not sent[-1].get("more_body", False)
        assert (starts, is_whole) == (([200], False) if how == "broken off" else ([502], True))

    run(tmp_path, test)


async def _pieces(*pieces: str) -> AsyncIterator[str]:
    for piece in pieces:
        yield piece


def test_handovers_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if whoever has the cluster's key can fill a worker's memory, or let calls wait there for ever."""
    monkeypatch.setattr(proxy, "_AGREE_S", 0.2)

    async def test(_: Side, decode: Side) -> None:
        async def told(body: Any) -> int:
            async with decode.session.post(f"{decode.listening.url}/handover", data=body) as answer:
                return answer.status

        for body in (b"", b"[]", b"{", b"{}", b'{"key": 3}', b'{"key": "k", "params": [1]}'):
            assert await told(body) == 400, body
        assert await told(io.BytesIO(b" " * (16 << 20) + b"{}")) == 413
        assert await asyncio.wait_for(told(b'{"key": "k", "within_s": 1e9}'), 5) == 504

    run(tmp_path, test)


def test_a_worker_drains_until_its_kv_has_left(tmp_path: Path) -> None:
    """Wrong if a machine that is stopped takes KV with it that another one is still fetching."""

    async def test(prefill: Side, _: Side) -> None:
        leg = Leg("k", 9, sends=True, tokens=1)
        prefill.worker.legs.begin(leg)
        prefill.worker.legs.end(leg)
        assert not await prefill.worker.drained(0.1)
        prefill.worker.report({"kv_left": "k"})
        assert await prefill.worker.drained(5.0)

    run(tmp_path, test)


def test_a_cluster_file_starts_vllm(tmp_path: Path) -> None:
    """Wrong if `engine: vllm` in a cluster file starts something else, or its settings get lost on the way."""
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "model: ./weights\nengine: vllm\npools: [{role: decode, count: 2}]\n"
        "serve: {vllm: {python: ./venv/bin/python, connector: nixl, arguments: [--dtype, float16]}}\n"
    )
    around = Surroundings("http://g", tmp_path / "weights", "weights", "/run")
    words = list(worker_commands(load_served_cluster(file), around)["decode-1"](9))
    assert words[3] == "vllm-worker"
    assert words[words.index("--python") + 1] == str(tmp_path / "venv/bin/python")
    assert words[words.index("--connector") + 1] == "nixl"
    assert words[-5:] == ["--epoch", "9", "--", "--dtype", "float16"]
    file.write_text("engine: llama\npools: [{role: decode, count: 1}]\n")
    with pytest.raises(SpecError, match="engine: got 'llama', allowed is embedded or vllm"):
        load_served_cluster(file)


_PARENT = """
import asyncio, os, signal, sys
from phasesplit.vllm.worker import vllm_server

async def main():
    vllm_server.command = lambda *given: ["/bin/sh", "-c", "sleep 60 & echo $! >&2; wait"]
    settings = vllm_server.VllmSettings(name="n", epoch=1, home="decode", model="m", models=("m",), sockets="/tmp")
    server = vllm_server.VllmServer(settings, "")
    server._is_healthy = lambda session: asyncio.sleep(0.5, True)
    await server.start(None)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    await server.stop()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_no_process_of_vllm_outlives_its_worker(how: str) -> None:
    """Wrong if the processes that vLLM starts go on when its worker ends, even by SIGKILL."""
    ended = subprocess.run(
        [sys.executable, "-c", _PARENT, how], capture_output=True, text=True, timeout=60, check=False
    )
    grandchild = int(ended.stderr.split()[0])
    eventually(lambda: not _is_running(grandchild))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_of_vllm() -> None:
    """Wrong if vLLM is started without the connector, or a person's arguments do not win."""
    given = {"name": "n", "epoch": 3, "home": "decode", "model": "dir", "models": ("m",), "sockets": "/run"}
    words = command(VllmSettings(**given, arguments=("--block-size", "64")), 81, "/run/line")
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["reports"] == "/run/line"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert words[-2:] == ["--block-size", "64"]
    whole = given | {"home": "unsplit", "connector": "none"}
    assert "--kv-transfer-config" not in command(VllmSettings(**whole), 81, "")
    with pytest.raises(SpecError, match="connector of a decode machine: got 'none'"):
        VllmSettings(**given, connector="none")
    with pytest.raises(SpecError, match="connector"):
        VllmSettings(**given, connector="nix")


def test_vllm_has_a_key_of_its_own() -> None:
    """Wrong if other users of the host may ask vLLM itself, or a key in the user's shell locks its own worker out."""
    given = {"name": "n", "epoch": 3, "home": "decode", "model": "dir", "models": ("m",), "sockets": "/run"}
    settings = VllmSettings(**given, environment={"VLLM_API_KEY": "the-user's"}, transfer_host="10.0.0.2")
    found = environment(settings, 81, "ours")
    assert found["VLLM_RPC_BASE_PATH"] == settings.sockets, "killed servers would fill the system's temporary directory"
    assert (found["VLLM_API_KEY"], found["VLLM_NIXL_SIDE_CHANNEL_HOST"]) == ("ours", "10.0.0.2")
    servers = VllmServer(settings, ""), VllmServer(settings, "")
    assert servers[0].headers != servers[1].headers
    with pytest.raises(SpecError, match="--api-key: vLLM gets a key of its worker's"):
        VllmSettings(**given, arguments=("--api-key=x",))


def test_long_names_fit(tmp_path: Path) -> None:
    """Wrong if a worker on a host with a long name cannot make its socket."""
    settings = VllmSettings(
        name="n" * 128, epoch=int(time.time() * 1000), home="decode", model="m", models=("m",), sockets=str(tmp_path),
        python="/nowhere/python",
    )  # fmt: skip
    place = WorkerPlace(host="127.0.0.1", port=0, gateway=None, join_key=None, key=None, drain_s=1.0)
    with pytest.raises(SpecError, match="/nowhere/python: No such file"):
        asyncio.run(run_vllm_worker(settings, place, ready=lambda _: None, say=lambda _: None))


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong if a person without vLLM gets a traceback of it, or a folder called vllm passes for it."""
    (tmp_path / "vllm").mkdir()
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys._base_executable} -S "$@"\n')
    bare.chmod(0o700)
    with pytest.raises(SpecError, match=r"vLLM is not installed there; pip install 'phasesplit\[vllm\]'"):
        require_vllm(str(bare))


def test_the_key_of_a_file_reaches_vllm(tmp_path: Path, given: list[VllmSettings]) -> None:
    """Wrong if machines with --key-file meet without the key, because only the environment's reaches vLLM."""
    (tmp_path / "key").write_text("a-long-key")
    assert cli.run(["vllm-worker", "--model", "m", "--key-file", str(tmp_path / "key")]) == 0
    (settings,) = given
    assert settings.environment["PHASESPLIT_JOIN_KEY"] == "a-long-key"


def test_a_model_that_is_not_there_is_an_error_before_vllm_starts(
    given: list[VllmSettings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong if a wrong path is reported after a minute only, in the midst of a hundred lines of vLLM's."""
    for wrong in (tmp_path / "no", "./no"):
        assert cli.run(["vllm-worker", "--model", str(wrong)]) == 2
        told = capsys.readouterr().err
        assert told.startswith(f"phasesplit: --model: got '{wrong}', allowed is a directory with safetensors")
        assert told.count("\n") == 1
    assert cli.run(["vllm-worker", "--model", str(tmp_path)]) == cli.run(["vllm-worker", "--model", "org/name"]) == 0
    assert [settings.model for settings in given] == [str(tmp_path), "org/name"]
