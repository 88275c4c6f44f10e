"""The OpenAI surface: every field gives what an unsplit engine would, or a 4xx that says why."""

import asyncio
from typing import Any

import pytest

from gateways import CHATS, COMPLETIONS, Rig, play, settle
from phasesplit.gateway.gateway import Keys
from phasesplit.gateway.limits import Limits, key_digest

PAIRS = [
    pytest.param((("p", "prefill"), ("t", "decode")), id="split"),
    pytest.param((("u", "unsplit"),), id="unsplit"),
]


def spelled(text: str) -> Any:
    """Return a rule that spells a text, then ends."""
    raw = text.encode()
    return lambda _, place: raw[place] if place < len(raw) else 256


@pytest.mark.parametrize("pools", PAIRS)
def test_completion(pools: Any) -> None:
    """A plain request would not give the machine's tokens, or counts that are not those of ids."""

    async def scenario() -> None:
        async with Rig(pools) as rig:
            answer = (await rig.complete(max_tokens=4).answer()).json
            assert answer["object"] == "text_completion"
            assert answer["choices"] == [
                {"text": "fghi", "index": 0, "logprobs": None, "finish_reason": "length", "stop_reason": None}
            ]
            assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
            rig.require_nothing_held()

    play(scenario())


@pytest.mark.parametrize("pools", PAIRS)
def test_stream(pools: Any) -> None:
    """A stream would lose or double the first token, end without its mark, or count otherwise."""

    async def scenario() -> None:
        async with Rig(pools) as rig:
            call = await rig.complete(stream=True, stream_options={"include_usage": True}).answer()
            *chunks, used, done = call.events
            assert [chunk["choices"][0]["text"] for chunk in chunks] == ["f", "g", "h", "i"]
            assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]
            assert (used["choices"], used["usage"]["completion_tokens"], done) == ([], 4, "[DONE]")
            rig.require_nothing_held()

    play(scenario())


def test_chat() -> None:
    """A chat would not reach the machines as its prompt, or its answer not be a message."""

    async def scenario() -> None:
        async with Rig() as rig:
            parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
            answer = (await rig.chat(parts).answer()).json
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": "mnop", "refusal": None}
            assert bytes(rig.workers["p"].seen[0]["prompt"]) == b"user: hello\n"
            events = (await rig.chat(stream=True).answer()).events
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            assert deltas == [{"role": "assistant", "content": ""}, *({"content": letter} for letter in "mnop")]

    play(scenario())


@pytest.mark.parametrize("pools", PAIRS)
@pytest.mark.parametrize(("most", "text"), [(0, ""), (1, "f"), (2, "fg")])
def test_few_tokens(pools: Any, most: int, text: str) -> None:
    """The one-token prefill leg would show in requests for zero, one or two tokens."""

    async def scenario() -> None:
        async with Rig(pools) as rig:
            answer = (await rig.complete(max_tokens=most).answer()).json
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "length")
            assert answer["usage"]["completion_tokens"] == most
            streamed = await rig.complete(max_tokens=most, stream=True).answer()
            assert (streamed.text, streamed.events[-1]) == (text, "[DONE]")
            assert streamed.events[-2]["choices"][0]["finish_reason"] == "length"
            rig.require_nothing_held()

    play(scenario())


def test_choices_and_prompts_keep_their_order() -> None:
    """Choices would be mixed up, or a prompt with several choices be counted for each."""

    async def scenario() -> None:
        async with Rig() as rig:
            answer = (await rig.complete([[1, 2], [1, 2, 3]], n=2, max_tokens=2).answer()).json
            assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "cd"), (1, "cd"), (2, "de"), (3, "de")]
            assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
            call = await rig.complete(["ab", "abc"], stream=True, max_tokens=2).answer()
            texts = {0: "", 1: ""}
            for event in call.events[:-1]:
                texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
            assert texts == {0: "cd", 1: "de"}

    play(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text", "reason", "tokens"),
    [
        ({"stop": "h"}, "fg", "h", 3),
        ({"stop": ["gh"]}, "f", "gh", 3),
        ({"stop": "f"}, "", "f", 1),
        ({"stop": "fg"}, "", "fg", 2),
        ({"stop": "gh", "include_stop_str_in_output": True}, "fgh", "gh", 3),
        ({"stop": "g", "min_tokens": 3}, "fghi", None, 4),
        ({"stop_token_ids": [104]}, "fg", 104, 3),
        ({"stop": "ij"}, "fghi", None, 4),
    ],
)
def test_stops(fields: dict[str, Any], text: str, reason: Any, tokens: int, stream: bool) -> None:
    """A stop would not cut the text where an unsplit engine does, the border between the machines included."""

    async def scenario() -> None:
        async with Rig() as rig:
            call = await rig.complete(stream=stream, return_token_ids=True, **fields).answer()
            if stream:
                choices = [event["choices"][0] for event in call.events[:-1]]
                found, ids = call.text, [token for choice in choices for token in choice["token_ids"]]
                last = choices[-1]
            else:
                last = call.json["choices"][0]
                found, ids = last["text"], last["token_ids"]
                assert call.json["usage"]["completion_tokens"] == tokens
                assert last["prompt_token_ids"] == list(b"hello")
            assert (found, last["stop_reason"], len(ids)) == (text, reason, tokens)
            assert last["finish_reason"] == ("length" if reason is None else "stop")
            await settle()
            rig.require_nothing_held()

    play(scenario())


