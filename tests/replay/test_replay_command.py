"""What `phasesplit replay` prints."""

import numpy as np
import pytest

from phasesplit.cli import run
from phasesplit.replay.client import ReplayResult, SeenRequest
from phasesplit.replay.replay_command import _print


def test_no_answer_is_no_latency(capsys: pytest.CaptureFixture[str]) -> None:
    """A table full of `nan ms` would stand over the reason why nothing was answered."""
    seen = SeenRequest(row=0, due_s=0.0, error="status 400: no")
    _print(ReplayResult([seen], np.zeros(0), 1.0))
    said = capsys.readouterr().out
    assert "nan" not in said
    assert "1 failed, the first with: status 400: no" in said


def test_a_workload_that_is_none_is_called_as_it_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    """A person would look for an option --workload, which this command has not."""
    assert run(["replay", "nofile", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err.startswith("phasesplit: WORKLOAD (no such file): unknown name 'nofile', known are ")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ("http://127.0.0.1:99999",),
            "URL http://127.0.0.1:99999, port: got '99999', allowed is a whole number from 1",
        ),
        (("127.0.0.1:80",), "URL: got '127.0.0.1:80', allowed is an address such as http://127.0.0.1:8080"),
        (("http://127.0.0.1:1",), "http://127.0.0.1:1: nothing listens there (connection refused)"),
        (("http://127.0.0.1:1", "--token-ids", "9:3"), "--token-ids: got '9:3', allowed is two whole numbers FROM:TO"),
        (("http://127.0.0.1:1", "--seed", f"{1 << 64}"), f"--seed: got {1 << 64}, allowed is a whole number from 0 to"),
    ],
)
def test_wrong_options_of_replay_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    """A mistyped address or option would look like an endpoint that has failed."""
    assert run(["replay", "azure-conversation", *arguments]) == 2
    written = capsys.readouterr().err
    assert written.startswith(f"phasesplit: {line}")
    assert written.count("\n") == 1
