"""`phasesplit vllm-worker`: a vLLM server as a worker of a live cluster."""

import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from phasesplit.cli.options import Home, Join, WorkerName, option
from phasesplit.cli.worker import (
    announce,
    bytes_of,
    demand_key,
    facing,
    number,
    port_of,
    say,
    seconds_of,
    tell,
)
from phasesplit.errors import SpecError
from phasesplit.protocol.roles import JOIN_KEY_VARIABLE


def vllm_worker(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            help="Arguments of vLLM's API server, after --, such as -- --dtype float16.", metavar="[ARG]..."
        ),
    ] = None,
    join: Join = None,
    name: WorkerName = None,
    home: Home = "unsplit",
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
    host: Annotated[
        str | None,
        option("--host", text="Address to listen at; by default the one that faces the gateway.", metavar="ADDRESS"),
    ] = None,
    port: Annotated[int, option("--port", text="Port to listen at; by default any free one.", metavar="N")] = 0,
    key_file: Annotated[
        str | None,
        option(
            "--key-file",
            text=f"File with the cluster's join key; by default the environment variable {JOIN_KEY_VARIABLE}, if set.",
            metavar="FILE",
        ),
    ] = None,
    drain: Annotated[
        str, option("--drain", text="Time that requests have to end in when it is told to stop; 30 s.", metavar="S")
    ] = "30 s",
    epoch: Annotated[int | None, typer.Option("--epoch", hidden=True)] = None,
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None,
    sockets: Annotated[str | None, typer.Option("--sockets", hidden=True)] = None,
) -> int:
    """Start vLLM's API server, and let it join a gateway as a worker; Ctrl-C lets it finish what it has begun.

    Example: phasesplit vllm-worker --join http://10.0.0.5:8080 --home decode --model /models/llama --key-file join.key
    """
    if parent is not None:
        from phasesplit.serving.parent import end_with_parent

        end_with_parent(parent)
    import asyncio
    import sys

    from phasesplit.domain.cluster import Role
    from phasesplit.files.serve_files import only_key, read_keys
    from phasesplit.serving import naming
    from phasesplit.serving.announcing import Gateway
    from phasesplit.serving.vllm_server import VllmSettings, demand_vllm
    from phasesplit.serving.vllm_worker import run_vllm_worker
    from phasesplit.serving.worker import WorkerPlace

    home = str(Role.parse(home, "--home"))
    called = naming.worker_name(name, home)
    if not model:
        raise SpecError("--model: vLLM needs a directory with safetensors or a hub's name")
    if layerwise_from_tokens is not None and layerwise_from_tokens < 0:
        raise SpecError.bad("--layerwise-from-tokens", layerwise_from_tokens, "a whole number, 0 or more")
    if not 1 <= block_tokens <= 4_096 or block_tokens & (block_tokens - 1):
        raise SpecError.bad("--block-tokens", block_tokens, "a power of two, 1 to 4,096")
    port_of(port)
    gateway = Gateway.from_text(join) if join is not None else None
    demand_vllm(python or sys.executable)
    if model.startswith(("/", ".")) and not Path(model).exists():
        raise SpecError.bad("--model", model, "a directory with safetensors that is there, or a hub's name")
    key = only_key(read_keys(key_file, "--key-file"), "--key-file") if key_file else os.environ.get(JOIN_KEY_VARIABLE)
    address = host or facing(gateway)
    demand_key(address, key)
    with tempfile.TemporaryDirectory(prefix="phasesplit-") as scratch:
        settings = VllmSettings(
            name=called,
            epoch=int(time.time() * 1000) if epoch is None else epoch,
            home=home,
            model=model,
            models=(model_name or naming.model_name(model),),
            sockets=sockets or scratch,
            python=python or sys.executable,
            connector=connector,
            arguments=tuple(arguments or ()),
            kv_bytes=bytes_of(kv_memory, "--kv-memory"),
            block_tokens=block_tokens,
            transfer_host=number(address, gateway),
            threshold_tokens=layerwise_from_tokens,
            environment={**os.environ, **({JOIN_KEY_VARIABLE: key} if key else {})},
        )
        place = WorkerPlace(
            host=address, port=port, gateway=gateway, join_key=key, key=key, drain_s=seconds_of(drain, "--drain")
        )
        return asyncio.run(run_vllm_worker(settings, place, ready=announce if parent is not None else tell, say=say))
