"""The connector under vLLM's own schedulers, in orders of events nobody has thought of. `make test-vllm` runs this."""

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from vllm_machines import MODEL_VARIABLE
from vllm_scheduling import LEAST_STAGING_BYTES, LONGEST_TOKENS, WORDS, Machine
from waiting import eventually

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.filterwarnings("ignore"),  # what vLLM and torch warn of is theirs to mend
]

_REQUESTS, _MOST_LIVE = 40, 10


@contextmanager
def pair(chance: random.Random, directory: Path, *, is_async: bool) -> Iterator[list[Machine]]:
    """Start two machines with settings by chance."""
    settings = {
        "blocks": chance.choice([26, 40, 64]),
        "budget_tokens": chance.choice([8, 13, 32, 64]),
        "most_running": chance.choice([2, 4, 8]),
        "threshold_tokens": chance.choice([0, 1, 8, 10**6]),
        "staging_bytes": chance.choice([0, LEAST_STAGING_BYTES]),
    }
    with ExitStack() as undo:
        machines = []
        for name in ("a", "b"):
            machines.append(
                Machine(
                    name, directory, os.environ[MODEL_VARIABLE],
                    is_async=is_async, is_late=chance.random() < 0.5, **settings,
                )
            )  # fmt: skip
            undo.callback(machines[-1].close)
        yield machines


def legs(chance: random.Random, machines: list[Machine], key: str, shared: list[list[int]]) -> list[Callable[[], None]]:
    """Return the legs of a request, in the order in which they come: one that is whole, both, or only one of two."""
    prompt = chance.choice(shared)[: chance.choice([0, 4, 8, 16, 30])]
    if not prompt or chance.random() < 0.85:
        prompt = prompt + [chance.randrange(WORDS) for _ in range(chance.choice([1, 3, 4, 5, 8, 12, 16, 31, 32, 33]))]
    most = chance.choice([1, 2, 5, 20, 40])
    source, target = chance.sample(machines, 2)
    if chance.random() < 0.15:
        return [partial(source.add, f"{key}.w", prompt, most, {"key": key})]
    shared_words = {"key": key, "peer_epoch": 1}
    sends = shared_words | {"do_remote_decode": True, "peer": target.name, "address": target.address}
    awaits = shared_words | {"do_remote_prefill": True, "peer": source.name}
    both: list[Callable[[], None]] = [
        partial(source.add, f"{key}.p", prompt, 1, sends),
        partial(target.add, f"{key}.d", prompt, most, awaits),
    ]
    return chance.sample(both, chance.choices([2, 1], [9, 1])[0])


def until(is_so: Callable[[], bool], machines: list[Machine], what: Callable[[], object]) -> None:
    """Step both machines until something holds."""
    eventually(is_so, lambda: [machine.step() for machine in machines], why=what)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_comes_in_whatever_order(tmp_path: Path, seed: int, is_async: bool) -> None:
    """Wrong if KV is lost, mixed up, read before it is there or written over, or anything is held when all is over."""
    chance = random.Random(2 * seed + is_async)  # noqa: S311 - no secret
    with pair(chance, tmp_path, is_async=is_async) as machines:
        shared = [[chance.randrange(WORDS) for _ in range(LONGEST_TOKENS)] for _ in range(3)]
        for number in range(_REQUESTS):
            while sum(len(machine.live) for machine in machines) >= _MOST_LIVE or chance.random() < 0.7:
                chance.choice(machines).step()
            for leg in legs(chance, machines, f"k{number}", shared):
                leg()
                for _ in range(chance.choice([0, 0, 1, 3])):
                    chance.choice(machines).step()
            live = [(machine, name) for machine in machines for name in machine.live]
            if live and chance.random() < 0.2:
                machine, name = chance.choice(live)
                chance.choice([partial(machine.abort, name), partial(machine.drop, name.split(".")[0])])()
        until(lambda: not any(machine.live for machine in machines), machines, lambda: [m.live for m in machines])
        until(lambda: not any(machine.held() for machine in machines), machines, lambda: [m.held() for m in machines])
        for machine in machines:
            machine.require_right_outputs()
        assert sum(machine.counts["came"] for machine in machines) >= _REQUESTS // 4
