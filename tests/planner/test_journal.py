"""The journal of a plan's answers, apart from any simulation."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import phasesplit
from phasesplit.errors import SpecError
from phasesplit.planner import journal
from phasesplit.planner.designs import designs_of
from phasesplit.planner.journal import FileJournal, problem_digest
from phasesplit.planner.probe import Answer, Question
from phasesplit.planner.problem import Measure, Problem, Variation
from phasesplit.planner.problem_file import read_problem
from refusals import assert_refused

ODD = Answer(
    holds=False,
    worst=math.inf,
    bottleneck="ITL p99",
    values=(0.1, math.nan),
    energy_w=0.1 + 0.2,
    kg_per_hour=1e-9,
    busy_share=(0.5,),
    kv_share=(0.25,),
)


def asked(**values: Any) -> Problem:
    base = {"model": "llama-3.1-70b", "machines": "dgx-h100", "workload": "azure-coding", "rate": 5, "duration": 60}
    return read_problem(None, {**base, **values}).problem


@pytest.fixture(scope="module")
def problem() -> Problem:
    """Return a problem."""
    return asked()


@pytest.fixture(scope="module")
def questions(problem: Problem) -> list[Question]:
    """Return questions that differ in one thing each."""
    first, second = designs_of(problem)[:2]
    one = Question(first, (3,), 0.1 + 0.2, 1)
    return [
        one,
        one._replace(design=second),
        one._replace(counts=(4,)),
        one._replace(rate_per_s=0.3),
        one._replace(seed=2),
        one._replace(variation=Variation(ratio=2.0)),
    ]


def test_answers_come_back_as_they_were(tmp_path: Path, problem: Problem, questions: list[Question]) -> None:
    """A plan that goes on would differ from one that was never interrupted, or mix up its questions."""
    file = tmp_path / "journal"
    answers = [ODD._replace(energy_w=float(number)) for number in range(len(questions))]
    with FileJournal(file, problem) as begun:
        for question, answer in zip(questions, answers, strict=True):
            assert begun.get(question) is None
            begun.put(question, answer)
    before = file.read_bytes()
    with FileJournal(file, problem) as again:
        found = [again.get(question) for question in questions]
    assert repr(found) == repr(answers)
    assert file.read_bytes() == before


def test_an_answer_is_in_the_file_at_once(tmp_path: Path, problem: Problem, questions: list[Question]) -> None:
    """A crash would lose what had been simulated."""
    file = tmp_path / "journal"
    with FileJournal(file, problem) as begun:
        begun.put(questions[0], ODD)
        assert len(file.read_text().splitlines()) == 2


def test_a_torn_last_line_is_cut_off(tmp_path: Path, problem: Problem, questions: list[Question]) -> None:
    """A journal would be of no use after the crash it was kept for, or broken by the next answer."""
    file = tmp_path / "journal"
    with FileJournal(file, problem) as begun:
        begun.put(questions[0], ODD)
        begun.put(questions[1], ODD)
    file.write_bytes(file.read_bytes()[:-7])
    with FileJournal(file, problem) as again:
        assert len(again) == 1
        again.put(questions[2], ODD)
    with FileJournal(file, problem) as third:
        assert third.get(questions[1]) is None
        assert repr(third.get(questions[2])) == repr(ODD)


def test_a_torn_header_begins_anew(tmp_path: Path, problem: Problem, questions: list[Question]) -> None:
    """A crash in the first instant would leave a file that has to be deleted by hand."""
    file = tmp_path / "journal"
    file.write_text('{"kind":"phasesplit pl')
    with FileJournal(file, problem) as begun:
        begun.put(questions[0], ODD)
    with FileJournal(file, problem) as again:
        assert len(again) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"slo": "splitwise*2"},
        {"workload": "azure-conversation"},
        {"duration": 61},
        {"model": "llama-3.1-8b"},
        {"machines": "dgx-a100"},
        {"reference": "dgx-h100"},
        {"grid_intensity": 0.1},
        {"rules": {"transfer": "serialized"}},
        {"arrivals": "poisson"},
        {"within": "energy=100kW"},
    ],
)
def test_a_journal_of_another_problem_is_refused(tmp_path: Path, problem: Problem, change: dict[str, Any]) -> None:
    """Answers to other questions would be taken for answers."""
    file = tmp_path / "journal"
    FileJournal(file, problem).__exit__(None, None, None)
    with pytest.raises(SpecError) as caught:
        FileJournal(file, asked(**change))
    assert_refused(caught.value, "another problem", "another file", "delete")


def test_two_plans_do_not_share_a_journal(tmp_path: Path, problem: Problem) -> None:
    """Each would cut off what the other has just written."""
    file = tmp_path / "journal"
    with FileJournal(file, problem), pytest.raises(SpecError, match="another plan is using this journal"):
        FileJournal(file, problem)
    with FileJournal(file, problem):
        pass


def test_answers_serve_every_question_about_the_same_simulations(problem: Problem) -> None:
    """The same simulations would be done again for another budget of machines, objective, rate or number of seeds."""
    digest = problem_digest(problem)
    assert digest == problem_digest(asked())
    assert digest == problem_digest(asked(rate=7, seeds=5, within="cost=900"))
    assert digest == problem_digest(replace(problem, objective=Measure.MACHINES, most_servers=3))


def test_a_journal_of_other_sources_is_refused(
    tmp_path: Path, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of a simulator that has been corrected since would go into a plan."""
    file = tmp_path / "journal"
    FileJournal(file, problem).__exit__(None, None, None)
    monkeypatch.setattr(journal, "_sources", lambda: "other")
    with pytest.raises(SpecError) as caught:
        FileJournal(file, problem)
    assert_refused(caught.value, "another version")


