"""Tokens of text and text of tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasesplit.engine.gguf import open_gguf
from phasesplit.engine.tokens import (
    SPLITS,
    Detokenizer,
    Tokenizer,
    letters_of_bytes,
    tokenizer_from_gguf,
    tokenizer_from_json,
)
from phasesplit.errors import SpecError

MERGES = ["1 2", "12 3", "! !", "Ġ !", "Ġ !!", "a b", "ab c", "' T", "Ċ Ċ", "Ã ©", "Ġ Ġ"]
SPECIAL = ["<s>", "<|end|>"]


def metadata(**changes: Any) -> dict[str, Any]:
    """Return a vocabulary of 256 bytes and a few merges, under which splits show."""
    words = [*SPECIAL, *letters_of_bytes(), *[merge.replace(" ", "") for merge in MERGES]]
    keys: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": words,
        "token_type": np.array([3, 3] + [1] * (len(words) - 2), dtype=np.int32),
        "merges": MERGES,
        "bos_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (keys | changes).items()}


def made(**changes: Any) -> Tokenizer:
    return tokenizer_from_gguf("m.gguf", metadata(**changes))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token).decode() for token in tokenizer.encode(text, has_start=False)]


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        ("smollm", "123", ["1", "2", "3"]),
        ("gpt-2", "123", ["123"]),
        ("default", "123", ["123"]),
        ("qwen2", "123", ["1", "2", "3"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("llama-bpe", "'T", ["'T"]),  # the contraction of any case
        ("gpt-2", "'Ta", ["'", "T", "a"]),
        ("gpt-2", " !!", [" !!"]),
        ("default", " !!", [" ", "!!"]),  # signs leave the blank before them
        ("gpt-2", "  abc", [" ", " ", "abc"]),  # the last blank goes with the word
        ("llama-bpe", "a\n\nb", ["a", "\n\n", "b"]),
        ("smollm", "é", ["é"]),
        ("qwen2", "e\u0301", ["é"]),  # Qwen puts letter and accent together
        ("smollm", "<|end|>ab<|end", ["<|end|>", "ab", "<", "|", "e", "n", "d"]),
    ],
)
def test_text_is_split_by_the_rule(rule: str, text: str, expected: list[str]) -> None:
    """A model would get other tokens than it was trained on."""
    assert pieces(made(pre=rule), text) == expected


@pytest.mark.parametrize("rule", sorted(SPLITS))
def test_any_text_comes_back(rule: str) -> None:
    """A text would lose bytes on its way to tokens and back."""
    tokenizer = made(pre=rule)
    text = "abc 123!!\r\n\t  \u3000né 日本 🎉👩‍👧 <|end|> \x00\x7f end "
    assert tokenizer.decode(tokenizer.encode(text, has_start=False), has_special=True) == text
    assert tokenizer.encode("") == list(tokenizer.start)


def test_words_of_the_vocabulary_that_no_merge_makes() -> None:
    """Llama 3 keeps words whole that its merges would not build."""
    words = [*metadata()["tokenizer.ggml.tokens"], "xyz"]
    changes = {"tokens": words, "token_type": np.ones(len(words), dtype=np.int32)}
    assert pieces(made(pre="llama-bpe", **changes), "xyz") == ["xyz"]
    assert pieces(made(pre="gpt-2", **changes), "xyz") == ["x", "y", "z"]


def test_start_of_text() -> None:
    """A text would lack the token that its model expects first, or a chat get it twice."""
    assert made().start == ()
    assert made(add_bos_token=True).encode("a")[0] == 0
    assert made(add_bos_token=True).encode("a", has_start=False)[0] != 0
    assert (made(pre="llama-bpe").start, made(pre="llama-bpe", add_bos_token=False).start) == ((0,), ())


def test_special_tokens_are_not_text() -> None:
    """An answer would show the marks of its end."""
    tokenizer = made()
    tokens = tokenizer.encode("ab<|end|>")
    assert tokenizer.special == {0, 1}
    assert (tokenizer.decode(tokens), tokenizer.decode(tokens, has_special=True)) == ("ab", "ab<|end|>")
    shown = made(token_type=np.array([3, 4] + [1] * (len(MERGES) + 256), dtype=np.int32))
    assert shown.decode(shown.encode("ab<|end|>")) == "ab<|end|>"


def test_characters_come_whole() -> None:
    """A stream would show half a character, which no later piece can mend."""
    tokenizer = made()
    text = "é日🎉x"
    stream = Detokenizer(tokenizer)
    shown = [stream.push(token) for token in tokenizer.encode(text)]
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
    assert shown[-5:] == ["", "", "", "🎉", "x"]
    assert stream.finish() == ""


def test_a_character_that_is_cut_off() -> None:
    """Bytes that are no character would vanish, or raise in the middle of an answer."""
    tokenizer = made()
    tokens = tokenizer.encode("🎉")
    assert tokenizer.decode(tokens[:2]) == "\ufffd"
    assert tokenizer.decode([*tokens[:2], *tokenizer.encode("x")]) == "\ufffdx"
    assert [tokenizer.token_bytes(token) for token in (10**6, -1)] == [b"", b""]


def test_half_a_surrogate_pair_is_refused() -> None:
    """Broken text from a client would end in a traceback."""
    with pytest.raises(SpecError, match="character 2"):
        made().encode("ab\ud83d")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": "llama"}, "allowed is gpt2"),
        ({"model": np.arange(2)}, "allowed is gpt2"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"pre": "qwen3"}, "did you mean qwen2"),
        ({"tokens": []}, "tokens is not a list"),
        ({"tokens": ["a", "a"]}, "has a token twice"),
        ({"merges": ["a zz"]}, "do not fit the tokens"),
        ({"merges": ["a"]}, "do not fit the tokens"),
        ({"merges": None}, "merges is not a list"),
        ({"token_type": None}, "not one number for each token"),
        ({"token_type": np.ones(3)}, "not one number for each token"),
    ],
)
def test_wrong_vocabularies_are_refused(changes: dict[str, Any], why: str) -> None:
    """A model would get other tokens than it was trained on, or its mistake be shown as a traceback."""
    with pytest.raises(SpecError) as caught:
        made(**changes)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokenizer_json(tmp_path: Path, tiny_path: Path) -> None:
    """A directory from Hugging Face would be tokenised otherwise than by its own rule."""
    from tokenizers import processors

    ours = tokenizer_from_gguf("m", open_gguf(tiny_path).metadata)
    library = ours._library
    path = tmp_path / "tokenizer.json"
    path.write_text(library.to_str())
    same = tokenizer_from_json(path)
    text = "the rain in 1234 é 🎉<|im_end|>"
    assert same.encode(text) == ours.encode(text)
    assert (same.decode(same.encode(text)), same.start, same.special) == (text[:-10], (), ours.special)
    expected = ours.encode(text)
    library.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    library.enable_truncation(4)
    path.write_text(library.to_str())
    started = tokenizer_from_json(path)
    assert started.encode(text) == [1, *expected]


def test_sentencepiece_json(tmp_path: Path) -> None:
    """Blanks and bytes of a SentencePiece vocabulary (Llama 2, Mistral) would be shown as it writes them."""
    words = ["<unk>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = {"type": "BPE", "vocab": {word: index for index, word in enumerate(words)}, "merges": [["▁", "a"]]}
    content = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": model | {"byte_fallback": True, "unk_token": "<unk>"},
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    tokenizer = tokenizer_from_json(path)
    assert tokenizer.encode("a a🎉")[:2] == [2, 3]
    assert tokenizer.decode(tokenizer.encode("a a🎉")) == "a a🎉"


@pytest.mark.parametrize("content", ["", "{", "{}", '{"model": 3}'])
def test_wrong_tokenizer_json(tmp_path: Path, content: str) -> None:
    """A damaged tokenizer would end in a traceback."""
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(SpecError, match="is not a tokenizer"):
        tokenizer_from_json(path)
    with pytest.raises(SpecError, match="cannot be read"):
        tokenizer_from_json(tmp_path)
