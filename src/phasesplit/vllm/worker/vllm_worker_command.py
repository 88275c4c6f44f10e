"""`phasesplit vllm-worker`: start vLLM's API server, let it join a gateway as a worker, and end with it."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from starlette.routing import Route

from phasesplit.console.options import option
from phasesplit.engine.server import protocol_app
from phasesplit.errors import SpecError
from phasesplit.launcher.embedded import start_up_s
from phasesplit.launcher.listening import Listening
from phasesplit.launcher.worker_command import (
    JoinOptions,
    ListenOptions,
    SupervisedOptions,
    announce,
    bytes_of,
    number,
    say,
    say_ready,
    worker_place,
)
from phasesplit.launcher.worker_process import WorkerPlace, live
from phasesplit.protocol.roles import JOIN_KEY_VARIABLE
from phasesplit.vllm.worker.proxy import VllmProxy
from phasesplit.vllm.worker.state import VllmWorkerState
from phasesplit.vllm.worker.vllm_server import VllmServer, VllmSettings


def vllm_worker(
    *,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Arguments of vLLM's API server, after --, such as -- --dtype float16.", metavar="[ARG]..."
        ),
    ] = None,
    joins: JoinOptions,
    model: Annotated[
        str, option("--model", text="Directory with safetensors, or a hub's name, as vLLM takes it.", metavar="MODEL")
    ] = "",
    model_name: Annotated[
        str | None,
        option("--model-name", text="Name that clients ask for; by default the model's own.", metavar="NAME"),
    ] = None,
    python: Annotated[
        str | None,
        option(
            "--python", text="Interpreter with vLLM and phasesplit; by default the one that runs this.", metavar="P"
        ),
    ] = None,
    connector: Annotated[
        str,
        option(
            "--connector",
            text="How KV moves: phasesplit (layer by layer), nixl (vLLM's own, when prefill is over), none.",
            metavar="phasesplit|nixl|none",
        ),
    ] = "phasesplit",
    kv_memory: Annotated[str, option("--kv-memory", text="Memory for KV; by default 1GB.", metavar="BYTES")] = "1GB",
    block_tokens: Annotated[
        int, option("--block-tokens", text="Tokens of a KV block: the gateway's, 32.", metavar="N")
    ] = 32,
    layerwise_from_tokens: Annotated[
        int | None,
        option(
            "--layerwise-from-tokens",
            text="Shortest prompt whose KV leaves layer by layer; by default it follows from measurements.",
            metavar="N",
        ),
    ] = None,
    listens: ListenOptions,
    supervised: SupervisedOptions,
) -> int:
    """Start vLLM's API server, and let it join a gateway as a worker; Ctrl-C lets it finish what it has begun.

    Example: phasesplit vllm-worker --join http://10.0.0.5:8080 --home decode --model /models/llama --key-file join.key
    """
    supervised.end_with_parent()
    import asyncio
    import sys

    from phasesplit.launcher import announcing
    from phasesplit.vllm.worker.vllm_server import VllmSettings, require_vllm

    home = joins.role()
    called = announcing.worker_name(joins.name, home)
    if not model:
        raise SpecError("--model: vLLM needs a directory with safetensors or a hub's name")
    if layerwise_from_tokens is not None and layerwise_from_tokens < 0:
        raise SpecError.bad("--layerwise-from-tokens", layerwise_from_tokens, "a whole number, 0 or more")
    if not 1 <= block_tokens <= 4_096 or block_tokens & (block_tokens - 1):
        raise SpecError.bad("--block-tokens", block_tokens, "a power of two, 1 to 4,096")
    place = worker_place(joins, listens)
    require_vllm(python or sys.executable)
    if model.startswith(("/", ".")) and not Path(model).exists():
        raise SpecError.bad("--model", model, "a directory with safetensors that is there, or a hub's name")
    with tempfile.TemporaryDirectory(prefix="phasesplit-") as scratch:
        settings = VllmSettings(
            name=called,
            epoch=int(time.time() * 1000) if supervised.epoch is None else supervised.epoch,
            home=home,
            model=model,
            models=(model_name or announcing.model_name(model),),
            sockets=supervised.sockets or scratch,
            python=python or sys.executable,
            connector=connector,
            arguments=tuple(arguments or ()),
            kv_bytes=bytes_of(kv_memory, "--kv-memory"),
            block_tokens=block_tokens,
            transfer_host=number(place.host, place.gateway),
            threshold_tokens=layerwise_from_tokens,
            environment={**os.environ, **({JOIN_KEY_VARIABLE: place.key} if place.key else {})},
        )
        return asyncio.run(
            run_vllm_worker(settings, place, ready=say_ready if supervised.parent is None else announce, say=say)
        )


async def run_vllm_worker(
    settings: VllmSettings,
    place: WorkerPlace,
    *,
    ready: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> int:
    """Run a vLLM worker until it is stopped, and return the process's exit code; see `worker.run_worker`.

    Args:
        settings: The worker's.
        place: Where it listens and which gateway it joins.
        ready: Called with `url` and its facts once it can be reached.
        say: Called with each line for the log.

    Raises:
        SpecError: vLLM does not start or does not serve, or the address cannot be had.
    """
    line = os.path.join(settings.sockets, f"{os.getpid()}.{settings.epoch}.line")
    server = VllmServer(settings, line)
    headers = {"Authorization": f"Bearer {place.key}"} if place.key else {}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=server.headers) as session,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as peers,
    ):
        worker = VllmWorkerState(settings, server, session, line)
        try:
            await server.start(session)
            listening = Listening(place.host, place.port)
            await worker.start(place.url(listening))
            await worker.warm_up()
            proxy = VllmProxy(worker, peers)
            computing = [
                Route("/v1/completions", proxy, methods=["POST"]),
                Route("/handover", proxy.handover, methods=["POST"]),
            ]
            await listening.start(protocol_app(worker, computing, key=place.key))
            worker.start_up_s = round(start_up_s(), 3)
            return await live(worker, place, listening, ready=ready, say=say)
        finally:
            worker.close()
            await server.stop()