def test_the_sources_of_answers_are_in_the_digest() -> None:
    """A corrected simulator would go on with the answers of the old one: a package of it has no part in the digest."""
    modules = [name for name in journal._SOURCES if (Path(phasesplit.__file__).parent / name / "__init__.py").is_file()]
    assert tuple(modules) == journal._SOURCES
    loaded = "import phasesplit.planner.probe, sys; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    parts = {name.split(".")[1] for name in ran.stdout.split() if name.startswith("phasesplit.")}
    assert parts - set(journal._SOURCES) == {"_jit", "_version", "errors"}


def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, problem: Problem) -> None:
    """A file named by mistake would be overwritten."""
    for content in ("model: llama\n", "[1]\n", json.dumps({"kind": "another"}) + "\n", "\n\x00\n x"):
        file = tmp_path / "notes.txt"
        file.write_text(content)
        with pytest.raises(SpecError) as caught:
            FileJournal(file, problem)
        assert_refused(caught.value, "not a journal")
        assert file.read_text() == content


def test_a_line_that_is_no_answer_is_named(tmp_path: Path, problem: Problem) -> None:
    """A damaged file would end in a traceback."""
    file = tmp_path / "journal"
    FileJournal(file, problem).__exit__(None, None, None)
    for line in (
        "[1]",
        "nothing",
        '[["a", [1], 1.0, 0, [1]], [true]]',
        '[["a", [1], 1.0, 0, [1]], ["yes", 1.0, "", [], 1.0, 1.0, [], []]]',
        "[" * 100_000,
    ):
        file.write_text(f"{file.read_text().splitlines()[0]}\n{line}\n")
        with pytest.raises(SpecError) as caught:
            FileJournal(file, problem)
        assert_refused(caught.value, "line 2", "not an answer")


def test_a_folder_is_no_journal(tmp_path: Path, problem: Problem) -> None:
    """A wrong path would end in a traceback."""
    with pytest.raises(SpecError) as caught:
        FileJournal(tmp_path, problem)
    assert_refused(caught.value, "cannot be used", "journal")


def test_a_journal_stops_growing(
    tmp_path: Path, problem: Problem, questions: list[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan could fill the disk."""
    monkeypatch.setattr(journal, "MOST_ANSWERS", 2)
    file = tmp_path / "journal"
    with FileJournal(file, problem) as begun:
        for question in questions[:4]:
            begun.put(question, ODD)
        assert repr(begun.get(questions[3])) == repr(ODD)
    assert len(file.read_text().splitlines()) == 3
