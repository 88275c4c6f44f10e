"""A machine that is lost in the middle of an output: others go on behind what is there, and nobody sees a seam."""

import asyncio
import re
from typing import Any

import pytest

from doubles.codec import END
from gateways import TWICE, Call, Rig, play, settle
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.meters import intervals
from phasesplit.gateway.request_states import RequestState

UNSPLIT = (("u1", "unsplit"), ("u2", "unsplit"), ("u3", "unsplit"))
THRICE = (("p1", "prefill"), ("p2", "prefill"), ("t1", "decode"), ("t2", "decode"), ("t3", "decode"))


def speaks(text: str) -> Any:
    """Return the rule of machines that say one text, byte by byte, whatever the prompt is."""
    raw = text.encode()
    return lambda _, place: raw[place % len(raw)]


async def cut(rig: Rig, places: tuple[int, ...], **fields: Any) -> Call:
    """Stream a completion, and kill the machine of its decode phase before each of these tokens of its answer."""
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


async def held_stream(rig: Rig) -> Call:
    """Begin a stream whose decode machine holds its third token back, and those that could go on theirs."""
    for name in ("t1", "t2", "t3"):
        rig.workers[name].hold("token 3")
    call = rig.complete(stream=True, max_tokens=8)
    await settle()
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
@pytest.mark.parametrize("places", [(1,), (2,), (3, 2), (9,)])
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
            assert record["continued"] == record["attempts"] - 1 == rig.gateway.in_flight.meters.continued
            assert record["outcome"] == "completed"
            await settle()
            rig.require_nothing_held()

    play(scenario())


@pytest.mark.parametrize("state", [RequestState.TRANSFERRING, RequestState.WAITING, RequestState.DECODING])
def test_what_machines_get_of_an_output_that_goes_on(state: RequestState) -> None:
    """Penalties, draws and bounds would begin again in the middle of an output."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            place = {RequestState.TRANSFERRING: 1, RequestState.WAITING: 1, RequestState.DECODING: 3}[state]
            if state is RequestState.TRANSFERRING:
                for name in ("p1", "p2"):
                    rig.workers[name].hold("send")
            for name in ("t1", "t2"):
                rig.workers[name].hold(f"token {place}")
            call = rig.complete(stream=True, max_tokens=8, min_tokens=6, seed=3, temperature=1, stop=["xyz", 200])
            await settle()
            choice = rig.gateway.in_flight.live[0]
            assert (choice.progress.state, choice.pair is not None) == (state, True)
            rig.workers[choice.pair.decode].die()  # type: ignore[union-attr]
            for worker in rig.workers.values():
                worker.go("send")
                worker.go(f"token {place}")
            await call.answer()
            bodies = [body for worker in rig.workers.values() for body in worker.seen if "resumed_tokens" in body]
            told = sorted((b["resumed_tokens"], b["max_tokens"], b["min_tokens"], b["seed"]) for b in bodies)
            assert told == [(place, 1, 1, 3), (place, 8 - place, 6 - place, 3)]
            # A stop string may have begun in text that these machines do not see.
            assert [(body.get("stop"), body["stop_token_ids"]) for body in bodies] == [(None, [200])] * 2
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
            assert (rig.records[0]["outcome"], rig.records[0]["continued"]) == ("decode_lost", 1)
            page = (await rig.call("/metrics").answer()).body.decode()
            assert re.search(r"^phasesplit_continued_total 1.0$", page, re.MULTILINE)
            assert 'phasesplit_requests_total{outcome="decode_lost"} 1.0' in page
            await settle()
            rig.require_nothing_held()

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
            rig.require_nothing_held()

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
        ({"bad_words": ["ab cd"]}, False),
        ({"truncate_prompt_tokens": 4}, False),
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
                worker.decode_s = 1.0
            call = rig.complete(stream=True, max_tokens=4)
            await rig.pass_time(1.5)
            victim = rig.gateway.in_flight.live[0].pair
            assert victim is not None
            rig.workers[victim.decode].die()
            await rig.pass_time(4)
            await call.answer()
            record = rig.records[0]
            assert (record["assigned_s"], record["first_token_s"], record["second_token_s"]) == (0.0, 0.0, 1.0)
            assert (record["output_tokens"], record["continued"]) == (4, 1)
            assert record["last_token_s"] == 2.5
            assert (await rig.complete(max_tokens=1).answer()).status == 200

    play(scenario())


@pytest.mark.parametrize("pools", [THRICE, UNSPLIT], ids=["split", "unsplit"])
@pytest.mark.parametrize(("place", "reason"), [(3, "stop"), (4, "stop"), (4, "length")])
def test_an_output_ends_where_it_would_have(pools: tuple[tuple[str, str], ...], place: int, reason: str) -> None:
    """An output would go on behind its end, or give the wrong reason, if its machine was lost just there."""

    async def scenario() -> None:
        def rule(_: Any, place: int) -> int:
            return END if place == 4 and reason == "stop" else ord("a") + place

        given = {"max_tokens": 5 if reason == "length" else 9, "return_token_ids": True}
        expected = await whole(pools, rule, **given)
        async with Rig(pools, rule=rule) as rig:
            call = await cut(rig, (place,), **given)
            assert joined(call) == joined(expected)
            assert joined(call)[1] == reason
            assert (rig.records[0]["output_tokens"], rig.records[0]["continued"]) == (5, 1)
            await settle()
            rig.require_nothing_held()

    play(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_what_a_broken_machine_says_behind_a_wrong_token_is_not_believed(stream: bool) -> None:
    """Tokens of an attempt that was given up in the middle of a chunk would get into the output."""

    async def scenario() -> None:
        async with Rig(UNSPLIT) as rig:
            for worker in rig.workers.values():
                worker.hold("token 2")
            call = rig.complete(stream=stream, max_tokens=6)
            await settle()
            choice = rig.gateway.in_flight.live[0]
            for place, token in ((2, 9999), (3, ord("x"))):
                choice.token(token, None, place, 1, "stop")
            choice.no_more_tokens("stop", 1)
            for worker in rig.workers.values():
                worker.go("token 2")
            await call.answer()
            given = call.text if stream else call.json["choices"][0]["text"]
            reason = (joined(call)[1]) if stream else call.json["choices"][0]["finish_reason"]
            assert (given, reason) == ("fghijk", "length")
            # What nobody has seen yet may be as wrong as the token: it is made anew.
            assert (rig.records[0]["attempts"], rig.records[0]["continued"]) == (2, int(stream))
            await settle()
            rig.require_nothing_held()

    play(scenario())


async def lose_all(rig: Rig) -> None:
    """Kill all machines, that of the one request's decode phase last."""
    pair = rig.gateway.in_flight.live[0].pair
    assert pair is not None
    for name in sorted(rig.workers, key=lambda name: name == pair.decode):
        rig.workers[name].stall()  # and nobody answers in its place
        rig.workers[name].die()
        await settle()


