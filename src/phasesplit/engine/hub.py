"""A model's files from the Hugging Face hub, over HTTPS only.

The revision that `main` has when a model is first fetched is kept; later starts need no network.
"""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

from phasesplit.engine.cached_file import Say, Source, alone, write_checked
from phasesplit.errors import SpecError

Opener = Callable[[str], AbstractContextManager[Source]]
"""Opens an address. Raises OSError."""

HUB = "https://huggingface.co"
_INSTEAD = "or give --model PATH"
_NEEDED = ("config.json", "tokenizer.json")
_TAKEN = (
    *_NEEDED,
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors", re.ASCII)
_MOST_BYTES, _MOST_LIST_BYTES = 200 << 30, 16 << 20
"""Ours: more is no model that a processor runs; nor is a longer list of files one of a model."""
_SILENCE_S = 30.0


class _File(NamedTuple):
    name: str
    size_bytes: int
    sha256: str | None


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


def fetched_from_hub(name: str, directory: Path, say: Say, open_url: Opener) -> Path:
    """Return the directory of a model, fetched where it is not there yet: all of it, or nothing.

    Args:
        name: `ORG/NAME`.
        directory: Where models of the hub are kept.
        say: Told what takes time.
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
                address, told = f"{HUB}/{name}/resolve/{revision}/{file.name}", f"{where}, {file.name}"
                with open_url(address) as source:
                    write_checked(whole / file.name, source, size_bytes=file.size_bytes, sha256=file.sha256, where=told)
            whole.replace(path)
        except urllib.error.HTTPError as error:
            with error:
                raise SpecError(f"{where}: {_refused(error.code)}; {_INSTEAD}") from None
        except urllib.error.URLError as error:
            raise SpecError(f"{where}: the hub cannot be reached ({error.reason}); {_INSTEAD}") from None
        except HTTPException as error:
            raise SpecError(f"{where}: the hub's answer broke off ({type(error).__name__}); {_INSTEAD}") from None
        except OSError as error:
            raise SpecError(f"{where}: cannot be fetched ({error.strerror or error}); {_INSTEAD}") from None
    return path


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
        raise SpecError(f"{where}: the hub answered with something that is no list of files; {_INSTEAD}") from None
    if re.fullmatch("[0-9a-f]{40}", revision) is None:
        raise SpecError(f"{where}: the hub answered with a revision that is none; {_INSTEAD}")
    shards = [file for file in files if _SHARD.fullmatch(file.name)]
    # A model with both forms has its weights twice.
    single = [file for file in shards if file.name == "model.safetensors"]
    taken = [file for file in files if file.name in _TAKEN] + (single or shards)
    missing = {*_NEEDED} - {file.name for file in taken} | (set() if shards else {"model.safetensors"})
    if missing:
        raise SpecError(f"{where}: has no {', '.join(sorted(missing))}, which the engine needs; {_INSTEAD}")
    if sum(file.size_bytes for file in taken) > _MOST_BYTES:
        raise SpecError(f"{where}: has more than {_MOST_BYTES >> 30} GiB, which is not fetched; {_INSTEAD}")
    return revision, taken


def _file(entry: dict[str, Any]) -> _File:
    lfs = entry.get("lfs") or {}
    return _File(str(entry["rfilename"]), int(entry["size"]), lfs.get("sha256"))
