"""What the two machines of a request are sent, field by field."""

from typing import Any

import orjson
import pytest

from phasesplit.gateway.legs import split_legs, whole_leg
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.parsing import parsed_chat, parsed_completion
from phasesplit.protocol.completions import ChatRequest, ClientRequest, CompletionRequest

LIMITS = Limits(structured_output=True)
SEED = 77
PROMPT_IDS = [1, 2, 3]
TO, FROM = {"do_remote_decode": True}, {"do_remote_prefill": True}
MESSAGES = [{"role": "user", "content": "hello", "name": "ann"}]
BOTH = {"model": "m", "prompt": PROMPT_IDS, "seed": SEED, "return_token_ids": True}
PREFILL = BOTH | {"max_tokens": 1, "stream": False, "kv_transfer_params": TO}
DECODE = BOTH | {
    "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}, "kv_transfer_params": FROM,
}  # fmt: skip


def request_of(fields: dict[str, Any]) -> ClientRequest:
    if "messages" in fields:
        return parsed_chat(orjson.dumps({"model": "m"} | fields), LIMITS)
    return parsed_completion(orjson.dumps({"model": "m", "prompt": "p"} | fields), LIMITS)


def legs_of(fields: dict[str, Any], choice: int = 0) -> tuple[dict[str, Any], dict[str, Any] | None]:
    request = request_of(fields)
    most = 100 if request.most_tokens is None else request.most_tokens
    legs = split_legs(
        request, choice, PROMPT_IDS, most_tokens=most, seed=SEED, prefill_transfer=TO, decode_transfer=FROM
    )
    return legs.prefill, legs.decode


SAME: dict[str, Any] = {
    "ignore_eos": True, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "presence_penalty": 1.0, "frequency_penalty": 1.0,
    "repetition_penalty": 1.5, "logit_bias": {"5": 1.0}, "user": "u", "response_format": {"type": "json_object"},
    "seed": 5, "priority": 1, "min_p": {"a": {"b": 1}},
}  # fmt: skip
"""Fields that both legs repeat."""

BY_ID = {"return_tokens_as_token_ids": True}
STOPPING = {"include_stop_str_in_output": True}
DIFFERENT: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "n": (2, {}, {}),
    "best_of": (1, {}, {}),
    "suffix": ("", {}, {}),
    "max_tokens": (9, {}, {"max_tokens": 9}),
    "min_tokens": (4, {"min_tokens": 1}, {"min_tokens": 4}),
    "stop": (
        ["a", 7],
        {"stop": ["a"], "stop_token_ids": [7]} | STOPPING,
        {"stop": ["a"], "stop_token_ids": [7]} | STOPPING,
    ),
    "stop_token_ids": ([7], {"stop_token_ids": [7]} | STOPPING, {"stop_token_ids": [7]} | STOPPING),
    "include_stop_str_in_output": (False, {}, {}),
    "stream": (True, {}, {}),
    "logprobs": (3, {"logprobs": 3} | BY_ID, {"logprobs": 3} | BY_ID),
    "echo": (True, {}, {}),
    "return_token_ids": (False, {}, {}),
}
"""A field, its value, and what it adds to the prefill leg and to the decode leg."""


@pytest.mark.parametrize("field", SAME)
def test_field_is_repeated(field: str) -> None:
    """A client's setting would not reach one of the two machines, and its tokens differ from an unsplit engine's."""
    added = {field: SAME[field]}
    assert legs_of(added) == (PREFILL | added, DECODE | added)


@pytest.mark.parametrize("field", DIFFERENT)
def test_field_is_derived(field: str) -> None:
    """A client's field would collide with the prefill leg's single token, or be lost on the decode leg."""
    value, of_prefill, of_decode = DIFFERENT[field]
    assert legs_of({field: value}) == (PREFILL | of_prefill, DECODE | of_decode)


