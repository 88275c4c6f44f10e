"""A machine that is lost in mid-stream: other machines go on behind what the client has, and nobody sees a seam."""

import re
from typing import Any

import pytest

from gateways import TWICE, Call, Rig, play, settle
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.states import State

UNSPLIT = (("u1", "unsplit"), ("u2", "unsplit"), ("u3", "unsplit"))
THRICE = (("p1", "prompt"), ("p2", "prompt"), ("t1", "token"), ("t2", "token"), ("t3", "token"))


def speaks(text: str) -> Any:
    """Return the rule of machines that say one text, byte by byte, whatever the prompt is."""
    raw = text.encode()
    return lambda _, place: raw[place % len(raw)]


async def cut(rig: Rig, places: tuple[int, ...], **fields: Any) -> Call:
    """Stream a completion, and kill the machine of its token phase before each of these tokens of its answer."""
    call = rig.complete(stream=True, **fields)
    stages = [f"token {place}" for place in places]
    for worker in rig.workers.values():
        worker.hold(stages[0])
    for stage, following in zip(stages, [*stages[1:], None], strict=True):
        await settle()
        for worker in rig.workers.values():
            if following is not None:
                worker.hold(following)
            if worker.waiting(stage):
                worker.die()
        for worker in rig.workers.values():
            worker.go(stage)
        await rig.pass_time(0.5)
    await call.answer()
    return call


def parts(call: Call) -> list[dict[str, Any]]:
    """Return the events of a stream but the mark of its end."""
    return [event for event in call.events if event != "[DONE]"]


async def whole(pools: tuple[tuple[str, str], ...], rule: Any, **fields: Any) -> Call:
    """Return the same stream without a loss."""
    async with Rig(pools, rule=rule) as rig:
        return await rig.complete(stream=True, **fields).answer()


def joined(call: Call) -> tuple[str, Any, list[Any]]:
    """Return a stream's text, its finish reason, and its log-probabilities with their offsets."""
    choices = [event["choices"][0] for event in parts(call) if event.get("choices")]
    scores = [
        pair for c in choices if (s := c.get("logprobs")) for pair in zip(s["tokens"], s["text_offset"], strict=True)
    ]
    return "".join(c["text"] for c in choices), choices[-1]["finish_reason"], scores


@pytest.mark.parametrize("pools", [THRICE, UNSPLIT], ids=["split", "unsplit"])
@pytest.mark.parametrize("places", [(1,), (2,), (3, 2)])
@pytest.mark.parametrize(
    ("said", "fields"),
    [
        ("abcdefghij", {}),
        ("abcdefghij", {"seed": 4, "temperature": 1, "presence_penalty": 1, "min_tokens": 9}),
        ("abcdefghij", {"stop": ["def"]}),
        ("abcdefghij", {"stop": ["bcdef"], "include_stop_str_in_output": True}),
        ("a\N{GRINNING FACE}bcdefgh", {}),
        ("abcdefghij", {"logprobs": 2}),
        ("abcdefghij", {"echo": True, "logprobs": 1}),
    ],
)
def test_streams_go_on_without_a_seam(
    pools: tuple[tuple[str, str], ...], places: tuple[int, ...], said: str, fields: dict[str, Any]
) -> None:
    """A client would get an error, a gap, a repetition, half a character or wrong usage for another one's crash."""

    async def scenario() -> None:
        given = {"max_tokens": 10, "stream_options": {"include_usage": True}} | fields
        expected = await whole(pools, speaks(said), **given)
        async with Rig(pools, rule=speaks(said)) as rig:
            call = await cut(rig, places, **given)
            assert joined(call) == joined(expected)
            assert parts(call)[-1]["usage"] == parts(expected)[-1]["usage"]
            assert len({(event["id"], event["created"], event["model"]) for event in parts(call)}) == 1
            record = rig.records[0]
            assert record["continued"] == record["attempts"] - 1 == rig.gateway.desk.meters.continued
            assert record["outcome"] == "completed"
            await settle()
            rig.demand_nothing_held()

    play(scenario())


