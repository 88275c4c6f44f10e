"""A model on disk, opened: a GGUF file, or a directory as Hugging Face lays it out.

1. `open_checkpoint` decides which of the two it is.
2. `gguf.open_gguf` or `read_safetensors` maps the tensors, in both cases under the names that GGUF uses. Source of the
   safetensors layout: https://github.com/huggingface/safetensors (8 bytes of length, a JSON header, the bytes). It is
   read here rather than with that package, whose NumPy side has no BF16.
3. `config` checks the sizes; `weights_from_tensors` takes every matrix and vector under its name and checks its shape
   against them.
4. The result is a `Checkpoint`: config, weights, tokenizer, chat template, and an identity of the weights.
"""

import hashlib
import json
import mmap
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.chat_template import ChatTemplate
from phasesplit.engine.config import ModelConfig, config_from_gguf, config_from_hf
from phasesplit.engine.gguf import open_gguf
from phasesplit.engine.quant_blocks import KINDS, Tensor, Values, tensor_from_values
from phasesplit.engine.tokens import Tokenizer, tokenizer_from_gguf, tokenizer_from_json
from phasesplit.errors import SpecError

_DTYPES = ("F32", "F16", "BF16")
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
_ROPE_DIVISORS = "rope_freqs.weight"
_SAMPLE_BYTES = 256
_PAIRED_ARCHITECTURES = ("llama",)
"""Architectures whose queries and keys GGUF keeps with the two values of a rotation side by side."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """One transformer layer. Matrices are [outputs, inputs] of a kind the engine keeps; vectors are float32.

    Attributes:
        attention_norm: RMSNorm before attention, [hidden].
        query: [query_heads x head_dim, hidden]; rows of a head in the order of rotate-half (value i turns with value
            i + head_dim / 2), from every kind of file.
        key: [kv_heads x head_dim, hidden], rows as of `query`.
        value: [kv_heads x head_dim, hidden].
        output: [hidden, query_heads x head_dim].
        query_bias: [query_heads x head_dim], or None.
        key_bias: [kv_heads x head_dim], or None.
        value_bias: [kv_heads x head_dim], or None.
        query_norm: RMSNorm of each head's query, [head_dim], or None.
        key_norm: RMSNorm of each head's key, [head_dim], or None.
        ffn_norm: RMSNorm before the feed-forward layer, [hidden].
        gate: [ffn, hidden].
        up: [ffn, hidden].
        down: [hidden, ffn].
    """

    attention_norm: Values
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    query_bias: Values | None
    key_bias: Values | None
    value_bias: Values | None
    query_norm: Values | None
    key_norm: Values | None
    ffn_norm: Values
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """All weights of a model.

    Attributes:
        embedding: [vocab, hidden].
        layers: First to last.
        output_norm: RMSNorm after the last layer, [hidden].
        output: [vocab, hidden]; the very object `embedding` where the two are tied.
        rope_frequencies: Angle by which position 1 turns each pair, [head_dim / 2] float64, scaling included.
        identity: 64 hexadecimal digits over names, kinds, shapes and a sample of the bytes of every tensor: it tells
            two models apart without reading them whole. It does not protect against somebody who tries to be taken for
            another model; `file_digest` does.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    output_norm: Values
    output: Tensor
    rope_frequencies: NDArray[np.float64]
    identity: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """An opened model.

    Attributes:
        config: Its sizes.
        weights: Its weights, for the most part still on disk and mapped.
        load_tokenizer: Makes `tokenizer`; raises SpecError where the model's is none.
        template: From messages to a prompt, or None where the model comes without.
        paths: The files that hold the weights; `file_digest` takes them.
    """

    config: ModelConfig
    weights: Weights
    load_tokenizer: Callable[[], Tokenizer]
    template: ChatTemplate | None
    paths: tuple[Path, ...]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Text to tokens and back; made when it is first asked for, since that takes as long as all the rest."""
        return self.load_tokenizer()


def open_checkpoint(path: Path) -> Checkpoint:
    """Return a model on disk.

    Args:
        path: A GGUF file, or a directory with config.json, tokenizer.json and safetensors.

    Raises:
        SpecError: It is not there, is damaged, contradicts itself, or is of a kind that the engine does not run.
    """
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Checkpoint:
    where = str(path)
    file = open_gguf(path)
    config = config_from_gguf(where, file.metadata, file.tensors)
    has_paired_rows = config.architecture in _PAIRED_ARCHITECTURES
    weights = weights_from_tensors(where, config, file.tensors, has_paired_rows=has_paired_rows)
    source = file.metadata.get("tokenizer.chat_template")
    words = file.metadata["tokenizer.ggml.tokens"]
    ids = {"bos_token": config.bos_token_id, "eos_token": config.stop_token_ids[0] if config.stop_token_ids else None}
    named = {name: words[token] for name, token in ids.items() if token is not None and isinstance(words, list)}
    template = ChatTemplate(where, source, named) if isinstance(source, str) else None
    return Checkpoint(
        config=config,
        weights=weights,
        load_tokenizer=lambda: tokenizer_from_gguf(where, file.metadata),
        template=template,
        paths=(path,),
    )


def _from_directory(directory: Path) -> Checkpoint:
    if not (directory / "config.json").is_file():
        raise SpecError(f"{directory}: is neither a GGUF file nor a directory with a config.json")
    generation = directory / "generation_config.json"
    config = config_from_hf(
        str(directory / "config.json"),
        read_json(directory / "config.json"),
        read_json(generation) if generation.is_file() else None,
    )
    paths = safetensors_paths(directory)
    weights = weights_from_tensors(str(directory), config, read_safetensors(paths), has_paired_rows=False)
    return Checkpoint(
        config=config,
        weights=weights,
        load_tokenizer=lambda: tokenizer_from_json(directory / "tokenizer.json"),
        template=_hf_template(directory),
        paths=tuple(paths),
    )


def _hf_template(directory: Path) -> ChatTemplate | None:
    """Return the template of chat_template.jinja, or else of tokenizer_config.json: of several, the default."""
    beside, settings_path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {str(one.get("name")): one.get("template") for one in source if isinstance(one, dict)}
        source = named.get("default")
    if beside.is_file():
        try:
            source = beside.read_text(encoding="utf-8")
        except (OSError, ValueError):
            raise SpecError(f"{beside}: cannot be read as text") from None
    if source is None:
        return None
    if not isinstance(source, str):
        raise SpecError.bad(f"{settings_path}, chat_template", type(source).__name__, "a text")
    return ChatTemplate(str(directory), source, _token_texts(settings))


def _token_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens of tokenizer_config.json, each a text or a mapping with its text as `content`."""
    texts = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            texts[name] = value
    return texts


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
            raise SpecError.bad(f"{index}, weight_map", name, "the name of a file in its directory")
    return [directory / name for name in names]


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
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise SpecError.bad(f"{where}, dtype", dtype, " or ".join(_DTYPES))
    if not _are_sizes(shape) or not 1 <= len(shape) <= _MOST_DIMENSIONS or 0 in shape:
        raise SpecError.bad(f"{where}, shape", shape, f"1 to {_MOST_DIMENSIONS} positive whole numbers")
    kind = KINDS[dtype]
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


