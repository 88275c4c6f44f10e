"""The state of a vLLM worker: facts for the gateway, from vLLM's metrics, its connector and the live requests.

1. `VllmWorkerState.start`: the server is up; its metrics are read from now on, twice a second.
2. `VllmWorkerState.warm_up`: the server answers its first requests, which no client waits for. Their prefill times and
   the connector's link settle from which length on KV leaves layer by layer.
3. While it serves, `proxy` begins and ends a `Leg` for each request, and the connector reports what happens to keys.
   Both become events and facts for the gateway.
4. `VllmWorkerState.close`: all requests end, and with the connector's socket the connector's process.
"""

import asyncio
import contextlib
import json
import logging
import os
import random
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from phasesplit._version import __version__
from phasesplit.domain.machine import Link, blocks_for
from phasesplit.engine.server_worker import Feed
from phasesplit.errors import SpecError
from phasesplit.kv_transfer.calibration import link_text
from phasesplit.kv_transfer.chooser import Floats, threshold_tokens
from phasesplit.kv_transfer.layout import KvLayout
from phasesplit.kv_transfer.outgoing import boot_id
from phasesplit.protocol.prometheus_text import read_samples
from phasesplit.vllm.worker.vllm_server import VllmServer, VllmSettings


@dataclass(slots=True)
class Leg:
    """One request.

    Attributes:
        key: The gateway's name for it; empty if it has none.
        prompt_tokens: Tokens of its prompt.
        sends: Its KV leaves when its prompt is computed, and has not left.
        awaits: Its KV comes from another machine.
        tokens: Output tokens so far.
        answers: Its answer has begun.
    """

    key: str
    prompt_tokens: int
    sends: bool = False
    awaits: bool = False
    tokens: int = 0
    answers: bool = False


class OpenLegs:
    """All live requests, and KV that is kept although its request has been answered."""

    def __init__(self) -> None:
        self._legs: dict[int, Leg] = {}
        self._kept: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._legs) + len(self._kept)

    def begin(self, leg: Leg) -> None:
        """Record a request."""
        self._legs[id(leg)] = leg

    def end(self, leg: Leg) -> None:
        """Record the end of a request; KV of an answered one that leaves stays until `left`."""
        self._legs.pop(id(leg), None)
        if leg.sends and leg.tokens:
            self._kept[leg.key] = leg.prompt_tokens

    def left(self, key: str) -> bool:
        """Record that the KV of a key is gone, maybe before its request is answered; return whether it was here."""
        was_here = self._kept.pop(key, None) is not None
        for leg in self._legs.values():
            if leg.key == key and leg.sends:
                leg.sends, was_here = False, True
        return was_here

    def keys(self) -> list[str]:
        """Return the gateway's names of all that is here."""
        return [*{leg.key for leg in self._legs.values() if leg.key} | set(self._kept)]

    def held_tokens(self) -> dict[str, int]:
        """Return the tokens whose KV each key holds here, at most."""
        return self._kept | {leg.key: leg.prompt_tokens + leg.tokens for leg in self._legs.values() if leg.key}

    def pending_tokens(self) -> int:
        """Return the prompt tokens still to be computed here, and one for each decode."""
        return sum(1 if leg.tokens or leg.awaits else leg.prompt_tokens for leg in self._legs.values())