@pytest.mark.parametrize(("text", "tokens"), [("", 1), ("a", 2), ("ab", 3)])
def test_end_of_text(text: str, tokens: int) -> None:
    """The end of the text would not end the answer, least of all as first token: the decode machine would wait."""

    async def scenario() -> None:
        async with Rig(rule=spelled(text)) as rig:
            answer = (await rig.complete(max_tokens=8).answer()).json
            assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (text, "stop")
            assert answer["usage"]["completion_tokens"] == tokens
            ended = rig.gateway.dispatcher.leases.ended
            assert {str(reason) for reason in ended} == {"completed"}
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_end_of_text_may_be_ignored() -> None:
    """An extension that load generators count on would end texts early."""

    async def scenario() -> None:
        async with Rig(rule=spelled("a")) as rig:
            answer = (await rig.complete(max_tokens=3, ignore_eos=True).answer()).json
            assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == ("length", 3)
            least = (await rig.complete(max_tokens=3, min_tokens=3).answer()).json
            assert least["usage"]["completion_tokens"] == 3

    play(scenario())


def test_special_tokens_may_be_shown() -> None:
    """An extension that shows special tokens would be ignored, or show the end of the text."""

    async def scenario() -> None:
        async with Rig(rule=spelled("a")) as rig:
            for fields, text in (({"min_tokens": 2}, "a<end>"), ({"ignore_eos": True}, "a<end><end>"), ({}, "a")):
                call = rig.complete(max_tokens=3, skip_special_tokens=False, **fields)
                assert (await call.answer()).json["choices"][0]["text"] == text

    play(scenario())


def test_logprobs_of_completions() -> None:
    """Log-probabilities of a token, the first above all, or of an echoed prompt would be lost or out of place."""

    async def scenario() -> None:
        async with Rig() as rig:
            choice = (await rig.complete("ab", max_tokens=2, logprobs=2, echo=True).answer()).json["choices"][0]
            assert choice["text"] == "abcd"
            assert choice["logprobs"] == {
                "tokens": ["a", "b", "c", "d"], "token_logprobs": [None, -0.25, -0.5, -0.5],
                "text_offset": [0, 1, 2, 3],
                "top_logprobs": [None, {}, {"c": -0.5, "d": -1.5}, {"d": -0.5, "e": -1.5}],
            }  # fmt: skip
            call = await rig.complete("ab", max_tokens=2, logprobs=0, stream=True).answer()
            parts = [event["choices"][0]["logprobs"] for event in call.events[:-1]]
            assert [(part["tokens"], part["text_offset"]) for part in parts] == [(["c"], [0]), (["d"], [1])]
            assert (await rig.complete("ab", max_tokens=0, echo=True).answer()).json["choices"][0]["text"] == "ab"

    play(scenario())


def test_logprobs_of_chats() -> None:
    """A chat's log-probabilities would lack bytes, or the likeliest tokens."""

    async def scenario() -> None:
        async with Rig(rule=spelled("漢")) as rig:
            answer = await rig.chat(max_tokens=3, logprobs=True, top_logprobs=1).answer()
            content = answer.json["choices"][0]["logprobs"]["content"]
            assert bytes(byte for token in content for byte in token["bytes"]).decode() == "漢"
            assert content[0]["top_logprobs"] == [{"token": "\ufffd", "logprob": -0.5, "bytes": [0xE6]}]
            assert answer.json["choices"][0]["message"]["content"] == "漢"

    play(scenario())


def test_machines_get_the_same_seed_and_unknown_fields() -> None:
    """The two machines would draw different tokens, or a field that we do not know be lost."""

    async def scenario() -> None:
        async with Rig() as rig:
            await rig.complete(priority=3, min_p=0.1).answer()
            prompt, token = rig.workers["p"].seen[0], rig.workers["t"].seen[0]
            assert prompt["seed"] == token["seed"]
            assert (prompt["priority"], token["min_p"]) == (3, 0.1)
            given, taken = prompt["kv_transfer_params"], token["kv_transfer_params"]
            assert (given["key"], given["peer"], given["peer_epoch"]) == (taken["key"], "t", 1)
            assert (taken["peer"], taken["do_remote_prefill"], given["do_remote_decode"]) == ("p", True, True)
            assert given["address"] == rig.workers["t"].snapshot()["address"]

    play(scenario())


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "prompt": "hello"} | fields


