"""Every kind of block, against the gguf package where it is installed and against blocks worked out by hand."""

import struct

import numpy as np
import pytest

from phasesplit.engine.quant_blocks import KINDS, Tensor, tensor_from_values


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def values_of(kind: str, raw: bytes) -> np.ndarray:
    """Return the values of one row of blocks."""
    blocks = np.frombuffer(raw, dtype=np.uint8).reshape(1, -1)
    columns = blocks.size // KINDS[kind].block_bytes * KINDS[kind].block_values
    return Tensor(name="t", kind=KINDS[kind], shape=(1, columns), raw=blocks).float32()[0]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equals_the_gguf_package(kind: str) -> None:
    """A file would be read as another model than llama.cpp reads."""
    gguf = pytest.importorskip("gguf", reason="the dev extra has it")
    rng = np.random.default_rng(5)
    rows, blocks = 7, 3
    raw = rng.integers(0, 256, (rows, blocks * KINDS[kind].block_bytes), dtype=np.uint8)
    number = gguf.GGMLQuantizationType[kind]
    with np.errstate(all="ignore"):
        theirs = gguf.dequantize(raw, number).reshape(rows, -1)
    ours = Tensor(name="t", kind=KINDS[kind], shape=theirs.shape, raw=raw).float32()
    assert KINDS[kind].number == number.value
    assert gguf.GGML_QUANT_SIZES[number] == (KINDS[kind].block_values, KINDS[kind].block_bytes)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)


def test_nibbles_of_4_bit_blocks() -> None:
    """The low halves of a block's bytes would not be its first 16 values."""
    quanta = bytes([0x10 * (15 - i) + i for i in range(16)])
    low, high = np.arange(16.0), 15.0 - np.arange(16.0)
    expected = np.concatenate([low, high])
    np.testing.assert_array_equal(values_of("Q4_0", half(0.5) + quanta), (expected - 8) * 0.5)
    np.testing.assert_array_equal(values_of("Q4_1", half(0.5) + half(-3.0) + quanta), expected * 0.5 - 3.0)


def test_fifth_bits() -> None:
    """The bit that makes 16 of a 5-bit value would come from another value's place."""
    only_value_17 = (1 << 17).to_bytes(4, "little")
    values = values_of("Q5_0", half(1.0) + only_value_17 + bytes(16))
    assert values[17] == 0.0
    assert set(np.delete(values, 17)) == {-16.0}
    assert values_of("Q5_1", half(1.0) + half(2.0) + only_value_17 + bytes(16))[17] == 18.0


def test_signed_bytes() -> None:
    """Negative values of Q8_0 would come out as large positive ones."""
    values = values_of("Q8_0", half(0.25) + bytes([256 - 128, 127, 0, 255] * 8))
    np.testing.assert_array_equal(values[:4], [-32.0, 31.75, 0.0, -0.25])


def test_brain_floats() -> None:
    """BF16 would not be the upper half of a float32."""
    np.testing.assert_array_equal(values_of("BF16", bytes([0x80, 0x3F, 0x00, 0xC0])), [1.0, -2.0])


def test_k_quants() -> None:
    """Scale and minimum of a sub-block of 32 would come from another one's six bits."""
    scales = bytearray(12)
    scales[1], scales[5] = 3, 2  # sub-block 1: scale 3, minimum 2
    scales[8 + 2] = 0x51  # sub-block 6: the low four bits of scale 1 and of minimum 5
    quanta = bytearray(128)
    quanta[0] = 0x70  # sub-block 1, value 0: 7
    quanta[96] = 0x09  # sub-block 6, value 0: 9
    values = values_of("Q4_K", half(2.0) + half(1.0) + bytes(scales) + bytes(quanta))
    assert (values[32], values[33]) == (2.0 * 3 * 7 - 2, -2.0)
    assert (values[192], values[193]) == (2.0 * 1 * 9 - 5, -5.0)
    assert values[0] == 0.0
    with_fifth = values_of("Q5_K", half(2.0) + half(1.0) + bytes(scales) + bytes([0b10] + [0] * 31) + bytes(quanta))
    assert with_fifth[32] == 2.0 * 3 * (7 + 16) - 2
    six = values_of("Q6_K", bytes([0x05]) + bytes(127) + bytes([0b10]) + bytes(63) + bytes([2] * 16) + half(0.5))
    assert (six[0], six[1]) == (0.5 * 2 * (5 + 32 - 32), 0.5 * 2 * -32)


def test_values_as_a_tensor() -> None:
    """Values unpacked at loading would not be those that are computed with."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = tensor_from_values("t", values)
    assert (tensor.kind.name, tensor.raw.shape, tensor.shape) == ("F32", (2, 12), (2, 3))
    np.testing.assert_array_equal(tensor.float32(), values)
