"""One instance by the published simulator's rules (sections 2, 3 and 6 of their list), followed literally."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from naive.agenda import Agenda
from naive.parts import Arrival, Build, Machine, Model, Outcome, Result, interpolate

BATCH_TASKS = 512
BATCH_TOKENS = 2048
PREEMPTIONS = 4
MIXED_FACTOR = 1.1


@dataclass(eq=False)
class Task:
    """The prefill task or the decode task of a request."""

    request: Request
    kind: Literal["prefill", "decode"]
    tokens: int
    """What it adds to the tokens of a batch: the whole prompt, or 1."""
    left_tokens: int
    """Tokens that it still has to make."""
    need_tokens: int
    """Tokens whose KV cache it reserves when it first enters a batch."""
    count: int = 0
    """Preemptions, and builds that left it waiting."""
    started: bool = False
    instance: Instance = field(init=False)

    @property
    def finished(self) -> bool:
        return self.left_tokens == 0


class Request:
    """A request and its two tasks."""

    def __init__(self, number: int, arrival: Arrival, outcome: Outcome) -> None:
        self.number = number
        self.arrival_s = arrival.arrival_s
        self.prompt_tokens = arrival.prompt_tokens
        self.output_tokens = arrival.output_tokens
        self.outcome = outcome
        self.prefill_end_s = math.nan
        self.prefill = Task(self, "prefill", arrival.prompt_tokens, 1, arrival.prompt_tokens + 1)
        self.decode = Task(self, "decode", 1, arrival.output_tokens - 1, arrival.output_tokens - 1)


class NewBatch:
    """The list that a batch build fills, with the four tests of a task."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.tasks: list[Task] = []
        self.requests: set[Request] = set()
        self.tokens = 0
        self.needs_bytes = 0.0

    def is_full(self) -> bool:
        """Test (1)."""
        return len(self.tasks) == BATCH_TASKS

    def has_no_tokens_for(self, task: Task) -> bool:
        """Test (2)."""
        return len(self.tasks) > 0 and self.tokens + task.tokens > BATCH_TOKENS

    def has_request_of(self, task: Task) -> bool:
        """Test (3)."""
        return task.request in self.requests

    def has_no_memory_for(self, task: Task) -> bool:
        """Test (4)."""
        if task.started:
            return False
        need = self.instance.need_bytes(task)
        return self.instance.memory_bytes + self.needs_bytes + need > self.instance.capacity_bytes

    def add(self, task: Task) -> None:
        self.tasks.append(task)
        self.requests.add(task.request)
        self.tokens += task.tokens
        if not task.started:
            self.needs_bytes += self.instance.need_bytes(task)


