"""safetensors files, against the package of their authors, and damaged."""

import json
from pathlib import Path

import numpy as np
import pytest

from phasesplit.engine.checkpoint import gguf_name, read_json, read_safetensors, safetensors_paths
from phasesplit.errors import SpecError


def shard(header: object, content: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + content


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_equals_the_safetensors_package(tmp_path: Path) -> None:
    """Tensors would be read otherwise than their authors write them."""
    package = pytest.importorskip("safetensors.numpy", reason="the dev extra has it")
    rng = np.random.default_rng(3)
    values = {
        "model.embed_tokens.weight": rng.standard_normal((5, 4)).astype(np.float32),
        "model.layers.11.self_attn.q_proj.bias": rng.standard_normal(4).astype(np.float16),
    }
    path = tmp_path / "model.safetensors"
    package.save_file(values, path, metadata={"format": "pt"})
    read = read_safetensors([path])
    assert list(read) == ["token_embd.weight", "blk.11.attn_q.bias"]
    for tensor, expected in zip(read.values(), values.values(), strict=True):
        np.testing.assert_array_equal(tensor.float32(), expected)


def test_brain_floats(tmp_path: Path) -> None:
    """BF16, in which most models are published, would be read as something else."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(shard(entry("BF16", [1, 2], [0, 4]), bytes([0x80, 0x3F, 0x00, 0xC0])))
    np.testing.assert_array_equal(read_safetensors([path])["t"].float32(), [[1.0, -2.0]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("lm_head.weight", "output.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.layers.3.post_attention_layernorm.weight", "blk.3.ffn_norm.weight"),
        ("model.layers.0.self_attn.k_norm.weight", "blk.0.attn_k_norm.weight"),
        ("model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"),
        ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.block_sparse_moe.gate.weight"),
    ],
)
def test_names(name: str, expected: str) -> None:
    """A tensor would be taken for another, or a strange one for a known one."""
    assert gguf_name(name) == expected


def test_shards(tmp_path: Path) -> None:
    """A model in several files would miss those that its index names."""
    for index in range(2):
        header = {f"t{index}": entry()["t"]}
        (tmp_path / f"part-{index}.safetensors").write_bytes(shard(header, bytes(8)))
    names = {"weight_map": {"t0": "part-0.safetensors", "t1": "part-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(names))
    paths = safetensors_paths(tmp_path)
    assert list(read_safetensors(paths)) == ["t0", "t1"]
    with pytest.raises(SpecError, match="is also in another shard"):
        read_safetensors([paths[0], paths[0]])


@pytest.mark.parametrize(
    ("index", "why"),
    [
        ({"weight_map": {"t": "../secret"}}, "the name of a file in its directory"),
        ({"weight_map": {}}, "a mapping of tensor names"),
        ([], "is not a mapping"),
    ],
)
def test_wrong_index(tmp_path: Path, index: object, why: str) -> None:
    """An index would lead to files outside the model, or end in a traceback."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SpecError, match=why):
        safetensors_paths(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    """A directory without weights would end in a traceback."""
    with pytest.raises(SpecError, match=r"has no model.safetensors"):
        safetensors_paths(tmp_path)
    with pytest.raises(SpecError, match="cannot be read"):
        read_safetensors([tmp_path / "absent"])
    with pytest.raises(SpecError, match="cannot be read"):
        read_json(tmp_path)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b"\1\0", "its header would have"),
        ((1 << 62).to_bytes(8, "little") + b"{}", "its header would have"),
        (shard(b"{"), "its header is not JSON"),
        (shard(b"\xff\xff"), "its header is not JSON"),
        (shard(b"[" * 100_000), "its header is not JSON"),
        (shard([]), "its header is not a mapping"),
        (shard({"t": 1}), "allowed is a mapping"),
        (shard(entry(dtype="I64"), bytes(8)), "F32 or F16 or BF16"),
        (shard(entry(dtype=["F32"]), bytes(8)), "F32 or F16 or BF16"),
        (shard(entry(shape=[]), bytes(8)), "positive whole numbers"),
        (shard(entry(shape=[0]), bytes(8)), "positive whole numbers"),
        (shard(entry(shape=[-2]), bytes(8)), "positive whole numbers"),
        (shard(entry(shape=[1 << 47] * 4), bytes(8)), "bytes apart"),
        (shard(entry(shape=2), bytes(8)), "positive whole numbers"),
        (shard(entry(offsets=[0, 4]), bytes(8)), "8 bytes apart"),
        (shard(entry(offsets=[-8, 0]), bytes(8)), "8 bytes apart"),
        (shard(entry(offsets=[8, 16]), bytes(8)), "ends at byte"),
        (shard(entry(), bytes(7)), "ends at byte"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, why: str) -> None:
    """A damaged or hostile file would crash the process, fill its memory, or be read as something else."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        read_safetensors([path])
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
