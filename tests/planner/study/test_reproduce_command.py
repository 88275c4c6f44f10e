"""`phasesplit reproduce`, called in process over made-up simulations, and once over real ones."""

import json
import re
from pathlib import Path

import pytest

from phasesplit import cli
from phasesplit.planner.study import reproduce_command
from phasesplit.planner.study.ablation import CONTRADICTIONS, AblationStep
from phasesplit.planner.study.reproduction import Findings
from planner.study.studies import made_up_findings

COLUMNS = ("published", "ours as published", "ours, default", "and bursty")


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Findings:
    """Return the study over made-up simulations, which the command then prints."""
    found = made_up_findings()
    monkeypatch.setattr(reproduce_command, "run_study", lambda _quick, _workers: found)
    return found


def test_text_puts_the_three_side_by_side(made_up: Findings, capsys: pytest.CaptureFixture[str]) -> None:
    """A person could not compare: a column, a reason, the ablation or the paper's contradictions would be missing."""
    assert cli.run(["reproduce"]) == 0
    shown = capsys.readouterr().out
    heads = [line for line in shown.splitlines() if all(name in line for name in COLUMNS)]
    assert len(heads) == 10
    for wanted in ("27P 3T (P)", "2.15x (P)", "120 (R)", "not at hand", "From published to right", "24.8", "2.154x"):
        assert wanted in shown
    assert shown.count("why: ") == sum(line.startswith("      why: ") for line in shown.splitlines()) > 50
    assert "nan" not in shown.lower()
    for ablation_step in AblationStep:
        assert ablation_step.label in shown


def test_json_holds_every_row(made_up: Findings, capsys: pytest.CaptureFixture[str]) -> None:
    """A program could not read the study, or would read something for a figure that nobody published."""
    assert cli.run(["reproduce", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    rows = [row for part in shown["parts"] for row in part["rows"]]
    assert len(rows) > 60
    for row in rows:
        assert row["why"]
        assert row["ours"]
        assert (row["published"]["number"] is None) == (row["published"]["source"] is None)
    assert shown["seeds"] == [0, 1]
    assert len(shown["contradictions"]) == len(CONTRADICTIONS)
    assert shown["simulations"] == made_up.questions


def test_html_is_one_file_with_every_part(made_up: Findings, tmp_path: Path) -> None:
    """The page would lack a part, load something from elsewhere, or differ from run to run."""
    pages = []
    for name in ("one.html", "two.html"):
        assert cli.run(["reproduce", "--html", str(tmp_path / name)]) == 0
        pages.append((tmp_path / name).read_text())
    assert pages[0] == pages[1]
    assert pages[0].count("<h2>") == 13
    assert pages[0].count("<svg") == 2
    assert not re.search(r'(?:src|href)="(?:https?:)?//', pages[0])


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--workers", "0"], "--workers"),
        (["--html", "study.txt"], "--html"),
        (["--slow"], "--slow"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    options: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mistake would be found after minutes of simulating, or end in a traceback."""
    assert cli.run(["reproduce", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert wanted in captured.err


def test_study_says_at_once_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person would not know whether to wait."""
    from phasesplit.planner.study import reproduction

    monkeypatch.setattr(reproduction, "reproduce", lambda *_, **__: made_up_findings(thorough=False))
    reproduce_command.run_study(True, 1)
    assert re.match(r"the study .*, 1 worker: expect about \d+ (s|minutes)\n", capsys.readouterr().err)
