"""What the gateway shows to monitoring: the page that Prometheus reads, and spans for OpenTelemetry.

The page is made when it is asked for; docs/metrics.md says what each name means. A choice that has ended becomes a span
with a span for each of its stages, made from the record that it leaves: serving a request costs nothing for them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from phasesplit.errors import SpecError
from phasesplit.gateway.in_flight import InFlightRequests
from phasesplit.gateway.leases import Purpose
from phasesplit.gateway.meters import Histogram, intervals
from phasesplit.gateway.request_states import RequestState
from phasesplit.kv_transfer.layout import ITEM_BYTES
from phasesplit.protocol.roles import ROLES

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


_ATTRIBUTES = (
    "request", "choice", "model", "outcome", "finish_reason", "prompt_tokens", "output_tokens", "attempts",
    "continued", "prefill_machine", "decode_machine",
)  # fmt: skip


class Spans:
    """Makes spans of records; give it to a gateway as `records`."""

    def __init__(self, tracer: "Tracer", close: Callable[[], None] = lambda: None) -> None:
        """Make one.

        Args:
            tracer: Where spans go.
            close: Sends those that have not been sent yet.
        """
        self._tracer = tracer
        self.close = close

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Make the spans of one record."""
        from opentelemetry.trace import set_span_in_context

        start_s = record["arrival_unix_s"]
        attributes = {f"phasesplit.{name}": record[name] for name in _ATTRIBUTES if record[name] is not None}
        whole = self._tracer.start_span("request", start_time=_ns(start_s), attributes=attributes)
        inside = set_span_in_context(whole)
        for stage, (begin_s, end_s) in intervals(record).items():
            span = self._tracer.start_span(stage, context=inside, start_time=_ns(start_s + begin_s))
            span.end(_ns(start_s + end_s))
        whole.end(_ns(start_s + record["ended_s"]))


def spans_to(endpoint: str) -> Spans:
    """Return what sends spans to a collector, in the background.

    Args:
        endpoint: URL of its OTLP endpoint over HTTP, such as "http://localhost:4318/v1/traces".

    Raises:
        SpecError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise SpecError(f"traces to {endpoint}: not installed; pip install 'phasesplit[otel]'") from None
    provider = TracerProvider(resource=Resource.create({"service.name": "phasesplit"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    return Spans(provider.get_tracer("phasesplit.gateway"), provider.shutdown)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LIVE_STATES = (
    RequestState.QUEUED,
    RequestState.PREFILLING,
    RequestState.TRANSFERRING,
    RequestState.WAITING,
    RequestState.DECODING,
)


def exposition(requests: InFlightRequests) -> bytes:
    """Return the page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(GatewayCollector(requests))
    return generate_latest(registry)


