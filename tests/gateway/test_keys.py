"""API keys."""

import hmac

import pytest

from phasesplit.gateway.limits import bearer_key, key_accepted, key_digest

DIGESTS = [key_digest("one"), key_digest("two")]


@pytest.mark.parametrize(
    ("key", "accepted"),
    [("one", True), ("two", True), ("three", False), ("on", False), ("", False), (None, False), ("öne\udc80", False)],
)
def test_only_accepted_keys_are_accepted(key: str | None, accepted: bool) -> None:
    """A wrong key would open the gateway, or a right one not."""
    assert key_accepted(key, DIGESTS) is accepted


def test_no_keys_means_no_lock() -> None:
    """A gateway without keys would refuse everybody."""
    assert key_accepted(None, [])


def test_no_key_is_not_the_empty_key() -> None:
    """A missing header would pass for an empty key that was accepted by mistake."""
    assert not key_accepted(None, [key_digest("")])


@pytest.mark.parametrize("key", ["one", "two", "x", None])
def test_every_digest_is_compared(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of the answer would tell which key came near."""
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append(b) or real(a, b))
    key_accepted(key, DIGESTS)
    assert compared == DIGESTS


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Bearer", None),
        ("Bearer ", None),
        ("Basic abc", None),
        ("", None),
        (None, None),
    ],
)
def test_key_is_read_from_the_header(header: str | None, key: str | None) -> None:
    """A client's key would not be found, or another scheme's secret be taken for one."""
    assert bearer_key(header) == key
