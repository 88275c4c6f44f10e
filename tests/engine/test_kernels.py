"""What is done to rows, and attention: right to a bound, the same bits as plain NumPy and in any company."""

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from phasesplit.engine import kernels
from phasesplit.engine.kernels import plain
from phasesplit.errors import SpecError

Values = NDArray[np.float32]
Whole = NDArray[np.int32]


def normal(*shape: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("width", [1, 7, 16, 64, 100, 576])
def test_rms_norm(width: int) -> None:
    """A row would have another length than its mean square says, or other bits than the plain twin's."""
    x, weight, out, twin = normal(5, width), normal(width, seed=1), np.empty((5, width), np.float32), normal(5, width)
    kernels.rms_norm(x, weight, 1e-5, out)
    plain.rms_norm(x, weight, np.float32(1e-5), twin)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    np.testing.assert_allclose(out, exact, rtol=width * 2.0**-23 + 1e-6)
    assert out.tobytes() == twin.tobytes()
    kernels.rms_norm(x, weight, 1e-5, x)
    assert x.tobytes() == out.tobytes(), "in place"


def test_norm_of_heads_touches_only_those() -> None:
    """Values would be normalised as if they were keys."""
    qkv, weight = normal(3, 60), normal(10, seed=1)
    wanted = qkv.copy()
    part = np.ascontiguousarray(qkv[:, 20:40]).reshape(-1, 10)
    kernels.rms_norm(part, weight, 1e-6, part)
    wanted[:, 20:40] = part.reshape(3, -1)
    kernels.norm_heads(qkv, 2, 2, weight, 1e-6)
    assert qkv.tobytes() == wanted.tobytes()


def test_rotation() -> None:
    """A head would turn by another angle, or a head that must not turn would."""
    positions = np.array([0, 1, 63, 4095, 100_000], np.int32)
    frequencies = 10_000.0 ** (-np.arange(8) / 8)
    table = kernels.rope_table(positions, frequencies)
    angles = positions[:, None] * frequencies
    np.testing.assert_allclose(table, np.concatenate([np.cos(angles), np.sin(angles)], axis=1), atol=1e-7)
    twin_table = np.empty_like(table)
    plain.rope_table(positions, frequencies, twin_table)
    assert table.tobytes() == twin_table.tobytes()
    x = normal(5, 4 * 16)
    turned, twin = x.copy(), x.copy()
    kernels.rope(turned, table, 3)
    plain.rope(twin, table, 3)
    assert turned.tobytes() == twin.tobytes()
    pairs = x.reshape(5, 4, 2, 8).astype(np.float64)
    complex_pairs = (pairs[:, :, 0] + 1j * pairs[:, :, 1]) * np.exp(1j * angles)[:, None]
    complex_pairs[:, 3] = pairs[:, 3, 0] + 1j * pairs[:, 3, 1]
    wanted = np.stack([complex_pairs.real, complex_pairs.imag], axis=2).reshape(5, -1)
    np.testing.assert_allclose(turned, wanted, atol=1e-5)


@pytest.mark.parametrize("width", [1, 31, 160])
def test_silu_multiply(width: int) -> None:
    """The activation would be another function, or overflow for a large negative gate."""
    gate_up = normal(4, 2 * width) * np.float32(30)
    gate_up[0, 0] = -200.0
    out, twin = np.empty((4, width), np.float32), np.empty((4, width), np.float32)
    kernels.silu_multiply(gate_up, out)
    plain.silu_multiply(gate_up, twin)
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-6, atol=1e-30)
    assert out.tobytes() == twin.tobytes()


