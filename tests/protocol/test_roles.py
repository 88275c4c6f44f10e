"""Addresses that only their own host reaches."""

from typing import Any

import pytest

from phasesplit.protocol.roles import closed_to_others, is_loopback

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


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.2", False), ("0.0.0.0", False), ("a.b", False)],  # noqa: S104 - read, not bound
)
def test_addresses_of_this_host_are_known(host: str, is_own: bool) -> None:
    """A machine that every host reaches would start without a key, or one of this host be refused without."""
    assert is_loopback(host) is is_own
