"""Panels and the product with them: right, equal bits for a row whatever its company, equal bits to plain NumPy."""

import threading
from itertools import pairwise

import numpy as np
import pytest
from numba.core.errors import TypingError
from numpy.typing import NDArray

from phasesplit.engine.kernels import IS_COMPILED, plain
from phasesplit.engine.packed import PANEL_KINDS as PANEL_KINDS
from phasesplit.engine.packed import Matrix, Panels, multiply, pack
from phasesplit.engine.quant_blocks import KINDS, Tensor, tensor_from_values
from phasesplit.errors import SpecError

Values = NDArray[np.float32]
EPS = 2.0**-24


def random_tensor(kind: str, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a random matrix of a kind; of quantised ones the bytes of the numbers are random and the scales sane."""
    rng = np.random.default_rng(seed)
    if kind in ("F32", "F16", "BF16"):
        values = rng.standard_normal((rows, columns)).astype(np.float32)
        if kind == "F32":
            return tensor_from_values("w", values)
        halves = values.astype(np.float16) if kind == "F16" else (values.view(np.uint32) >> 16).astype(np.uint16)
        return Tensor("w", KINDS[kind], (rows, columns), halves.view(np.uint8).reshape(rows, -1))
    blocks = rng.integers(0, 256, (rows * columns // 32, KINDS[kind].block_bytes), dtype=np.uint8)
    scales = 1 if kind in ("Q8_0", "Q4_0") else 2
    given = rng.standard_normal((len(blocks), scales)).astype(np.float16) * np.float16(0.01)
    blocks[:, : 2 * scales] = given.view(np.uint8)
    return Tensor("w", KINDS[kind], (rows, columns), blocks.reshape(rows, -1))


def product(x: Values, matrix: Matrix) -> Values:
    out = np.full((len(x), sum(part.rows for part in matrix)), np.nan, dtype=np.float32)
    multiply(x, matrix, out)
    return out


def plainly(x: Values, matrix: Matrix) -> Values:
    """Return the product from the plain twin."""
    out = np.empty((len(x), sum(part.rows for part in matrix)), dtype=np.float32)
    at = 0
    for part in matrix:
        plain.multiply(x, PANEL_KINDS[part.kind], part.data, part.rows, out, at)
        at += part.rows
    return out


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 32), (1, 96), (130, 64), (200, 2080)])
def test_product_is_that_of_the_tensors_values(kind: str, rows: int, columns: int) -> None:
    """A weight would stand at another place, or mean another number, than in the file."""
    tensor = random_tensor(kind, rows, columns)
    x = np.random.default_rng(1).standard_normal((7, columns)).astype(np.float32)
    weights = tensor.float32().astype(np.float64)
    bound = columns * EPS * (np.abs(x).astype(np.float64) @ np.abs(weights).T) * 1.1
    assert (np.abs(product(x, pack(tensor)) - x.astype(np.float64) @ weights.T) <= bound).all()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize(("rows", "columns"), [(70, 1120), (192, 64)])
def test_a_row_has_the_same_bits_in_any_company(kind: str, rows: int, columns: int) -> None:
    """Split, batched and chunked runs would give different tokens than whole ones."""
    matrix = pack(random_tensor(kind, rows, columns))
    x = np.random.default_rng(2).standard_normal((65, columns)).astype(np.float32)
    alone = np.concatenate([product(x[row : row + 1], matrix) for row in range(len(x))])
    for count in [*range(2, 14), 64, 65]:
        assert product(x[:count], matrix).tobytes() == alone[:count].tobytes(), count
        assert product(x[-count:], matrix).tobytes() == alone[-count:].tobytes(), count


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_compiled_and_plain_products_are_equal(kind: str, count: int) -> None:
    """A processor without the compiled kernels would answer differently."""
    matrix = pack(random_tensor(kind, 70, 1056))
    x = np.random.default_rng(3).standard_normal((count, 1056)).astype(np.float32)
    assert product(x, matrix).tobytes() == plainly(x, matrix).tobytes()


@pytest.mark.parametrize("columns", [1, 3, 50, 1025])
def test_any_number_of_inputs_works_in_float32(columns: int) -> None:
    """A model with an odd width would be computed wrongly."""
    matrix = pack(random_tensor("F32", 65, columns))
    x = np.random.default_rng(4).standard_normal((9, columns)).astype(np.float32)
    assert product(x, matrix).tobytes() == plainly(x, matrix).tobytes()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_quantised_panels_give_the_bits_of_float32_ones(kind: str) -> None:
    """`native` would not be the same model as `float32`."""
    tensor = random_tensor(kind, 100, 96)
    x = np.random.default_rng(5).standard_normal((10, 96)).astype(np.float32)
    native, plain_float = pack(tensor), pack(tensor, is_float32=True)
    assert (native[0].kind, plain_float[0].kind) == (kind, "F32")
    for count in (1, 10):
        assert product(x[:count], native).tobytes() == product(x[:count], plain_float).tobytes()


def test_matrices_below_each_other_are_one_product() -> None:
    """Queries, keys and values of different kinds would be mixed up, or the rows between them lost."""
    tensors = [random_tensor(kind, rows, 64, seed=rows) for kind, rows in (("Q4_1", 64), ("Q4_1", 7), ("Q8_0", 40))]
    matrix = pack(*tensors)
    x = np.random.default_rng(6).standard_normal((3, 64)).astype(np.float32)
    assert [(part.kind, part.rows) for part in matrix] == [("Q4_1", 71), ("Q8_0", 40)]
    apart = np.concatenate([product(x, pack(tensor)) for tensor in tensors], axis=1)
    assert product(x, matrix).tobytes() == apart.tobytes()


def test_packing_in_pieces_is_packing_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large vocabulary would lose or repeat rows where one piece ends and the next begins."""
    tensors = [random_tensor("Q4_1", rows, 64, seed=rows) for rows in (100, 90, 3)]
    whole = pack(*tensors)[0].data
    monkeypatch.setattr("phasesplit.engine.packed._ROWS_AT_ONCE", 64)
    assert pack(*tensors)[0].data.tobytes() == whole.tobytes()


def test_threads_do_not_share_scratch() -> None:
    """Two engines in one process would write over each other's unpacked panels."""
    matrices = [pack(random_tensor("Q4_1", 65, 512, seed=seed)) for seed in range(2)]
    x = np.random.default_rng(7).standard_normal((20, 512)).astype(np.float32)
    wanted = [product(x, matrix).tobytes() for matrix in matrices]
    found: list[set[bytes]] = [set(), set()]

    def run(number: int) -> None:
        for _ in range(50):
            found[number].add(product(x, matrices[number]).tobytes())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [{one} for one in wanted]


def test_shapes_are_checked_before_memory_is_touched() -> None:
    """A wrong shape would be read or written outside of its array."""
    matrix = pack(random_tensor("F32", 70, 32))
    x = np.zeros((2, 32), np.float32)
    for wrong_x, wrong_out in (((2, 31), (2, 70)), ((2, 32), (2, 69)), ((2, 32), (1, 70)), ((2, 32), (2, 128))):
        with pytest.raises(SpecError, match=r"shape|width"):
            multiply(x[: wrong_x[0], : wrong_x[1]].copy(), matrix, np.zeros(wrong_out, np.float32))
    with pytest.raises(SpecError, match="panels of 70 x 32"):
        Panels(kind="F32", rows=70, columns=32, data=matrix[0].data[:-1])
    with pytest.raises(SpecError, match="shape of 'w'"):
        pack(random_tensor("F32", 2, 32), random_tensor("F32", 2, 64))


@pytest.mark.skipif(not IS_COMPILED, reason="plain NumPy takes any array")
def test_other_arrays_than_contiguous_float32_are_refused() -> None:
    """Bytes of other numbers, or of gaps between them, would be taken for float32."""
    matrix = pack(random_tensor("F32", 64, 32))
    for wrong in (np.zeros((2, 32)), np.zeros((2, 32), np.int32), np.zeros((2, 64), np.float32)[:, ::2]):
        with pytest.raises(TypingError):
            multiply(wrong, matrix, np.zeros((2, 64), np.float32))  # type: ignore[arg-type]


def test_fused_multiply_add_rounds_once() -> None:
    """The plain twin would differ from the processor's instruction in rare last bits."""
    rng = np.random.default_rng(8)
    a, b = (rng.standard_normal(200_000).astype(np.float32) for _ in range(2))
    c = (-(a.astype(np.float64) * b) * (1 + rng.standard_normal(len(a)) * 2.0**-23)).astype(np.float32)
    c[::3] = (rng.standard_normal(len(c[::3])) * 10.0 ** rng.integers(-12, 9, len(c[::3]))).astype(np.float32)
    matrix = [np.longdouble(one) for one in (a, b, c)]  # 64 bits hold the product, and nearly every sum
    exact = matrix[0] * matrix[1] + matrix[2]
    found = plain.fma(a, b, c).astype(np.longdouble)
    ulp = np.spacing(np.abs(found).astype(np.float32)).astype(np.longdouble)
    assert (np.abs(found - exact) <= ulp / 2).all()
    # A sum just above the middle between two float32, by less than a float64 can tell: rounding twice goes down.
    one, tiny = (np.full(1, value, np.float32) for value in (1 + 2.0**-12, 2.0**-60))
    halfway = plain.fma(one, one, tiny)
    assert halfway[0] == np.float32(1 + 2.0**-11 + 2.0**-23)


def test_sizes_of_kinds_grow_with_their_bits() -> None:
    """A quantised matrix would take more memory than it has to."""
    sizes = [pack(random_tensor(kind, 64, 64))[0].data.nbytes for kind in ("Q4_0", "Q4_1", "Q8_0", "F32")]
    assert all(small < large for small, large in pairwise(sizes))
    assert sizes[-1] == 64 * 64 * 4
