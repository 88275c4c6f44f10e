"""The line to the process that speaks for a machine, its computing end."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from phasesplit.protocol.completions import LONGEST_NAME
from phasesplit.vllm.reports import LONGEST_BYTES, Reports

Line = tuple[Reports, socket.socket]


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    """Return both ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "line"))
        listener.listen(1)
        reports = Reports(str(tmp_path / "line"))
        other, _ = listener.accept()
    with other:
        yield reports, other
    reports.close()


def test_a_report_that_is_too_long_is_lost(line: Line) -> None:
    """Wrong if one report ends the thread that moves KV, or is cut where it is read and ends the reader."""
    reports, other = line
    for size in (LONGEST_BYTES, 300_000):
        reports.send({"gone": "k" * size})
    longest = {"gone": "\N{SNOWMAN}" * LONGEST_NAME, "why": "\N{SNOWMAN}" * LONGEST_NAME}
    reports.send(longest)
    assert json.loads(other.recv(LONGEST_BYTES)) == longest


def test_a_report_that_nobody_reads_is_lost(line: Line) -> None:
    """Wrong if a process that is slow to listen, or gone, raises in the model's thread."""
    reports, other = line
    for number in range(10_000):
        reports.send({"kv_left": f"k{number}"})
    other.close()
    reports.send({"kv_left": "k"})
    with pytest.raises(ConnectionError):
        reports.orders()
