"""One machine by the default rules: its lists, its memory, its steps (sections 3 and 5 of docs/rules.md)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

from naive.agenda import Action, Agenda
from naive.default_parts import Build, Counters, Model, Request, Rules


class Machine:
    """A server with one replica of the model."""

    hand_on: Callable[[Request], None]
    """Take over the KV of a request whose prefill phase has ended."""
    let_land: Callable[[Machine], None]
    """Begin the transfers that wait for room here."""
    begin_to_stream: Callable[[Request, float], None]
    """Begin a layer-wise transfer, if there is room, beside a step of so many seconds."""
    leave_mixed_pool: Callable[[Machine], None]
    """Go home, or change the home, if it is time to."""

    def __init__(
        self, number: int, build: Build, model: Model, rules: Rules, agenda: Agenda, counters: Counters
    ) -> None:
        self.number = number
        self.home = build.role
        self.times = build.times
        self.card = build.card
        self.rules = rules
        self.agenda = agenda
        self.counters = counters
        self.chunked = (rules.unsplit_batching if build.role == "unsplit" else rules.batching) == "chunked"
        room_bytes = build.hbm_bytes * rules.hbm_share - model.weights_bytes
        self.capacity_blocks = math.floor(room_bytes / (model.kv_bytes_per_token * rules.block_tokens))
        self.kv_bytes_per_token = model.kv_bytes_per_token
        self.headroom_blocks = math.floor(rules.kv_headroom * self.capacity_blocks)

        self.used_blocks = 0
        self.committed_blocks = 0
        self.pending_tokens = 0
        self.pending_output_tokens = 0
        self.prefill_phases = 0
        self.decode_phases = 0
        self.rank = 0
        self.mixed_since_s = 0.0

        self.waiting: list[Request] = []
        self.ready: list[Request] = []
        self.preempted: list[Request] = []
        self.landing: list[Request] = []
        self.running_entries: list[Request] = []

        self.iterations = 1
        self.step_start_s = 0.0
        self.step_times_s: list[float] = []
        """Of 1, 2, 3, ... iterations of the present step, as many as were planned."""
        self.event: int | None = None

    @property
    def free_blocks(self) -> int:
        return self.capacity_blocks - self.used_blocks

    @property
    def prefill_entries(self) -> list[Request]:
        return [request for request in self.running_entries if request.phase == "prefill"]

    @property
    def decode_entries(self) -> list[Request]:
        return [request for request in self.running_entries if request.phase == "decode"]

    def growth_blocks(self, iterations: int) -> int:
        """What the decode entries need for so many more iterations than they have booked."""
        blocks = self.rules.blocks
        return sum(blocks(each.context + iterations) - blocks(each.context) for each in self.decode_entries)

    # Its one event

    def schedule(self, time_s: float, action: Action) -> None:
        if self.event is not None:
            self.agenda.cancel(self.event)

        def happens() -> None:
            self.event = None
            action()

        self.event = self.agenda.at(time_s, happens)

    def wake(self) -> None:
        """Form a batch at this instant, but after what is going on."""
        self.schedule(self.agenda.now_s, self.form_batch)

    # What happens to it

    def task_arrives(self, request: Request) -> None:
        if request.phase == "prefill":
            self.waiting.append(request)
        else:
            self.ready.append(request)
        if not self.running_entries:
            self.form_batch()
        elif self.cut():
            self.counters.arrival_cuts += 1

    def memory_came_free_by_a_transfer(self) -> None:
        if not self.running_entries:
            self.form_batch()
            return
        if self.landing:
            self.let_land(self)
        if self.waiting:
            self.cut()

    def iterations_begun(self) -> int:
        """Iterations of the present step that are over when the one in progress is."""
        for count, time_s in enumerate(self.step_times_s[: self.iterations], start=1):
            if time_s > self.agenda.now_s - self.step_start_s:
                return count
        return self.iterations

    def cut(self) -> bool:
        """End the step with the iteration in progress; return whether that is sooner than it would have ended."""
        if self.prefill_entries or self.iterations_begun() == self.iterations:
            return False
        self.iterations = self.iterations_begun()
        self.schedule_step_end()
        return True

    def schedule_step_end(self) -> None:
        self.schedule(self.step_start_s + self.step_times_s[self.iterations - 1], self.step_ends)

    def lands(self, blocks: int) -> bool:
        """Hold room for KV that wants to come, if it is there."""
        if not self.running_entries:
            if blocks > self.free_blocks:
                return False
        else:
            if blocks + self.headroom_blocks > self.free_blocks:
                return False
            most = len(self.running_entries) * (self.iterations // self.rules.block_tokens + 1)
            if blocks + most > self.free_blocks:
                if blocks + self.growth_blocks(self.iterations_begun()) > self.free_blocks:
                    return False
                if blocks + self.growth_blocks(self.iterations) > self.free_blocks and self.cut():
                    self.counters.awaiting_room_cuts += 1
        self.used_blocks += blocks
        return True

    def step_ends(self) -> None:
        self.counters.iterations += self.iterations
        self.counters.task_iterations += self.iterations * len(self.running_entries)
        self.used_blocks += self.growth_blocks(self.iterations)
        for request in self.running_entries:
            if request.phase == "prefill":
                request.computed += request.chunk
            else:
                request.emitted_s += [self.step_start_s + time_s for time_s in self.step_times_s[: self.iterations]]
                request.held_blocks = self.rules.blocks(request.context)
        ended = [
            each
            for each in self.running_entries
            if (each.computed == each.context if each.phase == "prefill" else each.done)
        ]
        self.running_entries = [each for each in self.running_entries if each not in ended]
        for request in ended:
            if request.phase == "prefill":
                self.end_prefill_phase(request)
            if request.done:
                self.end_request(request)
        self.form_batch()

    def end_prefill_phase(self, request: Request) -> None:
        self.pending_tokens -= request.context
        self.prefill_phases -= 1
        request.emitted_s.append(self.agenda.now_s)
        if request.emitted > 1:
            # A token that was computed again in place of its decode phase: that begins here, if it had not yet.
            if request.kv_ready_s < 0:
                request.kv_ready_s = self.agenda.now_s
            if request.decode_start_s < 0:
                request.decode_start_s = self.agenda.now_s
        request.phase = "decode"
        if request.done:
            return
        if request.decode_machine is self:
            if request.kv_ready_s < 0:
                request.kv_ready_s = self.agenda.now_s
            self.ready.append(request)
        else:
            self.hand_on(request)

    def end_request(self, request: Request) -> None:
        """It may be here only for its prefill phase, if it has one output token."""
        target = request.decode_machine
        assert target is not None
        self.used_blocks -= request.held_blocks
        if target is not self:
            self.committed_blocks -= request.first_blocks
        target.pending_tokens -= 1
        target.pending_output_tokens -= request.arrival.expected_tokens
        target.committed_blocks -= request.expected_blocks
        target.decode_phases -= 1

    # The next batch

    def form_batch(self) -> None:
        if self.chunked:
            self.choose_with_chunks()
        else:
            self.choose_whole()
            while self.make_room() and not self.running_entries:
                self.counters.rebuilt += 1
                self.choose_whole()
            for request in self.preempted + self.ready:
                request.passed_over += 1
        self.leave_mixed_pool(self)
        if self.running_entries:
            self.start_step()
        if self.landing:
            self.let_land(self)

    def leaves_headroom(self, blocks: int) -> bool:
        return blocks <= self.free_blocks - (self.headroom_blocks if self.running_entries else 0)

    def choose_whole(self) -> None:
        new: list[Request] = []
        tokens = prefill_blocks = 0
        passes = [self.running_entries, self.ready]
        if self.waiting or self.preempted:
            aged = [each for each in self.preempted + self.ready if each.passed_over >= self.rules.preemption_limit]
            passes = [aged, self.waiting, self.preempted, *passes]
        for requests in passes:
            for request in requests:
                is_prefill = request.phase == "prefill"
                more = request.context if is_prefill else 1
                if len(new) == self.rules.batch_requests:
                    break
                if new and tokens + more > self.rules.batch_prompt_tokens:
                    break
                if request in new:
                    continue
                if is_prefill and not self.leaves_headroom(prefill_blocks + request.prefill_blocks):
                    break
                new.append(request)
                tokens += more
                prefill_blocks += request.prefill_blocks if is_prefill else 0
        for request in [request for request in self.running_entries if request not in new]:
            self.running_entries.remove(request)
            self.preempted.append(request)
            request.preemptions += 1
            self.counters.preemptions += 1
        for request in new:
            if request not in self.running_entries:
                self.join(request)
                request.chunk = request.context

    def join(self, request: Request) -> None:
        for requests in (self.waiting, self.preempted, self.ready):
            if request in requests:
                requests.remove(request)
        self.running_entries.append(request)
        if request.phase == "prefill":
            request.held_blocks = request.prefill_blocks
            self.used_blocks += request.held_blocks

    def make_room(self) -> bool:
        """Evict the entries that joined last until one more iteration fits; return whether any had to go."""
        running_entries = len(self.running_entries)
        while self.growth_blocks(1) > self.free_blocks:
            request = self.running_entries.pop()
            self.used_blocks -= request.held_blocks
            request.held_blocks = 0
            request.preemptions += 1
            self.counters.evictions += 1
            if request.phase == "decode":
                self.compute_again(request)
            else:
                self.counters.prompts_evicted += 1
            request.computed = 0
            self.waiting.insert(0, request)
        return len(self.running_entries) < running_entries

    def compute_again(self, request: Request) -> None:
        """Let a request whose KV is lost begin again with a prefill phase here."""
        request.phase = "prefill"
        request.computed = 0
        request.prefill_machine = self
        self.prefill_phases += 1
        self.pending_tokens += request.context

    def join_ready(self) -> None:
        while self.ready and len(self.running_entries) < self.rules.batch_requests:
            self.join(self.ready[0])

    def choose_with_chunks(self) -> None:
        self.join_ready()
        while self.make_room() and not self.running_entries:
            self.counters.rebuilt += 1
            self.join_ready()
        budget = self.rules.batch_prompt_tokens - len(self.decode_entries)
        for request in self.prefill_entries:
            request.chunk = max(0, min(budget, request.context - request.computed))
            budget -= request.chunk
            self.counters.chunks_continued += 1
        while budget > 0 and self.waiting and len(self.running_entries) < self.rules.batch_requests:
            request = self.waiting[0]
            beside_growth = request.prefill_blocks + self.growth_blocks(1) <= self.free_blocks
            if not (self.leaves_headroom(request.prefill_blocks) and beside_growth):
                break
            self.join(request)
            request.chunk = min(budget, request.context)
            budget -= request.chunk

    # The step

    def start_step(self) -> None:
        now_s = self.agenda.now_s
        self.counters.steps += 1
        for request in self.running_entries:
            if request.phase == "prefill" and request.prefill_start_s < 0:
                request.prefill_start_s = now_s
            if request.phase == "decode" and request.decode_start_s < 0:
                request.decode_start_s = now_s
        self.iterations = self.step_length()
        self.step_start_s = now_s
        if self.prefill_entries:
            self.step_times_s = [self.iteration_with_streams_s()]
        else:
            iterations_s = [
                self.times.iteration_s([], [request.context + iteration for request in self.running_entries])
                for iteration in range(self.iterations)
            ]
            self.step_times_s = list(accumulate(iterations_s))
        self.schedule_step_end()

    def step_length(self) -> int:
        if self.prefill_entries:
            return 1
        iterations = min(request.arrival.output_tokens - request.emitted for request in self.running_entries)
        while self.growth_blocks(iterations) > self.free_blocks:
            iterations -= 1
        assert iterations >= 1
        return iterations

    def iteration_with_streams_s(self) -> float:
        chunks = [(request.chunk, request.computed) for request in self.prefill_entries]
        step_s = self.times.iteration_s(chunks, [request.context for request in self.decode_entries])
        streams = [request for request in self.prefill_entries if self.may_stream(request)]
        if streams:
            all_bytes = sum(request.arrival.prompt_tokens * self.kv_bytes_per_token for request in streams)
            step_s += self.card.streaming_slowdown * min(step_s, all_bytes / self.card.bytes_per_s)
        for request in streams:
            self.begin_to_stream(request, step_s)
        return step_s

    def may_stream(self, request: Request) -> bool:
        ends = request.computed + request.chunk == request.context
        goes_away = request.decode_machine is not self and request.arrival.output_tokens > 1
        return ends and goes_away and request.arrival.prompt_tokens >= self.card.layerwise_from_tokens
