"""The decision log: what a line tells, what a replay finds, and what it refuses to do."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest

from phasesplit.errors import SpecError
from phasesplit.gateway.decisions import Decisions, Difference, Placed, header, replay, warm
from phasesplit.scheduler.ledger import DECODE, PREFILL
from phasesplit.scheduler.rules import Batching, Placement, Rules, Transfer

OLD_LOG = Path(__file__).parent / "decisions_version_1.jsonl"
"""A log that phasesplit 0.1.0 wrote when it still said prompt and token for the phases."""


def logged(rules: Rules | None = None) -> list[bytes]:
    """Return the log of two machines and three requests, the third of which makes the decode machine help out."""
    log: list[bytes] = []
    decisions = Decisions(rules or Rules(spill_tokens=150), 4, sink=log.append)
    decisions.enlist("p", 0, PREFILL, 100)
    decisions.enlist("t", 1, DECODE, 100)
    first = decisions.place("r0.1", 0.25, 100, 60, 28)
    assert first == Placed(0, 0, 1)
    second = decisions.place("r1.1", 0.5, 100, 60, 28)
    assert second is not None
    decisions.begin_prefill(first.slot, 0.5)
    decisions.end_prefill_phase(first.slot, 0.75)
    decisions.end_transfer(first.slot, 1.0)
    assert decisions.place("r2.1", 1.0, 5_000, 60, 28) is None
    decisions.end_prefill_phase(second.slot, 1.25)
    decisions.end_request(first.slot, 1.5)
    decisions.end_request(second.slot, 1.5)
    decisions.retire(0)
    decisions.switch_off(0)
    return log


def changed(log: list[bytes], number: int, change: Callable[[dict[str, Any]], object]) -> list[bytes]:
    """Return the log with a line (from 1) changed."""
    line = orjson.loads(log[number - 1])
    change(line)
    return [*log[: number - 1], orjson.dumps(line) + b"\n", *log[number:]]


def test_a_placement_records_what_was_seen_and_what_came_out() -> None:
    """A person who asks why a request went where it went would find no answer in the log."""
    log = [orjson.loads(line) for line in logged()]
    names = log[0]["saw"]
    assert log[1] == {"call": "enlist", "args": ["p", 0, PREFILL, 100]}
    second = log[4]
    assert second["args"] == ["r1.1", 0.5, 100, 60, 28, []]
    seen = [dict(zip(names, machine, strict=True)) for machine in zip(*second["saw"], strict=True)]
    assert (seen[0]["machine"], seen[0]["pending_tokens"], seen[0]["waiting"]) == (0, 100, 1)
    assert (seen[1]["pool"], seen[1]["committed_blocks"], seen[1]["decode_requests"]) == (DECODE, 8, 1)
    assert (second["gives"], second["moved"]) == ([1, 1, 1], [[1, 2, DECODE]])
    assert log[8]["gives"] is None


def test_replay_makes_every_call_again() -> None:
    """A log could be called equal without having been looked at."""
    log = logged()
    found = replay(log)
    assert (found.decisions, found.equal, found.placements, found.moves) == (len(log) - 1, len(log) - 1, 3, 2)
    assert (found.difference, found.cut) == (None, False)


def test_log_of_an_older_version_is_replayed_equal() -> None:
    """Whoever kept logs could not check them any more, though only names have changed since."""
    log = OLD_LOG.read_bytes().splitlines(keepends=True)
    assert {"begin_prompt", "end_prompt_phase"} <= {orjson.loads(line).get("call") for line in log}
    found = replay(log)
    assert (found.difference, found.decisions, found.equal) == (None, 21, 21)
    assert (found.placements, found.moves) == (5, 2)
    other = replay(changed(log, 10, lambda line: line.update(moved=[[0, 2, 0]])))
    assert isinstance(other.difference, Difference)
    assert (other.difference.line, other.difference.logged) == (10, '{"moved":[[0,2,0]]}')


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (4, lambda line: line.update(gives=[0, 1, 1]), '{"gives":[0,1,1]}'),
        (5, lambda line: line["saw"][2].__setitem__(0, 99), '"saw":[[0,1],[0,1],[99,'),
        (5, lambda line: line.pop("moved"), '{"moved":null}'),
        (7, lambda line: line.update(moved=[[0, 2, 0]]), '{"moved":[[0,2,0]]}'),
    ],
)
def test_replay_says_where_it_differs(number: int, change: Callable[[dict[str, Any]], object], said: str) -> None:
    """A fact or decision that does not follow from the log would go unnoticed, or nobody would know which."""
    log = changed(logged(), number, change)
    found = replay(log)
    assert (found.equal, found.decisions) == (number - 2, len(log) - 1)
    assert isinstance(found.difference, Difference)
    assert found.difference.line == number
    assert said in found.difference.logged
    assert said not in found.difference.now


def test_other_rules_come_to_other_decisions() -> None:
    """A replay would show what was logged, not what the rules say."""
    log = logged()
    assert replay([header(Rules(), 4), *log[1:]]).difference is not None


def test_a_line_written_otherwise_is_the_same() -> None:
    """A log that went through another JSON tool would be called different."""
    log = [re.sub(rb"([,:])", rb"\1 ", line) for line in logged()]
    assert replay(log).difference is None


def test_last_line_that_a_crash_cut_off_is_left_out() -> None:
    """The log of a gateway that was killed could not be checked at all."""
    log = logged()
    found = replay([*log[:-1], log[-1][:-5]])
    assert (found.cut, found.decisions, found.equal) == (True, len(log) - 2, len(log) - 2)
    later = replay([*changed(log, 4, lambda line: line.update(gives=None))[:-1], log[-1][:-5]])
    assert (later.cut, later.decisions, later.equal) == (True, len(log) - 2, 2)


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (3, lambda line: line.update(args=["t", 4, DECODE, 100])),
        (3, lambda line: line.update(args=["t", 0, DECODE, 100])),
        (3, lambda line: line.update(args=["t", 1, 4, 100])),
        (3, lambda line: line.update(args=["t", 1, DECODE, 0])),
        (4, lambda line: line.update(args=["r", 0.25, 1 << 31, 60, 28, []])),
        (4, lambda line: line.update(args=["r", 0, 100, 60, 28, []])),
        (4, lambda line: line.update(args=["r", 0.25, 100, 60, 28, [2]])),
        (4, lambda line: line.update(args=["r", 0.25, 100, 60, 28, [1, 1]])),
        (4, lambda line: line.update(args=["r", 0.25, True, 60, 28, []])),
        (6, lambda line: line.update(args=[2, 0.5])),
        (6, lambda line: line.update(args=[-1, 0.5])),
        (6, lambda line: line.update(args=[1 << 40, 0.5])),
        (6, lambda line: line.update(args=[0])),
        (6, lambda line: line.update(args=7)),
        (6, lambda line: line.update(call="ledger")),
        (6, lambda line: line.update(call=["place"])),
        (12, lambda line: line.update(args=[2])),
        (2, lambda line: line.update(call="place", args=["r", 0.25, 100, 60, 28, []])),
    ],
)
def test_call_that_the_ledger_cannot_take_is_refused(number: int, change: Callable[[dict[str, Any]], object]) -> None:
    """A damaged log would make compiled code write outside its arrays."""
    with pytest.raises(SpecError, match=f"^here, line {number}"):
        replay(changed(logged(), number, change), "here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda line: line.update(kind="x"), "not a decision log"),
        (lambda line: line.update(version=3), "version"),
        (lambda line: line.update(machines=0), "machines"),
        (lambda line: line.update(machines=1 << 40), "machines"),
        (lambda line: line["rules"].update(prefill_placement="guess"), "rules"),
        (lambda line: line["rules"].update(later=1), "rules"),
        (lambda line: line["rules"].update(published=True), "published"),
        (lambda line: line["rules"].update(block_tokens=3), "block_tokens"),
        (lambda line: line.update(rules=None), "rules"),
    ],
)
def test_log_of_something_else_is_refused(change: Callable[[dict[str, Any]], object], said: str) -> None:
    """A log of another version would be called different, for a reason that has nothing to do with decisions."""
    with pytest.raises(SpecError, match=f"^here.*{said}"):
        replay(changed(logged(), 1, change), "here")


@pytest.mark.parametrize("lines", [[], [b"\n"], [b"arrival_s,prompt_tokens\n"], [b"\xff\xfe"], [b"[1]\n"]])
def test_file_that_is_no_log_is_refused(lines: list[bytes]) -> None:
    """Any file would be called an equal log of no decisions."""
    with pytest.raises(SpecError, match="here: not a decision log"):
        replay(lines, "here")


def test_rules_survive_the_log() -> None:
    """A replay would run under other rules than the cluster did."""
    rules = Rules(
        prefill_placement=Placement.TWO_CHOICES,
        decode_placement=Placement.ROUND_ROBIN,
        batching=Batching.CHUNKED,
        transfer=Transfer.LAYERWISE,
        layerwise_from_tokens=7,
        streaming_slowdown=0.5,
        repurpose_after_s=0.1,
        seed=2**62,
        elastic=False,
    )
    assert replay(logged(rules)).difference is None


@pytest.mark.parametrize(
    "rules", [Rules.as_published(), Rules(prefill_placement=Placement.CUSTOM), Rules(decode_placement=Placement.CUSTOM)]
)
def test_rules_that_need_more_than_the_ledger_are_refused(rules: Rules) -> None:
    """A request would be left without a machine, or placed by queues that are not kept."""
    with pytest.raises(SpecError, match="rules, field"):
        Decisions(rules, 2)


def test_warming_up_makes_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first client would wait for a compiler."""
    log: list[bytes] = []
    monkeypatch.setattr("phasesplit.gateway.decisions.Decisions", partial(Decisions, sink=log.append))
    warm(Rules())
    assert {orjson.loads(line).get("call") for line in log[1:]} == {
        "enlist", "retire", "switch_off", "place", "begin_prefill", "end_prefill_phase", "end_transfer", "end_request",
    }  # fmt: skip
