"""Workers on several hosts: where those of `serve` listen, and what they may be called."""

import ipaddress
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kv_transfer.wires import BLOCKS, LAYOUT
from phasesplit import cli
from phasesplit.engine.fetch import model_path
from phasesplit.io.cluster_file import ServedCluster
from phasesplit.kv_transfer.block_pool import BlockPool
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import PeerInfo
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.launcher import listening, local_cluster
from phasesplit.launcher.announcing import worker_name
from phasesplit.launcher.embedded import EmbeddedWorker, WorkerSettings, start_up_s
from phasesplit.launcher.listening import Listening, outward_host
from phasesplit.launcher.local_cluster import Surroundings, worker_commands, workers_host


def test_workers_of_serve_listen_where_other_hosts_reach_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines of another host could not fetch KV from those beside a gateway that listens at all addresses."""
    monkeypatch.setattr(local_cluster, "outward_host", lambda: "10.0.0.5")
    assert workers_host(ServedCluster(host="0.0.0.0", join_key="a-long-key")) == "10.0.0.5"  # noqa: S104 - not bound
    for alone in (ServedCluster(host="0.0.0.0"), ServedCluster(join_key="a-long-key")):  # noqa: S104 - not bound
        assert workers_host(alone) == ""
    for host, words in (("10.0.0.5", ["10.0.0.5"]), ("", [])):
        around = Surroundings("http://127.0.0.1:1", Path("m"), "m", "/s", host)
        for command in worker_commands(ServedCluster(), around).values():
            told = list(command(1))
            assert [told[place + 1] for place, word in enumerate(told) if word == "--host"] == words


def test_the_address_of_the_default_route_is_one_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers would listen at an address that nobody reaches, or a host without a network could not serve."""
    found = outward_host()
    if found:
        assert not ipaddress.ip_address(found).is_loopback
        Listening(found, 0)._socket.close()
    monkeypatch.setattr(listening, "_ELSEWHERE", "no address")
    assert outward_host() == ""


@pytest.mark.parametrize("command", ["worker", "vllm-worker"])
@pytest.mark.parametrize("name", ["a/b", "", "..", "n" * 129, "n\n"])
def test_names_that_are_none_are_refused(command: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A person would get a traceback of a file that is not there, or no word at all."""
    python = ["--python", sys.executable] if command == "vllm-worker" else []
    assert cli.run([command, "--model", "tiny", "--name", name, *python]) == 2
    said = capsys.readouterr().err
    assert "--name: got" in said
    assert "allowed is 1 to 128 letters" in said
    assert said.count("\n") == 1


def test_a_worker_without_a_name_gets_one() -> None:
    """Two workers of a host could not join the same gateway."""
    assert worker_name(None, "decode").endswith(f"-decode-{os.getpid()}")
    assert worker_name("gpu-0.rack_7", "decode") == "gpu-0.rack_7"


def test_a_long_name_makes_no_long_path(tmp_path: Path) -> None:
    """A worker could not listen where its host has a long name: paths of sockets have 107 bytes."""
    paths = set()
    for name in ("n" * 128, "n" * 127):
        greeting = PeerInfo(machine=name, epoch=int(time.time() * 1000), layout=LAYOUT, blocks=BLOCKS)
        endpoint = KvEndpoint(greeting, SharedPool(LAYOUT, BLOCKS), BlockPool(BLOCKS), directory=str(tmp_path))
        paths.add(Path(endpoint.address["unix"]))
        endpoint.close()
    assert len(paths) == 2
    assert {path.parent for path in paths} == {tmp_path}
    assert {len(path.name) for path in paths} == {29}


def test_the_start_of_a_worker_counts_from_its_process() -> None:
    """A plan would take machines to serve earlier than they do: importing is a large part of it."""
    code = "import time; time.sleep(0.3); from phasesplit.launcher.embedded import start_up_s; print(start_up_s())"
    since_s = time.monotonic()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    tick_s = 0.01
    assert 0.3 - tick_s <= float(told.stdout) <= time.monotonic() - since_s + tick_s


def test_an_embedded_worker_tells_its_start(tmp_path: Path) -> None:
    """A profile of a worker would have no time of its start, and plans would take machines to be there at once."""
    settings = WorkerSettings(
        name="w", epoch=1, home="mixed", model=model_path("tiny", print), model_name="tiny", kv_bytes=1 << 22,
        rules=ServedCluster().rules, has_prefix_cache=False, core_share=1.0, sockets=str(tmp_path),
        transfer_host="127.0.0.1",
    )  # fmt: skip
    embedded = EmbeddedWorker(settings, lambda _: None, print)
    embedded.start()
    try:
        assert 0 < embedded.worker.facts()["start_up_s"] <= start_up_s()
    finally:
        embedded.close()
