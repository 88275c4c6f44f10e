"""A split answer equals an unsplit one, and one whose machines were lost meanwhile, over combinations of fields."""

import random
from typing import Any

import pytest

from gateways import SPLIT, Call, Rig, play, settle

WORDS = "the quick brown fox 漢字 jumps over\n".encode()


def told(prompt: Any, place: int) -> int:
    """Return a text with spaces, line breaks and characters of three bytes, that ends somewhere."""
    at = len(prompt) + place
    return 256 if at % 41 == 40 else WORDS[at % len(WORDS)]


def drawn(rng: random.Random) -> dict[str, Any]:
    """Return some fields of a request."""
    choices: dict[str, list[Any]] = {
        "max_tokens": [0, 1, 2, 3, 16, 60],
        "min_tokens": [0, 1, 2, 5],
        "stop": ["o", ["quick", "fox"], "漢", " ", ["字 j", "x"]],
        "stop_token_ids": [[32], [10, 98]],
        "include_stop_str_in_output": [True],
        "ignore_eos": [True],
        "logprobs": [0, 3],
        "echo": [True],
        "n": [2],
        "prompt": ["a", "xy" * 8, ["b", "cde"], [1, 2, 3], [[4], [5, 6]]],
        "return_token_ids": [True],
    }
    fields = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.4}
    fields["min_tokens"] = min(fields.get("min_tokens", 0), fields.get("max_tokens", 4))
    return fields


STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def read(call: Call) -> list[Any]:
    """Return what a client reads of a stream, without what is new with each request: choices and usage."""
    assert call.events[-1] == "[DONE]"
    streamed: dict[int, dict[str, Any]] = {}
    for event in call.events[:-1]:
        assert "error" not in event
        for choice in event["choices"]:
            one = streamed.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": {}})
            one["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            one["finish_reason"] = choice["finish_reason"]
            if "token_ids" in choice:
                one.setdefault("token_ids", []).extend(choice["token_ids"])
            for name, values in (choice["logprobs"] or {}).items():
                one["logprobs"].setdefault(name, []).extend(values or ())
    return [streamed, call.events[-2]["usage"]]


async def answers(pools: Any, fields: dict[str, Any]) -> list[Any]:
    """Return what clients read, whole and streamed, without what is new with each request."""
    async with Rig(pools, rule=told) as rig:
        whole = (await rig.complete(**fields).answer()).json
        streamed, usage = read(await rig.complete(**fields, **STREAMED).answer())
        await settle()
        rig.require_nothing_held()
        assert usage == whole["usage"]
        for one in whole["choices"]:
            found = streamed[one["index"]]
            assert found == {name: one[name] or ({} if name == "logprobs" else one[name]) for name in found}
        return [whole["choices"], whole["usage"]]


@pytest.mark.parametrize("seed", range(25))
def test_split_and_streamed_answers_equal_whole_ones(seed: int) -> None:
    """Some combination of fields would show where the two machines meet, or differ in a stream."""

    async def scenario() -> None:
        rng = random.Random(seed)  # noqa: S311 - picks what is tested
        for _ in range(4):
            fields = drawn(rng)
            assert await answers(SPLIT, fields) == await answers((("u", "unsplit"),), fields), fields

    play(scenario())


async def cut(rig: Rig, call: Call, place: int) -> Call:
    """Kill the machine that is about to tell a token of its answer, as soon as there is one, and wait for the end."""
    for worker in rig.workers.values():
        worker.hold(f"token {place}")
    await settle()
    victim = next((worker for worker in rig.workers.values() if worker.waiting(f"token {place}")), None)
    if victim is not None:
        victim.die()
    for worker in rig.workers.values():
        worker.go(f"token {place}")
    await rig.pass_time(0.5)
    return await call.answer()


@pytest.mark.parametrize("pools", [(*SPLIT, ("t2", "decode")), (("u", "unsplit"), ("u2", "unsplit"))])
@pytest.mark.parametrize("seed", range(25))
def test_answers_of_lost_machines_equal_undisturbed_ones(pools: Any, seed: int) -> None:
    """Some combination of fields would show where one machine was lost and another went on."""

    async def scenario() -> None:
        rng = random.Random(seed)  # noqa: S311 - picks what is tested
        fields, place = drawn(rng), rng.randrange(1, 8)
        is_chat = rng.random() < 0.4
        if is_chat:
            fields = {name: value for name, value in fields.items() if name not in ("prompt", "echo")}
            fields |= {"logprobs": True, "top_logprobs": 2} if "logprobs" in fields else {}
        for more in (STREAMED, {}):
            found = []
            for disturbed in (False, True):
                async with Rig(pools, rule=told) as rig:
                    call = (rig.chat if is_chat else rig.complete)(**fields, **more)
                    await (cut(rig, call, place) if disturbed else call.answer())
                    assert call.status == 200
                    found.append(read(call) if more else [call.json["choices"], call.json["usage"]])
                    lost = sum(worker.is_dead for worker in rig.workers.values())
                    assert sum(record["continued"] for record in rig.records) >= lost
                    await settle()
                    rig.require_nothing_held()
            assert found[0] == found[1], fields

    play(scenario())
