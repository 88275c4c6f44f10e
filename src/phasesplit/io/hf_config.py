"""A model from its Hugging Face config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasesplit.domain.model import Model, transformer_parameters
from phasesplit.errors import SpecError

MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Architectures whose parameters `transformer_parameters` counts; others need a YAML file of their own."""

_VALUE_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0}
_QUANTIZED_BITS = {"fp8": 8, "fbgemm_fp8": 8, "mxfp4": 4}
_LARGEST = 100_000_000
_GROUP_OVERHEAD_BITS = 20
"""A scale of 16 bits and a zero point of 4 for each group of weights in GPTQ and AWQ files."""


def model_from_config(path: Path, config: Mapping[str, Any]) -> Model:
    """Return the model that a config.json describes.

    Parameters are counted from the sizes. Weights take the bytes of `torch_dtype`, or of `quantization_config` for the
    matrices of the layers, embeddings staying at 16 bits. KV values take 2 bytes whatever the weights take, as serving
    engines keep them unless set otherwise.

    Args:
        path: Where it was read, for messages; its directory names a model that does not name itself.
        config: Its content.

    Raises:
        SpecError: The architecture is not one of `MODEL_TYPES`, or a field is missing or not allowed.
    """
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise SpecError.bad(f"{path}, model_type", kind, f"{', '.join(MODEL_TYPES)}; describe others in a YAML file")

    def size(field: str, default: int | None = None) -> int:
        value = config.get(field, default)
        value = default if value is None else value
        if value is None:
            raise SpecError(f"{path}: field {field} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST:
            raise SpecError.bad(f"{path}, {field}", value, f"a whole number from 1 to {_LARGEST}")
        return value

    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise SpecError.bad(f"{path}, tie_word_embeddings", tied, "true or false")
    experts = size("num_local_experts" if "num_local_experts" in config else "num_experts", 1)
    hidden, query_heads = size("hidden_size"), size("num_attention_heads")
    sizes: dict[str, Any] = {
        "layers": size("num_hidden_layers"),
        "hidden": hidden,
        "query_heads": query_heads,
        "kv_heads": size("num_key_value_heads", query_heads),
        "head_dim": size("head_dim", max(hidden // query_heads, 1)),
    }
    if query_heads % sizes["kv_heads"]:
        raise SpecError.bad(f"{path}, num_key_value_heads", sizes["kv_heads"], f"a divisor of {query_heads}")
    experts_per_token = size("num_experts_per_tok", 1) if experts > 1 else 1
    if experts_per_token > experts:
        raise SpecError.bad(f"{path}, num_experts_per_tok", experts_per_token, f"at most {experts}")
    parameters, active = transformer_parameters(
        **sizes,
        feed_forward=size("moe_intermediate_size", size("intermediate_size"))
        if experts > 1
        else size("intermediate_size"),
        vocabulary=size("vocab_size"),
        experts=experts,
        experts_per_token=experts_per_token,
        tied_embeddings=tied,
    )
    embeddings = size("vocab_size") * hidden * (1 if tied else 2)
    source = f"{path.name} ({kind})"
    return Model(
        name=str(config.get("_name_or_path") or path.resolve().parent.name),
        parameters=parameters,
        active_parameters=active,
        experts=experts,
        experts_per_token=experts_per_token,
        weights_bytes=_weights_bytes(path, config, parameters - embeddings, embeddings),
        value_bytes=2.0,
        max_context_tokens=size("max_position_embeddings", 131_072),
        sources=dict.fromkeys((*sizes, "max_context_tokens"), source)
        | {"parameters": f"counted from {source}", "weights_bytes": f"counted from {source}", "value_bytes": "assumed"},
        **sizes,
    )


def _weights_bytes(path: Path, config: Mapping[str, Any], in_layers: int, embeddings: int) -> float:
    kind = config.get("torch_dtype", config.get("dtype", "bfloat16"))
    if not isinstance(kind, str) or kind not in _VALUE_BYTES:
        raise SpecError.bad(f"{path}, torch_dtype", kind, " or ".join(_VALUE_BYTES))
    value_bytes = _VALUE_BYTES[kind]
    quantization = config.get("quantization_config")
    if not quantization:
        return (in_layers + embeddings) * value_bytes
    if not isinstance(quantization, Mapping):
        raise SpecError.bad(f"{path}, quantization_config", quantization, "a mapping")
    method = quantization.get("quant_method")
    bits = quantization.get("bits", _QUANTIZED_BITS.get(str(method)))
    group = quantization.get("group_size", 0)
    if bits not in (2, 3, 4, 6, 8) or isinstance(bits, bool):
        raise SpecError.bad(f"{path}, quantization_config", method, f"a field bits, or {', '.join(_QUANTIZED_BITS)}")
    per_group_bits = _GROUP_OVERHEAD_BITS / group if isinstance(group, int) and group > 0 else 0.0
    return in_layers * (float(bits) + per_group_bits) / 8 + embeddings * 2.0
