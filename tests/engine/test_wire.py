"""The worker's side of the wire, against what the gateway's legs can send."""

from typing import Any

import orjson
import pytest

from phasesplit.engine.sampling import Sampling
from phasesplit.engine.wire import Served, WorkerRequest, parsed_request
from phasesplit.errors import RequestError
from phasesplit.gateway.legs import split_legs, whole_leg
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.parsing import parsed_chat, parsed_completion
from phasesplit.protocol.completions import ChatRequest, CompletionRequest, WorkerBody
from phasesplit.protocol.worker import Address, SendKv, TakeKv

SEED, OURS = 77, 3
ADDRESS = {"boot_id": "b", "unix": "/run/w.sock", "tcp": ["10.0.0.1", 7000]}
TO = {"do_remote_decode": True, "key": "r.0", "peer": "t1", "peer_epoch": 4, "address": ADDRESS, "epoch": 2}
FROM = {"do_remote_prefill": True, "key": "r.0", "peer": "p1", "peer_epoch": 2, "epoch": 4}


def encode(text: str, has_start: bool) -> list[int]:
    return [1] * has_start + [ord(letter) % 300 for letter in text]


SERVED = Served(models=("m", "other"), vocab=300, context_tokens=100, encode=encode)


def parsed(**fields: Any) -> WorkerRequest:
    return parsed_request(orjson.dumps({"model": "m", "prompt": [5, 6]} | fields), SERVED, seed=OURS)


