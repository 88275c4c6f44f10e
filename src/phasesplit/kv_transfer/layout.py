"""What both ends of a transfer must have in common before a byte moves."""

import json
import re
from dataclasses import asdict, dataclass, fields

from phasesplit.domain.machine import blocks_for
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.messages import LayoutMismatchError

PROTOCOL = 3
"""Version of the messages; machines of different versions refuse one another."""

_TOO_LARGE = 2**64

_DIGEST = re.compile("[0-9a-f]{64}")
_SHOWN_DIGITS = 12

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """How KV blocks look on a machine. Blocks are copied byte for byte, so every field must be equal on both ends.

    Attributes:
        model: Digest of the weights, any text.
        layers: Layers, >= 1.
        kv_heads: Heads of keys (and of values) on this machine, >= 1.
        head_dim: Numbers of a head, >= 1.
        dtype: One of `ITEM_BYTES`.
        block_tokens: Tokens of a block, >= 1.
        block_layout: Order of the numbers inside a block, any text.
        protocol: Version of the messages.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    block_layout: str
    protocol: int = PROTOCOL

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise TransferError(f"layout {name}: got {getattr(self, name)!r}, allowed is an integer of 1 or more")
        if self.dtype not in ITEM_BYTES:
            raise TransferError(f"layout dtype: got {self.dtype!r}, allowed is one of {', '.join(ITEM_BYTES)}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values."""
        return 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype] * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks that hold so many tokens; the last one may be partly used."""
        return blocks_for(tokens, self.block_tokens)

    def require_equal(self, theirs: "KvLayout") -> None:
        """Compare with the layout of a peer.

        Raises:
            LayoutMismatchError: A field differs; the first one is named with both values.
        """
        for field in fields(self):
            ours, other = getattr(self, field.name), getattr(theirs, field.name)
            if ours != other:
                raise LayoutMismatchError(
                    f"layout {field.name}: ours is {shown(ours)}, the peer's is {shown(other)}; {advice(field.name)}"
                )


def shown(value: object) -> str:
    """Return a field of a layout as people read it: of a digest the first digits tell two models apart."""
    return value[:_SHOWN_DIGITS] if isinstance(value, str) and _DIGEST.fullmatch(value) else repr(value)


def advice(field: str) -> str:
    """Return what to do where a field of two layouts differs."""
    what = "model (the same file or directory)" if field == "model" else "version and settings"
    return f"start both machines with the same {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """What a machine says of itself when a channel opens.

    Attributes:
        machine: Its name in the cluster.
        epoch: Grows by one with each start of that machine, >= 0.
        layout: Its KV blocks.
        blocks: Blocks of its pool, >= 0; of use only to one-sided writers.
        capabilities: What it can do beyond the protocol; both use what both have.
    """

    machine: str
    epoch: int
    layout: KvLayout
    blocks: int = 0
    capabilities: tuple[str, ...] = ()

    def to_text(self, **more: str) -> bytes:
        """Return it as JSON, UTF-8.

        Args:
            more: What else the message says; `from_text` does not look at it.
        """
        return json.dumps(asdict(self) | more, sort_keys=True).encode()

    @classmethod
    def from_text(cls, text: bytes) -> "PeerInfo":
        """Read what `to_text` wrote.

        Raises:
            LayoutMismatchError: It has another version of the protocol.
            TransferError: It is not peer info.
        """
        try:
            parts = json.loads(text)
            spoken = parts["layout"].get("protocol")
            if spoken != PROTOCOL:  # looked at first: another version may have other fields
                raise LayoutMismatchError(f"layout protocol: ours is {PROTOCOL!r}, the peer's is {spoken!r}")
            layout = KvLayout(**parts.pop("layout"))
            capabilities = tuple(str(name) for name in parts["capabilities"])
            machine, epoch, blocks = parts["machine"], parts["epoch"], parts["blocks"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise TransferError(f"not peer info: {error}") from error
        if not isinstance(machine, str) or not isinstance(epoch, int) or not isinstance(blocks, int):
            raise TransferError("not peer info: machine, epoch or blocks of the wrong type")
        if not (0 <= epoch < _TOO_LARGE and 0 <= blocks < _TOO_LARGE):
            raise TransferError("not peer info: epoch or blocks below 0 or above 2^64 - 1")
        return cls(machine=machine, epoch=epoch, layout=layout, blocks=blocks, capabilities=capabilities)
