"""GGUF files: what is written is read, and what is damaged is refused in one line."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from phasesplit.engine.gguf import WRITABLE, open_gguf, pack, write_gguf
from phasesplit.errors import SpecError


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, lengths: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(lengths)}QIQ", len(lengths), *lengths, kind, offset)


def file_of(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    entries: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (),
    counts: tuple[int, int] | None = None,
    content: bytes = b"",
) -> bytes:
    """Return the bytes of a file whose parts need not fit each other."""
    numbers = counts or (len(tensors), len(entries))
    header = magic + struct.pack("<IQQ", version, *numbers) + b"".join(entries) + b"".join(tensors)
    return header + b"\0" * (-len(header) % 32) + content


def refused(path: Path, content: bytes) -> str:
    """Return the message with which a file is refused."""
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_what_is_written_is_read(path: Path) -> None:
    """A value or a tensor would come back as another than was written."""
    values = np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)
    metadata = {"a": 7, "b": -1, "c": 0.5, "d": True, "e": "é", "f": ["x", ""], "g": np.array([1, 2], dtype=np.int32)}
    write_gguf(path, metadata, {kind: (kind, values) for kind in WRITABLE})
    read = open_gguf(path)
    array = read.metadata["g"]
    assert isinstance(array, np.ndarray)
    assert ({k: v for k, v in read.metadata.items() if k != "g"}, array.tolist()) == (
        {k: v for k, v in metadata.items() if k != "g"},
        [1, 2],
    )
    np.testing.assert_array_equal(read.tensors["F32"].float32(), values)
    largest_error = {"F16": 2e-3, "Q8_0": 0.02, "Q4_0": 0.4, "Q4_1": 0.25}
    for kind, most in largest_error.items():
        assert read.tensors[kind].shape == (3, 64)
        assert 0 < np.abs(read.tensors[kind].float32() - values).max() < most


def test_equals_the_gguf_package(tiny_path: Path) -> None:
    """Header or tensors would be read otherwise than their authors read them."""
    gguf = pytest.importorskip("gguf", reason="the dev extra has it")
    theirs = gguf.GGUFReader(tiny_path)
    ours = open_gguf(tiny_path)
    for key, value in ours.metadata.items():
        expected = theirs.fields[key].contents()
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected
    assert {one.name for one in theirs.tensors} == set(ours.tensors)
    for one in theirs.tensors:
        np.testing.assert_array_equal(ours.tensors[one.name].raw.ravel(), one.data.view(np.uint8).ravel())
        assert ours.tensors[one.name].shape == tuple(reversed(one.shape.tolist()))


@pytest.mark.parametrize("kind", WRITABLE)
def test_packs_as_the_gguf_package(kind: str) -> None:
    """A tiny model would hold blocks that no real quantiser makes."""
    gguf = pytest.importorskip("gguf", reason="the dev extra has it")
    values = np.random.default_rng(2).standard_normal((5, 96)).astype(np.float32)
    values[0] = 0
    theirs = gguf.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    np.testing.assert_array_equal(pack(kind, values).ravel(), theirs.ravel())


def test_views_do_not_copy_the_file(tiny_path: Path) -> None:
    """Opening a model would read all of it, or give memory that a kernel could write to the file."""
    raw = open_gguf(tiny_path).tensors["token_embd.weight"].raw
    assert raw.base is not None
    assert not raw.flags.writeable


WHOLE = tensor(b"t", (32,), 0, 0)
DAMAGED: list[tuple[str, bytes, str]] = [
    ("empty", b"", "it is empty"),
    ("another format", b"PK\x03\x04" + bytes(60), "instead of b'GGUF'"),
    ("version 1", file_of(version=1), "its version is 1"),
    ("big-endian", file_of(version=0x03000000), "little-endian"),
    ("endless tensors", file_of(counts=(1 << 60, 0)), "the number of tensors"),
    ("endless keys", file_of(counts=(0, 1 << 60)), "the number of metadata keys"),
    ("missing keys", file_of(counts=(0, 3)), "it ends inside"),
    ("endless name", file_of(entries=(struct.pack("<Q", 1 << 40),)), "the length of the name of metadata key 0"),
    ("endless text", file_of(entries=(entry(b"k", 8, struct.pack("<Q", (1 << 64) - 1)),)), "it ends inside"),
    ("endless array", file_of(entries=(entry(b"k", 9, struct.pack("<IQ", 4, 1 << 50)),)), "the most allowed is"),
    ("endless strings", file_of(entries=(entry(b"k", 9, struct.pack("<IQ", 8, 1 << 20)),)), "it ends inside"),
    ("short array", file_of(entries=(entry(b"k", 9, struct.pack("<IQ", 10, 1 << 20)),)), "it ends inside"),
    ("array of arrays", file_of(entries=(entry(b"k", 9, struct.pack("<IQ", 9, 1)),)), "arrays hold numbers"),
    ("unknown type", file_of(entries=(entry(b"k", 77, b""),)), "unknown type 77"),
    ("not UTF-8", file_of(entries=(entry(b"k", 8, text(b"\xff")),)), "not UTF-8"),
    ("string not UTF-8", file_of(entries=(entry(b"k", 9, struct.pack("<IQ", 8, 1) + text(b"\xff")),)), "not UTF-8"),
    ("a key twice", file_of(entries=(entry(b"k", 0, b"a"), entry(b"k", 0, b"b"))), "appears twice"),
    ("alignment", file_of(entries=(entry(b"general.alignment", 4, struct.pack("<I", 24)),)), "a power of two"),
    ("alignment 0", file_of(entries=(entry(b"general.alignment", 4, bytes(4)),)), "a power of two"),
    ("a tensor twice", file_of(tensors=(WHOLE, WHOLE), content=bytes(128)), "appears twice"),
    ("no dimensions", file_of(tensors=(tensor(b"t", (), 0, 0),)), "has 0 dimensions"),
    ("nine dimensions", file_of(tensors=(tensor(b"t", (1,) * 9, 0, 0),)), "has 9 dimensions"),
    ("empty tensor", file_of(tensors=(tensor(b"t", (0,), 0, 0),)), "has the lengths (0,)"),
    ("huge tensor", file_of(tensors=(tensor(b"t", (1 << 40,) * 4, 0, 0),)), "ends at byte"),
    ("huge length", file_of(tensors=(tensor(b"t", (1 << 63,), 0, 0),)), "the most allowed"),
    ("cut off", file_of(tensors=(WHOLE,), content=bytes(127)), "ends at byte"),
    ("far away", file_of(tensors=(tensor(b"t", (32,), 0, 1 << 63),), content=bytes(128)), "ends at byte"),
    ("between", file_of(tensors=(tensor(b"t", (32,), 0, 8),), content=bytes(512)), "no multiple of 32"),
    ("half a block", file_of(tensors=(tensor(b"t", (33,), 2, 0),), content=bytes(512)), "multiple of 32"),
    ("unknown kind", file_of(tensors=(tensor(b"t", (32,), 10, 0),), content=bytes(512)), "supported are F32"),
]


@pytest.mark.parametrize(("content", "why"), [pytest.param(*row[1:], id=row[0]) for row in DAMAGED])
def test_damaged_files_are_refused(path: Path, content: bytes, why: str) -> None:
    """A damaged or hostile file would crash the process, fill its memory, or be read as something else."""
    assert why in refused(path, content)


def test_the_whole_file_beside_the_damaged_ones_is_read(path: Path) -> None:
    """The damaged files would be refused for another reason than their damage."""
    path.write_bytes(file_of(entries=(entry(b"k", 0, b"a"),), tensors=(WHOLE,), content=bytes(128)))
    assert open_gguf(path).tensors["t"].shape == (32,)


def test_places_that_are_no_files(tmp_path: Path) -> None:
    """A wrong path would end in a traceback."""
    for place in (tmp_path, tmp_path / "absent"):
        with pytest.raises(SpecError, match="cannot be read"):
            open_gguf(place)


def test_every_way_of_cutting_a_file_short(tiny_path: Path, path: Path) -> None:
    """A download that broke off would be taken for a model, or crash."""
    whole = tiny_path.read_bytes()
    for length in [*range(400), *range(400, len(whole) - 32, 9_973)]:
        refused(path, whole[:length])


def complaint(path: Path) -> str:
    """Return the message with which a file is refused, or nothing where it is read."""
    try:
        open_gguf(path)
    except SpecError as error:
        return str(error)
    return ""


def flipped(rng: np.random.Generator, whole: bytes) -> bytes:
    at = int(rng.integers(len(whole)))
    return whole[:at] + bytes([int(rng.integers(256))]) + whole[at + 1 :]


def grown(rng: np.random.Generator, whole: bytes) -> bytes:
    at = int(rng.integers(len(whole) - 8))
    return whole[:at] + struct.pack("<Q", int(rng.integers(1 << 62))) + whole[at + 8 :]


@pytest.mark.parametrize("damage", [flipped, grown])
def test_random_damage_gives_a_model_or_one_line(
    tiny_path: Path, path: Path, damage: Callable[[np.random.Generator, bytes], bytes]
) -> None:
    """Some damage to a header that nobody thought of would get past the checks."""
    whole = tiny_path.read_bytes()
    header_bytes = whole.index(b"output_norm.weight") + 60
    rng = np.random.default_rng(11)
    outcomes = []
    for _ in range(200):
        path.write_bytes(damage(rng, whole[:header_bytes]) + whole[header_bytes:])
        outcomes.append(complaint(path))
    assert {message.count("\n") for message in outcomes} == {0}
    assert 0 < outcomes.count("") < len(outcomes)
