"""Whole files in and out: compressed or not, from standard input or to standard output, never half-written."""

import gzip
import sys
import zlib
from pathlib import Path
from typing import Any

from phasesplit.atomic_files import atomic_path
from phasesplit.errors import SpecError
from phasesplit.files.extras import extra_module

_GZIP = b"\x1f\x8b"
_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def read_bytes(path: str | Path) -> tuple[str, bytes]:
    """Return what to call an input and its content, decompressed when it begins as gzip or Zstandard does.

    Args:
        path: A file, or `-` for standard input.

    Raises:
        SpecError: The file cannot be read, or its compressed content is damaged or cut off.
    """
    label = "standard input" if str(path) == "-" else str(path)
    try:
        content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise SpecError(f"{label}: no such file") from None
    except (OSError, ValueError) as problem:
        raise SpecError(f"{label}: cannot be read ({getattr(problem, 'strerror', None) or problem})") from None
    if content.startswith(_GZIP):
        return label, _gunzip(label, content)
    if content.startswith(_ZSTANDARD):
        return label, _unzstandard(label, content)
    return label, content


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file as a whole or not at all, compressed as its name ends (.gz, .zst); `-` is standard output.

    Raises:
        SpecError: The file cannot be written.
    """
    if str(path) == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    target = Path(path)
    if target.suffix == ".gz":
        content = gzip.compress(content, compresslevel=6, mtime=0)
    elif target.suffix == ".zst":
        zstandard: Any = extra_module("zstandard", "zstd", str(target))
        content = zstandard.ZstdCompressor().compress(content)
    try:
        with atomic_path(target) as part:
            part.write_bytes(content)
    except OSError as problem:
        raise SpecError(f"{target}: cannot be written ({problem.strerror or problem})") from None


def _gunzip(label: str, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except EOFError:
        raise SpecError(f"{label}: the gzip file is cut off before its end") from None
    except (OSError, zlib.error) as problem:
        raise SpecError(f"{label}: the gzip file is damaged ({problem})") from None


def _unzstandard(label: str, content: bytes) -> bytes:
    zstandard: Any = extra_module("zstandard", "zstd", label)
    parts: list[bytes] = []
    try:
        while content:
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(content))
            if not frame.eof:
                raise SpecError(f"{label}: the Zstandard file is cut off before its end")
            content = frame.unused_data
    except zstandard.ZstdError as problem:
        raise SpecError(f"{label}: the Zstandard file is damaged ({problem})") from None
    return b"".join(parts)
