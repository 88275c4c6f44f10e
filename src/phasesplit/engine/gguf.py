"""GGUF files: read over a memory map (`open_gguf`), and written (`write_gguf`) for small models.

A file may be cut off, corrupt or hostile, so every length is checked against what is left of the file before it is
used, and every count against a limit. Source of the layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from phasesplit.atomic_files import atomic_path
from phasesplit.engine.quant_blocks import KINDS, BlockFormat, Bytes, Tensor, Values
from phasesplit.errors import SpecError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Number of a metadata type to its struct format; 8 is a string and 9 an array."""
STRING, ARRAY = 8, 9

_MOST_ENTRIES = 1 << 16
"""Of metadata keys, and of tensors: the largest published models have a few thousand."""
_MOST_ELEMENTS = 1 << 22
"""Of one metadata array: the largest vocabularies have a quarter of a million tokens and half a million merges."""
_MOST_DIMENSIONS = 4
_LONGEST_NAME = 1 << 10
_LARGEST_ALIGNMENT = 1 << 16
_KIND_OF_NUMBER = {kind.number: kind for kind in KINDS.values()}

Value = int | float | bool | str | list[str] | NDArray[np.generic]
"""A metadata value; arrays of numbers are read-only."""


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """An open GGUF file.

    Attributes:
        path: Where it is.
        metadata: Key to value.
        tensors: Name to tensor, as views of the mapped file. The map stays open as long as one of them lives.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, Tensor]


class _Cursor:
    """A place in the header, which moves on only over bytes that are there."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.at = path, content, 0

    def fail(self, why: str) -> SpecError:
        return SpecError(f"{self.path}: not a usable GGUF file: {why}")

    def skip(self, count: int, what: str) -> int:
        """Move over so many bytes and return where they start."""
        start = self.at
        if count > len(self.content) - start:
            raise self.fail(f"it ends inside {what} (byte {start} of {len(self.content)})")
        self.at = start + count
        return start

    def number(self, form: str, what: str) -> int:
        value: int = struct.unpack_from(form, self.content, self.skip(struct.calcsize(form), what))[0]
        return value

    def count(self, most: int, what: str) -> int:
        value = self.number("<Q", what)
        if value > most:
            raise self.fail(f"{what} is {value}, the most allowed is {most}")
        return value

    def name(self, what: str) -> str:
        length = self.count(_LONGEST_NAME, f"the length of {what}")
        return self.text(self.content[self.skip(length, what) : self.at], what)

    def text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Value:
        if kind in SCALARS:
            return self.number(SCALARS[kind], what)
        if kind == STRING:
            length = self.number("<Q", what)
            return self.text(self.content[self.skip(length, what) : self.at], what)
        if kind != ARRAY:
            raise self.fail(f"{what} has the unknown type {kind}")
        element = self.number("<I", what)
        count = self.count(_MOST_ELEMENTS, f"the length of {what}")
        if element == STRING:
            return self.strings(count, what)
        if element not in SCALARS:
            raise self.fail(f"{what} is an array of type {element}; arrays hold numbers or strings")
        form = np.dtype(SCALARS[element])
        start = self.skip(count * form.itemsize, what)
        array: NDArray[np.generic] = np.frombuffer(self.content[start : self.at], dtype=form)
        return array

    def strings(self, count: int, what: str) -> list[str]:
        """Return an array of strings; this loop is most of the time that a header takes."""
        content, at, end, length_of = self.content, self.at, len(self.content), struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = at + 8
            if start > end:
                raise self.fail(f"it ends inside {what} (byte {at} of {end})")
            at = start + length_of(content, at)[0]
            if at > end:
                raise self.fail(f"it ends inside {what} (byte {start} of {end})")
            found.append(content[start:at])
        self.at = at
        try:
            return [raw.decode() for raw in found]
        except UnicodeDecodeError:
            raise self.fail(f"{what} has a string that is not UTF-8") from None