def gguf_name(name: str) -> str:
    """Return a Hugging Face tensor's name as GGUF would have it; a name that has no counterpart comes back as it is."""
    found = _IN_LAYER.fullmatch(name)
    if found and found[2] in _LAYER_NAMES:
        return f"blk.{int(found[1])}.{_LAYER_NAMES[found[2]]}.{found[3]}"
    return _TOP_NAMES.get(name, name)


def weights_from_tensors(
    where: str, config: ModelConfig, tensors: Mapping[str, Tensor], *, has_paired_rows: bool
) -> Weights:
    """Return a model's weights.

    Kinds that the engine does not compute on become F32; the others stay views of the file, except for queries and keys
    that have to be put in order.

    Args:
        where: The file or directory, for messages.
        config: The model's sizes.
        tensors: GGUF name to tensor, all that the model has.
        has_paired_rows: Whether the rows of queries and keys lie as GGUF keeps them for the architecture llama.

    Raises:
        SpecError: A tensor is missing, has another shape than the sizes say, or is not known.
    """
    shelf = _Shelf(where, tensors)
    embedding = shelf.matrix("token_embd.weight", config.vocab, config.hidden)
    layers = tuple(_layer(shelf, config, index, has_paired_rows) for index in range(config.layers))
    output_norm = shelf.vector("output_norm.weight", config.hidden)
    if config.tied_embeddings:
        output = embedding
        shelf.taken.add("output.weight")  # some files repeat it
    else:
        output = shelf.matrix("output.weight", config.vocab, config.hidden)
    divisors = shelf.vector(_ROPE_DIVISORS, config.head_dim // 2) if _ROPE_DIVISORS in tensors else None
    if divisors is not None and not (np.isfinite(divisors) & (divisors > 0)).all():
        raise SpecError(f"{where}: tensor {_ROPE_DIVISORS!r} has values that are not positive numbers")
    if shelf.left():
        raise SpecError(f"{where}: has {len(shelf.left())} tensors that are not known, first {shelf.left()[0]!r}")
    return Weights(
        embedding=embedding,
        layers=layers,
        output_norm=output_norm,
        output=output,
        rope_frequencies=config.rope_frequencies(divisors),
        identity=_identity(config, tensors.values()),
    )


class _Shelf:
    """Tensors by name, each taken once and checked."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        self.where, self.tensors, self.taken = where, tensors, set[str]()

    def take(self, name: str, *shape: int) -> Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise SpecError(f"{self.where}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise SpecError.bad(f"{self.where}, shape of {name!r}", tensor.shape, str(shape))
        self.taken.add(name)
        return tensor

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        tensor = self.take(name, rows, columns)
        return tensor if tensor.kind.is_kept else tensor_from_values(name, tensor.float32())

    def vector(self, name: str, length: int) -> Values:
        return self.take(name, length).float32()

    def left(self) -> list[str]:
        """Return what no one took, without the tables that the sizes already give."""
        return sorted(name for name in self.tensors.keys() - self.taken if not name.endswith(".inv_freq"))


def _layer(shelf: _Shelf, config: ModelConfig, index: int, has_paired_rows: bool) -> LayerWeights:
    start = f"blk.{index}."
    hidden, head_dim, ffn = config.hidden, config.head_dim, config.ffn
    widths = {"q": config.query_heads * head_dim, "k": config.kv_heads * head_dim, "v": config.kv_heads * head_dim}
    heads = {"q": config.query_heads, "k": config.kv_heads}

    def projection(part: str) -> Tensor:
        matrix = shelf.matrix(f"{start}attn_{part}.weight", widths[part], hidden)
        if not (has_paired_rows and part in heads):
            return matrix
        return replace(matrix, raw=rotate_half_rows(matrix.raw, heads[part]).view(np.uint8))

    def bias(part: str) -> Values | None:
        if not config.qkv_bias:
            return None
        values = shelf.vector(f"{start}attn_{part}.bias", widths[part])
        return rotate_half_rows(values, heads[part]).view(np.float32) if has_paired_rows and part in heads else values

    def head_norm(part: str) -> Values | None:
        return shelf.vector(f"{start}attn_{part}_norm.weight", head_dim) if config.qk_norm else None

    return LayerWeights(
        attention_norm=shelf.vector(f"{start}attn_norm.weight", hidden),
        query=projection("q"),
        key=projection("k"),
        value=projection("v"),
        output=shelf.matrix(f"{start}attn_output.weight", hidden, widths["q"]),
        query_bias=bias("q"),
        key_bias=bias("k"),
        value_bias=bias("v"),
        query_norm=head_norm("q"),
        key_norm=head_norm("k"),
        ffn_norm=shelf.vector(f"{start}ffn_norm.weight", hidden),
        gate=shelf.matrix(f"{start}ffn_gate.weight", ffn, hidden),
        up=shelf.matrix(f"{start}ffn_up.weight", ffn, hidden),
        down=shelf.matrix(f"{start}ffn_down.weight", hidden, ffn),
    )


def rotate_half_rows(rows: NDArray[np.generic], heads: int) -> NDArray[np.generic]:
    """Return rows whose pairs lie side by side, as GGUF keeps Llama's, with pairs half a head apart.

    Args:
        rows: [heads x head_dim, ...]: row 2 i + j of a head is its value i + j x head_dim / 2.
        heads: Number of heads.

    Source: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py, undone.
    """
    paired = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)


def _identity(config: ModelConfig, tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256(repr(config).encode())
    for tensor in sorted(tensors, key=lambda one: one.name):
        flat = tensor.raw.reshape(-1)
        digest.update(f"{tensor.name} {tensor.kind.name} {tensor.shape} ".encode())
        digest.update(flat[:_SAMPLE_BYTES].tobytes() + flat[-_SAMPLE_BYTES:].tobytes())
    return digest.hexdigest()


def file_digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 of files one after the other, in hexadecimal, reading each once in small pieces.

    Raises:
        SpecError: One cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
        except OSError as error:
            raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    return digest.hexdigest()
