"""The handshake of a channel: who each end is and, where the cluster has a key, proof that both know it.

```
sender                                     receiver
  HELLO      peer info, random number  -->
             <--  CHALLENGE                machine, epoch, random number       (only where there is a key)
  PROOF      HMAC                     -->                                      (only where there is a key)
             <--  WELCOME or REFUSE        peer info, HMAC; or the reason
```

Each proof is an HMAC-SHA256 over everything said so far, so it holds for one channel and for these two machines in
these epochs; what the two ends prove has different labels, so neither can be made to prove for the other. The sender
proves first: who only connects learns nothing that a key could be guessed from.

Source: challenge and response as in RFC 2195, made mutual as in RFC 5802 (SCRAM); HMAC: RFC 2104.
"""

import hmac
import json
import secrets

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.layout import PROTOCOL, PeerInfo
from phasesplit.kv_transfer.messages import Message, MessageKind

Identity = tuple[str, int]
"""Name and epoch of a machine."""

_RANDOM_BYTES = 16
_SENDER = f"phasesplit transfer {PROTOCOL}, sender".encode()
_RECEIVER = f"phasesplit transfer {PROTOCOL}, receiver".encode()


class HandshakeClient:
    """The sender's half.

    Args:
        info: What this machine says of itself.
        secret: The cluster's key; None: there is none, and nothing is proven.
        expected: Name and epoch of the receiver; None: any.
    """

    def __init__(self, info: PeerInfo, secret: bytes | None, expected: Identity | None) -> None:
        self._ours = info
        self._secret = secret
        self._expected = expected
        self._hello = info.to_text(nonce=_random() if secret is not None else "")
        self._challenge = b""

    def hello(self) -> Message:
        """Return the first message."""
        return Message(MessageKind.HELLO, text=self._hello)

    def proof(self, challenge: bytes) -> Message:
        """Return the answer to a challenge.

        Raises:
            TransferError: There is no key here, it is not the machine that was expected, or not the first challenge.
        """
        try:
            parts = json.loads(challenge)
            machine, epoch = str(parts["machine"]), int(parts["epoch"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TransferError(f"not a challenge: {error}") from error
        if self._secret is None:
            raise TransferError(f"{machine} wants proof of the cluster's key, and {self._ours.machine} has none")
        if self._challenge:
            raise TransferError(f"{machine} wants a second proof")
        self._require((machine, epoch))
        self._challenge = challenge
        return Message(MessageKind.PROOF, text=_proof(self._secret, _SENDER, self._hello, challenge))

    def on_welcome(self, welcome: bytes) -> PeerInfo:
        """Return whom a welcome is from.

        Raises:
            TransferError: It is not peer info, not from the machine that was expected, its blocks look different, or
                it does not prove that it knows the key.
        """
        theirs = PeerInfo.from_text(welcome)
        if self._secret is not None:
            due = _proof(self._secret, _RECEIVER, self._hello, self._challenge, theirs.to_text())
            shown = str(json.loads(welcome).get("proof", "")).encode(errors="replace")
            if not hmac.compare_digest(due.hex().encode(), shown):
                raise TransferError(f"{theirs.machine} has not proven that it knows the cluster's key")
        self._require((theirs.machine, theirs.epoch))
        self._ours.layout.require_equal(theirs.layout)
        return theirs

    def _require(self, found: Identity) -> None:
        if self._expected not in (None, found):
            machine, epoch = self._expected or found
            raise TransferError(f"expected {machine} in epoch {epoch}, found {found[0]} in epoch {found[1]}")


class HandshakeServer:
    """The receiver's half, for one channel.

    Args:
        info: What this machine says of itself.
        secret: The cluster's key; None: there is none, and nothing is to be proven.
    """

    def __init__(self, info: PeerInfo, secret: bytes | None) -> None:
        self._ours = info
        self._secret = secret
        self._hello = b""
        self._challenge = b""
        self._client: PeerInfo | None = None

    def challenge(self) -> Message:
        """Return what is to be answered before anybody is welcome."""
        return Message(MessageKind.CHALLENGE, text=self._challenge)

    def on_message(self, message: Message) -> PeerInfo | None:
        """Return who is at the other end, or None where a challenge must be answered first.

        Raises:
            TransferError: The other end does not say who it is, one of the two has a key and the other has none, or
                the proof is wrong.
        """
        if message.kind is MessageKind.HELLO and self._client is None:
            return self._on_hello(message.text)
        if message.kind is MessageKind.PROOF and self._client is not None and self._secret is not None:
            due = _proof(self._secret, _SENDER, self._hello, self._challenge)
            if not hmac.compare_digest(due, message.text):
                raise TransferError(f"{self._client.machine} has another key than the cluster of {self._ours.machine}")
            return self._client
        raise TransferError(f"{message.kind.name} comes before the handshake")

    def welcome(self) -> Message:
        """Return the last message, with our own proof where there is a key."""
        text = self._ours.to_text()
        if self._secret is not None:
            shown = _proof(self._secret, _RECEIVER, self._hello, self._challenge, text)
            text = self._ours.to_text(proof=shown.hex())
        return Message(MessageKind.WELCOME, text=text)

    def _on_hello(self, text: bytes) -> PeerInfo | None:
        theirs = PeerInfo.from_text(text)
        has_key = bool(json.loads(text).get("nonce"))
        if has_key and self._secret is None:
            raise TransferError(f"{theirs.machine} wants proof of the cluster's key, and {self._ours.machine} has none")
        if self._secret is None:
            return theirs
        if not has_key:
            raise TransferError(f"{self._ours.machine} wants proof of the cluster's key, and {theirs.machine} has none")
        self._client, self._hello = theirs, text
        parts = {"machine": self._ours.machine, "epoch": self._ours.epoch, "nonce": _random()}
        self._challenge = json.dumps(parts).encode()
        return None


def _random() -> str:
    return secrets.token_hex(_RANDOM_BYTES)


def _proof(secret: bytes, label: bytes, *said: bytes) -> bytes:
    """Return the HMAC over a label and what was said, each part with its length before it."""
    parts = (label, *said)
    return hmac.digest(secret, b"".join(len(part).to_bytes(8, "little") + part for part in parts), "sha256")