def test_exponential_is_nearly_exact() -> None:
    """Shares of attention would be off by more than a unit or two in the last place."""
    x = np.linspace(-86.9, 87.9, 100_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(plain.exponential(x) - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() < 2
    assert plain.exponential(np.zeros(1, np.float32))[0] == 1
    assert plain.exponential(np.full(1, -np.inf, np.float32))[0] < 1e-37


def test_addition() -> None:
    """A residual or a bias would be lost."""
    x, y, bias = normal(3, 5), normal(3, 5, seed=1), normal(5, seed=2)
    wanted = x + y + bias
    kernels.add(x, y)
    kernels.add_bias(x, bias)
    np.testing.assert_array_equal(x, wanted)


@dataclass(frozen=True)
class Sequences:
    """Some sequences with their KV in scattered blocks of the second of two layers."""

    heads: int
    kv_heads: int
    dim: int
    pool: Values
    tables: Whole
    owners: Whole
    positions: Whole
    qkv: Values

    def attend(self, rows: NDArray[np.intp] | slice = slice(None), *, twin: bool = False) -> Values:
        qkv = np.ascontiguousarray(self.qkv[rows])
        out = np.full((len(qkv), self.heads * self.dim), np.nan, dtype=np.float32)
        function: Callable[..., None] = plain.attend if twin else kernels.attend
        shared = (self.pool, 1, self.tables, self.owners[rows].copy(), self.positions[rows].copy())
        function(qkv, *shared, self.heads, self.kv_heads, out)
        return out


LENGTHS = (1, 31, 32, 33, 64, 65, 100)
SHAPES = [(9, 3, 64), (4, 2, 16), (3, 3, 20), (8, 1, 6), (50, 1, 4)]


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def sequences(request: pytest.FixtureRequest) -> Sequences:
    heads, kv_heads, dim = request.param
    blocks = sum(-(-length // 32) for length in LENGTHS)
    numbers = np.random.default_rng(3).permutation(blocks + 5).astype(np.int32).tolist()
    tables = np.zeros((len(LENGTHS), 4), np.int32)
    for sequence, length in enumerate(LENGTHS):
        for index in range(-(-length // 32)):
            tables[sequence, index] = numbers.pop()
    owners = np.repeat(np.arange(len(LENGTHS), dtype=np.int32), LENGTHS)
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in LENGTHS])
    qkv = normal(len(owners), (heads + 2 * kv_heads) * dim) * np.float32(2)
    pool = normal(2, blocks + 5, 2 * kv_heads * dim * 32, seed=4)  # what another sequence left
    kernels.write_kv(qkv, pool, 1, tables, owners, positions, heads, kv_heads)
    return Sequences(heads, kv_heads, dim, pool, tables, owners, positions, qkv)


def test_attention_is_causal_and_right(sequences: Sequences) -> None:
    """A token would see another sequence, its future, or weigh its past wrongly."""
    own = sequences
    out = own.attend().astype(np.float64)
    shared = own.heads // own.kv_heads
    parts = np.split(own.qkv.astype(np.float64), [own.heads * own.dim, (own.heads + own.kv_heads) * own.dim], axis=1)
    for sequence, length in enumerate(LENGTHS):
        rows = own.owners == sequence
        query, key, value = (part[rows].reshape(length, -1, own.dim) for part in parts)
        key, value = np.repeat(key, shared, axis=1), np.repeat(value, shared, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(own.dim)
        scores += np.triu(np.full((length, length), -np.inf), 1)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        wanted = np.einsum("hqk,khd->qhd", shares, value).reshape(length, -1)
        np.testing.assert_allclose(out[rows], wanted, atol=2e-5)


def test_attention_has_the_same_bits_in_any_company(sequences: Sequences) -> None:
    """A chunked, batched or token-by-token run would differ from a whole one."""
    whole = sequences.attend()
    order = np.random.default_rng(5).permutation(len(whole))
    assert sequences.attend(order).tobytes() == whole[order].tobytes(), "shuffled"
    for chunk in (1, 7, 32, 50):
        starts = range(0, len(whole), chunk)
        chunked = [sequences.attend(slice(start, start + chunk)) for start in starts]
        assert np.concatenate(chunked).tobytes() == whole.tobytes(), chunk


def test_compiled_and_plain_attention_are_equal(sequences: Sequences) -> None:
    """A processor without the compiled kernels would answer differently."""
    rows = np.arange(0, len(sequences.owners), 5)
    assert sequences.attend(rows, twin=True).tobytes() == sequences.attend(rows).tobytes()


def test_kv_lies_where_the_layout_says(sequences: Sequences) -> None:
    """A machine that receives KV would read keys and values from other places than they were written to."""
    own = sequences
    twin = own.pool.copy()
    plain.write_kv(own.qkv, twin, 1, own.tables, own.owners, own.positions, own.heads, own.kv_heads)
    assert twin.tobytes() == own.pool.tobytes()
    row = len(own.owners) - 3
    block = own.pool[1, own.tables[own.owners[row], own.positions[row] // 32]]
    keys, values = np.split(block, 2)
    head, slot = own.kv_heads - 1, own.positions[row] % 32
    query, key, value = np.split(own.qkv[row], [own.heads * own.dim, (own.heads + own.kv_heads) * own.dim])
    np.testing.assert_array_equal(keys.reshape(own.kv_heads, own.dim, 32)[head, :, slot], key[head * own.dim :])
    np.testing.assert_array_equal(values.reshape(own.kv_heads, 32, own.dim)[head, slot], value[head * own.dim :])
    assert len(query) == own.heads * own.dim


def test_places_outside_the_pool_are_refused(sequences: Sequences) -> None:
    """A wrong table or position would be read or written outside of the pool."""
    own, out = sequences, np.empty((1, sequences.heads * sequences.dim), np.float32)
    numbers = np.zeros(1, np.int32)

    def attend(*, layer: int = 0, tables: Whole = own.tables, owner: int = 0, position: int = 0, kv: int = 0) -> None:
        places = (tables, numbers + np.int32(owner), numbers + np.int32(position))
        kernels.attend(own.qkv[:1], own.pool, layer, *places, own.heads, kv or own.kv_heads, out)

    attend()
    for name, value in (("layer", 2), ("layer", -1), ("owner", 7), ("owner", -1), ("position", 128), ("kv", 13)):
        with pytest.raises(SpecError):
            attend(**{name: value})  # type: ignore[arg-type]
    for block in (-1, own.pool.shape[1]):
        wrong = np.array([[0, 0, block, -5]], np.int32)
        attend(tables=wrong, position=63)
        with pytest.raises(SpecError, match="row 0"):
            attend(tables=wrong, position=64)


def test_shapes_are_checked_before_memory_is_touched() -> None:
    """A wrong shape would be read or written outside of its array."""
    x = normal(2, 8)
    calls: list[Callable[[], None]] = [
        lambda: kernels.rms_norm(x, normal(7), 1e-5, normal(2, 8)),
        lambda: kernels.rms_norm(x, normal(8), 1e-5, normal(1, 8)),
        lambda: kernels.norm_heads(x, 1, 2, normal(4), 1e-5),
        lambda: kernels.rope(x, normal(2, 4), 3),
        lambda: kernels.rope(x, normal(1, 4), 1),
        lambda: kernels.silu_multiply(x, normal(2, 3)),
        lambda: kernels.add(x, normal(1, 8)),
        lambda: kernels.add_bias(x, normal(1)),
    ]
    for call in calls:
        with pytest.raises(SpecError):
            call()


PROGRAM = """
import hashlib, numpy as np
from phasesplit.engine import kernels
from phasesplit.engine.quant_blocks import tensor_from_values
from phasesplit.engine.packed import multiply, pack
f = lambda *shape: np.random.default_rng(0).standard_normal(shape).astype(np.float32)
x, digest = f(9, 40), hashlib.sha256()
out = np.empty((9, 70), np.float32)
multiply(x, pack(tensor_from_values("w", f(70, 40))), out)
qkv, pool, table = f(9, 64), f(1, 2, 1024), np.zeros((1, 1), np.int32)
owners, positions = np.zeros(9, np.int32), np.arange(9, dtype=np.int32)
heads = np.empty((9, 32), np.float32)
kernels.write_kv(qkv, pool, 0, table, owners, positions, 2, 1)
kernels.attend(qkv, pool, 0, table, owners, positions, 2, 1, heads)
for array in (out, heads, pool):
    digest.update(array.tobytes())
print(kernels.IS_COMPILED, digest.hexdigest())
"""


def run_with(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_without_compiling_the_bits_are_the_same() -> None:
    """PHASESPLIT_JIT=0 would be another engine."""
    assert run_with(PHASESPLIT_JIT="0") == ["False", run_with(PHASESPLIT_JIT="1")[1]]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs the names of x86 processors")
@pytest.mark.parametrize(("name", "features"), [("haswell", "+avx,+avx2,+fma"), ("x86-64", "")])
def test_other_processors_give_the_same_bits(name: str, features: str) -> None:
    """The machines of a pair would disagree about a prompt when they are not of the same make."""
    assert run_with(PHASESPLIT_JIT="1", NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features) == run_with()
