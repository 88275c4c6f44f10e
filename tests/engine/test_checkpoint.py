"""Models opened whole, from a GGUF file and from a directory."""

import json
from pathlib import Path

import numpy as np
import pytest

from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.gguf import open_gguf
from phasesplit.engine.tokens import tokenizer_from_gguf
from phasesplit.errors import SpecError

HF_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def rotate_half(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return GGUF's rows of queries or keys in Hugging Face's order."""
    paired = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.concatenate([paired[:, :, 0], paired[:, :, 1]], axis=1).reshape(rows.shape)


@pytest.fixture
def directory(tmp_path: Path, tiny_path: Path) -> Path:
    """Return the tiny model as Hugging Face would lay it out."""
    file = open_gguf(tiny_path)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    content = b""
    for tensor in file.tensors.values():
        values = tensor.float32()
        _, _, part = tensor.name.partition("blk.")
        index, _, rest = part.partition(".")
        name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}.get(
            tensor.name, f"model.layers.{index}.{HF_NAMES.get(rest.removesuffix('.weight'))}.weight"
        )
        if rest.startswith(("attn_q.", "attn_k.")):
            values = rotate_half(values, 4 if "attn_q" in rest else 2)
        header[name] = {
            "dtype": "F32",
            "shape": values.shape,
            "data_offsets": [len(content), len(content) + values.nbytes],
        }
        content += values.tobytes()
    raw = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + content)
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 160, "vocab_size": 300, "max_position_embeddings": 2048,
        "rms_norm_eps": float(np.float32(1e-5)), "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = tokenizer_from_gguf("m", file.metadata)
    (tmp_path / "tokenizer.json").write_text(tokenizer._library.to_str())
    settings = {"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages[0].content }}{{ eos_token }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_both_layouts_are_one_model(tiny_path: Path, directory: Path) -> None:
    """The same model would compute other things from one kind of file than from the other."""
    ours, theirs = open_checkpoint(tiny_path), open_checkpoint(directory)
    assert ours.config == theirs.config
    assert ours.tokenizer.encode("the 12é<|im_end|>") == theirs.tokenizer.encode("the 12é<|im_end|>")
    assert theirs.paths == (directory / "model.safetensors",)
    for one, other in zip(ours.weights.layers, theirs.weights.layers, strict=True):
        for name in ("query", "key", "value", "output", "gate", "up", "down"):
            np.testing.assert_array_equal(getattr(one, name).float32(), getattr(other, name).float32())
        np.testing.assert_array_equal(one.attention_norm, other.attention_norm)
        np.testing.assert_array_equal(one.ffn_norm, other.ffn_norm)
    np.testing.assert_array_equal(ours.weights.output.float32(), theirs.weights.output.float32())
    np.testing.assert_array_equal(ours.weights.output_norm, theirs.weights.output_norm)


def test_templates(tiny_path: Path, directory: Path) -> None:
    """A model's chat template would not be found where its makers put it."""
    messages = [{"role": "user", "content": "hi"}]
    ours = open_checkpoint(tiny_path).template
    assert ours is not None
    assert ours.render(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    settings = directory / "tokenizer_config.json"

    def prompt() -> str | None:
        template = open_checkpoint(directory).template
        return None if template is None else template.render(messages)

    assert prompt() == "hi<|im_end|>"
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    settings.write_text(json.dumps({"chat_template": several}))
    assert prompt() == "yes"
    settings.unlink()
    assert prompt() is None
    (directory / "chat_template.jinja").write_text("beside")
    assert prompt() == "beside"
    (directory / "chat_template.jinja").unlink()
    settings.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(SpecError, match="allowed is a text"):
        open_checkpoint(directory)


def test_places_without_a_model(tmp_path: Path, directory: Path) -> None:
    """A wrong path would end in a traceback."""
    (directory / "tokenizer.json").unlink()
    with pytest.raises(SpecError, match=r"tokenizer.json: cannot be read"):
        _ = open_checkpoint(directory).tokenizer
    (directory / "config.json").unlink()
    with pytest.raises(SpecError, match=r"neither a GGUF file nor a directory with a config.json"):
        open_checkpoint(directory)
    with pytest.raises(SpecError, match="cannot be read"):
        open_checkpoint(tmp_path / "absent.gguf")


def complaint(path: Path) -> str:
    """Return the message with which a file is refused, or nothing where it is read."""
    try:
        open_checkpoint(path)
    except SpecError as error:
        return str(error)
    return ""


def test_random_damage_gives_a_model_or_one_line(tiny_path: Path, tmp_path: Path) -> None:
    """Metadata that is read without complaint would end in a traceback when a model is made of it."""
    whole = tiny_path.read_bytes()
    header_bytes = whole.index(b"output_norm.weight") + 60
    rng = np.random.default_rng(23)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(whole)
    outcomes = []
    with path.open("r+b") as file:
        for _ in range(250):
            at, wrong = int(rng.integers(header_bytes)), int(rng.integers(256))
            file.seek(at)
            file.write(bytes([wrong]))
            file.flush()
            outcomes.append(complaint(path))
            file.seek(at)
            file.write(whole[at : at + 1])
    assert {message.count("\n") for message in outcomes} == {0}
    assert 0 < outcomes.count("") < len(outcomes)
