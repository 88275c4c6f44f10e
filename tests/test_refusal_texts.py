"""The helper that checks refusals can fail, and each kind of message once in all its words."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phasesplit.errors import SpecError
from phasesplit.io.rule_settings import rules_from
from phasesplit.io.specs import load_cluster, load_machine
from refusals import assert_refused

LINE = "plan.yaml, line 3, rules.kv_headroom: got 0.9, allowed is a share from 0 to 0.5"


@pytest.mark.parametrize(
    "named",
    [
        ["plan.yaml", "line 3", "kv_headroom", "0.9", "0 to 0.5"],
        ["kv_headroom", 0.9, "0.5"],
        ["0.9", "0"],
        [],
    ],
)
def test_a_right_refusal_passes(named: list[object]) -> None:
    """A test would depend on words that are nobody's promise."""
    assert_refused(LINE, *named)
    assert_refused(SpecError(LINE), *named)
    assert_refused((2, "", f"phasesplit: {LINE}\n"), *named)
    assert_refused((2, "", f"compiling the simulation kernel, once\nphasesplit: {LINE}\n"), *named)


@pytest.mark.parametrize(
    "named",
    [
        ["seed"],
        ["headroom"],
        ["kv_headroo"],
        ["kv_headroom", "0.8"],
        ["kv_headroom", "9"],
        ["kv_headroom", 0.9, "0.55"],
        ["kv_headroom", 0.9, "0 to 0"],
        ["kv_headroom", 0.9, "5"],
        ["kv_headroom", 0.9, "0.9"],
        ["kv_headroom", 0.5, "0.5"],
        ["line 33"],
        ["0.9", "kv_headroom"],
    ],
    ids=str,
)
def test_a_wrong_field_value_or_limit_fails(named: list[object]) -> None:
    """A refusal of another field, with another value or limit, would pass for the right one."""
    with pytest.raises(AssertionError):
        assert_refused(LINE, *named)


@pytest.mark.parametrize(
    "refused",
    [
        "",
        "a\nb",
        "Traceback\n" + LINE,
        (0, "", f"phasesplit: {LINE}\n"),
        (1, "", f"phasesplit: {LINE}\n"),
        (2, "half a report", f"phasesplit: {LINE}\n"),
        (2, "", f"{LINE}\n"),
        (2, "", f"phasesplit: {LINE}\nand more\n"),
        (2, "", ""),
    ],
)
def test_another_status_or_more_than_a_line_fails(refused: object) -> None:
    """A traceback, a success or half a report would pass for a refusal."""
    with pytest.raises(AssertionError):
        assert_refused(refused)


def test_other_statuses_and_processes_are_understood() -> None:
    """An infeasible plan, or a command in a process of its own, could not be checked."""
    assert_refused((1, "", "phasesplit: no design keeps the SLO\n"), "SLO", status=1)
    code = "import sys; sys.exit('phasesplit: a: got 1, allowed is 2')"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert_refused(ran, "a", 1, 2, status=1)


CLUSTER = "model: bloom-176b\npools:\n  - {role: prefill, machine: dgx-h100}\n"


@pytest.mark.parametrize(
    ("load", "text", "told"),
    [
        (load_machine, "name: box\nlin: 8\n", "line 2, lin: unknown field, did you mean link?"),
        (load_cluster, CLUSTER, "line 3, pools[0]: field count is missing"),
    ],
)
def test_texts_about_files(tmp_path: Path, load: Callable[[Path], object], text: str, told: str) -> None:
    """A message would no longer be the sentence that STYLE.md describes."""
    path = tmp_path / "own.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load(path)
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"transfr": "auto"}, "rules, field transfr: unknown name 'transfr', did you mean transfer?"),
        ({"kv_headroom": 0.9}, "rules, field kv_headroom: got 0.9, allowed is a share from 0 to 0.5"),
        ({"batch_requests": "many"}, "rules, field batch_requests: got 'many', allowed is a whole number"),
        ({"published": "maybe"}, "rules, field published: got 'maybe', allowed is true or false"),
    ],
)
def test_texts_about_values(settings: dict[str, object], told: str) -> None:
    """A message would no longer be the sentence that STYLE.md describes."""
    with pytest.raises(SpecError) as caught:
        rules_from(settings)
    assert str(caught.value) == told