def test_stream_options_stay_here() -> None:
    """The prefill leg would be refused for options of a stream that it does not have."""
    prompt, token = legs_of({"stream": True, "stream_options": {"include_usage": False}})
    assert "stream_options" not in prompt
    assert token is not None
    assert token["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_chat_reaches_machines_as_a_completion(field: str) -> None:
    """A machine would have to know chats, or read another name of the bound and decode without end."""
    assert legs_of({"messages": MESSAGES, field: 9}) == (PREFILL, DECODE | {"max_tokens": 9})


def test_what_templates_read_stays_here() -> None:
    """A machine would refuse a request for a field that has done its work."""
    assert legs_of({"messages": MESSAGES, "chat_template_kwargs": {"a": 1}, "tool_choice": "none"}) == (PREFILL, DECODE)


@pytest.mark.parametrize(("fields", "count"), [({"logprobs": True, "top_logprobs": 2}, 2), ({"logprobs": True}, 0)])
def test_chat_logprobs_reach_both_machines(fields: dict[str, Any], count: int) -> None:
    """The first token's log-probabilities would be lost."""
    added = {"logprobs": count} | BY_ID
    assert legs_of({"messages": MESSAGES} | fields) == (PREFILL | added, DECODE | added)


def test_echo_asks_the_prefill_machine_about_the_prompt() -> None:
    """The prompt's log-probabilities would be asked of the machine that does not compute it, or of none."""
    prompt, token = legs_of({"echo": True, "logprobs": 0})
    assert token is not None
    assert (prompt["prompt_logprobs"], "prompt_logprobs" in token, "echo" in prompt) == (0, False, False)


def test_every_field_has_its_test() -> None:
    """A field would be added to the wire without a decision on what the legs do with it."""
    elsewhere = {
        "model", "prompt", "messages", "stream_options", "max_completion_tokens", "top_logprobs", "add_special_tokens",
    }  # fmt: skip
    fields = set(CompletionRequest.model_fields) | set(ChatRequest.model_fields)
    assert fields == (set(SAME) | set(DIFFERENT) | elsewhere) & fields
    assert {*SAME, *DIFFERENT} - fields == {"priority", "min_p", "return_token_ids"}


@pytest.mark.parametrize("most", [0, 1])
def test_one_token_needs_no_second_machine(most: int) -> None:
    """KV would be moved for a token that nobody asked for, or a machine be asked for zero tokens."""
    prompt, token = legs_of({"max_tokens": most})
    assert (prompt["max_tokens"], token, "kv_transfer_params" in prompt) == (1, None, False)


def test_two_tokens_need_both_machines() -> None:
    """The second token would never be made."""
    prompt, token = legs_of({"max_tokens": 2, "min_tokens": 2})
    assert token is not None
    assert (prompt["max_tokens"], prompt["min_tokens"]) == (1, 1)
    assert (token["max_tokens"], token["min_tokens"]) == (2, 2)


def test_choices_have_their_own_seed() -> None:
    """Choices would repeat one another, or a choice's two machines draw different first tokens."""
    fields = {"prompt": ["p", "q"], "n": 2, "seed": 10}
    drawn = [legs_of(fields, choice) for choice in range(4)]
    assert [prompt["seed"] for prompt, _ in drawn] == [10, 11, 10, 11]
    assert all(token is not None and token["seed"] == prompt["seed"] for prompt, token in drawn)
    unseeded = [legs_of({"prompt": ["p", "q"], "n": 2}, choice)[0]["seed"] for choice in range(4)]
    assert unseeded == [SEED, SEED + 1, SEED + 2, SEED + 3]


def test_an_output_that_goes_on_does_not_use_its_draws_again() -> None:
    """Machines that take the output for prompt would repeat the luck of its beginning, or the two of a pair differ."""

    def seeds(fields: dict[str, Any], choice: int, emitted: tuple[int, ...]) -> tuple[int, int]:
        request = request_of(fields)
        legs = split_legs(
            request, choice, PROMPT_IDS, most_tokens=100, seed=2**63 - 1, emitted=emitted, prefill_transfer=TO,
            decode_transfer=FROM,
        )  # fmt: skip
        assert legs.decode is not None
        return legs.prefill["seed"], legs.decode["seed"]

    drawn = [seeds({"n": 3}, choice, (7,) * made) for choice in range(3) for made in (0, 1, 2, 50)]
    assert all(prompt == token and 0 <= prompt < 2**63 for prompt, token in drawn)
    assert len(set(drawn)) == len(drawn)
    # The client's own seed says what comes; only machines that count on from the output's beginning are sent it again.
    assert seeds({"seed": 5}, 0, (7,)) == (5, 5)


def test_largest_seed_has_a_successor() -> None:
    """The second choice would be refused for a seed out of range."""
    assert legs_of({"seed": 2**63 - 1, "n": 2}, 1)[0]["seed"] == -(2**63)


def test_greedy_choice_needs_no_seed() -> None:
    """Greedy requests would pay for a random generator of their own."""
    assert "seed" not in legs_of({"temperature": 0})[0]


def test_null_is_left_out() -> None:
    """A null that the client's library fills in would be refused by a strict machine."""
    prompt, token = legs_of({"temperature": None, "logit_bias": None, "stop": None, "odd": None, "echo": None})
    assert (prompt, token) == (PREFILL, DECODE)


def test_legs_do_not_share_the_dispatchers_fields() -> None:
    """A change to one leg's transfer would reach the other request's."""
    prompt, _ = legs_of({})
    assert prompt["kv_transfer_params"] is not TO


def test_one_machine_is_sent_the_whole_request() -> None:
    """A machine that takes both phases would be sent half of the request."""
    request = request_of({"max_tokens": 9, "min_tokens": 4, "echo": True, "logprobs": 1, "n": 2, "stream": False})
    leg = whole_leg(request, 1, PROMPT_IDS, most_tokens=9, seed=SEED)
    assert leg == BOTH | {
        "max_tokens": 9, "min_tokens": 4, "seed": SEED + 1, "stream": True, "stream_options": {"include_usage": True},
        "logprobs": 1, "prompt_logprobs": 1, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    assert whole_leg(request_of({"max_tokens": 0}), 0, PROMPT_IDS, most_tokens=0, seed=SEED)["max_tokens"] == 1
