"""Headers, peer info and checksums: what is damaged or foreign must not pass."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.wires import LAYOUT
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.layout import KvLayout, PeerInfo
from phasesplit.kv_transfer.messages import (
    HEADER_BYTES,
    LONGEST_FRAME_BYTES,
    LONGEST_TEXT_BYTES,
    LayoutMismatchError,
    Message,
    MessageKind,
    checksum,
    unpack,
)

GREETING = PeerInfo(machine="prefill-3", epoch=7, layout=LAYOUT, blocks=9, capabilities=("layer-wise",))
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@given(u64, u64, u32, u32, u32, u32, st.integers(0, LONGEST_FRAME_BYTES))
def test_header_comes_back(epoch: int, transfer: int, layer: int, first: int, blocks: int, check: int, n: int) -> None:
    """A frame would be addressed to another place than was meant."""
    frame = Message(MessageKind.FRAME, epoch, transfer, layer, first, blocks, check, n)
    packed = frame.pack()
    assert len(packed) == HEADER_BYTES
    assert unpack(packed) == frame


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_damaged_header_is_refused(bit: int) -> None:
    """A header with one wrong bit would place a frame elsewhere."""
    packed = bytearray(Message(MessageKind.FRAME, 1, 2, 3, 4, 5, 6, 7).pack())
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TransferError):
        unpack(packed)


@pytest.mark.parametrize("kind", [MessageKind.FRAME, MessageKind.HELLO])
def test_length_is_bounded(kind: MessageKind) -> None:
    """A peer could make the receiver allocate, or wait for, any number of bytes."""
    large = Message(kind, length_bytes=LONGEST_FRAME_BYTES + 1, text=b"x" * (LONGEST_FRAME_BYTES + 1))
    with pytest.raises(TransferError, match="allowed are"):
        unpack(large.pack()[:HEADER_BYTES])


def test_peer_info_comes_back() -> None:
    """A machine would be registered under another name, epoch or layout."""
    assert PeerInfo.from_text(GREETING.to_text()) == PeerInfo.from_text(GREETING.to_text(proof="x")) == GREETING


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{}", b'{"layout": 3}', b"\xff", b'{"layout": {"protocol": 1}}', b"[" * LONGEST_TEXT_BYTES,
        GREETING.to_text().replace(b'"epoch": 7', b'"epoch": 1' + b"0" * 99),
        GREETING.to_text().replace(b'"epoch": 7', b'"epoch": -1'),
        GREETING.to_text().replace(b'"epoch": 7', b'"epoch": 7.0'),
    ],
)  # fmt: skip
def test_what_is_no_peer_info_is_refused(text: bytes) -> None:
    """Another program at the port would raise something that nobody expects."""
    with pytest.raises(TransferError):
        PeerInfo.from_text(text)


def test_equal_layouts_agree_and_unequal_ones_name_the_field() -> None:
    """A mismatch would not be seen, or not be explained."""
    LAYOUT.require_equal(replace(LAYOUT))
    with pytest.raises(LayoutMismatchError, match="layout head_dim: ours is 4, the peer's is 8"):
        LAYOUT.require_equal(replace(LAYOUT, head_dim=8))
    digests = {"ours": "0123456789abcdef" * 4, "theirs": "fedcba9876543210" * 4}
    ours, theirs = (replace(LAYOUT, model=digest) for digest in digests.values())
    said = r"^layout model: ours is 0123456789ab, the peer's is fedcba987654; start both machines with the same model"
    with pytest.raises(LayoutMismatchError, match=said):
        ours.require_equal(theirs)


@pytest.mark.parametrize(("field", "value"), [("layers", 0), ("head_dim", 1.5), ("dtype", "int3")])
def test_impossible_layout_is_refused(field: str, value: object) -> None:
    """Blocks of no size would be moved."""
    with pytest.raises(TransferError, match=f"layout {field}: got"):
        replace(LAYOUT, **{field: value})


def test_block_bytes() -> None:
    """A block's size would be wrong. Llama2-7B in float16, 32 layers: 512 KiB a token; keys and values, all heads."""
    llama = KvLayout(
        model="llama2-7b", layers=32, kv_heads=32, head_dim=128, dtype="float16", block_tokens=16, block_layout="any"
    )
    assert llama.layers * llama.block_bytes / llama.block_tokens == 512 * 1024
    assert [llama.blocks_for(tokens) for tokens in (1, 15, 16, 17, 32, 33)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("size_bytes", [1, 7, 4_072, 16_288, 20_000, 65_536, 1_000_003])
def test_checksum_finds_accidents(size_bytes: int) -> None:
    """A frame with one wrong bit, a zeroed stretch, shifted or swapped bytes would pass."""
    rng = np.random.default_rng(size_bytes)
    frame = rng.integers(1, 256, size_bytes, dtype=np.uint8)
    right = checksum(frame)
    for at in {0, size_bytes // 2, size_bytes - 1, *rng.integers(0, size_bytes, 20).tolist()}:
        wrong = frame.copy()
        wrong[at] ^= 1 << (at % 8)
        assert checksum(wrong) != right
    zeroed = frame.copy()
    zeroed[size_bytes // 3 : size_bytes // 3 + 64] = 0
    assert checksum(zeroed) != right
    if size_bytes > 1:
        assert checksum(np.roll(frame, 1)) != right
    assert checksum(frame.copy()) == right


@pytest.mark.parametrize("stretch_bytes", [8, 64, 256, 2_048, 4_096, 8_192, 16_384, 24_576])
def test_checksum_finds_swapped_stretches(stretch_bytes: int) -> None:
    """Two rows, heads or blocks in each other's place would pass."""
    frame = np.random.default_rng(0).integers(0, 256, 12 * 24_576, dtype=np.uint8)
    right = checksum(frame)
    for other in range(1, min(12, len(frame) // stretch_bytes)):
        swapped = frame.copy()
        swapped[:stretch_bytes] = frame[other * stretch_bytes :][:stretch_bytes]
        swapped[other * stretch_bytes :][:stretch_bytes] = frame[:stretch_bytes]
        assert checksum(swapped) != right
