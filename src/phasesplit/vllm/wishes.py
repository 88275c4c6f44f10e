"""What a request says of its KV, read: `kv_transfer_params` comes from outside, and a mistake there ends no engine."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from phasesplit.protocol.completions import OpenTransferFields
from phasesplit.protocol.errors import of_validation

_log = logging.getLogger(__name__)
_WHOLE = "kv_transfer_params: %s; the request is served whole"


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
    if not isinstance(params, Mapping) or not _is_split(params):
        return None
    try:
        fields = OpenTransferFields.model_validate(dict(params))
    except ValidationError as error:
        _log.warning(_WHOLE, of_validation(error))
        return None
    key, peer, epoch, address = fields.key, fields.peer, fields.peer_epoch, fields.address
    if key is None or peer is None or epoch is None or (fields.do_remote_decode and not address):
        needed = {"key": key, "peer": peer, "peer_epoch": epoch, "address": address}
        _log.warning(_WHOLE, f"{next(name for name, value in needed.items() if not value and value != 0)} is required")
        return None
    return Wishes(bool(fields.do_remote_decode), key, peer, epoch, address or {})


def key_of_whole(params: object) -> str | None:
    """Return what its sender calls a request that is to be served whole; None of others, and where it does not say.

    Args:
        params: As for `read_wishes`.
    """
    if not isinstance(params, Mapping) or _is_split(params):
        return None
    try:
        return OpenTransferFields.model_validate({"key": params.get("key")}).key
    except ValidationError:
        return None


def _is_split(params: Mapping[str, Any]) -> bool:
    return bool(params.get("do_remote_decode") or params.get("do_remote_prefill"))
