"""API keys, compared in constant time."""

import hashlib
import hmac
from collections.abc import Iterable


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
