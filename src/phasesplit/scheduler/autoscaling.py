"""Policies that change how many machines serve: pure functions from what was seen of the pools to the counts wanted.

A policy decides and does nothing else. Its driver looks at the machines, starts and drains them, and knows the time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from phasesplit.errors import SpecError
from phasesplit.scheduler.ledger import DECODE, MIXED, PREFILL, UNSPLIT

Counts = dict[int, int]
"""Machines by role (PREFILL, DECODE, MIXED, UNSPLIT of `scheduler.ledger`)."""

LOAD_BYTES_PER_S = 5e9
"""How fast a starting machine loads the model. Source: ours, about what one NVMe drive reads; networks are slower."""
STARTUP_S = 60.0
"""How long a machine takes before it loads the model. Source: ours, a guess; booting a cloud server takes minutes."""
DAY_S = 86_400.0
_ROUNDING_S = 1e-6
"""Looks come at sums of intervals, which round; so much is taken for equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What is known of the machines of one role when a policy decides.

    The counts are of this moment; everything else is as old as the signal (`PolicyView.age_s`).

    Attributes:
        serving: Machines that take requests.
        starting: Machines ordered that do not yet.
        most: Machines there can be.
        since_change_s: Time since machines of this role were last started or stopped; infinity if never.
        startup_s: Time from order to service of its slowest machine.
        pending_tokens: Work assigned to this role and not done: prompt tokens for prefill machines, expected output
            tokens for decode machines, both for mixed and unsplit ones; wherever it spilled to, without draining ones.
        committed_share: KV blocks that requests on its serving machines are expected to fill, over their memory.
    """

    serving: int
    starting: int
    most: int
    since_change_s: float
    startup_s: float
    pending_tokens: float
    committed_share: float

    @property
    def ordered(self) -> int:
        """Machines that serve or soon will."""
        return self.serving + self.starting


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyView:
    """What a policy decides from.

    Attributes:
        now_s: The time.
        age_s: How old the signal is.
        tokens_per_s: Output tokens that the whole cluster emitted per second between the signal and the one before.
        pools: By role.
    """

    now_s: float
    age_s: float
    tokens_per_s: float
    pools: Mapping[int, PoolFacts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What all policies share; a policy of one's own is a frozen subclass with `wanted`.

    Attributes:
        initial: Machines of each role at the start, in the order prefill, decode, mixed (or unsplit alone); None: all.
        least: Machines that a role keeps at least, >= 1.
        interval_s: Time between two looks, after each of which the policy decides; > 0.
        cooldown_s: Time that a role is left alone after a change, >= 0.
        startup_s: Time that a machine takes to start before it loads the model, >= 0.
        load_bytes_per_s: Speed at which it then loads the model's weights, > 0.
        signal_delay_s: How late signals arrive, >= 0.
        stale_after_s: A signal older than this is not acted on, >= 0.
    """

    name: ClassVar[str] = ""

    initial: tuple[int, ...] | None = None
    least: int = 1
    interval_s: float = 30.0
    cooldown_s: float = 120.0
    startup_s: float = STARTUP_S
    load_bytes_per_s: float = LOAD_BYTES_PER_S
    signal_delay_s: float = 0.0
    stale_after_s: float = 120.0

    def __post_init__(self) -> None:
        if self.initial is not None:
            self._require("initial", min(self.initial, default=0) >= self.least, f"counts of at least {self.least}")
        self._require("least", self.least >= 1, "a whole number of at least 1")
        self._require("interval_s", self.interval_s > 0, "a time > 0 in seconds")
        for field in ("cooldown_s", "startup_s", "signal_delay_s", "stale_after_s"):
            self._require(field, getattr(self, field) >= 0, "a time >= 0 in seconds")
        self._require("load_bytes_per_s", self.load_bytes_per_s > 0, "a speed > 0 in bytes per second")

    def opening(self, now_s: float, most: Counts) -> Counts:  # noqa: ARG002 - a schedule needs the time
        """Return the machines that serve at the start.

        Args:
            now_s: The time of the start.
            most: Machines there are, by role, in the order of `initial`.

        Raises:
            SpecError: The policy names counts for other roles than the cluster has, or more machines than there are.
        """
        if self.initial is not None:
            return self._by_role("initial", self.initial, most)
        fewest = min(most.values())
        self._require("least", self.least <= fewest, f"at most {fewest}, the machines of the smallest role")
        return dict(most)

    def wanted(self, seen: PolicyView) -> Counts:
        """Return the machines wanted of each role; the driver keeps them between `least` and what there is."""
        raise NotImplementedError

    def is_stale(self, seen: PolicyView) -> bool:
        """Return whether the signal is too old to be acted on."""
        return seen.age_s > self.stale_after_s + _ROUNDING_S

    def may_change(self, seen: PolicyView, pool: PoolFacts) -> bool:
        """Return whether the signal is young enough, and from after the role's last change and its cool-down.

        A signal from before the last change knows nothing of it, however young it is.
        """
        return not self.is_stale(seen) and pool.since_change_s + _ROUNDING_S >= self.cooldown_s + seen.age_s

    def _by_role(self, field: str, counts: tuple[int, ...], most: Counts) -> Counts:
        allowed = f"{'+'.join(str(count) for count in most.values())} at most, {self.least} of each role at least"
        fits = len(counts) == len(most) and all(
            self.least <= count <= room for count, room in zip(counts, most.values(), strict=True)
        )
        self._require(field, fits, allowed, "+".join(map(str, counts)))
        return dict(zip(most, counts, strict=True))

    def _require(self, field: str, holds: bool, allowed: str, value: object = None) -> None:
        if not holds:
            raise SpecError.bad(
                f"autoscale {self.name}, {field}", getattr(self, field) if value is None else value, allowed
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Static(Policy):
    """Changes nothing: what the others are compared with."""

    name: ClassVar[str] = "static"

    interval_s: float = math.inf

    def wanted(self, seen: PolicyView) -> Counts:
        """Return the machines that there are."""
        return {role: pool.ordered for role, pool in seen.pools.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold(Policy):
    """Each role by itself: one step up when the work per machine is high, one down when it is low.

    Attributes:
        high_tokens: Pending tokens per machine above which a role grows; of prefill, mixed and unsplit machines.
        low_tokens: Pending tokens per machine below which it shrinks; below `high_tokens`.
        decode_high_tokens: The same for decode machines, whose work is expected output tokens.
        decode_low_tokens: The same for decode machines.
        full_share: A role also grows when more than this share of its KV memory is committed, and does not shrink if
            that would make it so; (0, 1].
        step: Machines at a time, >= 1.
    """

    name: ClassVar[str] = "threshold"

    high_tokens: float
    low_tokens: float
    decode_high_tokens: float | None = None
    decode_low_tokens: float | None = None
    full_share: float = 0.9
    step: int = 1

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        self._require("low_tokens", 0 <= self.low_tokens < self.high_tokens, f"0 to below high ({self.high_tokens:g})")
        high, low = self.limits(DECODE)
        self._require("decode_low_tokens", 0 <= low < high, f"0 to below decode-high ({high:g})")
        self._require("full_share", 0 < self.full_share <= 1, "a share above 0, at most 1")
        self._require("step", self.step >= 1, "a whole number of at least 1")

    def limits(self, role: int) -> tuple[float, float]:
        """Return the high and the low limit of a role."""
        if role != DECODE:
            return self.high_tokens, self.low_tokens
        high, low = self.decode_high_tokens, self.decode_low_tokens
        return self.high_tokens if high is None else high, self.low_tokens if low is None else low

    def wanted(self, seen: PolicyView) -> Counts:
        """Return a step up, a step down, or what there is."""
        return {
            role: self._wanted(role, pool) if self.may_change(seen, pool) else pool.ordered
            for role, pool in seen.pools.items()
        }

    def _wanted(self, role: int, pool: PoolFacts) -> int:
        high, low = self.limits(role)
        work = pool.pending_tokens / pool.ordered
        if work > high or pool.committed_share > self.full_share:
            return pool.ordered + self.step
        fewer = max(pool.ordered - self.step, 1)
        if work < low and pool.committed_share * pool.ordered <= self.full_share * fewer:
            return fewer
        return pool.ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class Joint(Policy):
    """Both phases from one signal: output tokens per second set decode machines, a fixed ratio prefill machines.

    A mixed or unsplit pool alone is sized by the same signal; a mixed pool next to the others keeps its size.

    Source: scaling both pools at a fixed ratio by the rate of output tokens: HeteroScale (Li et al. 2025, "Taming the
    Chaos: Coordinated Autoscaling for Heterogeneous and Disaggregated LLM Inference", arXiv 2508.19559).

    Attributes:
        target_tokens_per_s: Output tokens per second that a decode machine is to emit, > 0.
        ratio: Prefill machines for each decode machine, > 0; None: that of the whole cluster.
        slack: A role shrinks only if that keeps each machine at least this share below its target, [0, 1).
    """

    name: ClassVar[str] = "joint"

    target_tokens_per_s: float
    ratio: float | None = None
    slack: float = 0.1

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        self._require("target_tokens_per_s", self.target_tokens_per_s > 0, "tokens per second, > 0")
        self._require("ratio", self.ratio is None or self.ratio > 0, "prefill machines per decode machine, > 0")
        self._require("slack", 0 <= self.slack < 1, "a share from 0 to below 1")

    def wanted(self, seen: PolicyView) -> Counts:
        """Return the machines that the token rate asks for."""
        counts = {role: pool.ordered for role, pool in seen.pools.items()}
        lead = next((role for role in (DECODE, UNSPLIT, MIXED) if role in seen.pools), None)
        if lead is None or not all(self.may_change(seen, pool) for pool in seen.pools.values()):
            return counts
        needed = math.ceil(seen.tokens_per_s / self.target_tokens_per_s)
        if needed < counts[lead]:
            roomy = math.ceil(seen.tokens_per_s / (self.target_tokens_per_s * (1 - self.slack)))
            needed = min(roomy, counts[lead])
        counts[lead] = max(needed, 1)
        if lead == DECODE and PREFILL in counts:
            ratio = self.ratio or seen.pools[PREFILL].most / seen.pools[DECODE].most
            # The tolerance keeps 3 decode machines at a ratio of 2/3 from asking for 3 prefill machines.
            counts[PREFILL] = math.ceil(counts[DECODE] * ratio - 1e-9)
        return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Policy):
    """Counts by the time of day; machines are ordered so much earlier that they serve on time.

    Attributes:
        entries: (time of day in seconds, counts in the order of `initial`), in order of time; before the first one the
            last one holds. Model time 0 is midnight. `initial` is not used.
    """

    name: ClassVar[str] = "schedule"

    entries: tuple[tuple[float, tuple[int, ...]], ...]

    def __post_init__(self) -> None:
        Policy.__post_init__(self)
        times_s = [at_s for at_s, _ in self.entries]
        self._require("initial", self.initial is None, "nothing: the schedule says what there is at the start")
        self._require(
            "entries",
            bool(times_s) and times_s == sorted(set(times_s)) and times_s[0] >= 0 and times_s[-1] < DAY_S,
            "times of day from 0h to below 24h, each later than the one before",
        )

    def opening(self, now_s: float, most: Counts) -> Counts:
        """Return the counts of the first moment; every entry must name as many roles as the cluster has."""
        for at_s, counts in self.entries:
            self._by_role(f"{at_s / 3600:g}h", counts, most)
        return dict(zip(most, self.at(now_s), strict=True))

    def at(self, now_s: float) -> tuple[int, ...]:
        """Return the counts that hold at a time."""
        past = [counts for at_s, counts in self.entries if at_s <= now_s % DAY_S]
        return past[-1] if past else self.entries[-1][1]

    def wanted(self, seen: PolicyView) -> Counts:
        """Return the counts of now, or of when a machine ordered now would serve, if those are more."""
        return {
            role: max(self.at(seen.now_s)[index], self.at(seen.now_s + pool.startup_s + self.interval_s)[index])
            for index, (role, pool) in enumerate(seen.pools.items())
        }
