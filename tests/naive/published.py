"""The published simulator's rules, followed literally: arrivals, schedulers, transfers.

The section numbers are those of the list of these rules; `published_instance` holds section 6.
"""

from collections.abc import Callable, Sequence
from functools import partial

from naive.agenda import Agenda
from naive.parts import Arrival, Counters, Machine, Model, Outcome, Result
from naive.published_instance import Instance, Request, Task

END_S = 86_400.0
LINK_BYTES_PER_S = 200 * 2**30
RETRY_S = 1.0
PREFILL_QUEUE_TOKENS = 8192


class Cluster:
    """Instances and the scheduler before them."""

    def __init__(self, machines: Sequence[Machine], model: Model) -> None:
        self.agenda = Agenda()
        self.model = model
        self.result = Result([])
        self.instances = [
            Instance(number, machine, model, self.agenda, self.result) for number, machine in enumerate(machines)
        ]
        for instance in self.instances:
            instance.start_transfer = self.start_transfer
            instance.go_back_from_mixed = self.go_back_from_mixed
        self.prefill_list = [instance for instance in self.instances if instance.role == "prefill"]
        self.mixed_list: list[Instance] = []
        self.decode_list = [instance for instance in self.instances if instance.role == "decode"]
        self.unsplit = all(instance.role == "unsplit" for instance in self.instances)

    @property
    def counters(self) -> Counters:
        return self.result.counters

    def serve(self, arrivals: Sequence[Arrival]) -> Result:
        """Run until nothing is left to happen, or until the published end of time."""
        for number, arrival in enumerate(arrivals):
            outcome = Outcome()
            self.result.outcomes.append(outcome)
            request = Request(number, arrival, outcome)
            self.agenda.at(arrival.arrival_s, partial(self.request_arrives, request))
        self.agenda.run(END_S)
        return self.result

    def kv_bytes(self, tokens: int) -> float:
        return self.model.kv_bytes_per_token * tokens

    # Section 5: submission and transfer

    def request_arrives(self, request: Request) -> None:
        if self.unsplit:
            prefill_side, decode_side = self.choose_baseline(request)
        else:
            prefill_side, decode_side = self.choose_splitwise(request)
        self.submit(request, prefill_side, decode_side)

    def submit(self, request: Request, prefill_side: Instance, decode_side: Instance) -> None:
        request.prefill.instance = prefill_side
        request.decode.instance = decode_side
        request.outcome.prefill_instance = prefill_side.number
        request.outcome.decode_instance = decode_side.number
        prefill_side.task_arrives(request.prefill)
        if prefill_side is decode_side:
            self.counters.same_instance += 1
            decode_side.task_arrives(request.decode)

    def start_transfer(self, prompt: Task) -> None:
        """Try to start the transfer of a request whose prompt has ended; try again later if there is no room."""
        request = prompt.request
        destination = request.decode.instance
        reserved = self.kv_bytes(request.prompt_tokens + 1)
        if destination.memory_bytes + reserved <= destination.capacity_bytes:
            destination.memory_bytes += reserved
            duration = self.kv_bytes(request.prompt_tokens) / LINK_BYTES_PER_S
            self.agenda.at(self.agenda.now_s + duration, partial(self.end_transfer, request))
        else:
            self.agenda.at(self.agenda.now_s + RETRY_S, partial(self.start_transfer, prompt))

    def end_transfer(self, request: Request) -> None:
        source, destination = request.prefill.instance, request.decode.instance
        source.free(self.kv_bytes(request.prompt_tokens + 1))
        destination.task_arrives(request.decode)
        source.transfer_out_ended()

    # Section 4: schedulers

    def choose_baseline(self, request: Request) -> tuple[Instance, Instance]:
        chosen = min(self.instances, key=pending_tokens)
        chosen.sched_pending_tokens += request.prompt_tokens + 1
        return chosen, chosen

    def choose_splitwise(self, request: Request) -> tuple[Instance, Instance]:
        prefill_kv = self.kv_bytes(request.prompt_tokens + 1)
        all_kv = prefill_kv + self.kv_bytes(request.output_tokens - 1)

        def too_long_a_queue(instance: Instance) -> bool:
            pending = instance.sched_pending_tokens + request.prompt_tokens
            return len(instance.queue) > 0 and pending > PREFILL_QUEUE_TOKENS

        def too_little_memory(instance: Instance) -> bool:
            return instance.sched_memory_bytes + all_kv >= instance.capacity_bytes

        prefill_side = first_accepted([self.prefill_list, self.mixed_list], pending_tokens, too_long_a_queue)
        decode_side = first_accepted([self.decode_list, self.mixed_list], sched_memory, too_little_memory)

        if prefill_side is None and self.decode_list:
            prefill_side = min(self.decode_list, key=pending_tokens)
            self.decode_list.remove(prefill_side)
            self.mixed_list.append(prefill_side)
            self.counters.decode_to_mixed += 1
        if decode_side is None and self.prefill_list:
            decode_side = min(self.prefill_list, key=sched_memory)
            self.prefill_list.remove(decode_side)
            self.mixed_list.append(decode_side)
            self.counters.prefill_to_mixed += 1
        if prefill_side is None or decode_side is None:
            prefill_side = min(self.prefill_list + self.mixed_list + self.decode_list, key=pending_tokens)
            decode_side = prefill_side

        if prefill_side is not decode_side:
            prefill_side.sched_memory_bytes += prefill_kv
        decode_side.sched_memory_bytes += all_kv
        prefill_side.sched_pending_tokens += request.prompt_tokens
        decode_side.sched_pending_tokens += 1
        return prefill_side, decode_side

    def go_back_from_mixed(self, instance: Instance) -> None:
        if instance not in self.mixed_list:
            return
        self.mixed_list.remove(instance)
        home = self.prefill_list if instance.role == "prefill" else self.decode_list
        home.append(instance)
        self.counters.back_from_mixed += 1


def pending_tokens(instance: Instance) -> float:
    return instance.sched_pending_tokens


def sched_memory(instance: Instance) -> float:
    return instance.sched_memory_bytes


def first_accepted(
    lists: Sequence[list[Instance]], load: Callable[[Instance], float], refused: Callable[[Instance], bool]
) -> Instance | None:
    """Return the least loaded instance of the first list whose least loaded one is not refused."""
    for instances in lists:
        if instances:
            least = min(instances, key=load)
            if not refused(least):
                return least
    return None


def simulate(arrivals: Sequence[Arrival], machines: Sequence[Machine], model: Model) -> Result:
    """Return what becomes of the requests by the published rules.

    The scheduler is token_jsq where every machine is unsplit, and mixed_pool where none is.

    Raises:
        ValueError: A request has fewer than two output tokens, or unsplit machines stand beside others.
    """
    if any(arrival.output_tokens < 2 for arrival in arrivals):
        raise ValueError("the published rules need two output tokens or more")
    if len({machine.role == "unsplit" for machine in machines}) != 1:
        raise ValueError("either all machines are unsplit or none is")
    return Cluster(machines, model).serve(arrivals)
