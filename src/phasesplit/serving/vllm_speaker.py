"""Who answers for a vLLM machine: facts from vLLM's metrics, its connector and the requests that are on their way."""

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from phasesplit._version import __version__
from phasesplit.domain.kv import blocks_for
from phasesplit.domain.link import Link
from phasesplit.engine.server_feed import Feed
from phasesplit.errors import SpecError
from phasesplit.serving.vllm_legs import Legs
from phasesplit.serving.vllm_line import ConnectorLine
from phasesplit.serving.vllm_metrics import Figures, read_figures
from phasesplit.serving.vllm_server import VllmServer, VllmSettings
from phasesplit.serving.vllm_warming import FirstRequests, between
from phasesplit.transfer.calibration import link_text
from phasesplit.transfer.chooser import threshold_tokens
from phasesplit.transfer.layout import KvLayout
from phasesplit.transfer.links import boot_id

_LOOK_S = 0.5
_STALE_S = 30.0
_CALL_S = 10.0
_TOLD = ("prompt_started", "kv_ready", "kv_left", "gone")


class VllmSpeaker:
    """A vLLM worker as its server sees it; satisfies `engine.server.Speaker`.

    Args:
        settings: What the worker is told.
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
        self.legs = Legs()
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.url = ""
        self.start_up_s: float | None = None
        self._hello: dict[str, Any] = {}
        self._threshold_tokens: int | None = None
        self._link = ""
        self._moved: Mapping[str, Any] = {}
        self._missed = 0
        self._context_tokens = self._memory_bytes = 0
        self._figures, self._looked_s = Figures(), time.monotonic()
        self._line = ConnectorLine(line, self._hear)
        self._line.start()
        self._looking: asyncio.Task[None] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return self.settings.models

    @property
    def error(self) -> BaseException | None:
        """See `Speaker`; a server that does not answer counts as ended."""
        if self.server.error is None and time.monotonic() - self._looked_s > _STALE_S:
            self.server.error = TimeoutError(f"vLLM has not answered for {_STALE_S:g} s")
        return self.server.error

    async def start(self, url: str) -> None:
        """Begin to look after a server that is up.

        Args:
            url: Where others reach this worker.

        Raises:
            SpecError: It does not say what it is.
        """
        self.url = url
        try:
            self._context_tokens = orjson.loads(await self._page("/v1/models"))["data"][0]["max_model_len"]
            await self._look()
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            raise SpecError(f"vLLM does not say what it serves: {type(problem).__name__} {problem}") from None
        if not self._figures.blocks:
            raise SpecError("vLLM's /metrics does not tell its KV blocks; it must run without --disable-log-stats")
        self._looking = asyncio.create_task(self._keep_looking())

    async def warm_up(self) -> None:
        """Let the server, once looked after, answer what no client waits for, and settle which KV leaves by layers.

        Raises:
            SpecError: It does not answer as it should.
        """
        first = FirstRequests(
            self.session, self.server.url, self.names[0], self._context_tokens, within_s=self.settings.start_s
        )
        await first.warm_up()
        self._memory_bytes = await asyncio.to_thread(self.server.resident_bytes)
        if "link" not in self._hello:  # a connector greets before its server serves: there is none of ours
            return
        link, tokens = Link(**self._hello["link"]), self._hello["threshold_tokens"]
        if tokens is None:
            layout = KvLayout(**self._hello["layout"])
            tokens = threshold_tokens(layout, between(await first.prompt_times_s()), link)
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
            # Where the other machine's worker calls, see `vllm_meetings`.
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
            "figures_age_s": round(time.monotonic() - self._looked_s, 3),
            "is_draining": self.is_draining,
            "transfers": {
                **self._moved, "missed": self._missed,
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
        """Let the KV go that is kept for a key."""
        self._line.abort(key)
        if self.settings.connector != "phasesplit":
            self.legs.left(key)

    def drain(self) -> None:
        self.is_draining = True
        self.feed.nudge()

    async def drained(self, within_s: float) -> bool:
        """Wait until no request is here; return whether that came in time."""
        end_s = time.monotonic() + within_s
        while len(self.legs) and time.monotonic() < end_s:
            await asyncio.sleep(0.02)
        return not len(self.legs)

    def tell(self, report: dict[str, Any]) -> None:
        """Tell who listens what happens to a key; that its KV has left, once."""
        if "kv_left" not in report or self.legs.left(str(report["kv_left"])):
            self.feed.tell(report)

    def close(self) -> None:
        """End all requests, and whoever listens."""
        for task in tuple(self.tasks.values()):
            task.cancel()
        if self._looking is not None:
            self._looking.cancel()
        self.feed.close()
        self._line.close()

    def _hear(self, report: dict[str, Any]) -> None:
        if "hello" in report:
            self._hello = report["hello"]
        elif "moved" in report:
            self._moved = report["moved"]
        elif "missed" in report:
            self._missed += 1  # vLLM computes the prompt itself; nobody has to act
        elif any(kind in report for kind in _TOLD):
            self.tell(report)

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except (aiohttp.ClientError, TimeoutError, OSError):
                continue  # the age of the figures shows it

    async def _look(self) -> None:
        self._figures = read_figures(await self._page("/metrics"))
        self._looked_s = time.monotonic()

    async def _page(self, path: str) -> str:
        """Return a page of the server, or raise what aiohttp raises."""
        times = aiohttp.ClientTimeout(total=_CALL_S)
        async with self.session.get(f"{self.server.url}{path}", timeout=times, raise_for_status=True) as answer:
            return await answer.text()
