"""What this host is: processor, cores, memory, software."""

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasesplit.files.profile_schema import MachineFacts

_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_tile",
    "asimd",
    "sve",
)
"""Instruction sets that change how fast matrix products are."""
_SOFTWARE = ("numpy", "numba", "llvmlite")


def host_facts(name: str | None = None, *, threads: int | None = 1, root: Path = Path("/")) -> "MachineFacts":
    """Return what this host is.

    Args:
        name: As machine files call it; by default of its processor.
        threads: Threads that compute, None where it cannot be seen.
        root: What stands in for the root of the file system, in tests.
    """
    from phasesplit.files.profile_schema import MachineFacts
    from phasesplit.pool.cores import usable_cores

    processor, flags = _processor(root / "proc/cpuinfo")
    return MachineFacts(
        name=name or f"{'-'.join(processor.lower().split()) or platform.machine()}-core",
        processor=processor or platform.machine(),
        cores=usable_cores(),
        threads=threads,
        features=tuple(feature for feature in _FEATURES if feature in flags),
        memory_bytes=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        system=f"{platform.system()} {platform.release()}",
    )


def software_versions() -> dict[str, str]:
    """Return versions of this package and of what sets the times of the embedded engine."""
    from importlib.metadata import version

    from phasesplit._version import __version__

    return {
        "phasesplit": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _SOFTWARE},
    }


def _processor(path: Path) -> tuple[str, frozenset[str]]:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return "", frozenset()
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)  # those of the first core stay
    named = {name.strip(): value.strip() for name, value in fields.items()}
    flags = named.get("flags") or named.get("Features") or ""
    return named.get("model name", ""), frozenset(flags.split())