def test_an_answer_that_is_not_streamed_goes_on_as_well() -> None:
    """A machine that is lost at the end of a long answer would cost all of it."""

    async def scenario() -> None:
        async with Rig(THRICE, limits=Limits(first_token_s=40.0)) as rig:
            for name in ("t1", "t2", "t3"):
                rig.workers[name].hold("token 6")
            call = rig.complete(max_tokens=10)
            await settle()
            await lose_all(rig)
            await rig.pass_time(35.0)
            assert not call.done
            for name, home in THRICE:
                await rig.join(name, home, epoch=2)
            await call.answer()
            assert call.json["choices"][0]["text"] == "fghijklmno"
            assert call.json["usage"] == {"prompt_tokens": 5, "completion_tokens": 10, "total_tokens": 15}
            bodies = [body for worker in rig.workers.values() for body in worker.seen]
            assert [body["resumed_tokens"] for body in bodies] == [6]  # of the machine that is back first
            record = rig.records[0]
            assert (record["continued"], record["first_token_s"], record["longest_gap_s"]) == (1, 0.0, 35.0)
            lost = rig.complete(max_tokens=10)
            for worker in rig.workers.values():
                worker.hold("token 6")
            await settle()
            await lose_all(rig)
            await rig.pass_time(41.0)
            assert (await lost.answer()).status == 502
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_stages_of_an_output_that_went_on_before_its_kv_had_arrived() -> None:
    """Stages would overlap: the second transfer would count as what the first token did not hide."""

    async def scenario() -> None:
        async with Rig(THRICE) as rig:
            for name in ("p1", "p2"):
                rig.workers[name].prefill_s = 1.0
                rig.workers[name].hold("send")
            call = rig.complete(stream=True, max_tokens=6)
            await settle()
            await rig.pass_time(1.5)
            choice = rig.gateway.in_flight.live[0]
            assert (choice.progress.state, choice.pair is not None) == (RequestState.TRANSFERRING, True)
            rig.workers[choice.pair.decode].die()  # type: ignore[union-attr]
            await rig.pass_time(2.0)
            for name in ("p1", "p2"):
                rig.workers[name].go("send")
            await call.answer()
            record = rig.records[0]
            assert [record[f"{name}_s"] for name in ("prefill_started", "first_token", "kv_ready")] == [0.0, 1.0, None]
            assert (record["second_token_s"], record["longest_gap_s"]) == (2.5, 1.5)
            found = intervals(record)
            assert found == {"queue": (0.0, 0.0), "prefill": (0.0, 1.0), "decode": (2.5, record["last_token_s"])}

    play(scenario())


