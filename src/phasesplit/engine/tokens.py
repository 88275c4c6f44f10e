"""Text to tokens and back, through the `tokenizers` library.

GGUF carries no tokenizer, only a vocabulary, merges and the name of the rule that splits text before merging
(`tokenizer.ggml.pre`). An unknown rule is refused: a near one gives other tokens, and a worse model, without a word.
"""

import codecs
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phasesplit.errors import SpecError, one_line

if TYPE_CHECKING:
    import tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
}
"""tokenizer.ggml.pre to the patterns that split text, one after the other. Source: llama-vocab.cpp in llama.cpp."""

_WITH_WHOLE_WORDS = ("llama-bpe",)
"""Rules whose pieces become one token where the vocabulary has them, whatever the merges; they start with BOS."""
_CONTROL, _USER_DEFINED = 3, 4


@lru_cache(maxsize=1)
def letters_of_bytes() -> tuple[str, ...]:
    """Return the letter in which byte-level vocabularies write each of the 256 bytes.

    Source: GPT-2, encoder.py, `bytes_to_unicode`.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return tuple(chr(byte if byte in plain else next(others)) for byte in range(256))


@lru_cache(maxsize=1)
def _byte_of_letter() -> dict[str, int]:
    return {letter: byte for byte, letter in enumerate(letters_of_bytes())}


class Tokenizer:
    """Encodes text and decodes tokens.

    Attributes:
        start: Tokens put before a text unless asked not to: BOS, or nothing.
        special: Tokens that stand for structure and not for text, such as the end of an answer.
    """

    def __init__(self, library: "tokenizers.Tokenizer", start: tuple[int, ...]) -> None:
        self._library = library
        added = library.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self._bytes: dict[int, bytes] = {}
        self._is_byte_level = _is_byte_level(library)
        self.start = start
        self.special = frozenset(token for token, entry in added.items() if entry.special)

    def encode(self, text: str, *, has_start: bool = True) -> list[int]:
        """Return the tokens of a text; special tokens written out in it count as such.

        Args:
            text: Any text.
            has_start: Whether `start` comes first; false for what a chat template made, which writes its own.

        Raises:
            SpecError: The text holds half of a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise SpecError.bad(f"text, character {error.start}", text[error.start], "a Unicode character") from None
        ids = self._library.encode(text, add_special_tokens=False).ids
        return [*self.start, *ids] if has_start else list(ids)

    def token_bytes(self, token: int) -> bytes:
        """Return what a token stands for, maybe a part of a character; nothing for a number without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = self._spelled(token)
        return known

    def decode(self, tokens: Iterable[int], *, has_special: bool = False) -> str:
        """Return the text of tokens, bytes that are no character as U+FFFD.

        Args:
            tokens: Token ids.
            has_special: Whether special tokens are written out.
        """
        stream = Detokenizer(self, has_special=has_special)
        return "".join([stream.push(token) for token in tokens]) + stream.finish()

    def _spelled(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._library.id_to_token(token) if token >= 0 else None
        if text is None:
            return b""
        if self._is_byte_level:
            letters = _byte_of_letter()
            return bytes(letters[letter] for letter in text) if letters.keys() >= set(text) else text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes([int(text[3:5], 16)])
        return text.replace("▁", " ").encode()


class Detokenizer:
    """Turns a stream of tokens into text, holding back bytes until their character is whole."""

    def __init__(self, tokenizer: Tokenizer, *, has_special: bool = False) -> None:
        self._tokenizer, self._has_special = tokenizer, has_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that a token completes: often empty, never a part of a character."""
        if token in self._tokenizer.special and not self._has_special:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """Return what is left when no token follows: U+FFFD for a character that was cut off, mostly nothing."""
        return self._decoder.decode(b"", final=True)


def tokenizer_from_gguf(where: str, metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that a GGUF file describes.

    Qwen's normal form (NFC) is applied, as its own tokenizer does.

    Args:
        where: The file, for messages.
        metadata: Its metadata.

    Raises:
        SpecError: It is not a byte-level BPE, splits text by an unknown rule, or contradicts itself.
    """
    import tokenizers
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

    model, rule = (metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if not isinstance(model, str) or model != "gpt2":
        shown = model[:80] if isinstance(model, str) else type(model).__name__
        raise SpecError.bad(f"{where}, tokenizer.ggml.model", shown, "gpt2 (byte-level BPE)")
    if not isinstance(rule, str):
        raise SpecError(f"{where}: tokenizer.ggml.pre is missing, known are {', '.join(SPLITS)}")
    if rule not in SPLITS:
        raise SpecError.unknown(f"{where}, tokenizer.ggml.pre", rule[:80], SPLITS)
    words, merges = (_strings(where, metadata, key) for key in ("tokens", "merges"))
    vocabulary = {word: token for token, word in enumerate(words)}
    if len(vocabulary) != len(words):
        raise SpecError(f"{where}: tokenizer.ggml.tokens has a token twice")
    try:
        bpe = models.BPE(
            vocab=vocabulary, merges=[_pair(merge) for merge in merges], ignore_merges=rule in _WITH_WHOLE_WORDS
        )
    except Exception as error:
        raise SpecError(f"{where}: tokenizer.ggml.merges do not fit the tokens: {one_line(error)}") from None
    library = tokenizers.Tokenizer(bpe)
    if rule == "qwen2":
        library.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[rule]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    library.decoder = decoders.ByteLevel()
    kinds = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(words):
        raise SpecError(f"{where}: tokenizer.ggml.token_type has not one number for each token")
    for kind in (_CONTROL, _USER_DEFINED):
        added = [words[token] for token in np.flatnonzero(kinds == kind)]
        library.add_tokens([AddedToken(word, special=kind == _CONTROL, normalized=False) for word in added if word])
    has_start = metadata.get("tokenizer.ggml.add_bos_token", rule in _WITH_WHOLE_WORDS)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return Tokenizer(library, (bos,) if has_start is True and isinstance(bos, int) else ())


def tokenizer_from_json(path: Path) -> Tokenizer:
    """Return the tokenizer of a Hugging Face tokenizer.json: byte-level, or SentencePiece's with byte fallback.

    Raises:
        SpecError: It cannot be read or is not a tokenizer that the library understands.
    """
    import tokenizers

    try:
        library = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:
        raise SpecError(f"{path}: is not a tokenizer: {one_line(error)}") from None
    library.no_truncation()
    library.no_padding()
    return Tokenizer(library, tuple(library.encode("", add_special_tokens=True).ids))


def _is_byte_level(library: "tokenizers.Tokenizer") -> bool:
    decoder = json.loads(library.to_str())["decoder"] if library.decoder is not None else None
    return "ByteLevel" in json.dumps(decoder)


def _strings(where: str, metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value:
        raise SpecError(f"{where}: tokenizer.ggml.{key} is not a list of strings")
    return value


def _pair(merge: str) -> tuple[str, str]:
    """Return the two parts of a merge; the first may itself start with a space."""
    at = merge.find(" ", 1)
    return merge[: max(at, 0)], merge[at + 1 :]
