"""A vLLM API server as a child process: its command, its start, its end."""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from phasesplit.errors import SpecError
from phasesplit.launcher.supervisor import end_with_parent

_POLL_S, _STOP_S, _CALL_S = 0.5, 5.0, 5.0
CONNECTORS = ("phasesplit", "nixl", "none")
_GUARD = 'read -r _; kill -9 "-$1" 2>/dev/null'
"""A shell that waits for the end of its input, which is ours, and then ends a process group: vLLM's server ends with
its parent, but the processes that it has started do not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """The settings of a vLLM worker.

    Attributes:
        name: Its name, unique in the cluster.
        epoch: Which start of it this is.
        home: The role it comes with: `prefill`, `decode`, `mixed` or `unsplit`.
        model: What vLLM is to load: a directory or a hub's name.
        models: Names under which clients ask for it.
        python: Interpreter that has vLLM, and phasesplit, installed.
        connector: How KV moves: `phasesplit` (layer by layer), `nixl` (vLLM's own, pulled when the prefill phase is
            over) or `none` (unsplit only).
        arguments: Further arguments of vLLM's API server; they go last, so they win.
        kv_bytes: Memory for KV.
        block_tokens: Tokens of a KV block.
        sockets: Directory of the Unix sockets over which workers of this host share memory.
        transfer_host: Address, as a number, at which workers of other hosts reach its KV.
        threshold_tokens: The shortest prompt whose KV leaves layer by layer, >= 0; None: follows from measurements.
        start_s: Seconds that vLLM may take to come up, and then to answer each of its first requests.
        environment: What vLLM finds in its environment, the cluster's join key among it.
    """

    name: str
    epoch: int
    home: str
    model: str
    models: tuple[str, ...]
    sockets: str
    python: str = sys.executable
    connector: str = "phasesplit"
    arguments: tuple[str, ...] = ()
    kv_bytes: int = 1 << 30
    block_tokens: int = 32
    transfer_host: str = "127.0.0.1"
    threshold_tokens: int | None = None
    start_s: float = 600.0
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def __post_init__(self) -> None:
        if self.connector not in CONNECTORS:
            raise SpecError.unknown("connector", self.connector, CONNECTORS)
        if self.connector == "none" and self.home in ("prefill", "decode"):
            raise SpecError.bad(f"connector of a {self.home} machine", "none", "phasesplit or nixl")
        if any(part.partition("=")[0] == "--api-key" for part in self.arguments):
            raise SpecError("--api-key: vLLM gets a key of its worker's; keys of the cluster are the gateway's")


def require_vllm(python: str) -> None:
    """Check that an interpreter has vLLM, without importing it.

    Args:
        python: The interpreter.

    Raises:
        SpecError: It has none, or cannot be run.
    """
    check = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        # -P: a folder of that name where the worker is started is not vLLM.
        done = subprocess.run([python, "-P", "-c", check], stdin=subprocess.DEVNULL, capture_output=True)  # noqa: S603 - the user names the interpreter
    except OSError as problem:
        raise SpecError(f"{python}: {problem.strerror or problem}") from None
    if done.returncode:
        raise SpecError(f"{python}: vLLM is not installed there; pip install 'phasesplit[vllm]'")


def command(settings: VllmSettings, port: int, line: str) -> list[str]:
    """Return program and arguments of the API server.

    Args:
        settings: The worker's.
        port: Where the server listens, on this host alone.
        line: Path of the socket that its connector reports to.
    """
    transfer = _transfer(settings, line)
    return [
        settings.python, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model,
        "--served-model-name", *settings.models, "--host", "127.0.0.1", "--port", str(port),
        "--block-size", str(settings.block_tokens), "--kv-cache-memory-bytes", str(settings.kv_bytes),
        *(["--kv-transfer-config", json.dumps(transfer)] if transfer else []), *settings.arguments,
    ]  # fmt: skip


def _transfer(settings: VllmSettings, line: str) -> dict[str, Any]:
    shared = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if settings.connector == "none":
        return {}
    if settings.connector == "nixl":
        # The device that vLLM computes on decides where NIXL's buffers are; a CPU's are named.
        return {"kv_connector": "NixlConnector", **shared}
    extra = {
        "machine": settings.name, "epoch": settings.epoch, "sockets": settings.sockets,
        "transfer_host": settings.transfer_host, "reports": line, "threshold_tokens": settings.threshold_tokens,
    }  # fmt: skip
    return {
        "kv_connector": "PhaseSplitConnector",
        "kv_connector_module_path": "phasesplit.vllm.connector",
        "kv_connector_extra_config": extra,
        **shared,
    }


def environment(settings: VllmSettings, side_port: int, key: str) -> dict[str, str]:
    """Return the server's environment; what is set already stays, except the key.

    Args:
        settings: The worker's.
        side_port: A free port, for NIXL's handshakes.
        key: The key that calls must have.
    """
    usual = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each server would bind to the same cores
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.transfer_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_RPC_BASE_PATH": settings.sockets,  # a server that is killed leaves its sockets behind
    }
    return usual | dict(settings.environment) | {"VLLM_API_KEY": key}


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """The process.

    Args:
        settings: The worker's.
        line: Path of the socket that its connector reports to.

    Attributes:
        url: Where it listens.
        headers: What calls to it must have: other users of this host reach it too.
        error: Why it no longer serves; None while it does.
    """

    def __init__(self, settings: VllmSettings, line: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._key = secrets.token_urlsafe()
        self.headers = {"Authorization": f"Bearer {self._key}"}
        self.error: Exception | None = None
        self._settings = settings
        self._command = command(settings, port, line)
        self._process: asyncio.subprocess.Process | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Start it, and wait until it serves.

        Raises:
            SpecError: It ends, or takes too long; its log says why.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),  # our standard output is for the announcement
                env=environment(self._settings, free_port(self._settings.transfer_host), self._key),
                process_group=0,
                preexec_fn=partial(end_with_parent, os.getpid()),
            )
            self._guard = await asyncio.create_subprocess_exec(
                "/bin/sh", "-c", _GUARD, "sh", str(self._process.pid), stdin=asyncio.subprocess.PIPE, process_group=0
            )
        except OSError as problem:
            raise SpecError(f"{self._settings.python}: {problem.strerror or problem}") from None
        self._watching = asyncio.create_task(self._watch(self._process))
        until_s = asyncio.get_running_loop().time() + self._settings.start_s
        while not await self._is_healthy(session):
            if self.error is not None:
                raise SpecError(f"vLLM does not start: {self.error}; its log is above")
            if asyncio.get_running_loop().time() > until_s:
                raise SpecError(f"vLLM does not serve within {self._settings.start_s:g} s")
            await asyncio.sleep(_POLL_S)

    def resident_bytes(self) -> int:
        """Return the memory of its processes that is not of files, 0 if the system does not say."""
        group, pages = "" if self._process is None else str(self._process.pid), 0
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if (place / "stat").read_text().rpartition(")")[2].split()[2] == group:
                    _, resident, shared, *_ = (place / "statm").read_text().split()
                    pages += int(resident) - int(shared)
        return pages * os.sysconf("SC_PAGE_SIZE")

    async def stop(self) -> None:
        """End it and the processes that it has started."""
        process, guard = self._process, self._guard
        if process is None or guard is None or guard.stdin is None:
            return
        if process.returncode is None:
            process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _STOP_S)
        guard.stdin.close()
        await guard.wait()
        await process.wait()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self.error = ChildProcessError(f"vLLM has ended with code {code}")

    async def _is_healthy(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=_CALL_S)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
