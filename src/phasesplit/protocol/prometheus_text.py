"""Metrics of another process in Prometheus' text form, read."""

from collections.abc import Mapping
from typing import NamedTuple


class Sample(NamedTuple):
    """One line of a page of metrics.

    Attributes:
        name: Its name, suffixes such as `_total` and `_bucket` included.
        labels: Its labels.
        value: Its value.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def read_samples(text: str) -> list[Sample]:
    """Return the samples of a page in order, none where it is not Prometheus' text.

    Args:
        text: The body of GET /metrics.
    """
    from prometheus_client.parser import text_string_to_metric_families  # a third of a second, and few need it

    try:
        return [
            Sample(one.name, one.labels, float(one.value))
            for family in text_string_to_metric_families(text)
            for one in family.samples
        ]
    except ValueError:
        return []
