"""Metrics of another process."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from phasesplit.protocol.prometheus_text import Sample, read_samples


def test_what_prometheus_writes_is_read() -> None:
    """A figure of a machine would be missed, or stand under another one's labels."""
    registry = CollectorRegistry()
    Counter("done", "Requests.", ["why"], registry=registry).labels('a "quoted" \\ one, two}').inc(3)
    Histogram("took", "Seconds.", buckets=[1.0], registry=registry).observe(2.0)
    found = read_samples(generate_latest(registry).decode())
    assert Sample("done_total", {"why": 'a "quoted" \\ one, two}'}, 3.0) in found
    assert [(one.labels["le"], one.value) for one in found if one.name == "took_bucket"] == [("1.0", 0), ("+Inf", 1)]


@pytest.mark.parametrize("text", ["", "<html>no</html>", "not a page of metrics"])
def test_other_pages_say_nothing(text: str) -> None:
    """Who looks at a wrong address would read of our parser."""
    assert read_samples(text) == []
