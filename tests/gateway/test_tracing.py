"""OpenTelemetry traces."""

import importlib.util

import pytest

from gateways import Rig, play, settle
from phasesplit.errors import SpecError
from phasesplit.gateway.meters import STAGES, RequestStages, intervals
from phasesplit.gateway.metrics import Spans, spans_to

HAS_OTEL = importlib.util.find_spec("opentelemetry") is not None


def test_stages_follow_one_another() -> None:
    """Stages would overlap, leave gaps, or count what was never reached."""
    whole = RequestStages(0.0, 0.1, 0.5, 1.0, 1.25, 1.5, 4.0)
    found = intervals(whole.record())
    assert list(found) == list(STAGES)
    assert [end for _, end in found.values()] == [0.5, 1.0, 1.25, 1.5, 4.0]
    assert sum(whole.durations().values()) == 4.0
    assert list(intervals(RequestStages(0.0, 0.1, 0.5, None).record())) == ["queue"]
    # All KV may be there before the first token is: nothing of the transfer was exposed.
    early = RequestStages(0.0, 0.1, 0.5, 1.0, 0.9, 1.5, 1.5).durations()
    assert (early["transfer"], early["wait"], sum(early.values())) == (0.0, 0.5, 1.5)


@pytest.mark.skipif(not HAS_OTEL, reason="OpenTelemetry is not installed")
def test_spans_have_the_stages_instants() -> None:
    """A trace would show other times than the metrics, or lose the request its stages belong to."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].prefill_s, rig.workers["t"].decode_s = 1.0, 0.5
            call = rig.complete(max_tokens=3)
            await settle()
            await rig.pass_time(2.0)
            await call.answer()
            Spans(provider.get_tracer("test"))(rig.records[0])

    play(scenario())
    *stages, whole = exporter.get_finished_spans()
    assert [span.name for span in (*stages, whole)] == [*STAGES, "request"]
    assert all(span.parent.span_id == whole.context.span_id for span in stages)
    assert [(span.end_time - span.start_time) / 1e9 for span in stages] == [0.0, 1.0, 0.0, 0.5, 0.5]
    assert whole.attributes["phasesplit.outcome"] == "completed"
    assert (whole.end_time - whole.start_time) / 1e9 == 2.0


@pytest.mark.skipif(HAS_OTEL, reason="OpenTelemetry is installed")
def test_missing_packages_are_one_line() -> None:
    """A person who configures traces would get a traceback, or none and no traces."""
    with pytest.raises(SpecError, match=r"phasesplit\[otel\]"):
        spans_to("http://localhost:4318/v1/traces")
