"""KV transfers as flows that share network cards: the last part of section 4 of docs/rules.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from naive.agenda import Agenda
from naive.default_machine import Machine
from naive.default_parts import Model, Request


@dataclass(eq=False)
class Flow:
    """Bytes on their way from a prefill machine to a decode machine."""

    request: Request
    source: Machine
    target: Machine
    left_bytes: float
    cap_bytes_per_s: float
    draining: bool
    """Whether nothing but the cards holds it up, so that its end is known."""
    since_s: float
    rate_bytes_per_s: float = 0.0
    event: int | None = None


class Network:
    """All flows, newest first."""

    def __init__(self, agenda: Agenda, model: Model, arrived: Callable[[Request], None]) -> None:
        self.agenda = agenda
        self.model = model
        self.arrived = arrived
        self.flows: list[Flow] = []

    def kv_bytes(self, request: Request) -> float:
        return request.arrival.prompt_tokens * self.model.kv_bytes_per_token

    def stream(self, request: Request, source: Machine, target: Machine, step_s: float) -> None:
        """Send while the prompt is computed, no faster than layers get ready."""
        size = self.kv_bytes(request)
        request.streamed = True
        self.open(Flow(request, source, target, size, size / step_s, False, self.agenda.now_s))

    def send(self, request: Request, source: Machine, target: Machine) -> None:
        """Send everything, after the prefill phase."""
        self.open(Flow(request, source, target, self.kv_bytes(request), math.inf, True, self.agenda.now_s))

    def drain(self, flow: Flow) -> None:
        """Let a streamed flow go as fast as it can: the prefill phase is over, at least the last layer is left."""
        self.progress(flow)
        share = flow.request.chunk / flow.request.arrival.prompt_tokens
        last_layer_bytes = share * self.kv_bytes(flow.request) / self.model.layers
        flow.left_bytes = max(flow.left_bytes, last_layer_bytes)
        flow.cap_bytes_per_s = math.inf
        flow.draining = True
        self.set_rate(flow)

    def open(self, flow: Flow) -> None:
        flow.request.flow = flow
        self.flows.insert(0, flow)
        self.share_again(flow)

    def last_byte_leaves(self, flow: Flow) -> None:
        request, card = flow.request, flow.source.card
        self.flows.remove(flow)
        request.flow = None
        self.share_again(flow)
        latency_s = card.layerwise_latency_s if request.streamed else card.serialized_latency_s
        self.agenda.at(self.agenda.now_s + latency_s, lambda: self.arrived(request))

    def outgoing(self, machine: Machine) -> list[Flow]:
        return [flow for flow in self.flows if flow.source is machine]

    def incoming(self, machine: Machine) -> list[Flow]:
        return [flow for flow in self.flows if flow.target is machine]

    def share_again(self, changed: Flow) -> None:
        """Give all flows at either end of one that has come or gone their shares, and draining ones their new end."""
        out = self.outgoing(changed.source)
        for flow in out + [flow for flow in self.incoming(changed.target) if flow not in out]:
            self.set_rate(flow)

    def set_rate(self, flow: Flow) -> None:
        self.progress(flow)
        flow.rate_bytes_per_s = min(
            flow.cap_bytes_per_s,
            flow.source.card.bytes_per_s / len(self.outgoing(flow.source)),
            flow.target.card.bytes_per_s / len(self.incoming(flow.target)),
        )
        if flow.draining:
            if flow.event is not None:
                self.agenda.cancel(flow.event)
            end_s = self.agenda.now_s + flow.left_bytes / flow.rate_bytes_per_s
            flow.event = self.agenda.at(end_s, lambda: self.last_byte_leaves(flow))

    def progress(self, flow: Flow) -> None:
        sent_bytes = flow.rate_bytes_per_s * (self.agenda.now_s - flow.since_s)
        flow.left_bytes = max(0.0, flow.left_bytes - sent_bytes)
        flow.since_s = self.agenda.now_s
