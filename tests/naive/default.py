"""The default rules, followed literally: arrivals and the life of a KV transfer (section 4 of docs/rules.md)."""

from collections.abc import Sequence
from functools import partial

from naive.agenda import Agenda
from naive.default_flows import Network
from naive.default_machine import Machine
from naive.default_parts import Arrival, Build, Counters, Model, Request, Result, Rules
from naive.default_pools import Pools


class Cluster:
    """Machines, the scheduler before them and the network between them."""

    def __init__(self, builds: Sequence[Build], model: Model, rules: Rules) -> None:
        self.rules = rules
        self.agenda = Agenda()
        self.counters = Counters()
        self.machines = [
            Machine(number, build, model, rules, self.agenda, self.counters) for number, build in enumerate(builds)
        ]
        self.pools = Pools(self.machines, rules, self.agenda, self.counters)
        self.on_the_way: list[Request] = []
        """Those for whose KV room is held on the decode machine, until it is there."""
        self.network = Network(self.agenda, model, self.kv_arrives)
        for machine in self.machines:
            machine.hand_on = self.hand_on
            machine.let_land = self.let_land
            machine.begin_to_stream = self.begin_to_stream
            machine.leave_mixed_pool = self.pools.leave_mixed

    def serve(self, arrivals: Sequence[Arrival]) -> Result:
        """Run until nothing is left to happen."""
        requests = [Request(number, arrival, self.rules) for number, arrival in enumerate(arrivals)]
        for request in requests:
            self.agenda.at(request.arrival.arrival_s, partial(self.request_arrives, request))
        self.agenda.run(float("inf"))
        return Result(requests, self.counters)

    def request_arrives(self, request: Request) -> None:
        longest = self.rules.blocks(request.arrival.prompt_tokens + request.arrival.output_tokens + 1)
        if longest > min(machine.capacity_blocks for machine in self.machines):
            request.refused = True
            return
        prefill_side, decode_side = self.pools.choose(request)
        self.pools.assign(request, prefill_side, decode_side)
        prefill_side.task_arrives(request)

    def begin_to_stream(self, request: Request, step_s: float) -> None:
        source, target = ends_of(request)
        if target.landing or not target.lands(request.first_blocks):
            self.counters.streams_without_room += 1
            return
        self.on_the_way.append(request)
        request.arriving_blocks = request.first_blocks
        self.counters.layerwise += 1
        self.network.stream(request, source, target, step_s)

    def hand_on(self, request: Request) -> None:
        if request.flow is not None:
            self.network.drain(request.flow)
            return
        _, target = ends_of(request)
        target.landing.append(request)
        self.let_land(target)
        self.counters.awaiting_room_waited += request in target.landing

    def let_land(self, machine: Machine) -> None:
        while machine.landing:
            request = machine.landing[0]
            source, _ = ends_of(request)
            if machine.lands(request.first_blocks):
                machine.landing.remove(request)
                self.on_the_way.append(request)
                request.arriving_blocks = request.first_blocks
                self.counters.serialized += 1
                self.network.send(request, source, machine)
                continue
            if machine.running_entries or any(machine in ends_of(each) for each in self.on_the_way):
                return
            machine.landing.remove(request)
            self.counters.recomputed += 1
            self.leave_prefill_machine(request)
            machine.compute_again(request)
            machine.waiting.append(request)
            machine.wake()
            if not source.running_entries:
                source.wake()

    def kv_arrives(self, request: Request) -> None:
        source, target = ends_of(request)
        self.on_the_way.remove(request)
        self.leave_prefill_machine(request)
        request.kv_ready_s = self.agenda.now_s
        target.task_arrives(request)
        source.memory_came_free_by_a_transfer()

    def leave_prefill_machine(self, request: Request) -> None:
        source, _ = ends_of(request)
        source.used_blocks -= request.held_blocks
        source.committed_blocks -= request.first_blocks
        request.held_blocks = request.arriving_blocks
        request.arriving_blocks = 0


def ends_of(request: Request) -> tuple[Machine, Machine]:
    assert request.assigned is not None
    assert request.decode_machine is not None
    return request.assigned, request.decode_machine


def simulate(arrivals: Sequence[Arrival], builds: Sequence[Build], model: Model, rules: Rules) -> Result:
    """Return what becomes of the requests by the default rules.

    Raises:
        RuntimeError: A request never ended, or an account of an idle machine is not zero: the rules would be wrong.
    """
    cluster = Cluster(builds, model, rules)
    result = cluster.serve(arrivals)
    for request in result.requests:
        if not (request.refused or request.done):
            raise RuntimeError(f"request {request.number} never ended")
    for machine in cluster.machines:
        accounts = (machine.used_blocks, machine.committed_blocks, machine.pending_tokens, machine.prefill_phases)
        if any(accounts) or machine.pending_output_tokens or machine.decode_phases:
            raise RuntimeError(f"machine {machine.number} ends with {accounts}")
    return result
