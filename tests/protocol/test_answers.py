"""Answers, chunks, log-probabilities, events: the shapes that OpenAI's clients read."""

import pytest

from phasesplit.protocol.answers import (
    AnswerPiece,
    ClientAnswer,
    FinishedChoice,
    TokenLogprob,
    chat_logprobs,
    completion_logprobs,
    model_list,
    usage,
)

ANSWER = ClientAnswer("1", 1700000000, "m")
LOGPROBS = [
    TokenLogprob("a", -0.5, b"a", (("a", -0.5, b"a"), ("b", -1.0, b"b"))),
    TokenLogprob("\ufffd", -2.0, b"\xe6"),
]
USED = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_usage_is_counted_from_token_ids() -> None:
    """Usage would be counted from pieces of text, and a prompt with n choices be charged n times."""
    assert usage([3], [1, 2]) == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert usage([3, 4], [0]) == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}


def test_completion_shape() -> None:
    """A client of /v1/completions could not read the answer."""
    choices = [FinishedChoice(0, "ab", "length"), FinishedChoice(1, "c", "stop", LOGPROBS, 5, "END")]
    assert ANSWER.completion(choices, USED) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "m",
        "choices": [
            {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None},
            {
                "index": 1,
                "text": "c",
                "logprobs": completion_logprobs(LOGPROBS, 5),
                "finish_reason": "stop",
                "stop_reason": "END",
            },
        ],
        "usage": USED,
    }


def test_chat_shape() -> None:
    """A client of /v1/chat/completions could not read the answer."""
    answer = ANSWER.chat([FinishedChoice(0, "ab", "stop", LOGPROBS)], USED)
    assert (answer["id"], answer["object"], answer["usage"]) == ("chatcmpl-1", "chat.completion", USED)
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "ab", "refusal": None},
            "logprobs": chat_logprobs(LOGPROBS),
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


def test_completion_chunk_shape() -> None:
    """A client that streams completions could not read a chunk, or would miss the null usage before the last."""
    chunk = ANSWER.completion_chunk(AnswerPiece(1, "a", LOGPROBS, 4), with_usage=True)
    assert (chunk["object"], chunk["usage"]) == ("text_completion", None)
    assert chunk["choices"] == [
        {"index": 1, "text": "a", "logprobs": completion_logprobs(LOGPROBS, 4), "finish_reason": None}
    ]
    assert "usage" not in ANSWER.completion_chunk(AnswerPiece(0, "a"), with_usage=False)


def test_chat_chunks_shape() -> None:
    """A client that streams chats would not learn who speaks, or take the end for text."""
    first = ANSWER.role_chunk(1, with_usage=False)
    last = ANSWER.chat_chunk(AnswerPiece(1, finish_reason="length"), with_usage=False)
    middle = ANSWER.chat_chunk(AnswerPiece(1, "a"), with_usage=False)
    assert {first["object"], middle["object"], last["object"]} == {"chat.completion.chunk"}
    assert [chunk["choices"][0] for chunk in (first, middle, last)] == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},
        {"index": 1, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None},
        {"index": 1, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None},
    ]


@pytest.mark.parametrize("chunk", [ANSWER.completion_usage_chunk(USED), ANSWER.chat_usage_chunk(USED)])
def test_usage_chunk_has_no_choice(chunk: dict[str, object]) -> None:
    """A client would add a choice for the chunk that only carries usage."""
    assert (chunk["choices"], chunk["usage"]) == ([], USED)


def test_completion_logprobs_shape() -> None:
    """Offsets or likeliest tokens of a completion would not match its text."""
    assert completion_logprobs(
        [TokenLogprob("漢", -1.5, "漢".encode()), *LOGPROBS, TokenLogprob("c", None, b"c")], 7
    ) == {
        "tokens": ["漢", "a", "\ufffd", "c"],
        "token_logprobs": [-1.5, -0.5, -2.0, None],
        "top_logprobs": [{}, {"a": -0.5, "b": -1.0}, {}, None],
        "text_offset": [7, 8, 9, 10],
    }


def test_chat_logprobs_shape() -> None:
    """A chat's log-probabilities would lose the bytes of a token that is part of a character."""
    assert chat_logprobs(LOGPROBS) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "b", "logprob": -1.0, "bytes": [98]},
                ],
            },
            {"token": "\ufffd", "logprob": -2.0, "bytes": [0xE6], "top_logprobs": []},
        ],
        "refusal": None,
    }


def test_models_shape() -> None:
    """A client could not list the models."""
    entry = {"id": "m", "object": "model", "created": 1, "owned_by": "phasesplit", "max_model_len": 4096}
    assert model_list(["m"], 1, 4096) == {"object": "list", "data": [entry]}
