"""What `phasesplit replay` prints."""

import numpy as np
import pytest

from phasesplit.cli import run
from phasesplit.cli.replay import _print
from phasesplit.measuring.replay import Replay, Seen


def test_no_answer_is_no_latency(capsys: pytest.CaptureFixture[str]) -> None:
    """A table full of `nan ms` would stand over the reason why nothing was answered."""
    seen = Seen(row=0, due_s=0.0, error="status 400: no")
    _print(Replay([seen], np.zeros(0), 1.0))
    said = capsys.readouterr().out
    assert "nan" not in said
    assert "1 failed, the first with: status 400: no" in said


def test_a_workload_that_is_none_is_called_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """A person would look for an option --workload, which this command has not."""
    assert run(["replay", "nofile", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("phasesplit: WORKLOAD (no such file): unknown name 'nofile', known are ")