def open_gguf(path: Path) -> GgufFile:
    """Return a GGUF file's metadata and tensors, reading no more of it than its header.

    Args:
        path: The file. It must not be cut shorter while the result is used.

    Raises:
        SpecError: It cannot be opened, is not a GGUF file of version 2 or 3, is cut off or contradicts itself, or holds
            a tensor of a kind that is not in `quant_blocks.KINDS`.
    """
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise SpecError(f"{path}: not a usable GGUF file: it is empty") from None
    cursor = _Cursor(path, content)
    if content[: cursor.skip(len(MAGIC), "its first bytes") + len(MAGIC)] != MAGIC:
        raise cursor.fail(f"it starts with {content[:4]!r} instead of {MAGIC!r}")
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        allowed = " or ".join(map(str, VERSIONS))
        raise cursor.fail(f"its version is {version}, allowed is {allowed}, in little-endian order")
    tensor_count = cursor.count(_MOST_ENTRIES, "the number of tensors")
    key_count = cursor.count(_MOST_ENTRIES, "the number of metadata keys")
    metadata = _metadata(cursor, key_count)
    return GgufFile(path=path, metadata=metadata, tensors=_tensors(cursor, tensor_count, _alignment(cursor, metadata)))


def _metadata(cursor: _Cursor, count: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(count):
        key = cursor.name(f"the name of metadata key {index}")
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.number("<I", f"metadata key {key!r}"), f"metadata key {key!r}")
    return metadata


def _alignment(cursor: _Cursor, metadata: Mapping[str, Value]) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_allowed = isinstance(value, int) and 8 <= value <= _LARGEST_ALIGNMENT and value & (value - 1) == 0
    if not (is_allowed and isinstance(value, int)):
        raise cursor.fail(f"general.alignment is {value!r}, allowed is a power of two from 8 to {_LARGEST_ALIGNMENT}")
    return value


def _tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, Tensor]:
    entries: dict[str, tuple[BlockFormat, tuple[int, ...], int]] = {}
    for index in range(count):
        name = cursor.name(f"the name of tensor {index}")
        what = f"tensor {name!r}"
        if name in entries:
            raise cursor.fail(f"{what} appears twice")
        dimensions = cursor.number("<I", what)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise cursor.fail(f"{what} has {dimensions} dimensions, allowed are 1 to {_MOST_DIMENSIONS}")
        shape = tuple(reversed([cursor.count(1 << 40, f"a length of {what}") for _ in range(dimensions)]))
        number = cursor.number("<I", what)
        if number not in _KIND_OF_NUMBER:
            raise cursor.fail(f"{what} has the type {number}, supported are {', '.join(KINDS)}")
        entries[name] = (_KIND_OF_NUMBER[number], shape, cursor.number("<Q", what))
    start = -(-cursor.at // alignment) * alignment
    return {name: _tensor(cursor, name, *entry[:2], start, entry[2], alignment) for name, entry in entries.items()}


def _tensor(
    cursor: _Cursor, name: str, kind: BlockFormat, shape: tuple[int, ...], start: int, offset: int, alignment: int
) -> Tensor:
    what = f"tensor {name!r}"
    if min(shape) < 1 or shape[-1] % kind.block_values:
        raise cursor.fail(
            f"{what} has the lengths {shape}, for {kind.name} the last is a multiple of {kind.block_values}"
        )
    if offset % alignment:
        raise cursor.fail(f"{what} starts at {offset}, which is no multiple of {alignment}")
    rows, row_bytes = 1, shape[-1] // kind.block_values * kind.block_bytes
    for length in shape[:-1]:
        rows *= length
    if start + offset + rows * row_bytes > len(cursor.content):
        raise cursor.fail(f"{what} ends at byte {start + offset + rows * row_bytes} of {len(cursor.content)}")
    raw = np.frombuffer(cursor.content, dtype=np.uint8, count=rows * row_bytes, offset=start + offset)
    return Tensor(name=name, kind=kind, shape=shape, raw=raw.reshape(rows, row_bytes))


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