class GatewayCollector(Collector):
    """Reads the gateway's counts when the page is asked for; it keeps none itself."""

    def __init__(self, requests: InFlightRequests) -> None:
        self._in_flight = requests

    def collect(self) -> Iterator[Metric]:
        """Return all metrics."""
        yield from self._requests()
        yield from self._latencies()
        yield from self._kv()
        yield from self._machines()
        yield from self._pools()

    def _requests(self) -> Iterator[Metric]:
        meters, dispatcher = self._in_flight.meters, self._in_flight.dispatcher
        yield _counter("requests", "Choices that have ended, by how.", "outcome", meters.outcomes)
        responses = CounterMetricFamily(
            "phasesplit_http_responses", "Answers of the OpenAI endpoints.", labels=["path", "status"]
        )
        for (path, status), count in sorted(meters.responses.items()):
            responses.add_metric([path, str(status)], count)
        yield responses
        states = Counter(str(choice.progress.state) for choice in self._in_flight.live)
        live = {str(state): states[str(state)] for state in _LIVE_STATES}
        yield _gauge("live_requests", "Choices that are served now, by state.", "state", live)
        yield _total("retries", "Attempts given up for another pair of machines.", meters.retries)
        yield _total("continued", "Of these, those behind whose output another pair went on.", meters.continued)
        yield _counter(
            "absorbed_events",
            "Events that came too late or twice and changed nothing.",
            "event",
            meters.absorbed_events,
        )
        yield _counter("placements", "What became of requests for a pair.", "verdict", dict(dispatcher.counts))
        yield _total("prompt_tokens", "Prompt tokens of completed choices.", meters.prompt_tokens)
        yield _total("output_tokens", "Output tokens.", meters.output_tokens)
        yield _one("pending_prompt_tokens", "Prompt tokens that wait or run.", dispatcher.pending_prompt_tokens)

    def _latencies(self) -> Iterator[Metric]:
        meters = self._in_flight.meters
        yield _histogram("ttft_seconds", "From arrival to the first token.", meters.ttft)
        yield _histogram("itl_seconds", "Between two tokens of a choice.", meters.itl)
        yield _histogram("e2e_seconds", "From arrival to the last token, of completed choices.", meters.e2e)
        family = HistogramMetricFamily(
            "phasesplit_stage_seconds", "Time in each stage, of completed choices.", labels=["stage"]
        )
        for stage, histogram in meters.stages.items():
            family.add_metric([stage], histogram.buckets(), histogram.sum_s)
        yield family

    def _kv(self) -> Iterator[Metric]:
        leases = self._in_flight.dispatcher.leases
        held: Counter[tuple[str, str]] = Counter()
        for lease in leases:
            held[lease.machine, str(lease.purpose)] += lease.blocks
        names = ["machine", "purpose"]
        blocks = GaugeMetricFamily("phasesplit_kv_lease_blocks", "KV blocks under lease.", labels=names)
        sizes = GaugeMetricFamily("phasesplit_kv_lease_bytes", "KV bytes under lease.", labels=names)
        for machine in self._in_flight.dispatcher.registry.connected():
            each = block_bytes(machine.facts.get("layout") or {})
            for purpose in Purpose:
                blocks.add_metric([machine.name, purpose], held[machine.name, purpose])
                if each:
                    sizes.add_metric([machine.name, purpose], held[machine.name, purpose] * each)
        yield blocks
        yield sizes
        ended = {str(reason): count for reason, count in leases.ended.items()}
        yield _counter("kv_leases_ended", "KV leases that have ended, by why.", "reason", ended)
        yield _total("kv_late_releases", "Releases of KV leases that had ended before.", leases.late)

    def _machines(self) -> Iterator[Metric]:
        now_s, machines = self._in_flight.clock.now_s(), self._in_flight.dispatcher.registry.connected()
        ages = {machine.name: now_s - machine.reported_s for machine in machines}
        yield _gauge("machine_facts_age_seconds", "Since a machine last said anything.", "machine", ages)
        for fact, name, text in (
            ("used_blocks", "machine_kv_used_blocks", "KV blocks in use, as the machine reports."),
            ("capacity_blocks", "machine_kv_capacity_blocks", "KV blocks that a machine has."),
            ("waiting_prompts", "machine_waiting_prompts", "Prompts that wait on a machine."),
            ("running", "machine_running_requests", "Requests that a machine works on."),
        ):
            values = {machine.name: machine.facts.get(fact, 0) for machine in machines if not machine.off}
            yield _gauge(name, text, "machine", values)
        transfers = CounterMetricFamily(
            "phasesplit_transfers", "KV transfers that a machine has sent, by mode.", labels=["machine", "mode"]
        )
        sent = CounterMetricFamily(
            "phasesplit_transfer_sent_bytes", "KV bytes that a machine has sent.", labels=["machine"]
        )
        for machine in machines:
            stats = machine.facts.get("transfers") or {}
            for mode in ("layerwise", "serialized", "failed"):
                transfers.add_metric([machine.name, mode], stats.get(mode, 0))
            sent.add_metric([machine.name], stats.get("bytes_sent", 0))
        yield transfers
        yield sent

    def _pools(self) -> Iterator[Metric]:
        dispatcher = self._in_flight.dispatcher
        views = dispatcher.pools(self._in_flight.clock.now_s())
        members = Counter(view.pool for view in views if view.state == "serving")
        pools = {pool: members[pool] for pool in ROLES}
        yield _gauge("pool_machines", "Machines that serve in a pool.", "pool", pools)
        yield _counter("pool_moves", "Moves between pools that load caused.", "move", dispatcher.moves())
        states = GaugeMetricFamily("phasesplit_machine_state", "1 for a machine's state.", labels=["machine", "state"])
        for view in views:
            states.add_metric([view.name, view.state], 1)
        yield states
        homes = GaugeMetricFamily(
            "phasesplit_machine_pool",
            "1 for the pool that a machine is in.",
            labels=["machine", "pool", "home", "epoch"],
        )
        for view in views:
            homes.add_metric([view.name, view.pool, view.home, str(view.epoch)], 1)
        yield homes
        broken = {view.name: float(view.state in ("broken", "probing")) for view in views}
        yield _gauge("breaker_open", "1 while a machine is left alone after failures.", "machine", broken)
        yield _one(
            "decision_log_ended", "1 once the log of decisions takes no more.", bool(self._in_flight.log_ended())
        )
        yield _one("degraded", "Reasons for which the cluster is not split as it should be.", len(dispatcher.degraded))


def block_bytes(layout: dict[str, Any]) -> int:
    """Return the bytes of one KV block over all layers, 0 where the layout does not say."""
    try:
        return int(
            2 * layout["layers"] * layout["kv_heads"] * layout["head_dim"] * layout["block_tokens"]
            * ITEM_BYTES[layout["dtype"]]
        )  # fmt: skip
    except (KeyError, TypeError):
        return 0


def _counter(name: str, text: str, label: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"phasesplit_{name}", text, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([str(value)], count)
    return family


def _gauge(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"phasesplit_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"phasesplit_{name}", text, value=value)


def _one(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"phasesplit_{name}", text, value=value)


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    family = HistogramMetricFamily(f"phasesplit_{name}", text, labels=[])
    family.add_metric([], histogram.buckets(), histogram.sum_s)
    return family
