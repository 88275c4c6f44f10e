"""Writing GGUF files: small models for tests, and for a first run where there is no network."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from phasesplit.atomic_files import atomic_path
from phasesplit.engine.blocks import KINDS, Bytes, Values
from phasesplit.engine.gguf import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING, VERSIONS

WRITABLE = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
"""Kinds that values can be turned into."""

Entry = int | float | bool | str | list[str] | NDArray[np.generic]


def _half(column: Values) -> Bytes:
    return column.astype("<f2").view(np.uint8)


def _inverse(scale: Values) -> Values:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _packed(quanta: Values) -> Bytes:
    """Return 32 values from 0 to 15 as 16 bytes: the first half of them low, the second half high."""
    whole = np.clip(quanta, 0, 15).astype(np.uint8)
    packed: Bytes = whole[:, :16] | (whole[:, 16:] << np.uint8(4))
    return packed


def pack(kind: str, values: Values) -> Bytes:
    """Return float32 values as the bytes of a kind.

    Args:
        kind: One of `WRITABLE`.
        values: Finite, [..., columns], columns a multiple of the kind's block.

    Returns:
        Blocks, [blocks, bytes of a block] uint8.

    Source: quantize_row_*_ref in ggml-quants.c.
    """
    blocks = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, KINDS[kind].block_values)
    if kind == "F32":
        return blocks.astype("<f4").view(np.uint8)
    if kind == "F16":
        return blocks.astype("<f2").view(np.uint8)
    if kind == "Q8_0":
        scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        scaled = blocks * _inverse(scale)
        quanta = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))
        return np.concatenate([_half(scale), quanta.astype(np.int8).view(np.uint8)], axis=1)
    if kind == "Q4_0":
        largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
        scale = largest / np.float32(-8)
        return np.concatenate([_half(scale), _packed(blocks * _inverse(scale) + np.float32(8.5))], axis=1)
    least = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - least) / np.float32(15)
    quanta = (blocks - least) * _inverse(scale) + np.float32(0.5)
    return np.concatenate([_half(scale), _half(least), _packed(quanta)], axis=1)


def write_gguf(path: Path, metadata: Mapping[str, Entry], tensors: Mapping[str, tuple[str, Values]]) -> None:
    """Write a GGUF file of version 3; the same arguments give the same bytes.

    Args:
        path: Where; an existing file is replaced once all is written.
        metadata: Key to value. An int is written as uint32 (int64 where it does not fit), a float as float32.
        tensors: Name to a kind of `WRITABLE` and its values, rows first.

    Raises:
        OSError: It cannot be written.
    """
    with atomic_path(path) as part, part.open("wb") as file:
        file.write(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(metadata)))
        for key, value in metadata.items():
            file.write(_string(key) + _entry(value))
        packed = {name: pack(kind, values) for name, (kind, values) in tensors.items()}
        offset = 0
        for name, (kind, values) in tensors.items():
            lengths = values.shape[::-1]
            file.write(_string(name) + struct.pack(f"<I{len(lengths)}Q", len(lengths), *lengths))
            file.write(struct.pack("<IQ", KINDS[kind].number, offset))
            offset += -(-packed[name].nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        for content in packed.values():
            _align(file)
            file.write(content.tobytes())
        _align(file)


def _align(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _entry(value: Entry) -> bytes:
    """Return type and value of a metadata entry."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if 0 <= value < 1 << 32 else struct.pack("<Iq", 11, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    numbers = {np.dtype(form): number for number, form in SCALARS.items()}
    return struct.pack("<IIQ", ARRAY, numbers[value.dtype], value.size) + value.tobytes()