def error_of(body: bytes | None = None, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parsed_request(body, SERVED, seed=OURS) if body is not None else parsed(**fields)
    assert "\n" not in str(caught.value)
    return caught.value


def through_the_gateway(fields: dict[str, Any]) -> dict[str, WorkerRequest]:
    """Return what a worker makes of each body that the gateway derives."""
    limits = Limits(structured_output=True)
    body = orjson.dumps({"model": "m"} | ({} if "messages" in fields else {"prompt": [5, 6]}) | fields)
    request = parsed_chat(body, limits) if "messages" in fields else parsed_completion(body, limits)
    most = 50 if request.most_tokens is None else request.most_tokens
    legs = split_legs(request, 0, [5, 6], most_tokens=most, seed=SEED, prefill_transfer=TO, decode_transfer=FROM)
    bodies = {
        "prefill": legs.prefill,
        "decode": legs.decode,
        "whole": whole_leg(request, 0, [5, 6], most_tokens=most, seed=SEED),
    }
    return {
        name: parsed_request(orjson.dumps(leg), SERVED, seed=OURS) for name, leg in bodies.items() if leg is not None
    }


def on_all(expected: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(("prefill", "decode", "whole"), expected)


IN_SAMPLING: dict[str, tuple[Any, Any]] = {
    "temperature": (0.5, 0.5), "top_p": (0.25, 0.25), "top_k": (3, 3), "presence_penalty": (1.0, 1.0),
    "frequency_penalty": (-1.5, -1.5), "repetition_penalty": (2, 2.0), "seed": (-5, -5),
    "logit_bias": ({"5": 1, "6": -2.5}, ((5, 1.0), (6, -2.5))), "ignore_eos": (True, True),
    "stop_token_ids": ([7], (7,)), "logprobs": (4, 4), "min_p": (0.25, 0.25),
}  # fmt: skip
"""A field of clients, its value, and how it arrives in `Sampling` on every leg."""
ELSEWHERE: dict[str, tuple[Any, dict[str, dict[str, Any]]]] = {
    "model": ("other", on_all({"model": "other"})),
    "prompt": ([5, 6], on_all({"prompt_ids": (5, 6)})),
    "max_tokens": (9, {"prefill": {"max_tokens": 1}, "decode": {"max_tokens": 9}, "whole": {"max_tokens": 9}}),
    "stop": ("ab", on_all({"stop": ("ab",), "include_stop": True})),
    "stream": (
        False,
        {"prefill": {"stream": False, "include_usage": False}, "decode": {"stream": True, "include_usage": True}},
    ),
    "return_token_ids": (False, on_all({"return_token_ids": True})),
}
"""A field of clients, its value, and what of the worker's request it sets on each leg."""
ASIDE = {
    "n": 2, "best_of": 1, "suffix": "", "include_stop_str_in_output": True, "user": "ann",
    "stream_options": {"include_usage": True}, "response_format": {"type": "text"},
}  # fmt: skip
"""Fields that the gateway settles itself, or that change no answer."""
OF_CHATS = {"messages", "max_completion_tokens", "top_logprobs"}


@pytest.mark.parametrize("field", IN_SAMPLING)
def test_setting_is_honoured_on_every_leg(field: str) -> None:
    """A client's setting would be dropped between the gateway and the engine."""
    value, arrived = IN_SAMPLING[field]
    for request in through_the_gateway({field: value}).values():
        assert getattr(request.sampling, field) == arrived != getattr(Sampling(), field)


@pytest.mark.parametrize("field", ELSEWHERE)
def test_field_is_honoured(field: str) -> None:
    """A client's field would be dropped between the gateway and the engine."""
    value, arrived = ELSEWHERE[field]
    found = through_the_gateway({field: value})
    for leg, attributes in arrived.items():
        for name, expected in attributes.items():
            assert getattr(found[leg], name) == expected


@pytest.mark.parametrize("field", ASIDE)
def test_field_of_the_gateway_disturbs_no_leg(field: str) -> None:
    """A field that the gateway settles would make the worker refuse the request."""
    needed = {"stream": True} if field == "stream_options" else {}
    assert {*through_the_gateway({field: ASIDE[field]} | needed)} == {"prefill", "decode", "whole"}


def test_min_tokens_reach_both_machines() -> None:
    """The first token could end the text on one machine and not on the other."""
    found = through_the_gateway({"min_tokens": 4, "max_tokens": 9})
    least = {leg: request.sampling.min_tokens for leg, request in found.items()}
    assert least == {"prefill": 1, "decode": 4, "whole": 4}


def test_chat_fields_are_honoured() -> None:
    """A chat's bound or log-probabilities would be lost, which have other names than a completion's."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True}
    found = through_the_gateway(chat | {"max_completion_tokens": 8, "top_logprobs": 2})
    bounds = {leg: request.max_tokens for leg, request in found.items()}
    assert bounds == {"prefill": 1, "decode": 8, "whole": 8}
    assert {request.sampling.logprobs for request in found.values()} == {2}
    for asked, expected in ((chat, 0), (chat | {"logprobs": False}, None)):
        assert through_the_gateway(asked)["whole"].sampling.logprobs == expected


def test_echo_scores_the_prompt_on_one_machine() -> None:
    """An echoed prompt would come without its log-probabilities, or the decode machine compute the prompt again."""
    found = through_the_gateway({"echo": True, "logprobs": 3})
    assert {leg: request.wants_prompt_logprobs for leg, request in found.items()} == {
        "prefill": 3, "decode": None, "whole": 3,
    }  # fmt: skip
    assert all(request.names_by_id for request in found.values())
    assert all(request.wants_prompt_logprobs is None for request in through_the_gateway({"echo": True}).values())


def test_every_field_of_clients_is_decided_on() -> None:
    """A field would be added to the gateway that the worker silently ignores."""
    fields = set(CompletionRequest.model_fields) | set(ChatRequest.model_fields)
    decided = {*IN_SAMPLING, *ELSEWHERE, *ASIDE, *OF_CHATS, "min_tokens", "echo", "add_special_tokens"}
    assert fields == decided - {"min_p", "return_token_ids"}
    ours = {
        "min_p", "kv_transfer_params", "prompt_logprobs", "return_token_ids",
        "return_tokens_as_token_ids", "resumed_tokens",
    }  # fmt: skip
    assert set(WorkerBody.model_fields) - fields == ours
    assert fields - set(WorkerBody.model_fields) == {"messages", "suffix", "response_format", "user"}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}}, {"response_format": {"type": "json_schema"}},
        {"response_format": "json"}, {"tools": [{"type": "function"}]}, {"guided_json": {"a": 1}},
        {"guided_choice": ["a"]}, {"structured_outputs": {"regex": "a"}}, {"use_beam_search": True}, {"suffix": "x"},
        {"bad_words": ["a"]}, {"allowed_token_ids": [1]}, {"messages": [{"role": "user", "content": "hi"}]},
        {"truncate_prompt_tokens": 5}, {"prompt_embeds": "AAAA"},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
def test_what_the_engine_cannot_do_is_refused(fields: dict[str, Any]) -> None:
    """An answer would come that silently ignores what the client asked for."""
    error = error_of(**fields)
    assert (error.status, error.param, error.code) == (400, next(iter(fields)), "unsupported_parameter")


def test_asking_for_nothing_is_no_question() -> None:
    """Clients that fill in empty fields would be refused; so would those that send a field nobody knows."""
    assert parsed(tools=[], guided_json=None, suffix="", use_beam_search=False, priority=3, odd={"a": 1}) == parsed()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"), ({"prompt": "", "add_special_tokens": False}, "prompt"), ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1]]}, "prompt"), ({"prompt": [1, True]}, "prompt"), ({"prompt": [300]}, "prompt"),
        ({"prompt": [-1]}, "prompt"), ({"prompt": [1] * 100}, "prompt"),
        ({"prompt": [1] * 90, "max_tokens": 11}, "prompt"), ({"max_tokens": 2**63 - 1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"resumed_tokens": 3}, "resumed_tokens"), ({"resumed_tokens": -1}, "resumed_tokens"),
        ({"resumed_tokens": 1, "echo": True}, "resumed_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"), ({"n": 2}, "n"), ({"best_of": 2}, "best_of"),
        ({"temperature": -1}, "temperature"), ({"temperature": True}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"), ({"min_p": 1.5}, "min_p"), ({"seed": 1.0}, "seed"), ({"stop": [""]}, "stop"),
        ({"stop": [7]}, "stop"), ({"stop": ["a"] * 17}, "stop"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": 7}, "stop_token_ids"), ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"), ({"logprobs": 21}, "logprobs"), ({"logprobs": "2"}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"), ({"echo": 1}, "echo"),
        ({"stream": "yes"}, "stream"), ({"stream_options": {}}, "stream_options"), ({"model": None}, "model"),
        ({"kv_transfer_params": {"do_remote_decode": 1}}, "kv_transfer_params.do_remote_decode"),
        ({"kv_transfer_params": TO}, "max_tokens"),
        ({"kv_transfer_params": FROM, "echo": True}, "echo"),
        ({"kv_transfer_params": FROM, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"kv_transfer_params": TO | FROM}, "kv_transfer_params"),
        ({"kv_transfer_params": FROM | {"epoch": -1}}, "kv_transfer_params.epoch"),
        ({"kv_transfer_params": TO | {"address": {"unix": "x"}}}, "kv_transfer_params.address.boot_id"),
        ({"kv_transfer_params": TO | {"address": ADDRESS | {"tcp": ["h", 0]}}}, "kv_transfer_params.address.tcp"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_fields_are_named(fields: dict[str, Any], param: str) -> None:
    """A wrong field would reach the engine thread, or be refused without being named."""
    error = error_of(**fields)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("name", ["key", "peer", "peer_epoch", "epoch", "address"])
def test_transfer_needs_every_part(name: str) -> None:
    """A worker would compute KV that it cannot send, or wait for KV that it cannot name."""
    for whole in (TO, FROM):
        if name in whole:
            error = error_of(kv_transfer_params={one: whole[one] for one in whole if one != name}, max_tokens=1)
            assert (error.param, error.code) == (f"kv_transfer_params.{name}", "missing_required_parameter")


def test_transfers_arrive() -> None:
    """A worker would send the KV to the wrong place, or under another name than its peer awaits."""
    found = through_the_gateway({"max_tokens": 5})
    prefill, decode, whole = (found[leg] for leg in ("prefill", "decode", "whole"))
    assert prefill.transfer == SendKv("r.0", "t1", 4, Address("b", "/run/w.sock", ("10.0.0.1", 7000)))
    assert decode.transfer == TakeKv("r.0", "p1", 2)
    assert (prefill.epoch, decode.epoch, whole.transfer, whole.epoch) == (2, 4, None, None)
    assert parsed(kv_transfer_params={"epoch": 6}).epoch == 6


def test_stale_epoch_is_refused() -> None:
    """An order meant for a worker that has ended would be taken by its successor."""
    parsed().require_epoch(9)
    stale = parsed(kv_transfer_params=FROM)
    stale.require_epoch(4)
    with pytest.raises(RequestError, match="got 4, this worker is in epoch 5") as caught:
        stale.require_epoch(5)
    assert caught.value.status == 409


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b'{"model": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 5000]
)
def test_body_that_is_no_object_is_refused(body: bytes) -> None:
    """Broken JSON or UTF-8 would be answered as our own error."""
    assert (error_of(body).status, error_of(body).code) == (400, "invalid_json")


def test_missing_and_unknown_models() -> None:
    """A client would get another model's answer."""
    assert error_of(b'{"prompt": "a"}').code == "missing_required_parameter"
    assert (error_of(model="nobody").status, error_of(model="nobody").code) == (404, "model_not_found")


def test_text_prompts_are_encoded() -> None:
    """A client that talks to a worker directly could not send text, or would miss the model's start token."""
    assert parsed(prompt="A").prompt_ids == (1, 65)
    assert parsed(prompt="A", add_special_tokens=False).prompt_ids == (65,)


def test_what_is_left_out() -> None:
    """A request without settings would be answered otherwise than OpenAI's defaults say."""
    request = parsed()
    assert request.sampling == Sampling(temperature=1.0, seed=OURS)
    assert (request.max_tokens, request.stream, request.wants_prompt_logprobs) == (98, False, None)
    nulls = dict.fromkeys(set(WorkerBody.model_fields) - {"model", "prompt"})
    assert parsed(**nulls) == request


def test_prompt_logprobs_are_wanted_for_either_reason() -> None:
    """The logits of the prompt's rows would not be computed, or for nobody."""
    assert parsed(prompt_logprobs=0).wants_prompt_logprobs == 0
    assert parsed(echo=True).wants_prompt_logprobs is None
    assert parsed(logprobs=3).wants_prompt_logprobs is None
    assert parsed(echo=True, logprobs=3, prompt_logprobs=2).wants_prompt_logprobs == 3
