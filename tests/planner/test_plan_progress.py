"""How far a plan is, where there is no terminal."""

from types import SimpleNamespace

import pytest

from phasesplit.planner.plan import PlanStep
from phasesplit.planner.plan_view import PlanProgress
from planner.report.plans import split_plan


def test_without_a_terminal_a_line_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log of a long plan would stay empty for minutes, or fill with a line for every simulation."""
    now_s = iter([0.0, 29.0, 31.0, 60.0, 62.0])
    monkeypatch.setattr("phasesplit.planner.plan_view.time", SimpleNamespace(monotonic=lambda: next(now_s)))
    plan = split_plan()
    best = plan.entries[0]
    with PlanProgress(plan.problem, shown=False) as progress:
        for count in range(1, 6):
            progress(PlanStep(stage="sizing", questions=count, best=(best.design, best.found.counts, 299.2)))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in lines] == ["sizing, 3 simulations", "sizing, 5 simulations"]
    assert "best so far 299.2 USD/h" in lines[0]