@pytest.mark.parametrize("state", [State.TRANSFERRING, State.WAITING, State.DECODING])
def test_what_machines_are_told_of_an_output_that_goes_on(state: State) -> None:
    """Penalties, draws and bounds would begin again in the middle of an output."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            place = {State.TRANSFERRING: 1, State.WAITING: 1, State.DECODING: 3}[state]
            if state is State.TRANSFERRING:
                for name in ("p1", "p2"):
                    rig.workers[name].hold("send")
            for name in ("t1", "t2"):
                rig.workers[name].hold(f"token {place}")
            call = rig.complete(stream=True, max_tokens=8, min_tokens=6, seed=3, temperature=1)
            await settle()
            choice = rig.gateway.desk.live[0]
            assert (choice.progress.state, choice.pair is not None) == (state, True)
            rig.workers[choice.pair.token].die()  # type: ignore[union-attr]
            for worker in rig.workers.values():
                worker.go("send")
                worker.go(f"token {place}")
            await call.answer()
            bodies = [body for worker in rig.workers.values() for body in worker.seen if "resumed_tokens" in body]
            told = sorted((b["resumed_tokens"], b["max_tokens"], b["min_tokens"], b["seed"]) for b in bodies)
            assert told == [(place, 1, 1, 3), (place, 8 - place, 6 - place, 3)]
            assert {bytes(body["prompt"]) for body in bodies} == {b"hello" + b"fghijklm"[:place]}
            assert joined(call)[:2] == ("fghijklm", "length")

    play(scenario())


def test_attempts_of_a_stream_are_bounded() -> None:
    """A stream that kills machines would be given one after the other, or end as if all were well."""

    async def scenario() -> None:
        async with Rig(UNSPLIT, limits=Limits(attempts=2)) as rig:
            call = await cut(rig, (2, 1), max_tokens=10)
            assert call.events[-1]["error"]["code"] == "worker_error"
            assert all(event["choices"][0]["finish_reason"] is None for event in call.events[:-1])
            assert (rig.records[0]["outcome"], rig.records[0]["continued"]) == ("token_lost", 1)
            page = (await rig.call("/metrics").answer()).body.decode()
            assert re.search(r"^phasesplit_continued_total 1.0$", page, re.MULTILINE)
            assert 'phasesplit_requests_total{outcome="token_lost"} 1.0' in page
            await settle()
            rig.demand_nothing_held()

    play(scenario())


def test_a_stream_does_not_wait_for_ever_for_a_machine() -> None:
    """A client would look at half an answer until the request's last deadline."""

    async def scenario() -> None:
        async with Rig((("u", "unsplit"),), limits=Limits(idle_s=2.0)) as rig:
            rig.workers["u"].hold("token 2")
            call = rig.complete(stream=True, max_tokens=10)
            await settle()
            rig.workers["u"].stall()  # and nobody answers in its place
            rig.workers["u"].die()
            await rig.pass_time(1.5)
            assert not call.done
            await rig.pass_time(1.5)
            await call.answer()
            assert call.events[-1]["error"]["code"] == "worker_error"
            assert rig.records[0]["outcome"] == "deadline"
            await settle()
            rig.demand_nothing_held()

    play(scenario())


@pytest.mark.parametrize(
    ("fields", "goes_on"),
    [
        ({}, True),
        ({"temperature": 0, "seed": 1}, True),
        ({"repetition_penalty": 1.5}, True),
        ({"presence_penalty": 1}, False),
        ({"frequency_penalty": 1}, False),
        ({"seed": 1}, False),
        ({"response_format": {"type": "json_object"}}, False),
    ],
)
def test_machines_that_take_output_for_prompt_go_on_only_where_that_is_exact(
    fields: dict[str, Any], goes_on: bool
) -> None:
    """Penalties would forget half of the output, and grammars would begin again in its middle."""

    async def scenario() -> None:
        async with Rig(UNSPLIT, limits=Limits(structured_output=True), resumes=False) as rig:
            call = await cut(rig, (2,), max_tokens=10, **fields)
            assert (call.events[-1] == "[DONE]") is goes_on
            assert len(joined(call)[0] if goes_on else call.text) == (10 if goes_on else 2)

    play(scenario())


def test_a_continued_stream_keeps_its_first_instants() -> None:
    """A lost machine would count as a late first token, and its pause would be in no latency."""

    async def scenario() -> None:
        async with Rig(UNSPLIT) as rig:
            for worker in rig.workers.values():
                worker.token_s = 1.0
            call = rig.complete(stream=True, max_tokens=4)
            await rig.pass_time(1.5)
            victim = rig.gateway.desk.live[0].pair
            assert victim is not None
            rig.workers[victim.token].die()
            await rig.pass_time(4)
            await call.answer()
            record = rig.records[0]
            assert (record["assigned_s"], record["first_token_s"], record["second_token_s"]) == (0.0, 0.0, 1.0)
            assert (record["output_tokens"], record["continued"]) == (4, 1)
            assert record["last_token_s"] == 2.5
            assert (await rig.complete(max_tokens=1).answer()).status == 200

    play(scenario())
