"""Machines that come and go while a simulation runs: looks at the pools, asks a policy, starts and drains machines."""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit
from phasesplit.domain.cluster import Cluster
from phasesplit.scheduler.autoscaling import Counts, Policy, PolicyView, PoolFacts
from phasesplit.scheduler.ledger import DECODE, MIXED, OFF, POOLS, PREFILL, SERVING, STARTING, UNSPLIT, Ledger
from phasesplit.scheduler.pools import enlist, is_drained, retire
from phasesplit.simulator.events import iterations_by

Floats = NDArray[np.float64]

SERVING_COUNT, STARTING_COUNT, PENDING, COMMITTED, CAPACITY, EMITTED = range(6)
"""Columns of a look at the machines, by home; EMITTED is one sum for all, in the first row."""
_COLUMNS = 6


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """The machines at one time: float64 (POOLS, 6)."""

    time_s: float
    sums: Floats


@jit
def look(machines: NDArray[np.void], now_s: float, sums: Floats) -> None:
    """Sum up the work of the machines by home, and the output tokens of all so far, steps in progress included.

    A prompt that is computed in chunks counts as a token with each chunk; few compared with its output.

    Mutates: sums, (POOLS, 6).
    """
    sums[:] = 0.0
    for machine in range(machines.size):
        emitted = machines[machine]["task_iterations"]
        running_entries = machines[machine]["running_entries"]
        if running_entries > 0 and machines[machine]["prefill_entries"] == 0:
            under_way = min(iterations_by(machines, machine, now_s) - 1, machines[machine]["step_iterations"])
            emitted += running_entries * under_way
        sums[0, EMITTED] += emitted
        home = machines[machine]["home"]
        if machines[machine]["state"] == STARTING:
            sums[home, STARTING_COUNT] += 1.0
        if machines[machine]["state"] != SERVING:
            continue
        sums[home, SERVING_COUNT] += 1.0
        prompt_tokens = machines[machine]["pending_tokens"] - machines[machine]["decode_requests"]
        alone = home in (MIXED, UNSPLIT)
        sums[home if alone else PREFILL, PENDING] += prompt_tokens
        sums[home if alone else DECODE, PENDING] += machines[machine]["pending_output_tokens"]
        sums[home, COMMITTED] += machines[machine]["committed_blocks"]
        sums[home, CAPACITY] += machines[machine]["capacity_blocks"]


