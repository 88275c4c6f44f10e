"""A split answer equals an unsplit one, over combinations of fields."""

import random
from typing import Any

import pytest

from gateways import SPLIT, Rig, play, settle

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


async def answers(pools: Any, fields: dict[str, Any]) -> list[Any]:
    """Return what clients read, whole and streamed, without what is new with each request."""
    async with Rig(pools, rule=told) as rig:
        whole = (await rig.complete(**fields).answer()).json
        call = await rig.complete(**fields, stream=True, stream_options={"include_usage": True}).answer()
        streamed: dict[int, dict[str, Any]] = {}
        for event in call.events[:-1]:
            assert "error" not in event
            for choice in event["choices"]:
                one = streamed.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": {}})
                one["text"] += choice["text"]
                one["finish_reason"] = choice["finish_reason"]
                for name, values in (choice["logprobs"] or {}).items():
                    one["logprobs"].setdefault(name, []).extend(values)
        await settle()
        rig.demand_nothing_held()
        assert call.events[-1] == "[DONE]"
        assert call.events[-2]["usage"] == whole["usage"]
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
