"""OpenTelemetry traces, where its packages are installed: a span for each choice that has ended, and for its stages.

Spans are made from the record that a choice leaves, after its end: serving a request costs nothing for them.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from phasesplit.errors import SpecError
from phasesplit.gateway.stages import intervals

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_TOLD = (
    "request", "choice", "model", "outcome", "finish_reason", "prompt_tokens", "output_tokens", "attempts",
    "continued", "prompt_machine", "token_machine",
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
        told = {f"phasesplit.{name}": record[name] for name in _TOLD if record[name] is not None}
        whole = self._tracer.start_span("request", start_time=_ns(start_s), attributes=told)
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
