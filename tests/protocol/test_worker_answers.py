"""A worker's answers: the shapes of OpenAI and vLLM, and the ids a gateway makes its text from."""

from typing import Any

import orjson
import pytest

from phasesplit.errors import RequestError
from phasesplit.protocol.answers import usage
from phasesplit.protocol.openai_errors import error_answer
from phasesplit.protocol.worker import PrefillTimes, Scored
from phasesplit.protocol.worker_answers import TOKEN_NAME, ChunkPart, WorkerAnswer, read_answer

TEXTS = {1: "a", 2: "bc", 3: "\ufffd", 4: "\ufffd"}
HEAD = {"id": "r", "object": "text_completion", "created": 7, "model": "m"}
OUTPUT = (Scored(2, -0.5, ((2, -0.5), (1, -1.5))), Scored(3, -2.0, ((4, -0.25), (3, -2.0))))
PREFILL = (Scored(1), Scored(3, -3.0, ((2, -0.125),)))


def answer(**flags: bool) -> WorkerAnswer:
    return WorkerAnswer(request="r", created_s=7, model="m", spelled=TEXTS.__getitem__, **flags)


def choice_of(made: dict[str, Any]) -> dict[str, Any]:
    (choice,) = made["choices"]
    assert isinstance(choice, dict)
    return choice


def test_whole_answer() -> None:
    """A client that reads completions would not understand a worker."""
    used = usage([5], [2])
    part = ChunkPart(text="bc", output=OUTPUT, finish_reason="stop", stop_reason=3)
    expected = {
        "index": 0, "text": "bc", "logprobs": None, "finish_reason": "stop", "stop_reason": 3, "token_ids": [2, 3],
    }  # fmt: skip
    assert answer(has_token_ids=True).completion(part, used) == HEAD | {
        "choices": [expected],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }
    assert answer().completion(part, used, {"key": "k"})["kv_transfer_params"] == {"key": "k"}
    assert "token_ids" not in choice_of(answer().completion(part, used))


def test_chunks() -> None:
    """A stream would end without its usage, or tell a usage of its own in every chunk."""
    chunk = answer(has_token_ids=True).chunk(ChunkPart(text="bc", output=OUTPUT[:1]), with_usage=True)
    assert chunk["usage"] is None
    assert (choice_of(chunk)["token_ids"], choice_of(chunk)["finish_reason"]) == ([2], None)
    assert "usage" not in answer().chunk(ChunkPart(), with_usage=False)
    assert answer().usage_chunk(usage([1], [2])) == HEAD | {"choices": [], "usage": usage([1], [2])}


def test_logprobs_tell_ids() -> None:
    """The gateway could not tell two tokens of equal text apart, or would lose half a character."""
    told = choice_of(answer(has_logprobs=True).chunk(ChunkPart(output=OUTPUT, text_offset=4), with_usage=False))[
        "logprobs"
    ]
    assert told == {
        "tokens": ["bc", "\ufffd"],
        "token_logprobs": [-0.5, -2.0],
        "top_logprobs": [{"bc": -0.5, "a": -1.5}, {"\ufffd": -0.25}],
        "text_offset": [4, 6],
        "token_ids": [2, 3],
        "top_token_ids": [[2, 1], [4, 3]],
        "top_token_logprobs": [[-0.5, -1.5], [-0.25, -2.0]],
    }
    assert list(told["top_logprobs"][0]) == ["bc", "a"]


def test_tokens_are_named_by_id() -> None:
    """A client that asks for names that no two tokens share, as vLLM gives them, would get texts."""
    named = answer(has_logprobs=True, names_by_id=True).chunk(ChunkPart(output=OUTPUT), with_usage=False)
    told = choice_of(named)["logprobs"]
    assert told["tokens"] == ["token_id:2", "token_id:3"]
    assert told["top_logprobs"][1] == {"token_id:4": -0.25, "token_id:3": -2.0}


def test_echo_begins_with_the_prompt() -> None:
    """Log-probabilities of an echoed prompt would be lost, or counted as output."""
    flags = {"has_echo": True, "has_logprobs": True, "has_token_ids": True}
    choice = choice_of(answer(**flags).completion(ChunkPart(output=OUTPUT, prompt=PREFILL), usage([2], [2])))
    assert choice["logprobs"]["token_ids"] == [1, 3, 2, 3]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([2, 3], [1, 3])
    unasked = choice_of(answer(has_logprobs=True).completion(ChunkPart(output=OUTPUT, prompt=PREFILL), usage([2], [2])))
    assert unasked["logprobs"]["token_ids"] == [2, 3]


def test_prompt_logprobs_have_vllms_shape() -> None:
    """Tools that score prompts through vLLM would not understand a worker."""
    choice = choice_of(answer(has_prompt_logprobs=True).completion(ChunkPart(prompt=PREFILL), usage([2], [1])))
    assert choice["prompt_logprobs"] == [
        None,
        {
            "3": {"logprob": -3.0, "rank": None, "decoded_token": "\ufffd"},
            "2": {"logprob": -0.125, "rank": 1, "decoded_token": "bc"},
        },
    ]
    assert "prompt_logprobs" not in choice_of(answer().completion(ChunkPart(prompt=PREFILL), usage([2], [1])))


def test_errors() -> None:
    """A client's mistake would not be explained, or our own paths and states be shown."""
    told = error_answer(RequestError("n: too many", param="n", code="invalid_value")).body["error"]
    assert told == {"message": "n: too many", "type": "invalid_request_error", "param": "n", "code": "invalid_value"}
    assert error_answer(ValueError("secret")).body["error"]["message"] == "internal error"


@pytest.mark.parametrize("names_by_id", [False, True])
def test_what_a_machine_writes_the_gateway_reads(names_by_id: bool) -> None:
    """A token, its log-probability or a prompt's time would change on its way from a machine to the gateway."""
    times = PrefillTimes(0.25, 1.5)
    made = answer(has_token_ids=True, has_logprobs=True, has_prompt_logprobs=True, names_by_id=names_by_id)
    part = ChunkPart(output=OUTPUT, prompt=PREFILL, finish_reason="stop", times=times)
    read = read_answer(orjson.loads(orjson.dumps(made.completion(part, usage([2], [2])))))
    assert read.tokens == tuple(one.token for one in OUTPUT)
    assert read.scored == tuple(OUTPUT)
    assert [one.logprob for one in read.prompt_scored] == [one.logprob for one in PREFILL]
    assert (read.finish_reason, read.times) == ("stop", times)


def test_names_of_vllm_are_read() -> None:
    """The likeliest tokens of a machine that sends no ids with them, as vLLM does, would be lost."""
    logprobs = {"token_logprobs": [-1.0], "top_logprobs": [{f"{TOKEN_NAME}7": -1.0, f"{TOKEN_NAME}9": -2.0}]}
    found = read_answer({"choices": [{"token_ids": [7], "logprobs": logprobs, "finish_reason": "repetition"}]})
    assert found.scored == (Scored(7, -1.0, ((7, -1.0), (9, -2.0))),)
    assert found.finish_reason == "stop"
