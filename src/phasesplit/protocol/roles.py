"""How a machine joins a cluster: its role, the key it brings, and addresses that only its own host reaches."""

import ipaddress
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

ROLES = ("prefill", "decode", "mixed", "unsplit")
"""What a gateway may use a machine for."""

JOIN_KEY_VARIABLE = "PHASESPLIT_JOIN_KEY"
"""Environment variable with the key of a cluster: arguments of a process can be read by every user of its host."""


def is_loopback(host: str) -> bool:
    """Return whether a host is this one, whoever reads it; a name other than localhost is not looked up."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def closed_to_others(address: Mapping[str, Any]) -> str:
    """Return where, among the places at which a machine takes KV, only its own host reaches it; empty for nowhere.

    Args:
        address: As machines tell it: `tcp` and `nixl` as host and port, `http` as a URL; each may be missing.
    """
    pairs = (address.get("tcp"), address.get("nixl"))
    hosts = [str(pair[0]) for pair in pairs if isinstance(pair, list | tuple) and pair]
    try:
        hosts.append(urlsplit(str(address.get("http") or "")).hostname or "")
    except ValueError:
        return ""
    return next(filter(is_loopback, hosts), "")
