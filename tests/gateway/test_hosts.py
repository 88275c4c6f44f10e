"""Addresses that only their own host reaches."""

from typing import Any

import pytest

from phasesplit.gateway.hosts import closed_to_others

OPEN = {"boot_id": "b", "unix": "/run/x.kv", "tcp": ["10.0.0.2", 4], "nixl": None, "http": "http://10.0.0.2:5"}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, ""),
        ({"tcp": ["127.0.1.1", 4]}, "127.0.1.1"),
        ({"tcp": None, "nixl": ["::1", 4]}, "::1"),
        ({"http": "http://localhost:5"}, "localhost"),
        ({"http": "http://[::1]:5"}, "::1"),
        ({"tcp": None, "http": None}, ""),
        ({"tcp": [], "nixl": 3, "http": "http://["}, ""),
        ({"tcp": "127.0.0.1", "http": 7}, ""),
        ({"tcp": [None, 1]}, ""),
    ],
)
def test_every_way_counts(changed: dict[str, Any], found: str) -> None:
    """A machine that only its own host reaches would join, or one that says nonsense break the gateway."""
    assert closed_to_others(OPEN | changed) == found