@pytest.mark.parametrize("others", [UNSPLIT[1:], ()], ids=["found", "none"])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 60])
def test_a_client_that_leaves_at_the_cut_leaves_nothing(others: tuple[tuple[str, str], ...], turns: int) -> None:
    """The pair that is found for a stream would serve it for nobody, or hold its KV."""

    async def scenario() -> None:
        async with Rig((UNSPLIT[0], *others)) as rig:
            for worker in rig.workers.values():
                worker.hold("token 2")
            call = rig.complete(stream=True, max_tokens=10)
            await settle()
            victim = rig.gateway.in_flight.live[0].pair
            assert victim is not None
            rig.workers[victim.decode].die()
            for _ in range(turns):
                await asyncio.sleep(0)
            call.leave()
            await call.answer()
            for worker in rig.workers.values():
                worker.go("token 2")
            await rig.pass_time(1.0)
            assert [record["outcome"] for record in rig.records] == ["client_gone"]
            rig.require_nothing_held()
            assert rig.gateway.in_flight.queued == 0

    play(scenario())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_pair_that_goes_on_may_be_lost_too(side: str) -> None:
    """A second loss, in the prefill phase behind the first, would break the stream off or lose what was kept."""

    async def scenario() -> None:
        async with Rig(THRICE) as rig:
            call = await held_stream(rig)
            choice = rig.gateway.in_flight.live[0]
            for name in ("p1", "p2"):
                rig.workers[name].hold("prefill")
            rig.workers[choice.pair.decode].die()  # type: ignore[union-attr]
            await settle()
            assert (choice.progress.state, choice.progress.attempts) == (RequestState.PREFILLING, 2)
            pair = choice.pair
            assert pair is not None
            rig.workers[pair.prefill if side == "prefill" else pair.decode].die()
            for worker in rig.workers.values():
                worker.go("prefill")
                worker.go("token 3")
            await rig.pass_time(0.5)
            await call.answer()
            assert joined(call)[:2] == ("fghijklm", "length")
            assert (rig.records[0]["attempts"], rig.records[0]["continued"]) == (3, 2)
            await settle()
            rig.require_nothing_held()

    play(scenario())


@pytest.mark.parametrize("order", ["drain", "role"])
def test_a_machine_that_is_lost_while_it_drains_costs_a_pause(order: str) -> None:
    """A machine that is to go, or to change its pool, would take the streams with it that it was to finish."""

    async def scenario() -> None:
        async with Rig(THRICE) as rig:
            call = await held_stream(rig)
            pair = rig.gateway.in_flight.live[0].pair
            assert pair is not None
            dispatcher, now_s = rig.gateway.dispatcher, rig.clock.now_s()
            spare = next(name for name in ("t1", "t2", "t3") if name != pair.decode)
            for name in (pair.decode, spare):
                if order == "drain":
                    dispatcher.drain(name, now_s)
                else:
                    dispatcher.set_home(name, "prefill", 1, now_s)
            rig.workers[pair.decode].die()
            await settle()
            for worker in rig.workers.values():
                worker.go("token 3")
            await rig.pass_time(0.5)
            await call.answer()
            assert joined(call)[:2] == ("fghijklm", "length")
            assert (rig.records[0]["continued"], rig.records[0]["decode_machine"] in (pair.decode, spare)) == (1, False)
            await settle()
            rig.require_nothing_held()

    play(scenario())
