"""safetensors files: their tensors over a memory map, under the names that GGUF uses.

Source of the layout: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, the bytes). Read
here rather than with that package, whose NumPy side has no BF16.
"""

import json
import mmap
import re
from pathlib import Path
from typing import Any

import numpy as np

from phasesplit.engine.blocks import KINDS, Tensor
from phasesplit.errors import SpecError

_KIND_OF_DTYPE = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
_LARGEST_HEADER_BYTES = 100_000_000
"""As the safetensors package allows."""
_MOST_DIMENSIONS = 4
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def gguf_name(name: str) -> str:
    """Return a Hugging Face tensor's name as GGUF would have it; a name that has no counterpart comes back as it is."""
    found = _IN_LAYER.fullmatch(name)
    if found and found[2] in _LAYER_NAMES:
        return f"blk.{int(found[1])}.{_LAYER_NAMES[found[2]]}.{found[3]}"
    return _TOP_NAMES.get(name, name)


def safetensors_paths(directory: Path) -> list[Path]:
    """Return the shards of a model: those that its index names, or else the one file `model.safetensors`.

    Raises:
        SpecError: There is neither, or the index is not one, or names a file outside the directory.
    """
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise SpecError(f"{directory}: has no model.safetensors and no {index.name}")
    content = read_json(index)
    shards = content.get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise SpecError.bad(f"{index}, weight_map", type(shards).__name__, "a mapping of tensor names to files")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if Path(name).name != name:
            raise SpecError.bad(f"{index}, weight_map", name, "the name of a file beside it")
    return [directory / name for name in names]


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping of a JSON file.

    Raises:
        SpecError: It cannot be read, is not JSON, or is not a mapping.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise SpecError(f"{path}: is not JSON") from None
    if not isinstance(content, dict):
        raise SpecError(f"{path}: is not a mapping")
    return content


def read_safetensors(paths: list[Path]) -> dict[str, Tensor]:
    """Return the tensors of a model's shards under their GGUF names, as views of the mapped files.

    Args:
        paths: The shards. They must not be cut shorter while the result is used.

    Raises:
        SpecError: A shard cannot be read, is cut off or contradicts itself, holds numbers other than F32, F16 and BF16,
            or repeats a tensor of another.
    """
    found: dict[str, Tensor] = {}
    for path in paths:
        for tensor in _shard(path):
            if tensor.name in found:
                raise SpecError(f"{path}: tensor {tensor.name!r} is also in another shard")
            found[tensor.name] = tensor
    return found


def _shard(path: Path) -> list[Tensor]:
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise SpecError(f"{path}: not a usable safetensors file: it is empty") from None
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 or length > min(len(content) - 8, _LARGEST_HEADER_BYTES):
        raise SpecError(f"{path}: not a usable safetensors file: its header would have {length} bytes")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError):
        raise SpecError(f"{path}: not a usable safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise SpecError(f"{path}: not a usable safetensors file: its header is not a mapping")
    return [_tensor(path, content, 8 + length, *entry) for entry in header.items() if entry[0] != "__metadata__"]


def _tensor(path: Path, content: mmap.mmap, start: int, name: str, entry: Any) -> Tensor:
    where = f"{path}, tensor {name!r}"
    if not isinstance(entry, dict):
        raise SpecError.bad(where, type(entry).__name__, "a mapping")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _KIND_OF_DTYPE:
        raise SpecError.bad(f"{where}, dtype", dtype, " or ".join(_KIND_OF_DTYPE))
    if not _are_sizes(shape) or not 1 <= len(shape) <= _MOST_DIMENSIONS or 0 in shape:
        raise SpecError.bad(f"{where}, shape", shape, f"1 to {_MOST_DIMENSIONS} positive whole numbers")
    kind = KINDS[_KIND_OF_DTYPE[dtype]]
    size = kind.block_bytes
    for one in shape:
        size *= one
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise SpecError.bad(f"{where}, data_offsets", offsets, f"a start and an end {size} bytes apart")
    if start + offsets[1] > len(content):
        raise SpecError(f"{where}: ends at byte {start + offsets[1]} of {len(content)}")
    raw = np.frombuffer(content, dtype=np.uint8, count=size, offset=start + offsets[0])
    if raw.ctypes.data % kind.block_bytes:
        raw = raw.copy()  # the header's length need not be a multiple of the numbers' size
    rows = size // (shape[-1] * kind.block_bytes)
    return Tensor(name=gguf_name(name), kind=kind, shape=tuple(shape), raw=raw.reshape(rows, -1))


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one < 1 << 48 for one in value)
