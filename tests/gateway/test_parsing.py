"""From bodies to requests: what is accepted, and what is said about the rest."""

from collections.abc import Callable

import orjson
import pytest

from phasesplit.errors import RequestError
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.parsing import output_bound, parsed_chat, parsed_completion
from phasesplit.protocol.completions import ClientRequest, extras

LIMITS = Limits()
COMPLETION = {"model": "m", "prompt": "hello"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def completion(limits: Limits = LIMITS, **fields: object) -> ClientRequest:
    return parsed_completion(orjson.dumps(COMPLETION | fields), limits)


def chat(limits: Limits = LIMITS, **fields: object) -> ClientRequest:
    return parsed_chat(orjson.dumps(CHAT | fields), limits)


def refusal(parse: Callable[..., ClientRequest], **fields: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    error = caught.value
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    return error


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
)
def test_prompts_have_four_forms(prompt: object, parsed: tuple[object, ...]) -> None:
    """A form of prompt that OpenAI's clients send would be refused, or read as another."""
    request = completion(prompt=prompt)
    assert (request.prompt, request.prompt_count) == (parsed, len(parsed))


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 0, "top_p": 1, "seed": -5, "stream": True, "stream_options": {"include_usage": True}},
        {"stop": "x"}, {"stop": ["a", "b", "c", "d"]}, {"stop": None}, {"stop": [13]}, {"stop_token_ids": [1]},
        {"max_tokens": 0}, {"max_tokens": 1}, {"max_tokens": 2}, {"max_tokens": None}, {"logit_bias": {"50256": -100}},
        {"top_k": -1}, {"min_tokens": 2, "max_tokens": 2}, {"user": "u"}, {"response_format": {"type": "text"}},
        {"presence_penalty": -2, "frequency_penalty": 2.0, "repetition_penalty": 1.1}, {"n": None, "stream": None},
    ],
)  # fmt: skip
@pytest.mark.parametrize("parse", [completion, chat])
def test_right_fields_are_accepted(parse: Callable[..., ClientRequest], fields: dict[str, object]) -> None:
    """A client that keeps to the API would be turned away."""
    assert parse(**fields).model == "m"


WRONG = [
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": 17}, "n", "invalid_value"),
    ({"n": "2"}, "n", "invalid_type"),
    ({"n": True}, "n", "invalid_type"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 10**12}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"stop": ["a"] * 5}, "stop", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": [True]}, "stop", "invalid_value"),
    ({"stop": {"a": 1}}, "stop", "invalid_value"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage", "invalid_type"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"0" * 11 + "9" * 10: 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "invalid_value"),
    ({"min_tokens": 3, "max_tokens": 2}, "min_tokens", "invalid_value"),
    ({"model": ""}, "model", "invalid_value"),
    ({"model": None}, "model", "invalid_type"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params", "unsupported_parameter"),
    ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params", "unsupported_parameter"),
    ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG)
@pytest.mark.parametrize("parse", [completion, chat])
def test_wrong_fields_are_named(
    parse: Callable[..., ClientRequest], fields: dict[str, object], param: str, code: str
) -> None:
    """A wrong field would pass, or its client not learn which one it is."""
    error = refusal(parse, **fields)
    assert (error.status, error.param, error.code) == (400, param, code)


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (completion, {"prompt": []}, "prompt"),
        (completion, {"prompt": [[]]}, "prompt"),
        (completion, {"prompt": [1, "a"]}, "prompt"),
        (completion, {"prompt": [-1]}, "prompt"),
        (completion, {"prompt": [1, True]}, "prompt"),
        (completion, {"prompt": [1, 2**31]}, "prompt"),
        (completion, {"prompt": None}, "prompt"),
        (completion, {"prompt": ["a"] * 9, "n": 2}, "n"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"best_of": 3, "n": 2}, "best_of"),
        (completion, {"suffix": "end"}, "suffix"),
        (chat, {"messages": []}, "messages"),
        (chat, {"messages": [{"content": "x"}]}, "messages.0.role"),
        (chat, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (chat, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (chat, {"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content"),
        (chat, {"top_logprobs": 2}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ],
)
def test_wrong_fields_of_one_endpoint_are_named(
    parse: Callable[..., ClientRequest], fields: dict[str, object], param: str
) -> None:
    """A wrong field of one endpoint would pass, or its client not learn which one it is."""
    error = refusal(parse, **fields)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"a": \xff}', b"[" * 100_000, b'{"model": NaN}', b'{"a": "\\ud800"}']
)
@pytest.mark.parametrize("parse", [parsed_completion, parsed_chat])
def test_bodies_that_are_not_objects_are_refused(parse: Callable[[bytes, Limits], ClientRequest], body: bytes) -> None:
    """Broken JSON, broken UTF-8 or deep nesting would be a 500 instead of a 400."""
    with pytest.raises(RequestError) as caught:
        parse(body, LIMITS)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_missing_fields_are_required() -> None:
    """A client would not learn which field it forgot."""
    with pytest.raises(RequestError, match="prompt is required") as caught:
        parsed_completion(b'{"model": "m"}', LIMITS)
    assert caught.value.code == "missing_required_parameter"


