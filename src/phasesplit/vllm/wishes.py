"""What a request says of its KV, read: `kv_transfer_params` comes from outside, and a mistake there ends no engine."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

LONGEST_NAME = 256
"""Characters of a key or of a machine's name: a report of both fits into a message of the line (`reports`)."""
_LATEST_EPOCH = 2**63
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


def read_wishes(params: object) -> Wishes | None:
    """Return what a request says of its KV, None where it is to be served whole, or says it wrong.

    Args:
        params: Its `kv_transfer_params`: a mapping, or whatever else a client may have sent.
    """
    if not isinstance(params, Mapping):
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


def key_of_whole(params: object) -> str | None:
    """Return what its sender calls a request that is to be served whole; None of others, and where it does not say.

    Args:
        params: As for `read_wishes`.
    """
    if not isinstance(params, Mapping) or params.get("do_remote_decode") or params.get("do_remote_prefill"):
        return None
    key = params.get("key")
    return key if is_name(key) else None


def objection(wishes: Wishes) -> str:
    """Return what is wrong with a wish, or the empty text."""
    for name in ("key", "peer"):
        if not is_name(getattr(wishes, name)):
            got = repr(getattr(wishes, name))[:40]
            return f"{name}: got {got}, allowed is a text of 1 to {LONGEST_NAME} printable characters"
    if type(wishes.peer_epoch) is not int or not 0 <= wishes.peer_epoch < _LATEST_EPOCH:
        return f"peer_epoch: got {wishes.peer_epoch!r:.40}, allowed is a whole number from 0 to {_LATEST_EPOCH - 1}"
    if wishes.leaves and not (isinstance(wishes.address, Mapping) and wishes.address):
        return f"address: got {wishes.address!r:.40}, allowed is where the peer takes KV"
    return ""


def is_name(text: object) -> TypeGuard[str]:
    """Return whether something can be a key or the name of a machine."""
    return isinstance(text, str) and 0 < len(text) <= LONGEST_NAME and text.isprintable()
