"""Whole files in and out: compressed or not, from standard input or to standard output, never half-written.

Also: columns as CSV, where a float keeps every bit and an undefined value is empty, and the import of packages that are
not installed with phasesplit (`extra_module`).
"""

import gzip
import importlib
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.atomic_files import atomic_path
from phasesplit.errors import SpecError

GZIP = b"\x1f\x8b"
"""How a file compressed by gzip begins."""
_ZSTANDARD = b"\x28\xb5\x2f\xfd"
_ROWS_AT_ONCE = 65_536
"""Bounds what Python's objects for the values take."""


def csv_bytes(columns: Mapping[str, NDArray[Any]]) -> bytes:
    """Return a header and a row for each place of the columns; texts must hold no comma and no quote.

    Args:
        columns: Name to values, all of one length.
    """
    count = max((len(column) for column in columns.values()), default=0)
    parts = [f"{','.join(columns)}\n"]
    for start in range(0, count, _ROWS_AT_ONCE):
        fields = (_fields(column[start : start + _ROWS_AT_ONCE]) for column in columns.values())
        parts.extend(f"{','.join(row)}\n" for row in zip(*fields, strict=True))
    return "".join(parts).encode()


def undefined(column: NDArray[Any]) -> NDArray[np.bool_]:
    """Return where a column has no value: NaN, or the number of a machine that a request never came to."""
    if column.dtype.kind == "f":
        return np.asarray(np.isnan(column))
    if column.dtype.kind in "iu":
        return np.asarray(column < 0)
    return np.zeros(column.shape, dtype=bool)


def _fields(column: NDArray[Any]) -> Iterator[str]:
    """Yield each value as text: a float with as many digits as tell it from its neighbours."""
    ending = ".0" if column.dtype.kind == "f" else ""
    for value, is_none in zip(column.tolist(), undefined(column).tolist(), strict=True):
        yield "" if is_none else str(value).removesuffix(ending)


def extra_module(module: str, extra: str, place: str) -> ModuleType:
    """Return a module of an extra.

    Args:
        module: What is imported, "pyarrow.parquet".
        extra: Which extra of phasesplit brings it, "parquet".
        place: The file or option that needs it, for the message.

    Raises:
        SpecError: It is not installed; what to type is named.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SpecError(f"{place}: needs a package that is not installed; pip install 'phasesplit[{extra}]'") from None


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
    if content.startswith(GZIP):
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
