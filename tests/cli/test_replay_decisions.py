"""`phasesplit replay-decisions`, called in process."""

import gzip
from collections.abc import Callable
from errno import ENOSPC
from functools import partial
from pathlib import Path

import pytest

from phasesplit.cli import run
from phasesplit.gateway.dispatcher import Dispatcher
from phasesplit.gateway.leases import LeaseEnd
from phasesplit.io.decision_log import DecisionLog
from phasesplit.scheduler.rules import Rules

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Return the log of 300 requests."""
    path = tmp_path / "decisions.jsonl"
    with DecisionLog(path) as log:
        dispatcher = Dispatcher(Rules(), sink=log.write)
        dispatcher.join("p", 1, "prefill", 1_000, 0.0)
        dispatcher.join("t", 1, "decode", 1_000, 0.0)
        for number in range(300):
            dispatcher.open(f"r{number}.1", 100, 50, float(number))
            dispatcher.first_token(f"r{number}.1", number + 0.25)
            dispatcher.ended(f"r{number}.1", LeaseEnd.COMPLETED, number + 0.5)
    return path


def test_equal_log_says_how_many_and_exits_0(written: Path, capsys: Captured) -> None:
    """A person could not tell a checked log from an empty one."""
    assert run(["replay-decisions", str(written)]) == 0
    assert capsys.readouterr().out == "902 decisions, 902 equal (300 placements, 0 moves by load)\n"


def test_compressed_log_is_read(written: Path, capsys: Captured) -> None:
    """Logs are large, and would have to be unpacked by hand."""
    packed = written.with_suffix(".jsonl.gz")
    packed.write_bytes(gzip.compress(written.read_bytes()))
    assert run(["replay-decisions", str(packed)]) == 0
    assert capsys.readouterr().out.startswith("902 decisions, 902 equal")
    packed.write_bytes(packed.read_bytes()[:-100])
    assert run(["replay-decisions", str(packed)]) == 2
    assert "cut off" in capsys.readouterr().err


def test_different_log_shows_what_differs_and_exits_1(written: Path, capsys: Captured) -> None:
    """A decision that does not follow from the facts would pass in a script."""
    written.write_bytes(written.read_bytes().replace(b'"gives":[0,0,1]', b'"gives":[0,1,1]', 1))
    assert run(["replay-decisions", str(written)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "902 decisions, 2 equal (0 placements, 0 moves by load)",
        "line 4, place",
        '  logged: {"gives":[0,1,1]}',
        '  now:    {"gives":[0,0,1]}',
    ]


def test_log_of_a_killed_gateway_is_read(written: Path, capsys: Captured) -> None:
    """What a crash left could not be looked at."""
    written.write_bytes(written.read_bytes()[:-3])
    assert run(["replay-decisions", str(written)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "901 decisions, 901 equal (300 placements, 0 moves by load)",
        "the last line is cut off and left out",
    ]


def test_wrong_file_is_one_line_and_exits_2(tmp_path: Path, capsys: Captured) -> None:
    """A wrong path would end in a traceback, or a huge line fill the memory."""
    text, huge = tmp_path / "trace.csv", tmp_path / "huge"
    text.write_text("arrival_s,prompt_tokens\n")
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    for path in (text, huge, tmp_path, tmp_path / "absent", "a\0b"):
        assert run(["replay-decisions", str(path)]) == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)


def test_log_is_not_written_over(written: Path) -> None:
    """A second run with the same options would destroy the log of the first."""
    before = written.read_bytes()
    assert run(["replay-decisions", str(written)]) == 0
    with pytest.raises(Exception, match="a file is there already"):
        DecisionLog(written)
    with pytest.raises(Exception, match="cannot be written"):
        DecisionLog(written.parent / "absent" / "log")
    assert written.read_bytes() == before


def test_decisions_are_in_the_file_at_once(tmp_path: Path, capsys: Captured) -> None:
    """A gateway that is killed would take its last decisions with it, or a log that is read meanwhile look broken."""
    path = tmp_path / "log"
    with DecisionLog(path) as log:
        Dispatcher(Rules(), sink=log.write).join("p", 1, "prefill", 1_000, 0.0)
        assert run(["replay-decisions", str(path)]) == 0
    assert capsys.readouterr().out.startswith("1 decisions, 1 equal")


def test_an_empty_log_is_said_to_be_empty(tmp_path: Path, capsys: Captured) -> None:
    """A person would look for what is wrong with the lines of a log that has none."""
    (tmp_path / "log").touch()
    assert run(["replay-decisions", str(tmp_path / "log")]) == 2
    assert "it is empty" in capsys.readouterr().err


def test_full_disk_ends_the_log_and_not_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests would fail because nobody can write about them."""
    log = DecisionLog(tmp_path / "log")
    log.write(b"{}\n")
    log.close()

    class Full:
        def write(self, _: bytes) -> int:
            raise OSError(ENOSPC, "No space left on device")

        def flush(self) -> None:
            self.write(b"")

        close = flush

    monkeypatch.setattr(log, "_file", Full())
    acts: list[Callable[[], None]] = [partial(log.write, b"{}\n"), log.close]
    for act in acts:
        log.broken = ""
        act()
        assert log.broken == "No space left on device"
    log.write(b"{}\n")
