"""Machines that only pretend: tokens by a rule, KV that arrives when a test says so, failures at every stage."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from doubles.clock import ManualClock
from doubles.codec import END
from phasesplit.domain.machine import blocks_for
from phasesplit.errors import WorkerError
from phasesplit.gateway.clock import Clock
from phasesplit.gateway.request_states import Event
from phasesplit.gateway.worker_client import LegError
from phasesplit.protocol.worker import Chunk, Scored

Rule = Callable[[Sequence[int], int], int]
"""The token at a place of the output, from the prompt's ids and the place."""


def alphabet(prompt: Sequence[int], place: int) -> int:
    """Return letters in order, beginning where the prompt's length says."""
    return ord("a") + (len(prompt) + place) % 26


class FakeWire:
    """What lies between fake machines: the first tokens whose KV has arrived, by key."""

    def __init__(self) -> None:
        self._ends: dict[str, int | WorkerError] = {}
        self._waiting: dict[str, asyncio.Future[int]] = {}

    def awaited(self, key: str) -> asyncio.Future[int]:
        """Return what will hold the first token of a transfer."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        if key in self._ends:
            self.end(key, self._ends[key])
        return future

    def end(self, key: str, with_: int | WorkerError) -> None:
        """End a transfer with its first token, or with what is wrong with it."""
        self._ends[key] = with_
        future = self._waiting.pop(key, None)
        if future is None or future.done():
            return
        if isinstance(with_, int):
            future.set_result(with_)
        else:
            future.set_exception(with_)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class FakeWorker:
    """A machine without a model; satisfies `gateway.worker.WorkerClient`.

    Its requests pass stages: "accept", "prefill", "send" on the prefill side, "accept", "kv", "token 0", "token 1", ...
    on the decode side, "accept", "prefill", "token 0", ... where it serves both phases.

    Attributes:
        name: The machine's name.
        epoch: Counts its starts.
        faults: By stage, the error that every request meets there.
        prefill_s: Seconds of a prefill phase, on `clock`.
        decode_s: Seconds of a token, on `clock`.
        held: KV blocks by key.
        seen: Bodies received, in order.
        given_up: How often a request was called off from outside, by stage.
        aborted: Keys given up by order.
        roles: Pools it was given, in order.
        resumes: It tells an output that goes on from its prompt.
        is_dead: It has been killed.
    """

    def __init__(
        self,
        name: str,
        wire: FakeWire | None = None,
        *,
        rule: Rule = alphabet,
        clock: Clock | None = None,
        epoch: int = 1,
        blocks: int = 1000,
        block_tokens: int = 16,
        context_tokens: int = 4096,
        model: str = "fake",
        layout: Mapping[str, Any] | None = None,
        resumes: bool = True,
    ) -> None:
        self.name, self.epoch, self.resumes = name, epoch, resumes
        self.faults: dict[str, LegError] = {}
        self.prefill_s = self.decode_s = 0.0
        self.held: dict[str, int] = {}
        self.seen: list[dict[str, Any]] = []
        self.given_up: Counter[str] = Counter()
        self.aborted: list[str] = []
        self.roles: list[str] = []
        self._wire = wire or FakeWire()
        self._rule = rule
        self._clock = clock or ManualClock()
        self._blocks, self._block_tokens, self._context, self._model = blocks, block_tokens, context_tokens, model
        self._layout = dict(layout or {"model": "fake"})
        self._gates: dict[str, list[asyncio.Future[None]]] = {}
        self._waits: set[asyncio.Future[Any]] = set()
        self._sends: dict[str, asyncio.Task[None]] = {}
        self._awake = asyncio.Event()
        self._awake.set()
        self._reports: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self.is_dead = False

    def hold(self, stage: str) -> None:
        """Let requests wait at a stage."""
        self._gates.setdefault(stage, [])

    def go(self, stage: str) -> None:
        """Let them go on, those that come later too."""
        for future in self._gates.pop(stage, []):
            if not future.done():
                future.set_result(None)

    def waiting(self, stage: str) -> int:
        """Return how many requests wait at a stage."""
        return sum(not future.done() for future in self._gates.get(stage, []))

    def die(self) -> None:
        """End as a killed process does: every connection breaks, no word of farewell."""
        self.is_dead = True
        for future in list(self._waits):
            if not future.done():
                future.set_exception(ConnectionError(f"{self.name} is gone"))
        self._reports.put_nowait(None)

    def stall(self) -> None:
        """Say nothing any more, as a stopped process does; `wake` ends it."""
        self._awake.clear()

    def wake(self) -> None:
        """Go on after `stall`."""
        self._awake.set()

    def report(self, report: dict[str, Any]) -> None:
        """Send a report, such as facts, to whoever listens; a stalled machine sends none."""
        if self._awake.is_set():
            self._reports.put_nowait(report)

    def snapshot(self, **changed: Any) -> dict[str, Any]:
        """Return the machine's facts, with some of them changed."""
        return {
            "name": self.name, "epoch": self.epoch, "home": "mixed", "model": self._model, "layout": self._layout,
            "address": {"boot_id": "here", "unix": None, "tcp": ["127.0.0.1", 1]}, "capacity_blocks": self._blocks,
            "used_blocks": sum(self.held.values()), "block_tokens": self._block_tokens,
            "context_tokens": self._context, "waiting_prompts": 0, "running": len(self.held), "held": dict(self.held),
            "pending_tokens": 0, "steps": 0, "tokens": 0, "started_s": 0.0, "transfers": {}, "threshold_tokens": 256,
            "version": "fake",
            "resumes": self.resumes,
        } | changed  # fmt: skip

    async def prefill_leg(self, body: Mapping[str, Any]) -> Chunk:
        self.seen.append(dict(body))
        key = str((body.get("kv_transfer_params") or {}).get("key", ""))
        self._take(key, body)
        has_kv_to_send = False
        try:
            token = await self._first_token(key, body)
            has_kv_to_send = "do_remote_decode" in (body.get("kv_transfer_params") or {})
        except ConnectionError as error:
            raise LegError(str(error), Event.PREFILL_LOST) from None
        finally:
            if not has_kv_to_send:
                self._free(key)
        if has_kv_to_send:
            self._sends[key] = asyncio.get_running_loop().create_task(self._send(key, token))
        return self._chunk(body, [token], None)._replace(finish_reason="length", prompt_scored=self._of_prompt(body))

    async def decode_leg(self, body: Mapping[str, Any]) -> AsyncIterator[Chunk]:
        self.seen.append(dict(body))
        key = str((body.get("kv_transfer_params") or {}).get("key", ""))
        self._take(key, body)
        most = body["max_tokens"]
        try:
            if "do_remote_prefill" in (body.get("kv_transfer_params") or {}):
                await self._reach("accept")
                token = await self._unless_dead(self._wire.awaited(key))
                self.report({"kv_ready": key})
                await self._reach("kv")
            else:
                token = await self._first_token(key, body)
            for place in range(most):
                if place:
                    await self._pause(self.decode_s)
                    token = self._at(body, place)
                await self._reach(f"token {place}")
                ends = token == END and not body.get("ignore_eos") and place >= body.get("min_tokens", 0)
                finish = "stop" if ends else "length" if place == most - 1 else None
                chunk = self._chunk(body, [token], finish)
                yield chunk._replace(prompt_scored=self._of_prompt(body)) if not place else chunk
                if finish:
                    return
        except ConnectionError as error:
            raise LegError(str(error), Event.DECODE_LOST) from None
        finally:
            self._free(key)

    async def facts(self) -> dict[str, Any]:
        return self.snapshot()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        await self._awake.wait()
        yield {"facts": self.snapshot()}
        while (report := await self._reports.get()) is not None:
            yield report

    async def abort(self, key: str, why: str) -> None:  # noqa: ARG002
        self.aborted.append(key)
        send = self._sends.pop(key, None)
        if send is not None:
            send.cancel()
        self._free(key)

    async def role(self, epoch: int, role: str) -> None:
        if epoch != self.epoch:
            raise LegError("stale epoch", Event.WORKER_REFUSED, machine_status=409)
        self.roles.append(role)

    async def close(self) -> None:
        for send in self._sends.values():
            send.cancel()

    async def _first_token(self, key: str, body: Mapping[str, Any]) -> int:
        await self._reach("accept")
        self.report({"prefill_started": key})
        await self._pause(self.prefill_s)
        await self._reach("prefill")
        return self._at(body, 0)

    def _at(self, body: Mapping[str, Any], place: int) -> int:
        """Return the token at a place behind the prompt, of which the last ids may be output already."""
        resumed = body.get("resumed_tokens", 0)
        return self._rule(body["prompt"][: len(body["prompt"]) - resumed], resumed + place)

    async def _send(self, key: str, token: int) -> None:
        try:
            await self._reach("send")
            self._wire.end(key, token)
            self.report({"kv_left": key})
        except (LegError, ConnectionError) as error:
            self._wire.end(key, LegError(str(error), Event.TRANSFER_FAILED))
        finally:
            self._free(key)
            self._sends.pop(key, None)

    async def _reach(self, stage: str) -> None:
        if self.is_dead:
            raise ConnectionError(f"{self.name} is gone")
        if stage in self.faults:
            raise self.faults[stage]
        gate = self._gates.get(stage)
        if gate is None:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gate.append(future)
        try:
            await self._unless_dead(future)
        except asyncio.CancelledError:
            self.given_up[stage] += 1
            raise

    async def _pause(self, seconds: float) -> None:
        if seconds > 0:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._clock.call_at(self._clock.now_s() + seconds, partial(_settle, future))
            await self._unless_dead(future)
        else:
            await asyncio.sleep(0)

    async def _unless_dead(self, future: asyncio.Future[Any]) -> Any:
        self._waits.add(future)
        try:
            return await future
        finally:
            self._waits.discard(future)

    def _take(self, key: str, body: Mapping[str, Any]) -> None:
        if key:
            self.held[key] = blocks_for(len(body["prompt"]) + 1, self._block_tokens)

    def _free(self, key: str) -> None:
        self.held.pop(key, None)

    def _chunk(self, body: Mapping[str, Any], tokens: list[int], finish: str | None) -> Chunk:
        count = body.get("logprobs")
        if count is None:
            return Chunk(tuple(tokens), (), finish)
        tops = [tuple(((token + i) % (END + 1), -0.5 - i) for i in range(count)) for token in tokens]
        return Chunk(tuple(tokens), tuple(map(Scored, tokens, [-0.5] * len(tokens), tops)), finish)

    def _of_prompt(self, body: Mapping[str, Any]) -> tuple[Scored, ...]:
        count = body.get("prompt_logprobs")
        if count is None:
            return ()
        return tuple(Scored(token, -0.25 if place else None) for place, token in enumerate(body["prompt"]))
