"""A model on disk, opened: a GGUF file, or a directory as Hugging Face lays it out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from phasesplit.engine.chat_template import ChatTemplate
from phasesplit.engine.config import ModelConfig, config_from_gguf, config_from_hf
from phasesplit.engine.gguf import open_gguf
from phasesplit.engine.safetensor_files import read_json, read_safetensors, safetensors_paths
from phasesplit.engine.tokens import Tokenizer, tokenizer_from_gguf, tokenizer_from_json
from phasesplit.engine.weights import Weights, weights_from_tensors
from phasesplit.errors import SpecError

_PAIRED_ARCHITECTURES = ("llama",)
"""Architectures whose queries and keys GGUF keeps with the two values of a rotation side by side."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """An opened model.

    Attributes:
        config: Its sizes.
        weights: Its weights, for the most part still on disk and mapped.
        load_tokenizer: Makes `tokenizer`; raises SpecError where the model's is none.
        template: From messages to a prompt, or None where the model comes without.
        paths: The files that hold the weights; `weights.file_digest` takes them.
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
