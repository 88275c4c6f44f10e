"""What one gateway lets clients ask of it: bounds on requests, and API keys."""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, fields

from phasesplit.errors import SpecError


def key_digest(key: str) -> bytes:
    """Return the SHA-256 digest of a key, 32 bytes; the gateway keeps no key itself."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def bearer_key(authorization: str | None) -> str | None:
    """Return the key of an Authorization header, None where it holds none.

    Args:
        authorization: The header's value, or None.
    """
    scheme, _, key = (authorization or "").strip().partition(" ")
    return (key.strip() or None) if scheme.lower() == "bearer" else None


def key_accepted(key: str | None, digests: Iterable[bytes]) -> bool:
    """Return whether a key is one of the accepted ones.

    Digests of equal length are compared, and all of them, so that the time taken tells nothing about a key.

    Args:
        key: The client's key, None for none.
        digests: SHA-256 digests of the accepted keys; without any, no key is needed.
    """
    accepted = tuple(digests)
    offered = key_digest(key or "")
    matches = sum(hmac.compare_digest(offered, digest) for digest in accepted)
    return not accepted or (key is not None and matches > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that a deployment sets.

    Attributes:
        body_bytes: Longest request body; longer is 413.
        header_s: Seconds within which a request's head and body must have arrived; slower is 408.
        live_requests: Client requests served or queued at once; more is 503.
        queued_requests: Requests without a pair; more is 503.
        choices: Choices of one request: prompts x n.
        messages: Messages of a chat.
        attempts: Pairs tried for one request.
        attempt_s: Seconds that a prompt's machine may give no token to anybody, in addition to three times what the
            prompts that are pending should take, before those that wait for it try another.
        first_token_s: Seconds from arrival within which the first content must be there.
        request_s: Seconds from arrival within which the last token must be there.
        idle_s: Seconds between two tokens after which a decode machine counts as stalled.
        lease_s: Seconds that a KV lease lives without a heartbeat.
        structured_output: Whether the machines behind the gateway can hold output to a grammar.

    Raises:
        SpecError: A bound is not positive.
    """

    body_bytes: int = 4 << 20
    header_s: float = 10.0
    live_requests: int = 2048
    queued_requests: int = 1024
    choices: int = 16
    messages: int = 2048
    attempts: int = 3
    attempt_s: float = 10.0
    first_token_s: float = 60.0
    request_s: float = 600.0
    idle_s: float = 30.0
    lease_s: float = 30.0
    structured_output: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "structured_output" and not 0 < value < float("inf"):
                raise SpecError.bad(f"limits, {field.name}", value, "a positive number")
