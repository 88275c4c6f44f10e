"""The only importer of Numba: `jit` compiles a function, or leaves it alone when asked to.

Numba's disk cache does not notice that a function called by a cached one was edited, so the cache lives in a directory
named by a digest of the package's sources: an edit anywhere gives a fresh directory. With `PHASESPLIT_JIT=0` in the
environment `jit` and its neighbours return the plain Python function, so that compiled and interpreted runs can be
compared byte for byte.
"""

import hashlib
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numba as _numba

# Numba types its decorator as a dispatcher; here a compiled function keeps the type that people wrote.
numba: Any = _numba

F = TypeVar("F", bound=Callable[..., Any])

JIT_ENABLED = os.environ.get("PHASESPLIT_JIT", "1") != "0"
"""Whether `jit` compiles; set by the environment variable PHASESPLIT_JIT (0 turns it off)."""

COMPILED_PACKAGES = ("domain", "scheduler", "simulator")
"""Packages whose sources compiled code depends on."""
_CACHES_KEPT = 4


def _sources_digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    root = Path(__file__).parent
    digest.update(Path(__file__).read_bytes())
    for package in COMPILED_PACKAGES:
        for path in sorted((root / package).glob("*.py")):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_root() -> Path:
    base = os.environ.get("PHASESPLIT_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "phasesplit" / "compiled"


def _drop_old_caches(root: Path, keep: Path) -> None:
    others = sorted((path for path in root.iterdir() if path != keep), key=lambda path: path.stat().st_mtime)
    for path in others[: -(_CACHES_KEPT - 1)]:
        shutil.rmtree(path, ignore_errors=True)


def _use_cache() -> tuple[Path | None, bool]:
    directory = _cache_root() / _sources_digest()
    # The loop's own file comes last: what an interrupted first run leaves behind is not taken for a warm cache.
    warm = any(directory.rglob("kernel.run-*.nbi")) if directory.is_dir() else False
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _drop_old_caches(directory.parent, directory)
    except OSError:
        return None, False
    numba.config.CACHE_DIR = str(directory)
    return directory, warm


CACHE_DIRECTORY, CACHE_IS_WARM = _use_cache() if JIT_ENABLED else (None, True)
"""Where compiled code is kept (None: nowhere writable), and whether it already held some when this process began."""


def load_lightly(cache: Any, signature: Any, context: Any) -> Any:
    """Load a function from Numba's cache without what only compiling needs, which takes 0.1 to 0.2 s to set up.

    Before it loads, Numba fills its tables of everything that code might call. Our code calls nothing that they hold,
    and whatever has to be compiled after all fills them itself.
    """
    with cache._guard_against_spurious_io_errors():
        return cache._load_overload(signature, context)


def jit(function: F) -> F:
    """Return `function` compiled by Numba and cached on disk, or itself where compiling is turned off.

    Compiled code counts no references (`_nrt=False`): it allocates nothing, and the counting of every column at every
    access costs five times the rest. A function that allocates an array does not compile. Division by
    zero gives infinity instead of an exception, since kernels return codes and raise nothing.
    """
    if not JIT_ENABLED:
        return function
    compiled: F = numba.njit(
        cache=CACHE_DIRECTORY is not None, nogil=True, _nrt=False, error_model="numpy", no_cfunc_wrapper=True
    )(function)
    if CACHE_DIRECTORY is not None:
        compiled._cache.load_overload = partial(load_lightly, compiled._cache)  # type: ignore[attr-defined]
    return compiled


def jit_inline(function: F) -> F:
    """Return `function` to be written out where it is called, before types are inferred.

    For small functions: no call then has to hand over all the columns.
    """
    if not JIT_ENABLED:
        return function
    compiled: F = numba.njit(_nrt=False, error_model="numpy", inline="always")(function)
    return compiled


def jit_part(function: F) -> F:
    """Return `function` compiled apart and inlined by LLVM: for large parts of the loop, called from one place each.

    Written out before types are inferred, as by `jit_inline`, they would make one function that takes half as long
    again to compile and up to a third longer to run (measured); called, they would have all the columns handed over.
    Such a function cannot be called from Python.
    """
    if not JIT_ENABLED:
        return function
    compiled: F = numba.njit(
        _nrt=False, error_model="numpy", no_cfunc_wrapper=True, no_cpython_wrapper=True, forceinline=True
    )(function)
    return compiled
