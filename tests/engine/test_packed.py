"""The file of packed weights: the model's own numbers, written once, mapped by all, written anew when damaged."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from phasesplit.engine.checkpoint import Checkpoint, open_checkpoint
from phasesplit.engine.fetch import TinySizes, write_tiny_model
from phasesplit.engine.packed import Matrix, PackedModel, Precision, multiply, packed_model
from phasesplit.errors import SpecError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("packed") / "tiny.gguf"
    write_tiny_model(path, kind="Q8_0")
    return open_checkpoint(path)


def only_file(directory: Path) -> Path:
    (path,) = directory.glob("*.panels")
    return path


def logits(model: PackedModel) -> bytes:
    """Return a product with every matrix, for comparison."""
    found = []
    matrices: list[Matrix] = [model.output]
    for layer in model.layers:
        matrices += [layer.qkv, layer.attention_output, layer.gate_up, layer.down]
    for matrix in matrices:
        x = np.random.default_rng(0).standard_normal((3, matrix[0].columns)).astype(np.float32)
        out = np.empty((3, sum(part.rows for part in matrix)), np.float32)
        multiply(x, matrix, out)
        found.append(out.tobytes())
    return b"".join(found)


@pytest.mark.parametrize("precision", ["native", "float32"])
def test_holds_the_models_weights(checkpoint: Checkpoint, tmp_path: Path, precision: Precision) -> None:
    """A matrix or vector would be another's."""
    model = packed_model(checkpoint, tmp_path, precision)
    weights = checkpoint.weights
    assert (model.config, model.identity, model.precision) == (checkpoint.config, weights.identity, precision)
    for layer, source in zip(model.layers, weights.layers, strict=True):
        x = np.random.default_rng(1).standard_normal((2, checkpoint.config.hidden)).astype(np.float32)
        fused = np.concatenate([source.query.float32(), source.key.float32(), source.value.float32()])
        out = np.empty((2, len(fused)), np.float32)
        multiply(x, layer.qkv, out)
        np.testing.assert_allclose(out, x @ fused.T, atol=1e-4)
        gate_up = np.concatenate([source.gate.float32(), source.up.float32()])
        out = np.empty((2, len(gate_up)), np.float32)
        multiply(x, layer.gate_up, out)
        np.testing.assert_allclose(out, x @ gate_up.T, atol=1e-4)
        np.testing.assert_array_equal(layer.attention_norm, source.attention_norm)
        np.testing.assert_array_equal(layer.ffn_norm, source.ffn_norm)
        assert layer.qkv_bias is layer.query_norm is layer.key_norm is None
        assert layer.qkv[0].kind == ("Q8_0" if precision == "native" else "F32")
    np.testing.assert_array_equal(model.output_norm, weights.output_norm)
    np.testing.assert_array_equal(model.rope_frequencies, weights.rope_frequencies)
    rows = np.empty((3, checkpoint.config.hidden), np.float32)
    model.embedding.rows(np.array([0, 299, 7], np.int32), rows)
    np.testing.assert_array_equal(rows, weights.embedding.float32()[[0, 299, 7]])
    for wrong in (-1, 300):
        with pytest.raises(SpecError, match="tokens"):
            model.embedding.rows(np.array([wrong], np.int32), rows[:1])


@pytest.mark.parametrize(("architecture", "has"), [("qwen2", "qkv_bias"), ("qwen3", "query_norm")])
def test_holds_what_only_some_models_have(tmp_path: Path, architecture: str, has: str) -> None:
    """Biases or norms of heads would be left out."""
    path = tmp_path / "tiny.gguf"
    write_tiny_model(path, sizes=TinySizes(architecture=architecture, is_tied=False))
    checkpoint = open_checkpoint(path)
    layer, source = packed_model(checkpoint, tmp_path).layers[1], checkpoint.weights.layers[1]
    assert getattr(layer, has) is not None
    for name in ("query_norm", "key_norm"):
        if getattr(source, name) is not None:
            np.testing.assert_array_equal(getattr(layer, name), getattr(source, name))
    if source.query_bias is not None and source.key_bias is not None and source.value_bias is not None:
        biases = np.concatenate([source.query_bias, source.key_bias, source.value_bias])
        np.testing.assert_array_equal(np.asarray(layer.qkv_bias), biases)


def test_is_written_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Every start would pack the weights again, or a second process keep a copy of its own."""
    first = packed_model(checkpoint, tmp_path)
    written = only_file(tmp_path).stat()
    second = packed_model(checkpoint, tmp_path)
    now = only_file(tmp_path).stat()
    assert (now.st_ino, now.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    assert logits(first) == logits(second)
    assert not second.output[0].data.flags.writeable
    assert [path.suffix for path in tmp_path.iterdir() if path.suffix not in (".panels", ".lock")] == []


def test_precisions_do_not_share_a_file(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A run that asks for float32 would get what another one packed, or the two give different numbers."""
    native, plain = packed_model(checkpoint, tmp_path), packed_model(checkpoint, tmp_path, "float32")
    assert len(list(tmp_path.glob("*.panels"))) == 2
    assert logits(native) == logits(plain)


@pytest.mark.parametrize("damage", ["empty", "cut", "header", "zeros", "middle", "foreign"])
def test_a_damaged_file_is_written_anew(checkpoint: Checkpoint, tmp_path: Path, damage: str) -> None:
    """A run would compute with what a crash of the machine left of the file, or refuse to start."""
    wanted = logits(packed_model(checkpoint, tmp_path))
    path = only_file(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "empty":
        content.clear()
    elif damage == "cut":
        del content[len(content) // 2 :]
    elif damage == "header":
        content[-60] ^= 1
    elif damage == "zeros":
        content[: len(content) // 4] = bytes(len(content) // 4)
    elif damage == "middle":
        del content[1000:1064]
    else:
        content[:] = b"something else entirely" * 100
    path.write_bytes(content)
    assert logits(packed_model(checkpoint, tmp_path)) == wanted


PROGRAM = """
import sys
from pathlib import Path
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.packed import packed_model
checkpoint = open_checkpoint(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
print(packed_model(checkpoint, Path(sys.argv[2])).layers[0].down[0].data.sum(dtype="i8"))
"""


def test_two_processes_at_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Workers that start together would read a half-written file, or write over each other's."""
    command = [sys.executable, "-c", PROGRAM, str(checkpoint.paths[0]), str(tmp_path)]
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    found = [process.communicate("go\n", timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    wanted = packed_model(checkpoint, tmp_path).layers[0].down[0].data.sum(dtype="i8")
    assert [int(text) for text in found] == [wanted, wanted]


def test_a_place_that_cannot_be_written_is_named(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The user would get a traceback where a folder is not writable."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        packed_model(checkpoint, tmp_path / "file" / "below")
