"""`simulate()`: the shell around the kernel, which feeds the trace, makes room, asks custom rules, takes what ended."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.cluster import Cluster
from phasesplit.domain.money import WORLD_GRID_KG_PER_KWH
from phasesplit.domain.request import Trace
from phasesplit.domain.slo import SPLITWISE, Slo
from phasesplit.errors import SimulationError, SpecError
from phasesplit.scheduler.autoscaling import Policy
from phasesplit.scheduler.ledger import Ledger, with_room, with_slots
from phasesplit.scheduler.rules import Placement, Rules
from phasesplit.simulator import kernel
from phasesplit.simulator.events import with_entities
from phasesplit.simulator.fleet import Fleet
from phasesplit.simulator.records import KeepAll, KeepSums, Metrics, Records
from phasesplit.simulator.result import MissCounter, Result, build_result
from phasesplit.simulator.setup import RunState, build_state
from phasesplit.simulator.world import DONE, UNFINISHED, Arrivals

_BUDGET = 1 << 20
_CHUNK_ROWS = 1 << 16
_SAMPLES_WANTED = 200

Progress = Callable[[int, float], None]
"""Called now and then with the number of requests that have ended and the model time in seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What a custom placement rule sees: the request, and the machines as the ledger has them.

    Attributes:
        now_s: The time of the arrival.
        prompt_tokens: Of the request.
        expected_tokens: Output length that rules may expect; never the true one.
        machines: MACHINES of `scheduler.ledger`, (m,): `facts.machines["pending_tokens"]` and so on; to be read only.
    """

    now_s: float
    prompt_tokens: int
    expected_tokens: int
    machines: NDArray[np.void]


Place = Callable[[Facts], tuple[int, int]]
"""A custom placement rule: returns the numbers of the prefill machine and of the decode machine (they may be equal)."""


def simulate(
    cluster: Cluster,
    trace: Trace | Iterable[Trace],
    rules: Rules | None = None,
    *,
    place: Place | None = None,
    autoscale: Policy | None = None,
    keep: bool = True,
    slo: Slo = SPLITWISE,
    metrics: frozenset[str] | None = None,
    grid_kg_per_kwh: float = WORLD_GRID_KG_PER_KWH,
    on_progress: Progress | None = None,
) -> Result:
    """Return what happens when a cluster serves a trace.

    Args:
        cluster: The cluster.
        trace: The requests, or consecutive stretches of them (`Workload.chunks`), each going on from the one before.
        rules: The scheduler's settings, by default `Rules()`.
        place: A custom placement rule, asked at every arrival instead of those in `rules`.
        autoscale: A policy that changes how many machines serve; the cluster's counts are then the most there can be.
        keep: Keep a row per request (`Result.columns`). Without it memory stays bounded whatever the trace's length,
            and quantiles are as fine as bins of at most 1.6 %.
        slo: What the result is judged by.
        metrics: Names of the only distributions wanted, with those of the SLO and `itl_s`; None: all. A search over
            thousands of clusters by one SLO saves time with an empty set.
        grid_kg_per_kwh: Carbon intensity of the electricity.
        on_progress: Called every million events or so.

    Raises:
        SpecError: The trace is empty or its stretches go back in time, the rules cannot serve it, `place` names no
            machine, or `autoscale` does not fit the cluster or goes with `place` or the published rules.
        SimulationError: An invariant broke: a bug.
    """
    rules = rules or Rules()
    if isinstance(trace, str) or not isinstance(trace, Iterable | Trace):
        raise SpecError.bad(
            "simulate(), trace", trace, "a Trace (see read_trace and load_workload) or stretches of one"
        )
    if place is not None:
        rules = replace(rules, prefill_placement=Placement.CUSTOM)
    elif rules.prefill_placement == Placement.CUSTOM:
        raise SpecError.bad(
            "rules, field prefill_placement", "custom", "another rule, or a function in simulate(place=...)"
        )
    if autoscale is not None and (rules.published or place is not None):
        found = "the published rules" if rules.published else "a custom placement rule"
        raise SpecError.bad(
            "simulate(), autoscale", f"{autoscale.name} with {found}", "a policy with the default rules"
        )
    stretches = (stretch for stretch in ([trace] if isinstance(trace, Trace) else trace) if len(stretch))
    first = next(stretches, None)
    if first is None:
        raise SpecError.bad("trace", "no requests", "at least one request")
    wanted = Metrics(cluster.reference, published=rules.published, slo=slo, only=metrics)
    records = (KeepAll if keep else KeepSums)(wanted)
    run = _Run(cluster, rules, first, stretches, records)
    if autoscale is not None:
        run.scale_by(autoscale, cluster, slo)
    run.go(place, on_progress)
    return build_result(
        cluster,
        rules,
        run.state,
        run.records,
        slo=slo,
        grid_kg_per_kwh=grid_kg_per_kwh,
        trace=run.about(),
        fleet=run.fleet,
        misses=None if run.misses is None else run.misses.misses(),
    )


class _Run:
    """One run: its state, the stretch of the trace it is in, and what has ended so far."""

    def __init__(
        self, cluster: Cluster, rules: Rules, first: Trace, following: Iterable[Trace], records: Records
    ) -> None:
        span_s = max(float(first.arrival_s[-1] - first.arrival_s[0]), 1e-3)
        self.rules = rules
        self.records = records
        self.fleet: Fleet | None = None
        self.misses: MissCounter | None = None
        self.state = build_state(
            cluster,
            rules,
            done_rows=_CHUNK_ROWS + rules.batch_requests + 2,
            sample_every_s=span_s / _SAMPLES_WANTED,
            start_s=float(first.arrival_s[0]),
        )
        self._first_s = float(first.arrival_s[0])
        self._stretch = first
        self._next: Trace | None = None
        self._following = iter(following)
        self._rows = 0
        self._check(first)

    def scale_by(self, policy: Policy, cluster: Cluster, slo: Slo) -> None:
        """Let a policy change how many machines serve, from the start on."""
        self.fleet = Fleet(cluster, policy, self.state.ledger, self._first_s)
        self.misses = MissCounter(cluster, slo, self._first_s)
        self.state.world.clock["pause_at_s"] = self.fleet.next_s

    def about(self) -> tuple[str, bool, float, float, int]:
        """Return the trace's name, whether it is an oracle, its first and last arrival, and its number of requests."""
        last = self._stretch
        return last.name, last.oracle, self._first_s, float(last.arrival_s[-1]), self._rows + len(last)

    def go(self, place: Place | None, on_progress: Progress | None) -> None:
        """Run to the end."""
        self._next = next(self._following, None)
        arrivals = self._arrivals()
        while True:
            status = kernel.run(self.state.ledger, self.state.world, arrivals, self._next is not None, _BUDGET)
            if status == kernel.NEED_ARRIVALS:
                arrivals = self._turn_page()
            elif status == kernel.NEED_CHOICE and place is not None:
                self._choose(place)
            elif status == kernel.NEED_CONTROL and self.fleet is not None:
                self.fleet.control(self.state.ledger)
                self.state.world.clock["pause_at_s"] = self.fleet.next_s
                continue
            elif status == kernel.FINISHED:
                break
            else:
                self._make_room(status)
            if on_progress is not None and status != kernel.NEED_CHOICE:
                clock = self.state.world.clock[0]
                on_progress(int(self.records.count + clock["done"]), float(clock["now_s"]))
        self._take_unfinished()
        self._take_done()

    def _arrivals(self) -> Arrivals:
        stretch = self._stretch
        return Arrivals(stretch.arrival_s, stretch.prompt_tokens, stretch.output_tokens, stretch.expected_tokens)

    def _turn_page(self) -> Arrivals:
        following = self._next
        if following is None:
            raise SimulationError("the kernel asked for arrivals after the last stretch of the trace")
        if len(following) and following.arrival_s[0] < self._stretch.arrival_s[-1]:
            raise SpecError.bad(
                f"trace {following.name}, request {self._rows + len(self._stretch)}, arrival_s",
                float(following.arrival_s[0]),
                f"a time not before the previous request's ({float(self._stretch.arrival_s[-1])})",
            )
        self._rows += len(self._stretch)
        self._check(following)
        self._stretch = following
        self._next = next(self._following, None)
        self.state.world.clock["first_row"] = self._rows
        self.state.world.clock["next_arrival"] = 0
        return self._arrivals()

    def _check(self, stretch: Trace) -> None:
        if self.rules.published and len(stretch) and int(stretch.output_tokens.min()) < 2:
            row = int(np.argmax(stretch.output_tokens < 2))
            raise SpecError.bad(
                f"trace {stretch.name}, request {self._rows + row}, output_tokens",
                int(stretch.output_tokens[row]),
                "at least 2 under the published rules",
            )

    def _make_room(self, status: int) -> None:
        ledger, world = self.state.ledger, self.state.world
        if status == kernel.NEED_SLOTS:
            slots = 2 * ledger.requests.size
            ledger = with_slots(ledger, slots)
            world = world._replace(future=with_entities(world.future, ledger.machines.size + slots))
        elif status == kernel.NEED_ROOM:
            ledger = with_room(ledger, 2 * ledger.running_entries.shape[2])
        elif status == kernel.NEED_DONE:
            self._take_done()
            return
        self.state = RunState(ledger, world)

    def _choose(self, place: Place) -> None:
        ledger, clock = self.state.ledger, self.state.world.clock[0]
        request = ledger.requests[clock["pending_slot"]]
        chosen = place(
            Facts(
                float(clock["now_s"]), int(request["prompt_tokens"]), int(request["expected_tokens"]), ledger.machines
            )
        )
        numbers = chosen if isinstance(chosen, tuple) and len(chosen) == 2 else (-1, -1)
        if not all(isinstance(number, int | np.integer) and 0 <= number < ledger.machines.size for number in numbers):
            allowed = f"two machine numbers from 0 to {ledger.machines.size - 1}"
            raise SpecError.bad(f"place(), request {request['row']}", chosen, allowed)
        ledger.counters["chosen_prefill"], ledger.counters["chosen_decode"] = chosen

    def _take_done(self) -> None:
        ledger, world = self.state.ledger, self.state.world
        done = world.done[: int(world.clock["done"][0])]
        if self.misses is not None:
            self.misses.add(done)
        self.records.add(done)
        world.clock["done"] = 0
        self.state = RunState(ledger, world._replace(done=np.empty(world.done.size, DONE)))

    def _take_unfinished(self) -> None:
        """Record the requests still in the system; only the published rules may leave any."""
        ledger = self.state.ledger
        left = int(ledger.counters["live"][0])
        if left == 0:
            check_drained(ledger)
            return
        if not self.rules.published:
            now_s = float(self.state.world.clock["now_s"][0])
            raise SimulationError(
                f"{left} requests were still in the system when nothing more could happen, at {now_s} s"
            )
        requests = ledger.requests[ledger.requests["row"] >= 0]
        rows = np.zeros(requests.size, DONE)
        for name in DONE.names or ():
            if name in (requests.dtype.names or ()):
                rows[name] = requests[name]
        rows["status"] = UNFINISHED
        rows["prefill_machine"] = requests["assigned_machine"]
        rows["decode_machine"] = requests["decode_machine"]
        self.records.add(rows)


def check_drained(ledger: Ledger) -> None:
    """Raise unless an idle ledger is all zero: no KV used or committed, nothing pending, no request anywhere.

    Raises:
        SimulationError: An account does not balance; the message names it and the machine.
    """
    accounts = (
        "used_blocks", "committed_blocks", "pending_tokens", "pending_output_tokens", "prefill_requests",
        "decode_requests", "running_entries", "prefill_entries", "batch_tokens", "context_tokens", "sending",
        "receiving",
    )  # fmt: skip
    for account in accounts:
        left = ledger.machines[account]
        if np.any(left != 0):
            machine = int(np.argmax(left != 0))
            raise SimulationError(f"machine {machine} ends with {account} = {left[machine]}, not 0")