class Fleet:
    """Which machines are switched on, since when, and what the policy has done so far.

    A machine is paid for from the order to start it until it is drained or the run ends. A role is the home of its
    machines: one that was re-purposed counts for its new role, and after a stop is started again in its first one.

    Args:
        cluster: All machines that there can be.
        policy: What decides.
        ledger: Of a run that has not begun; machines beyond the policy's opening counts are switched off in it.
        start_s: Time of the first arrival.

    Raises:
        SpecError: The policy does not fit the cluster.
    """

    def __init__(self, cluster: Cluster, policy: Policy, ledger: Ledger, start_s: float) -> None:
        self.policy = policy
        self.starts = 0
        self.stops = 0
        self.stale = 0
        self._first_homes = ledger.machines["home"].copy()
        roles, counts = np.unique(self._first_homes, return_counts=True)
        self._most: Counts = dict(zip(roles.tolist(), counts.tolist(), strict=True))
        self._startup_s = policy.startup_s + cluster.model.weights_bytes / policy.load_bytes_per_s
        self._on_s = np.zeros(cluster.machines)
        self._since_s = np.full(cluster.machines, start_s)
        self._stopped_s = np.full(cluster.machines, start_s)
        self._ready_s: dict[int, float] = {}
        self._draining: set[int] = set()
        self._changed_s = dict.fromkeys(self._most, -np.inf)
        self._looks = deque([_Look(start_s, np.zeros((POOLS, _COLUMNS)))])
        self._start_s = start_s
        self._ticks = 1
        for role, count in policy.opening(start_s, dict(self._most)).items():
            for machine in np.flatnonzero(ledger.machines["home"] == role)[count:].tolist():
                retire(ledger, machine)
                self._switch_off(ledger, machine)

    @property
    def next_s(self) -> float:
        """When the fleet has to be asked again: the next look, or the next machine that has started."""
        return min((self._start_s + self._ticks * self.policy.interval_s, *self._ready_s.values()))

    def control(self, ledger: Ledger) -> None:
        """Do what is due at `next_s`: let started machines serve, switch drained ones off, look, decide, order.

        Mutates: ledger.
        """
        now_s = self.next_s
        for machine in [machine for machine, ready_s in self._ready_s.items() if ready_s <= now_s]:
            del self._ready_s[machine]
            enlist(ledger, machine, ledger.machines["home"][machine])
        self._settle(ledger)
        if now_s < self._start_s + self._ticks * self.policy.interval_s:
            return
        self._ticks += 1
        sums = np.empty((POOLS, _COLUMNS))
        look(ledger.machines, now_s, sums)
        self._looks.append(_Look(now_s, sums))
        seen = self._seen(now_s)
        if seen is None:
            return
        self.stale += self.policy.is_stale(seen)
        for role, wanted in self.policy.wanted(seen).items():
            ordered = seen.pools[role].ordered
            # A re-purposed machine may have left a role with more than it had at first; that alone is no change.
            count = max(self.policy.least, min(wanted, max(self._most[role], ordered)))
            if count > ordered:
                self._start(ledger, role, count - ordered, now_s)
            elif count < ordered:
                self._stop(ledger, role, ordered - count, now_s)
        self._settle(ledger)

    def finish(self, ledger: Ledger, end_s: float) -> Floats:
        """Return how long each machine was switched on, float64 (m,), at the end of the run.

        Mutates: ledger.
        """
        self._settle(ledger)
        on = ledger.machines["state"] != OFF
        on_s: Floats = self._on_s + np.where(on, end_s - self._since_s, 0.0)
        return on_s

    def _seen(self, now_s: float) -> PolicyView | None:
        """Return what the policy may know now, with the latest look that has arrived; None before there is one."""
        # Looks come at sums of intervals, which round: one that is just as old as the delay has arrived.
        known_s = now_s - self.policy.signal_delay_s + 1e-6
        while len(self._looks) > 2 and self._looks[2].time_s <= known_s:
            self._looks.popleft()
        before, latest = self._looks[0], self._looks[1]
        if latest.time_s > known_s:
            return None
        sums, counts = latest.sums.tolist(), self._looks[-1].sums.tolist()
        return PolicyView(
            now_s=now_s,
            age_s=now_s - latest.time_s,
            tokens_per_s=(sums[0][EMITTED] - float(before.sums[0, EMITTED])) / (latest.time_s - before.time_s),
            pools={
                role: PoolFacts(
                    serving=int(counts[role][SERVING_COUNT]),
                    starting=int(counts[role][STARTING_COUNT]),
                    most=most,
                    since_change_s=now_s - self._changed_s[role],
                    startup_s=self._startup_s,
                    pending_tokens=sums[role][PENDING],
                    committed_share=sums[role][COMMITTED] / max(sums[role][CAPACITY], 1.0),
                )
                for role, most in self._most.items()
            },
        )

    def _start(self, ledger: Ledger, role: int, count: int, now_s: float) -> None:
        """Order so many machines of a role: first those that still drain, which serve at once, then others."""
        homes, states = ledger.machines["home"], ledger.machines["state"]
        draining = sorted(machine for machine in self._draining if homes[machine] == role)[:count]
        off = np.flatnonzero((states == OFF) & (self._first_homes == role)).tolist()[: count - len(draining)]
        self._draining.difference_update(draining)
        for machine in draining:
            enlist(ledger, machine, role)
        for machine in off:
            homes[machine] = ledger.machines["pool"][machine] = role
            states[machine] = STARTING
            self._since_s[machine] = now_s
            self._ready_s[machine] = now_s + self._startup_s
        if draining or off:
            self.starts += len(draining) + len(off)
            self._changed_s[role] = now_s

    def _stop(self, ledger: Ledger, role: int, count: int, now_s: float) -> None:
        """Stop so many machines of a role: first those still starting, latest first, then those with least to do."""
        machines = ledger.machines
        own = machines["home"] == role
        starting = [machine for machine in self._ready_s if own[machine]]
        starting.sort(key=lambda machine: (self._ready_s[machine], machine), reverse=True)
        serving = np.flatnonzero((machines["state"] == SERVING) & own)
        requests = machines["prefill_requests"] + machines["decode_requests"]
        serving = serving[np.lexsort((-serving, requests[serving]))]
        for machine in starting[:count]:
            del self._ready_s[machine]
            self._stopped_s[machine] = now_s
            self._switch_off(ledger, machine)
        for machine in serving.tolist()[: max(count - len(starting), 0)]:
            retire(ledger, machine)
            self._draining.add(machine)
            self._stopped_s[machine] = now_s
        self.stops += count
        self._changed_s[role] = now_s

    def _settle(self, ledger: Ledger) -> None:
        """Switch the machines off that have drained, as of the moment when they had."""
        for machine in [machine for machine in self._draining if is_drained(ledger, machine)]:
            self._draining.remove(machine)
            self._switch_off(ledger, machine)

    def _switch_off(self, ledger: Ledger, machine: int) -> None:
        # The last thing that any machine does is to free blocks, which notes the time.
        off_s = max(self._stopped_s[machine], ledger.machines["kv_since_s"][machine])
        self._on_s[machine] += off_s - self._since_s[machine]
        ledger.machines["state"][machine] = OFF
