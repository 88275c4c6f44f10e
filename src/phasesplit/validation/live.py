"""A live cluster for the length of a measurement: started, warmed up, measured, and ended in every case.

`pool_moves` counts the moves of machines between pools in the decisions that the gateway wrote.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from phasesplit.domain.request import Trace
from phasesplit.io.cluster_file import ServedCluster
from phasesplit.launcher.local_cluster import Watchers, run_cluster
from phasesplit.launcher.ready import Ready
from phasesplit.launcher.supervisor import Log
from phasesplit.replay.client import Client, Prompts, ReplayResult
from phasesplit.scheduler.ledger import MIXED, PREFILL
from phasesplit.validation.core_shares import CorePlan, core_wait_s, cpu_s, host_cpu_s, pinned

KINDS = ("prefill_to_mixed", "decode_to_mixed", "returns", "repurposed")
"""As a simulation counts them."""


def pool_moves(decisions: Iterable[Mapping[str, Any]], first: int = 0) -> dict[str, int]:
    """Return how often machines moved, by kind.

    Args:
        decisions: The lines of a decision log from its first on, as JSON has them.
        first: The first line whose moves count.
    """
    counts = dict.fromkeys(KINDS, 0)
    places: dict[int, tuple[int, int]] = {}
    for number, line in enumerate(decisions):
        if line.get("call") == "enlist":
            _, machine, home, _ = line["args"]
            places[machine] = home, home
        for machine, pool, home in line.get("moved", ()):
            before, home_before = places.get(machine, (home, home))
            places[machine] = pool, home
            if number < first or line["call"] in ("enlist", "retire", "switch_off"):
                continue
            if home != home_before:
                counts["repurposed"] += 1
            elif pool == MIXED:
                counts["prefill_to_mixed" if before == PREFILL else "decode_to_mixed"] += 1
            else:
                counts["returns"] += 1
    return counts


GATEWAY, CLIENT = "gateway", "client"
_RECORDS_S = 5.0
"""How long to wait for the last record after the last answer."""
_LOOK_S = 0.02
_TOLD_S = 0.2


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LiveRun:
    """What came of one replay.

    Attributes:
        replay: As the client saw it.
        records: The gateway's record of each request, in the order of the trace; None where there is none.
        moves: Moves of machines between pools meanwhile, by kind.
        busy_s: Process to the seconds it computed meanwhile: each worker, GATEWAY, CLIENT.
        waited_s: Worker to the seconds that its threads were ready meanwhile, but had no core.
        others_share: Share of the host's cores that other processes had meanwhile.
    """

    replay: ReplayResult
    records: Sequence[Mapping[str, Any] | None]
    moves: Mapping[str, int]
    busy_s: Mapping[str, float]
    waited_s: Mapping[str, float]
    others_share: float


@dataclass(slots=True, eq=False)
class Live:
    """A cluster that serves.

    Attributes:
        url: Where.
        model: Its name there.
        facts: Worker to what it announced.
        pids: Worker to its process.
        records: What the gateway has written of requests so far.
        decisions: The same of the scheduler's decisions.
    """

    url: str = ""
    model: str = ""
    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    pids: dict[str, int] = field(default_factory=dict)
    records: list[Mapping[str, Any]] = field(default_factory=list)
    decisions: list[bytes] = field(default_factory=list)
    _task: asyncio.Task[int] | None = None
    _client: Client | None = None
    _is_stopping: bool = False

    async def ask(self, trace: Trace, prompts: Prompts, on_progress: Callable[[int], None] = lambda _: None) -> LiveRun:
        """Send a trace from a process of its own, and return what came of it.

        Args:
            trace: The requests.
            prompts: Makes its prompts.
            on_progress: Called with how many requests have ended.

        Raises:
            WorkerLostError: The process that sends has ended early.
            KeyboardInterrupt: The cluster was stopped meanwhile.
        """
        assert self._client is not None and self._task is not None  # noqa: S101, PT018 - set by `served`
        first, decided = len(self.records), len(self.decisions)
        before_s, waited_s = self._busy_s(), self._waited_s()
        others_s, since_s = host_cpu_s(), time.perf_counter()
        answer = asyncio.create_task(self._client.replay(trace, self.url, self.model, prompts))
        while not answer.done():
            await asyncio.wait({answer}, timeout=_TOLD_S)
            on_progress(len(self.records) - first)
            if self._is_stopping or self._task.done():
                self._client.close()
                await asyncio.wait({answer})
                answer.exception()  # it was interrupted, that is no news
                raise KeyboardInterrupt
        seen, client_s = answer.result()
        busy_s = {name: value - before_s.get(name, 0.0) for name, value in self._busy_s().items()} | {CLIENT: client_s}
        wall_s, others_s = time.perf_counter() - since_s, host_cpu_s() - others_s - sum(busy_s.values())
        until_s = time.perf_counter() + _RECORDS_S
        while len(self.records) - first < len(seen.completed) and time.perf_counter() < until_s:
            await asyncio.sleep(_LOOK_S)
        return LiveRun(
            replay=seen,
            records=in_order(trace, self.records[first:]),
            moves=pool_moves(map(orjson.loads, self.decisions), decided),
            busy_s=busy_s,
            waited_s={name: value - waited_s.get(name, 0.0) for name, value in self._waited_s().items()},
            others_share=max(others_s, 0.0) / (wall_s * (os.cpu_count() or 1)),
        )

    def placed(self, plan: CorePlan) -> contextlib.AbstractContextManager[None]:
        """Return what lets workers, gateway and client compute where a plan says until a block ends."""
        assert self._client is not None  # noqa: S101 - set by `served`
        return pinned(plan, self.pids, (os.getpid(), self._client.pid))

    def _waited_s(self) -> dict[str, float]:
        return {name: core_wait_s(pid) for name, pid in self._running()}

    def _running(self) -> Iterator[tuple[str, int]]:
        return ((name, pid) for name, pid in self.pids.items() if Path(f"/proc/{pid}").exists())

    def _busy_s(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self._running()} | {GATEWAY: time.process_time()}


@contextlib.asynccontextmanager
async def served(cluster: ServedCluster, model: Path, *, say: Callable[[str], None], log: Log) -> AsyncIterator[Live]:
    """Run a cluster as `phasesplit serve` does, its gateway in this process, until the block ends.

    Args:
        cluster: What to run.
        model: Path of the model.
        say: Takes lines about the cluster.
        log: Takes lines of the workers' logs.

    Raises:
        SpecError: It cannot run.
        KeyboardInterrupt: It was stopped before it was ready.
    """
    live, is_ready = Live(), asyncio.Event()

    def ready(what: Ready) -> None:
        live.url, live.model = what.url, what.model
        live.facts = {str(worker["name"]): worker["announcement"] for worker in what.workers}
        live.pids = {str(worker["name"]): worker["pid"] for worker in what.workers}
        is_ready.set()

    def take_line(line: str) -> None:
        live._is_stopping = True  # the only thing that a cluster says once it serves is that it stops
        say(line)

    watchers = Watchers(
        ready=ready, say=take_line, log=log, decisions=live.decisions.append, records=live.records.append
    )
    task = live._task = asyncio.create_task(run_cluster(cluster, model, watchers))
    started = asyncio.create_task(is_ready.wait())
    try:
        await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            raise KeyboardInterrupt
        with contextlib.closing(Client()) as live._client:
            yield live
    finally:
        started.cancel()
        if not task.done():
            if not live._is_stopping:
                signal.raise_signal(signal.SIGTERM)
            await asyncio.wait([task])


def in_order(trace: Trace, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any] | None]:
    """Return the record of each request of a trace, None where there is none.

    Records come in the order of the requests' ends; by arrival they are in the trace's order, except where two arrived
    almost at once: then the first that has the prompt's length is it.

    Args:
        trace: The requests.
        records: Of those, in any order.
    """
    left = sorted(records, key=lambda record: float(record["arrival_unix_s"]))
    found: list[Mapping[str, Any] | None] = []
    for tokens in trace.prompt_tokens.tolist():
        match = next((place for place, record in enumerate(left) if record["prompt_tokens"] == tokens), None)
        found.append(None if match is None else left.pop(match))
    return found
