"""How the kernels are compiled: for this processor, at first use, and kept on disk.

The directory's name has a digest of the kernels' sources and the processor in it, because Numba's cache notices neither
an edit of a function that a cached one calls, nor what the vectors' width was. No fast-math anywhere: it would make
bits depend on the width.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import llvmlite.binding
import numba as _numba
from numba.core import caching as _caching

from phasesplit._jit import _cache_root, _drop_old_caches, load_lightly

numba: Any = _numba
caching: Any = _caching
F = TypeVar("F", bound=Callable[..., Any])

IS_COMPILED = (os.environ.get("PHASESPLIT_KERNELS") or os.environ.get("PHASESPLIT_JIT", "1")) != "0"
"""Whether kernels are compiled: as PHASESPLIT_KERNELS says (0 turns it off), else PHASESPLIT_JIT, as everywhere."""


_KEPT: list[Any] = []
"""Functions whose address somebody has."""


def _processor() -> tuple[str, dict[str, bool]]:
    """Return the processor's name and what it can do, or what Numba is set to compile for."""
    name = numba.config.CPU_NAME or llvmlite.binding.get_host_cpu_name()
    if numba.config.CPU_FEATURES is None and not numba.config.CPU_NAME:
        return str(name), dict(llvmlite.binding.get_host_cpu_features())
    named = (numba.config.CPU_FEATURES or "").split(",")
    return str(name), {feature[1:]: feature.startswith("+") for feature in named if feature}


PROCESSOR, _FEATURES = _processor()
HAS_AVX512 = _FEATURES.get("avx512f", False)
HAS_AVX2 = _FEATURES.get("avx2", False) and _FEATURES.get("fma", False)
LANES = 16 if HAS_AVX512 else 8 if HAS_AVX2 else 4
"""float32 values of one vector. Without a fused multiply-add the C library's is called: same bits, far slower."""


def _directory() -> tuple[Path | None, bool]:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    root = _cache_root().parent / "engine"
    directory = root / f"engine-{digest.hexdigest()[:16]}-{PROCESSOR}-{LANES}"
    is_warm = directory.is_dir() and any(directory.rglob("attention.attend-*.nbi"))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _drop_old_caches(root, directory)
    except OSError:
        return None, False
    return directory, is_warm


CACHE_DIRECTORY, CACHE_IS_WARM = _directory() if IS_COMPILED else (None, True)
"""Where compiled kernels are kept (None: nowhere writable), and whether it held them when this process began."""


@contextmanager
def _own_cache() -> Iterator[bool]:
    """Make Numba keep what is decorated inside in this package's directory, which other modules do not use."""
    before, load = numba.config.CACHE_DIR, caching.Cache.load_overload
    numba.config.CACHE_DIR, caching.Cache.load_overload = str(CACHE_DIRECTORY or before), load_lightly
    try:
        yield CACHE_DIRECTORY is not None
    finally:
        numba.config.CACHE_DIR, caching.Cache.load_overload = before, load


def compiled(function: F) -> F:
    """Return `function` compiled without the interpreter's lock and kept on disk; it allocates and raises nothing."""
    with _own_cache() as is_kept:
        made: F = numba.njit(cache=is_kept, nogil=True, _nrt=False, error_model="numpy", no_cfunc_wrapper=True)(
            function
        )
    if is_kept:
        made._cache.load_overload = partial(load_lightly, made._cache)  # type: ignore[attr-defined]
    return made


def callable_address(function: F, arguments: int) -> int:
    """Return where `function`, of so many whole numbers and without a result, lies when compiled; it stays there."""
    types = numba.types
    with _own_cache() as is_kept:
        made = numba.cfunc(types.void(*[types.intp] * arguments), cache=is_kept, _nrt=False)(function)
    _KEPT.append(made)
    return int(made.address)


def part(function: F) -> F:
    """Return `function` compiled as a part of those that call it."""
    made: F = numba.njit(_nrt=False, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True)(function)
    return made