def chatted(**fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": "x"}]} | fields


WRONG = [
    (COMPLETIONS, b"{", 400, None),
    (COMPLETIONS, b"[1]", 400, None),
    (COMPLETIONS, b'{"model": "fake", "prompt": "\xff"}', 400, None),
    (COMPLETIONS, b"[" * 100_000, 400, None),
    (COMPLETIONS, {"prompt": "x"}, 400, "model"),
    (COMPLETIONS, asked(model="gpt-9"), 404, "model"),
    (COMPLETIONS, asked(max_tokens="4"), 400, "max_tokens"),
    (COMPLETIONS, asked(max_tokens=2**31 - 1), 400, "prompt"),
    (COMPLETIONS, asked(max_tokens=10**30), 400, "max_tokens"),
    (COMPLETIONS, asked(prompt=""), 400, "prompt"),
    (COMPLETIONS, asked(prompt=[300]), 400, "prompt"),
    (COMPLETIONS, asked(prompt="x" * 5000), 400, "prompt"),
    (COMPLETIONS, asked(logit_bias={"300": 1}), 400, "logit_bias"),
    (COMPLETIONS, asked(stop_token_ids=[300]), 400, "stop_token_ids"),
    (COMPLETIONS, asked(response_format={"type": "json_object"}), 400, "response_format"),
    (COMPLETIONS, asked(kv_transfer_params={"key": "x"}), 400, "kv_transfer_params"),
    (COMPLETIONS, asked(prompt_logprobs=1), 400, "prompt_logprobs"),
    (CHATS, chatted(tools=[{"type": "function"}]), 400, "tools"),
    (CHATS, chatted(messages=[]), 400, "messages"),
    (CHATS, chatted(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), 400, "messages.0.content"),
    (CHATS, chatted(n=100), 400, "n"),
    ("/v1/nothing", {}, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG)
def test_wrong_requests(path: str, body: Any, status: int, param: str | None) -> None:
    """A wrong request would be served, crash, blame the wrong field, or leave something behind."""

    async def scenario() -> None:
        async with Rig() as rig:
            call = await rig.call(path, body).answer()
            assert (call.status, call.json["error"]["type"]) == (status, "invalid_request_error")
            assert call.json["error"]["param"] == param
            assert not rig.workers["p"].seen
            rig.require_nothing_held()

    play(scenario())


def test_longer_than_any_machine_is_refused_with_figures() -> None:
    """A prompt that no machine can ever hold would wait, or be refused without saying why."""

    async def scenario() -> None:
        async with Rig(blocks=10) as rig:
            call = await rig.complete("x" * 200).answer()
            assert (call.status, call.json["error"]["code"]) == (400, "context_length_exceeded")
            assert "200" in call.json["error"]["message"]
            unbounded = await rig.call(COMPLETIONS, asked()).answer()
            assert unbounded.status == 200

    play(scenario())


@pytest.mark.parametrize("headers", [{}, {"content-length": "99999999"}])
def test_long_bodies_are_cut_off(headers: dict[str, str]) -> None:
    """A huge body would be kept in memory before it is refused."""

    async def scenario() -> None:
        async with Rig(limits=Limits(body_bytes=1000)) as rig:
            call = await rig.call(COMPLETIONS, [bytes(1 << 23)] * 5, headers=headers).answer()
            assert (call.status, call.headers["connection"]) == (413, "close")
            assert len(call.parts) >= 1

    play(scenario())


def test_slow_bodies_are_given_up() -> None:
    """A client that sends a byte a minute would hold a place for ever."""

    async def scenario() -> None:
        async with Rig(limits=Limits(header_s=0.01)) as rig:
            call = rig.call(COMPLETIONS, [b"{"])
            call.is_slow = True
            assert (await call.answer()).status == 408
            rig.require_nothing_held()

    play(scenario())


def test_too_many_requests() -> None:
    """A gateway that is full would queue without bound, or not say when to come back."""

    async def scenario() -> None:
        async with Rig(limits=Limits(live_requests=1)) as rig:
            rig.workers["p"].hold("prefill")
            first = rig.complete()
            await settle()
            second = await rig.complete().answer()
            assert (second.status, second.headers["retry-after"]) == (503, "1")
            rig.workers["p"].go("prefill")
            assert (await first.answer()).status == 200

    play(scenario())


def test_long_prompts_are_read_beside_the_event_loop() -> None:
    """A long prompt would be read otherwise than a short one, or its errors be lost in another thread."""

    async def scenario() -> None:
        async with Rig(context_tokens=100_000, blocks=10_000) as rig:
            assert (await rig.complete("x" * 40_000).answer()).json["usage"]["prompt_tokens"] == 40_000
            assert (await rig.complete("x" * 40_000, max_tokens="1").answer()).json["error"]["param"] == "max_tokens"

    play(scenario())


def test_the_machines_context_bounds_requests() -> None:
    """Every request without max_tokens would ask for more than a machine with a short context takes."""

    async def scenario() -> None:
        async with Rig() as rig:
            await rig.join("t2", "decode", context_tokens=100)
            assert (await rig.call("/v1/models").answer()).json["data"][0]["max_model_len"] == 100
            answered = (await rig.complete("x" * 40, max_tokens=None).answer()).json
            assert answered["usage"]["completion_tokens"] == 60
            for prompt, most in (("x" * 100, None), ("x" * 40, 61)):
                call = await rig.complete(prompt, max_tokens=most).answer()
                assert (call.status, call.json["error"]["code"]) == (400, "context_length_exceeded")
                assert "the longest context is 100 tokens" in call.json["error"]["message"]
            rig.workers["t2"].die()
            await settle()
            assert (await rig.complete("x" * 100).answer()).status == 200

    play(scenario())


def test_client_keys() -> None:
    """Someone without a key would be served, or the leases be shown to anybody."""

    async def scenario() -> None:
        async with Rig(keys=Keys(client=(key_digest("k"),))) as rig:
            for path, body in ((COMPLETIONS, asked()), ("/v1/models", None), ("/debug/kv", None)):
                assert (await rig.call(path, body).answer()).status == 401
                good = await rig.call(path, body, headers={"Authorization": "Bearer k"}).answer()
                assert good.status == 200
            assert (await rig.call("/health").answer()).status == 200

    play(scenario())


def test_models() -> None:
    """A client could not find out what is served."""

    async def scenario() -> None:
        async with Rig() as rig:
            listed = (await rig.call("/v1/models").answer()).json
            assert [model["id"] for model in listed["data"]] == ["fake"]
            assert (await rig.call("/v1/models/fake").answer()).json["object"] == "model"
            assert (await rig.call("/v1/models/other").answer()).status == 404

    play(scenario())


def test_a_page_that_takes_another_method_says_which() -> None:
    """A person who opens an endpoint in a browser would read that it is not there."""

    async def scenario() -> None:
        async with Rig() as rig:
            answer = await rig.call(COMPLETIONS).answer()
            assert answer.status == 405
            assert "allowed is POST" in answer.json["error"]["message"]

    play(scenario())


def test_ready_only_with_machines_for_both_phases() -> None:
    """A balancer would send requests to a gateway that has nowhere to send them."""

    async def scenario() -> None:
        async with Rig(()) as rig:
            assert (await rig.call("/ready").answer()).status == 503
            for fields in ({}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
                refused = await rig.complete(**fields).answer()
                assert (refused.status, refused.json["error"]["code"]) == (503, "no_capacity")
                assert int(refused.headers["retry-after"]) >= 1
            await rig.join("p", "prefill")
            await rig.join("t", "decode")
            ready = await rig.call("/ready").answer()
            assert (ready.status, ready.json["degraded"]) == (200, [])

    play(scenario())


def test_draining_serves_to_the_end() -> None:
    """A shutdown would cut requests off, or go on taking new ones."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].hold("token 2")
            call = rig.complete()
            await settle()
            draining = rig.gateway.drain(10.0)
            task = asyncio.create_task(draining)
            await settle()
            assert (await rig.complete().answer()).status == 503
            assert not task.done()
            rig.workers["t"].go("token 2")
            assert (await call.answer()).status == 200
            await settle()
            assert task.done()

    play(scenario())


def test_server_that_ends_at_once_still_answers() -> None:
    """A client would read "Internal Server Error", and take a restart for a bug."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].hold("prefill")
            call = rig.complete()
            await settle()
            call.cancel()
            await settle()
            assert (call.status, call.json["error"]["code"]) == (503, "no_capacity")
            rig.require_nothing_held()

    play(scenario())


def test_draining_ends_what_is_late() -> None:
    """A request that never ends would keep a gateway from ending."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].hold("token 2")
            call = rig.complete(stream=True)
            await settle()
            task = asyncio.create_task(rig.gateway.drain(10.0))
            await settle()
            rig.clock.advance(10.0)
            await call.answer()
            await settle()
            assert "error" in call.events[-1]
            assert task.done()
            rig.require_nothing_held()

    play(scenario())