def test_long_bodies_are_refused_unread() -> None:
    """A body of any length would be parsed."""
    with pytest.raises(RequestError) as caught:
        parsed_completion(b"{" * 11, Limits(body_bytes=10))
    assert caught.value.status == 413


def test_limits_of_the_deployment_hold() -> None:
    """A deployment's own bounds would bind nobody."""
    assert refusal(completion, limits=Limits(choices=1), n=2).param == "n"
    assert refusal(chat, limits=Limits(messages=1), messages=CHAT["messages"] * 2).param == "messages"
    wanted = {"type": "json_schema", "json_schema": {"name": "x"}}
    assert completion(Limits(structured_output=True), response_format=wanted).response_format is not None


def test_errors_do_not_repeat_long_values() -> None:
    """A client could make the gateway write its megabytes to the log."""
    assert len(str(refusal(chat, n="x" * 100_000))) < 200


def test_unknown_fields_are_kept() -> None:
    """A field that only the machines understand would be lost."""
    request = chat(metadata=[{"type": "function"}], priority=3)
    assert extras(request) == {"metadata": [{"type": "function"}], "priority": 3}


@pytest.mark.parametrize("field", ["tools", "functions", "prompt_logprobs", "echo"])
def test_what_is_not_offered_may_be_asked_for_in_vain(field: str) -> None:
    """A client whose library always sends an empty list would be refused, or one that means it be ignored."""
    assert extras(chat(**{field: []})) == {field: []}
    assert refusal(chat, **{field: [1]}).param == field


def test_views_of_the_fields() -> None:
    """Stops, bounds and counts would be read from the wrong field."""
    request = completion(stop=["a", 5], stop_token_ids=[6], n=2, prompt=["a", "b"])
    assert (request.stop_strings, request.stop_tokens, request.choice_count) == (("a",), (5, 6), 4)
    assert (request.wants_usage, request.most_tokens) == (False, None)
    assert (chat(max_completion_tokens=3).most_tokens, chat(max_tokens=4).most_tokens) == (3, 4)
    assert completion(stream=True, stream_options={"include_usage": True}).wants_usage


@pytest.mark.parametrize(
    ("wanted", "prompt_tokens", "bound"),
    [(None, 10, 90), (None, 99, 1), (0, 100, 0), (5, 95, 5), (None, 100, None), (5, 96, None), (0, 101, None)],
)
def test_prompt_and_output_fit_into_the_context(wanted: int | None, prompt_tokens: int, bound: int | None) -> None:
    """A request would be started that cannot be finished on any machine, or one refused that can."""
    request = completion(max_tokens=wanted)
    if bound is not None:
        assert output_bound(request, prompt_tokens, 100) == bound
        return
    with pytest.raises(RequestError) as caught:
        output_bound(request, prompt_tokens, 100)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
