"""A simulated run told to a dispatcher: the same requests, everything that happens to them at the same instants."""

from dataclasses import dataclass
from random import Random

import orjson

from doubles import tiny_cluster, tiny_trace
from driving import done_rows, drive
from phasesplit.domain.cluster import Cluster
from phasesplit.gateway.decisions import SEEN
from phasesplit.gateway.dispatcher import Dispatcher, Pair
from phasesplit.gateway.estimates import Backlog
from phasesplit.gateway.leases import LeaseEnd
from phasesplit.gateway.limits import Limits
from phasesplit.scheduler.ledger import MIXED, PREFILL
from phasesplit.scheduler.rules import Batching, Placement, Rules

INSTANTS = ("arrival_s", "first_token_s", "kv_ready_s", "last_token_s", "prefill_start_s")
"""In the order in which they are reported where two are the same: a batch ends before the next one begins."""

Rows = list[tuple[float, int, int]]


@dataclass(frozen=True)
class Told:
    """How far a dispatcher came to the simulator's pairs.

    Attributes:
        pairs: Requests with the simulator's pair, up to the first without.
        evictions: Of the simulated run; a machine that evicts computes prompts again, of which no gateway learns.
        moves: Moves of the dispatcher's machines, by kind.
        simulated_moves: Those of the simulator's.
        differs: What the rules saw at the first request with another pair: each machine's facts by name; else None.
        in_the_corner: Whether a machine had more waiting there than the facts tell, by its token work.
    """

    pairs: int
    evictions: int
    moves: dict[str, int]
    simulated_moves: dict[str, int]
    differs: list[dict[str, int]] | None = None
    in_the_corner: bool = False


def drawn(random: Random) -> tuple[Cluster, Rules, Rows]:
    """Return a run with instants of which no two are the same by chance, and nobody mixed for too long."""
    rules = Rules(
        prefill_placement=random.choice([rule for rule in Placement if rule is not Placement.CUSTOM]),
        decode_placement=random.choice([rule for rule in Placement if rule is not Placement.CUSTOM]),
        batching=random.choice(list(Batching)),
        batch_prompt_tokens=200,
        spill_tokens=random.choice([300, 1_000, 8_192]),
        elastic=random.random() < 0.8,
        repurpose_after_s=1e9,
        block_tokens=4,
        layerwise_from_tokens=100,
        seed=random.randrange(1_000),
    )
    roles = random.choice(
        [
            (("prefill", 2), ("decode", 2)),
            (("prefill", 1), ("decode", 1), ("mixed", 1)),
            (("prefill", 3), ("decode", 2)),
            (("unsplit", 2),),
            (("prefill", 1), ("decode", 1)),
        ]
    )
    capacity_tokens = random.choice([8_000, 100_000])
    cluster = tiny_cluster(*roles, capacity_tokens=capacity_tokens, decode_context_s=1e-5, prefill_pair_s=1e-7)
    at_s = 0.0
    rows = []
    for _ in range(300):
        at_s += random.expovariate(random.choice([5, 30]))
        rows.append((at_s, random.randint(10, 400), random.randint(1, 60)))
    return cluster, rules, rows


def told(cluster: Cluster, rules: Rules, rows: Rows) -> Told:
    """Simulate a trace, tell a dispatcher what happened, and compare the pairs."""
    trace = tiny_trace(*rows)
    state = drive(cluster, rules, trace)
    done = done_rows(state)
    counters = state.ledger.counters[0]
    log: list[bytes] = []
    unbounded = Backlog(most_wait_s=1e9, most_pending_tokens=1 << 40)
    dispatcher = Dispatcher(rules, Limits(lease_s=1e9), backlog=unbounded, sink=log.append)
    roles = [pool.role.value for pool in cluster.pools for _ in range(pool.count)]
    for number, role in enumerate(roles):
        dispatcher.join(str(number), 1, role, int(state.ledger.machines[number]["capacity_blocks"]), 0.0)
    events = [
        (float(row[instant]), order, number)
        for number, row in enumerate(done)
        for order, instant in enumerate(INSTANTS)
        if row[instant] >= 0
    ]
    pairs = 0
    differs = None
    for now_s, order, number in sorted(events):
        key, row = f"r{number}", done[number]
        if INSTANTS[order] == "arrival_s":
            lengths = int(row["prompt_tokens"]), int(row["output_tokens"])
            pair = dispatcher.open(key, *lengths, now_s, expected_tokens=int(trace.expected_tokens[number]))
            assert isinstance(pair, Pair)
            if (pair.prefill, pair.decode) != (str(row["prefill_machine"]), str(row["decode_machine"])):
                differs = _facts(log[-1])
                break
            pairs += 1
        elif INSTANTS[order] == "prefill_start_s":
            dispatcher.prefill_started(key, now_s)
        elif INSTANTS[order] == "first_token_s":
            dispatcher.first_token(key, now_s)
        elif INSTANTS[order] == "kv_ready_s":
            dispatcher.kv_ready(key, now_s)
        else:
            dispatcher.ended(key, LeaseEnd.COMPLETED, now_s)
    return Told(
        pairs,
        int(counters["evictions"]),
        dispatcher.moves(),
        {kind: int(counters[kind]) for kind in dispatcher.moves()},
        differs,
        differs is not None and any(_in_the_corner(facts, int(row["prompt_tokens"]), rules) for facts in differs),
    )


def _facts(line: bytes) -> list[dict[str, int]]:
    names = ("machine", *SEEN, "waiting")
    return [dict(zip(names, machine, strict=True)) for machine in zip(*orjson.loads(line)["saw"], strict=True)]


def _in_the_corner(facts: dict[str, int], prompt_tokens: int, rules: Rules) -> bool:
    """Return whether decode tasks may wait on a machine that the spill limit is asked for, and no prompt does."""
    works_on_tokens = facts["pool"] in (PREFILL, MIXED) and facts["decode_requests"] > 0
    return works_on_tokens and facts["waiting"] == 0 and facts["pending_tokens"] + prompt_tokens > rules.spill_tokens
