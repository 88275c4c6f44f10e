"""Three machines that all do everything at once, with little memory: all requests end, and end right."""

import tempfile
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine_machines import Machine, Received, asked, served, turn, turn_until
from phasesplit.engine.sampling import Sampling
from phasesplit.engine.wire import WorkerRequest
from phasesplit.kv_transfer.messages import TransferTimeouts
from phasesplit.protocol.worker import Address, SendKv, TakeKv
from phasesplit.scheduler.rules import Batching

REQUESTS = 24
SHORT = TransferTimeouts(lease_s=0.5, heartbeat_s=0.05, answer_s=0.5, transfer_s=0.6)


class Sent:
    """One request on its way, whole on one machine or split over two."""

    def __init__(self, key: str, request: WorkerRequest, machines: list[Machine]) -> None:
        self.key, self.request, self.machines = key, request, machines
        self.received = [Received() for _ in machines]
        self.is_given_up = False

    def submit(self, leg: int) -> None:
        """Send one leg; the last is the one that answers."""
        request = self.request
        if len(self.machines) == 2:
            here, there = self.machines
            assert there.endpoint is not None
            where = there.endpoint.address
            address = Address(where["boot_id"], where["unix"], tuple(where["tcp"]) if where["tcp"] else None)
            transfer = (SendKv(self.key, there.name, 1, address), TakeKv(self.key, here.name, 1))[leg]
            request = replace(request, max_tokens=request.max_tokens if leg else 1, transfer=transfer)
        self.machines[leg].engine.submit(self.key, request, self.received[leg])

    def abort(self) -> None:
        """Do what the gateway does when a client hangs up, or one leg has failed."""
        self.is_given_up = True
        for machine in self.machines:
            machine.engine.abort(self.key)

    @property
    def is_over(self) -> bool:
        if not self.is_given_up and any(received.bad for received in self.received):
            self.abort()
        return self.is_given_up or self.received[-1].finished is not None


def drawn_request(rng: np.random.Generator, number: int) -> WorkerRequest:
    """Return a request; some begin alike."""
    tokens, seed = int(rng.integers(1, 150)), int(rng.choice([1, 2, 100 + number]))
    ids = np.random.default_rng(seed).integers(3, 300, 150)[:tokens].tolist()
    return asked(ids, int(rng.integers(1, 40)), Sampling(temperature=0.9, seed=number))


@pytest.mark.parametrize("way", ["shared-memory", "tcp"])
@pytest.mark.parametrize("seed", range(6))
def test_all_come_to_the_right_end(seed: int, way: str) -> None:
    """Machines that take and give KV at the same time would stall, lose blocks, or mix up what is whose."""
    rng = np.random.default_rng(seed)
    options: dict[str, Any] = {
        "blocks": 7 + 2 * (seed % 3),
        "batching": Batching.WHOLE if seed % 2 else Batching.CHUNKED,
        "batch_prompt_tokens": (32, 48, 2_048)[seed % 3],
        "threshold_tokens": (0, 60, 10_000)[seed // 2],
        "prefix_identity": b"tiny" if seed % 2 else None,
        "timeouts": SHORT,
    }
    with tempfile.TemporaryDirectory() as folder:  # the paths of sockets are short
        machines = [Machine(name, way=way, folder=folder, **options) for name in "abc"]
        sent: list[Sent] = []
        for number in range(REQUESTS):
            chosen = [machines[index] for index in rng.permutation(3)[: 1 + (number % 4 > 0)]]
            sent.append(Sent(f"r{number}", drawn_request(rng, number), chosen))
            for leg in rng.permutation(len(chosen)):
                sent[-1].submit(int(leg))
                if rng.random() < 0.5:
                    turn(*machines)
            if rng.random() < 0.2:
                sent[int(rng.integers(len(sent)))].abort()
        turn_until(lambda: sum(not one.is_over for one in sent) == 0, *machines)
        turn_until(lambda: not any(machine.engine.facts().held for machine in machines), *machines)
        turn(*machines)
        for machine in machines:
            machine.require_empty()
        alone = Machine(blocks=options["blocks"])
        right = [one for one in sent if not one.is_given_up]
        assert len(right) > REQUESTS // 4
        for one in right:
            assert one.received[-1].tokens == served(alone, one.request, one.key).tokens
        for machine in machines:
            machine.close()