class Instance:
    """One model replica: its batch, those who wait for it, and its memory."""

    start_transfer: Callable[[Task], None]
    go_back_from_mixed: Callable[[Instance], None]

    def __init__(self, number: int, machine: Machine, model: Model, agenda: Agenda, result: Result) -> None:
        self.number = number
        self.machine = machine
        self.role = machine.role
        self.capacity_bytes = machine.capacity_bytes
        self.kv_bytes_per_token = model.kv_bytes_per_token
        self.agenda = agenda
        self.result = result

        self.batch: list[Task] = []
        self.queue: list[Task] = []
        self.waiting_prompts: list[Task] = []
        self.preempted: list[Task] = []
        self.present: dict[Request, list[Task]] = {}
        self.present_order: list[Request] = []
        self.memory_bytes = model.weights_bytes
        self.sched_pending_tokens = 0
        self.sched_memory_bytes = model.weights_bytes

        self.batch_tokens = 0
        self.step_start_s = 0.0
        self.iteration_s = 0.0
        self.iterations = 0
        self.step_event = -1

    def need_bytes(self, task: Task) -> float:
        return self.kv_bytes_per_token * task.need_tokens

    def free(self, amount_bytes: float) -> None:
        self.memory_bytes -= amount_bytes
        self.sched_memory_bytes -= amount_bytes

    # What happens to it

    def task_arrives(self, task: Task) -> None:
        request = task.request
        if request not in self.present:
            self.present[request] = []
            self.present_order.append(request)
            self.present_order.sort(key=lambda each: each.arrival_s)
        self.present[request].append(task)
        self.enqueue(task)
        if task.kind == "prefill":
            self.waiting_prompts.append(task)

        if not self.batch:
            if self.memory_bytes + self.need_bytes(task) <= self.capacity_bytes:
                self.build_batch()
        elif self.fits_beside_the_batch(task) or self.is_prompt_that_fits_without_the_token_tasks(task):
            self.cut_step()

    def fits_beside_the_batch(self, task: Task) -> bool:
        return len(self.batch) < BATCH_TASKS and self.batch_tokens + task.tokens <= BATCH_TOKENS

    def is_prompt_that_fits_without_the_token_tasks(self, task: Task) -> bool:
        decode_tasks = sum(each.kind == "decode" for each in self.batch)
        return (
            task.kind == "prefill"
            and decode_tasks > 0
            and self.batch_tokens - decode_tasks + task.tokens <= BATCH_TOKENS
        )

    def transfer_out_ended(self) -> None:
        if not self.queue:
            return
        if not self.batch:
            if self.memory_bytes + self.need_bytes(self.queue[0]) <= self.capacity_bytes:
                self.build_batch()
        elif len(self.batch) < BATCH_TASKS and self.batch_tokens < BATCH_TOKENS:
            self.cut_step()

    def cut_step(self) -> None:
        if any(task.kind == "prefill" for task in self.batch):
            return
        iterations = math.floor((self.agenda.now_s - self.step_start_s) / self.iteration_s) + 1
        if iterations < self.iterations:
            self.iterations = iterations
            self.agenda.cancel(self.step_event)
            self.schedule_step_end()

    def end_step(self) -> None:
        counters = self.result.counters
        counters.iterations += self.iterations
        counters.task_iterations += self.iterations * len(self.batch)
        for task in self.batch:
            task.left_tokens -= 1 if task.kind == "prefill" else self.iterations
        for task in [task for task in self.batch if task.finished]:
            self.finish(task)
        self.build_batch()

    def finish(self, task: Task) -> None:
        request = task.request
        self.batch.remove(task)
        self.present[request].remove(task)
        if not self.present[request]:
            del self.present[request]
            self.present_order.remove(request)
        self.sched_pending_tokens -= task.tokens
        if task.kind == "prefill":
            request.prefill_end_s = self.agenda.now_s
            request.outcome.ttft_s = self.agenda.now_s - request.arrival_s
            if request.decode.instance is not self:
                self.start_transfer(task)
        else:
            request.outcome.e2e_s = self.agenda.now_s - request.arrival_s
            self.free(self.kv_bytes_per_token * (request.prefill.need_tokens + request.decode.need_tokens))

    # The queue

    def enqueue(self, task: Task) -> None:
        """Insert into the queue by (count, arrival) with a binary search, although the queue is not sorted."""
        low, high = 0, len(self.queue)
        while low < high:
            middle = (low + high) // 2
            if queue_key(task) < queue_key(self.queue[middle]):
                high = middle
            else:
                low = middle + 1
        self.queue.insert(low, task)

    # The batch

    def build_batch(self) -> None:
        self.apply(self.choose_batch())

    def choose_batch(self) -> list[Task]:
        new = NewBatch(self)

        for task in self.queue:
            if task.count < PREEMPTIONS or new.is_full() or new.has_no_tokens_for(task):
                break
            if not new.has_request_of(task) and not new.has_no_memory_for(task):
                new.add(task)

        for task in self.waiting_prompts:
            if new.is_full() or new.has_no_tokens_for(task):
                break
            if new.has_request_of(task):
                continue
            if new.has_no_memory_for(task):
                break
            new.add(task)

        for tasks in (self.preempted, self.batch):
            for task in tasks:
                if new.is_full() or new.has_no_tokens_for(task):
                    break
                if not new.has_request_of(task):
                    new.add(task)

        for request in self.present_order:
            task = self.present[request][0]
            if new.is_full():
                break
            if new.has_request_of(task):
                continue
            if new.has_no_tokens_for(task) or new.has_no_memory_for(task):
                break
            new.add(task)

        return new.tasks

    def apply(self, new: list[Task]) -> None:
        old = list(self.batch)
        new_set, old_set = set(new), set(old)
        for task in old:
            if task not in new_set:
                self.batch.remove(task)
                self.enqueue(task)
                self.preempted.append(task)
                self.result.counters.preemptions += 1
        for task in new:
            if task not in old_set:
                self.enter_batch(task)
        for tasks in self.present.values():
            if tasks[0] not in new_set:
                tasks[0].count += 1
        self.batch_tokens = sum(task.tokens for task in self.batch)
        if self.batch:
            self.start_step()
        elif not self.present:
            self.go_back_from_mixed(self)

    def enter_batch(self, task: Task) -> None:
        self.queue.remove(task)
        if task in self.waiting_prompts:
            self.waiting_prompts.remove(task)
        if task in self.preempted:
            self.preempted.remove(task)
        self.batch.append(task)
        if not task.started:
            task.started = True
            self.memory_bytes += self.need_bytes(task)
            request, now_s = task.request, self.agenda.now_s
            if task.kind == "prefill":
                request.outcome.queue_s = now_s - request.arrival_s
            else:
                request.outcome.second_token_overhead_s = now_s - request.prefill_end_s

    def start_step(self) -> None:
        kinds = {task.kind for task in self.batch}
        if "prefill" not in kinds:
            self.iterations = min(task.left_tokens for task in self.batch)
            self.iteration_s = interpolate(self.machine.decode_knots, self.batch_tokens)
        else:
            self.iterations = 1
            self.iteration_s = interpolate(self.machine.prefill_knots, self.batch_tokens)
            if "decode" in kinds:
                self.iteration_s *= MIXED_FACTOR
        self.step_start_s = self.agenda.now_s
        self.schedule_step_end()
        self.result.counters.steps += 1
        self.result.builds.append(
            Build(
                self.step_start_s,
                self.number,
                tuple((task.kind, task.request.number, task.left_tokens) for task in self.batch),
                self.iterations,
                self.iteration_s,
                tuple((task.kind, task.request.number, task.count) for task in self.queue),
            )
        )

    def schedule_step_end(self) -> None:
        self.step_event = self.agenda.at(self.step_start_s + self.iterations * self.iteration_s, self.end_step)


def queue_key(task: Task) -> tuple[int, float]:
    return task.count, task.request.arrival_s
