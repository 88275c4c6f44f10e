"""What a request says of its KV, read: `kv_transfer_params` comes from outside, and a mistake there ends no engine."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

_log = logging.getLogger(__name__)


class Wishes(NamedTuple):
    """What becomes of a request's KV.

    Attributes:
        leaves: It goes to another machine; False: it comes from one.
        key: What both machines call the request.
        peer: The other machine.
        peer_epoch: Its epoch.
        address: Where it is; empty where KV comes.
    """

    leaves: bool
    key: str
    peer: str
    peer_epoch: int
    address: Mapping[str, Any]


def read_wishes(params: Mapping[str, Any] | None) -> Wishes | None:
    """Return what a request says of its KV, None where it is to be served whole, or says it wrong.

    Args:
        params: Its `kv_transfer_params`.
    """
    if not params:
        return None
    leaves, comes = params.get("do_remote_decode"), params.get("do_remote_prefill")
    if not leaves and not comes:
        return None
    wishes = Wishes(
        bool(leaves), params.get("key", ""), params.get("peer", ""), params.get("peer_epoch", -1),
        params.get("address") or {},
    )  # fmt: skip
    if why := objection(wishes):
        _log.warning("kv_transfer_params: %s; the request is served whole", why)
        return None
    return wishes


def objection(wishes: Wishes) -> str:
    """Return what is wrong with a wish, or the empty text."""
    for name in ("key", "peer"):
        if not isinstance(getattr(wishes, name), str) or not getattr(wishes, name):
            return f"{name}: got {getattr(wishes, name)!r}, allowed is a text"
    if type(wishes.peer_epoch) is not int or wishes.peer_epoch < 0:
        return f"peer_epoch: got {wishes.peer_epoch!r}, allowed is a whole number from 0"
    if wishes.leaves and not (isinstance(wishes.address, Mapping) and wishes.address):
        return f"address: got {wishes.address!r}, allowed is where the peer takes KV"
    return ""