_PREFIX = "vllm:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What vLLM reports at /metrics.

    Attributes:
        blocks: KV blocks that it has.
        block_tokens: Tokens of a block.
        used_share: Share of the blocks that is in use, 0 to 1.
        running: Requests in the batch.
        waiting: Requests that wait, to be scheduled or for KV.
        awaiting_kv: Those that wait for KV of another machine.
        tokens: Output tokens so far.
        prompt_tokens: Prompt tokens so far, however they came.
        fetched_tokens: Those whose KV came from another machine.
        steps: Iterations so far.
        preemptions: Requests that lost their KV because memory was full.
    """

    blocks: int = 0
    block_tokens: int = 0
    used_share: float = 0.0
    running: int = 0
    waiting: int = 0
    awaiting_kv: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    fetched_tokens: int = 0
    steps: int = 0
    preemptions: int = 0


def read_figures(text: str) -> Figures:
    """Return the figures in Prometheus text; a missing one is 0.

    Args:
        text: The body of GET /metrics.
    """
    sums: dict[str, float] = {}
    info: Mapping[str, str] = {}
    for full_name, labels, value in read_samples(text):
        if not full_name.startswith(_PREFIX):
            continue
        name = full_name.removeprefix(_PREFIX)
        if name == "cache_config_info":
            info = labels
        for full in (name, f"{name}.{labels.get('stage', '')}", f"{name}.{labels.get('source', '')}"):
            sums[full] = sums.get(full, 0.0) + value

    def whole(name: str) -> int:
        return round(sums.get(name, 0.0))

    return Figures(
        blocks=_number(info.get("num_gpu_blocks")),
        block_tokens=_number(info.get("block_size")),
        used_share=sums.get("kv_cache_usage_perc", 0.0),
        running=whole("num_requests_running"),
        waiting=whole("num_requests_waiting"),
        awaiting_kv=whole("num_requests_kv_fetch_by_stage.in_progress"),
        tokens=whole("generation_tokens_total"),
        prompt_tokens=whole("prompt_tokens_total"),
        fetched_tokens=whole("prompt_tokens_by_source_total.external_kv_transfer"),
        steps=whole("iteration_tokens_total_count"),
        preemptions=whole("num_preemptions_total"),
    )


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0


_FIRST_TOKENS, _FIRST_OUTPUT_TOKENS = 256, 4
_SHORTEST_TOKENS, _STEP = 64, 4
_ENOUGH_S = 1.0
_TOKENS = range(1, 128)
"""Ids that every vocabulary has. Drawn from them, no block of a prompt comes twice, so prefix caches do not help."""


class FirstRequests:
    """The requests that a server answers before clients' requests.

    Args:
        session: For calls.
        url: The server's.
        model: Name that it serves.
        context_tokens: Tokens of its longest request, >= 2.
        within_s: Longest time of an answer.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, context_tokens: int, *, within_s: float
    ) -> None:
        self._session, self._url, self._model, self._context_tokens = session, url, model, context_tokens
        self._timeout = aiohttp.ClientTimeout(total=within_s)
        self._random = random.Random(0)  # noqa: S311 - no secret

    async def warm_up(self) -> None:
        """Let the server load, and compile, what it leaves to the first requests of a kind.

        Raises:
            SpecError: It does not answer as it should.
        """
        outputs = min(_FIRST_OUTPUT_TOKENS, self._context_tokens - 1)
        tokens = min(_FIRST_TOKENS, self._context_tokens - outputs)
        await self._ask(tokens, max_tokens=outputs, temperature=1.0, top_p=1.0, top_k=0, ignore_eos=True)
        await self._ask(1, max_tokens=1, temperature=1.0, top_p=0.9, top_k=50)
        # The server's arguments may forbid log-probabilities.
        await self._ask(1, max_tokens=1, temperature=0.0, logprobs=1, or_refuses=True)

    async def prefill_times_s(self) -> Mapping[int, float]:
        """Return the shortest time of prompts of some lengths, in tokens: of two, and of longer ones in about a second.

        The time of the whole request counts, with the milliseconds that the server takes around prefill.

        Raises:
            SpecError: It does not answer as it should.
        """
        best: dict[int, float] = {}
        end_s, most, tokens = time.monotonic() + _ENOUGH_S, self._context_tokens - 1, _SHORTEST_TOKENS
        if most < _STEP * tokens:
            tokens = max(1, most // _STEP)
        while tokens <= most and (len(best) < 2 or time.monotonic() + _STEP * best[tokens // _STEP] < end_s):
            best[tokens] = await self._prefill_s(tokens)
            tokens *= _STEP
        for tokens, took_s in tuple(best.items()):
            if time.monotonic() + took_s < end_s:
                best[tokens] = min(took_s, await self._prefill_s(tokens))
        return best

    async def _prefill_s(self, tokens: int) -> float:
        since_s = time.perf_counter()
        await self._ask(tokens, max_tokens=1, temperature=0.0)
        return time.perf_counter() - since_s

    async def _ask(self, tokens: int, *, or_refuses: bool = False, **fields: Any) -> None:
        """Send a prompt that the server has not seen, and wait for its end."""
        prompt = self._random.choices(_TOKENS, k=tokens)
        body = {"model": self._model, "prompt": prompt, **fields}
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body, timeout=self._timeout) as answer:
                text, status = await answer.text(), answer.status
        except TimeoutError:
            raise SpecError(f"vLLM does not answer its first request within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise SpecError(f"vLLM does not answer its first request: {problem}; its log is above") from None
        if status != 200 and not (or_refuses and status == 400):
            raise SpecError(f"vLLM does not serve a prompt of {tokens} tokens: {status} {' '.join(text.split())[:300]}")


def between(times_s: Mapping[int, float]) -> Callable[[Floats], Floats]:
    """Return the time of prefill by prompt tokens: straight lines through what was measured.

    Beyond the longest prompt measured the last line continues: attention, which grows faster, would make layer-wise
    transfers pay even earlier. Below the shortest prompt the first line continues, down to 0.

    Args:
        times_s: Prompt tokens, >= 1 and growing, to time; at least one.
    """
    tokens, times = np.array([*times_s], np.float64), np.array([*times_s.values()], np.float64)
    slopes = np.maximum(0.0, np.diff(times) / np.diff(tokens)) if len(tokens) > 1 else times / tokens
    first_s = max(0.0, times[0] - slopes[0] * tokens[0])

    def prefill_time_s(prompt_tokens: Floats) -> Floats:
        within_s: Floats = np.interp(prompt_tokens, [0.0, *tokens], [first_s, *times])
        return within_s + np.asarray(slopes[-1] * np.maximum(0.0, prompt_tokens - tokens[-1]), np.float64)

    return prefill_time_s


_LONGEST_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class ConnectorLine:
    """The worker's end of the socket to vLLM's connector; `phasesplit.vllm.reports` is the other end.

    Args:
        path: Of the socket; must not exist.
        on_report: Called with each report.
    """

    def __init__(self, path: str, on_report: Callable[[dict[str, Any]], None]) -> None:
        self._path, self._on_report = path, on_report
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        os.chmod(path, 0o600)
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._line: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Wait for the connector, and read what it reports until it ends."""
        self._task = asyncio.create_task(self._read())

    def abort(self, key: str) -> None:
        """Let the connector drop what it has of a key; without a connector nothing happens."""
        self._order({"abort": key})

    def set_threshold(self, tokens: int) -> None:
        """Let KV of prompts that begin from now on leave layer by layer if they have so many tokens, >= 0."""
        self._order({"threshold_tokens": tokens})

    def close(self) -> None:
        """Close the socket: the connector's process ends then."""
        if self._task is not None:
            self._task.cancel()
        for end in (self._line, self._listener):
            if end is not None:
                end.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def _order(self, order: dict[str, Any]) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(json.dumps(order).encode())

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        self._line, _ = await loop.sock_accept(self._listener)
        while text := await loop.sock_recv(self._line, _LONGEST_BYTES):
            try:
                report = json.loads(text)
            except ValueError:
                _log.error("a report of the connector is not JSON: %d bytes, %s", len(text), text[:80])
                continue
            self._on_report(report)


_POLL_S = 0.5
_STALE_S = 30.0
_CALL_S = 10.0
_FORWARDED = ("prefill_started", "kv_ready", "kv_left", "gone")


class VllmWorkerState:
    """What a vLLM worker's server needs to know; satisfies `engine.server.WorkerState`.

    Args:
        settings: The worker's.
        server: Its vLLM.
        session: For calls to it.
        line: Path of the socket that its connector reports to.

    Attributes:
        start_up_s: Seconds from the start of this process until it served, None before.
    """

    def __init__(self, settings: VllmSettings, server: VllmServer, session: aiohttp.ClientSession, line: str) -> None:
        self.settings, self.server, self.session = settings, server, session
        self.epoch, self.role, self.started_s = settings.epoch, settings.home, time.time()
        self.is_draining = False
        self.feed = Feed(self.facts)
        self.legs = OpenLegs()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.url = ""
        self.start_up_s: float | None = None
        self._hello: dict[str, Any] = {}
        self._threshold_tokens: int | None = None
        self._link = ""
        self._transfers: Mapping[str, Any] = {}
        self._missed = 0
        self._context_tokens = self._memory_bytes = 0
        self._figures, self._read_s = Figures(), time.monotonic()
        self._line = ConnectorLine(line, self._on_report)
        self._line.start()
        self._watching: asyncio.Task[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.settings.models

    @property
    def error(self) -> BaseException | None:
        """See `WorkerState`; a server that does not answer counts as ended."""
        if self.server.error is None and time.monotonic() - self._read_s > _STALE_S:
            self.server.error = TimeoutError(f"vLLM has not answered for {_STALE_S:g} s")
        return self.server.error

    async def start(self, url: str) -> None:
        """Begin to watch a server that is up.

        Args:
            url: Where others reach this worker.

        Raises:
            SpecError: It does not answer what it serves.
        """
        self.url = url
        try:
            self._context_tokens = orjson.loads(await self._page("/v1/models"))["data"][0]["max_model_len"]
            await self._read_metrics()
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            raise SpecError(f"vLLM does not say what it serves: {type(problem).__name__} {problem}") from None
        if not self._figures.blocks:
            raise SpecError("vLLM's /metrics has no count of KV blocks; it must run without --disable-log-stats")
        self._watching = asyncio.create_task(self._watch_metrics())

    async def warm_up(self) -> None:
        """Let the server, once watched, answer its first requests, and settle which KV leaves layer by layer.

        Raises:
            SpecError: It does not answer as it should.
        """
        first = FirstRequests(
            self.session, self.server.url, self.names[0], self._context_tokens, within_s=self.settings.start_s
        )
        await first.warm_up()
        self._memory_bytes = await asyncio.to_thread(self.server.resident_bytes)
        if "link" not in self._hello:  # ours says hello before its server serves
            return
        link, tokens = Link(**self._hello["link"]), self._hello["threshold_tokens"]
        if tokens is None:
            layout = KvLayout(**self._hello["layout"])
            tokens = threshold_tokens(layout, between(await first.prefill_times_s()), link)
            self._line.set_threshold(tokens)
        self._threshold_tokens, self._link = tokens, link_text(link, tokens)

    def facts(self) -> dict[str, Any]:
        figures, legs = self._figures, self.legs
        size = figures.block_tokens or 1
        return {
            "name": self.settings.name,
            "epoch": self.epoch,
            "home": self.settings.home,
            "role": self.role,
            "engine": f"vllm, connector {self.settings.connector}",
            "model": self.names[0],
            "models": list(self.names),
            "layout": self._hello.get(
                "layout",
                {"engine": "vllm", "connector": self.settings.connector, "block_tokens": figures.block_tokens},
            ),
            # Where the other machine's worker calls, see `proxy`.
            "address": {"boot_id": boot_id(), **self._hello.get("address", {}), "http": self.url},
            "threshold_tokens": self._threshold_tokens,
            "measured_link": self._hello.get("link"),
            "link": self._link,
            "block_tokens": figures.block_tokens,
            "context_tokens": self._context_tokens,
            "capacity_blocks": figures.blocks,
            "used_blocks": round(figures.used_share * figures.blocks),
            "waiting_prompts": max(0, figures.waiting - figures.awaiting_kv),
            "running": figures.running,
            "keys": legs.keys(),
            "held": {key: blocks_for(tokens, size) for key, tokens in legs.held_tokens().items()},
            "pending_tokens": legs.pending_tokens(),
            "steps": figures.steps,
            "tokens": figures.tokens,
            "evictions": figures.preemptions,
            "figures_age_s": round(time.monotonic() - self._read_s, 3),
            "is_draining": self.is_draining,
            "transfers": {
                **self._transfers, "missed": self._missed,
                "prompt_tokens": figures.prompt_tokens, "fetched_tokens": figures.fetched_tokens,
            },
            "started_s": self.started_s,
            "start_up_s": self.start_up_s,
            "memory_bytes": self._memory_bytes,
            "pid": os.getpid(),
            "version": __version__,
        }  # fmt: skip

    def abort(self, key: str, why: str) -> None:
        del why
        task = self.tasks.get(key)
        if task is not None:
            task.cancel()
        self.drop(key)

    def drop(self, key: str) -> None:
        """Drop the KV that is kept for a key."""
        self._line.abort(key)
        if self.settings.connector != "phasesplit":
            self.legs.left(key)

    def drain(self) -> None:
        self.is_draining = True
        self.feed.nudge()

    async def drained(self, within_s: float) -> bool:
        """Wait until no request is live; return whether that came in time."""
        end_s = time.monotonic() + within_s
        while len(self.legs) and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        return not len(self.legs)

    def report(self, event: dict[str, Any]) -> None:
        """Send the gateway what happens to a key; that its KV has left, once."""
        if "kv_left" not in event or self.legs.left(str(event["kv_left"])):
            self.feed.send(event)

    def close(self) -> None:
        """End all requests and all listeners."""
        for task in tuple(self.tasks.values()):
            task.cancel()
        if self._watching is not None:
            self._watching.cancel()
        self.feed.close()
        self._line.close()

    def _on_report(self, report: dict[str, Any]) -> None:
        if "hello" in report:
            self._hello = report["hello"]
        elif "transfers" in report:
            self._transfers = report["transfers"]
        elif "missed" in report:
            self._missed += 1  # vLLM computes the prompt itself
        elif any(kind in report for kind in _FORWARDED):
            self.report(report)

    async def _watch_metrics(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._read_metrics()
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue  # the age of the figures shows it

    async def _read_metrics(self) -> None:
        self._figures = read_figures(await self._page("/metrics"))
        self._read_s = time.monotonic()

    async def _page(self, path: str) -> str:
        """Return a page of the server, or raise what aiohttp raises."""
        times = aiohttp.ClientTimeout(total=_CALL_S)
        async with self.session.get(f"{self.server.url}{path}", timeout=times, raise_for_status=True) as answer:
            return await answer.text()
