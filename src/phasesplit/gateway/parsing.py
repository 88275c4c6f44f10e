"""From a body to a request, or to the error that says what is wrong with it."""

from typing import TypeVar

import orjson
from pydantic import ValidationError

from phasesplit.errors import RequestError
from phasesplit.gateway.limits import Limits
from phasesplit.protocol.bodies import json_object
from phasesplit.protocol.completions import ChatRequest, ClientRequest, CompletionRequest, extras
from phasesplit.protocol.openai_errors import invalid, of_validation, too_long_context, unsupported

_Kind = TypeVar("_Kind", bound=ClientRequest)

NOT_FOR_CLIENTS = frozenset({"kv_transfer_params", "request_id"})
"""Fields by which the gateway steers machines; a client that sets one could take another client's KV."""
NOT_OFFERED = {
    "use_beam_search": "beam search is not offered",
    "prompt_logprobs": "not offered under this name; echo and logprobs tell the same",
    "prompt_embeds": "prompts are text or token ids",
    "return_tokens_as_token_ids": "not offered; return_token_ids tells all ids",
}
NOT_OFFERED_IN_CHATS = {
    "tools": "calling tools is not offered",
    "functions": "calling functions is not offered",
    "audio": "the answer is text",
    "echo": "a chat's prompt is not echoed",
    "prediction": "a predicted output is not offered",
    "continue_final_message": "every answer is a new message",
}
"""Fields that would change the answer, and why they cannot; one that asks for nothing (null, false, empty) is left."""


def parsed_completion(body: bytes, limits: Limits) -> CompletionRequest:
    """Return the request in a body of POST /v1/completions.

    Args:
        body: The body's bytes.
        limits: What the deployment allows.

    Raises:
        RequestError: 413 for a body that is too long, 400 for anything else that is wrong with it.
    """
    request = _parsed(CompletionRequest, body, limits)
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise unsupported("best_of", "choosing the best of more completions than n is not offered")
    if request.suffix:
        raise unsupported("suffix", "text after the completion is not offered")
    _check(request, limits)
    return request


def parsed_chat(body: bytes, limits: Limits) -> ChatRequest:
    """Return the request in a body of POST /v1/chat/completions.

    Args:
        body: The body's bytes.
        limits: What the deployment allows.

    Raises:
        RequestError: 413 for a body that is too long, 400 for anything else that is wrong with it.
    """
    request = _parsed(ChatRequest, body, limits)
    if len(request.messages) > limits.messages:
        raise invalid("messages", f"{len(request.messages)} messages, allowed are {limits.messages}")
    for place, message in enumerate(request.messages):
        if message.content is None and message.role != "assistant":
            param = f"messages.{place}.content"
            raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "only allowed when logprobs is true")
    if None not in (request.max_tokens, request.max_completion_tokens) and request.most_tokens != request.max_tokens:
        raise invalid("max_tokens", "differs from max_completion_tokens; give one of the two")
    _check(request, limits)
    return request


def output_bound(request: ClientRequest, prompt_tokens: int, context_tokens: int) -> int:
    """Return the most output tokens of a choice: the client's bound, or what the context leaves.

    Args:
        request: The request.
        prompt_tokens: Tokens of the choice's prompt.
        context_tokens: Longest context that the model, and every machine it may run on, take.

    Raises:
        RequestError: Prompt and output do not fit into the context.
    """
    wanted = request.most_tokens
    # Without a bound there has to be room for one token at least.
    if prompt_tokens + (1 if wanted is None else wanted) > context_tokens:
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
        raise too_long_context(context_tokens, prompt_tokens, wanted, param=param)
    return context_tokens - prompt_tokens if wanted is None else wanted


def _parsed(kind: type[_Kind], body: bytes, limits: Limits) -> _Kind:
    if len(body) > limits.body_bytes:
        raise RequestError(f"the body has {len(body)} bytes, allowed are {limits.body_bytes}", status=413)
    try:
        return kind.model_validate(json_object(body))
    except ValidationError as error:
        raise of_validation(error) from None


def _check(request: ClientRequest, limits: Limits) -> None:
    """Raise for fields that are right alone and wrong together, or that this deployment does not allow."""
    for name, value in extras(request).items():
        if name in NOT_FOR_CLIENTS:
            raise unsupported(name, "only the gateway may set this field")
        if name == "vllm_xargs" and isinstance(value, dict):
            for inner in sorted(NOT_FOR_CLIENTS & value.keys()):  # vLLM takes both places for the same
                raise unsupported(f"{name}.{inner}", "only the gateway may set this field")
        try:
            orjson.dumps(value)
        except TypeError:  # it reads more than it writes, and unknown fields are passed on
            raise invalid(name, "nested too deep") from None
    refused = NOT_OFFERED | (NOT_OFFERED_IN_CHATS if isinstance(request, ChatRequest) else {})
    for name, value in extras(request).items():
        if name in refused and value not in (None, False, [], {}):
            raise unsupported(name, refused[name])
    if request.choice_count > limits.choices:
        raise invalid("n", f"{request.choice_count} choices (prompts x n), allowed are {limits.choices}")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "only allowed when stream is true")
    if request.min_tokens is not None and request.most_tokens is not None and request.min_tokens > request.most_tokens:
        raise invalid("min_tokens", f"{request.min_tokens} is above max_tokens {request.most_tokens}")
    form = request.response_format
    if form is not None and form.type != "text" and not limits.structured_output:
        raise unsupported(
            "response_format", f"the machines behind this gateway cannot hold output to {form.type}; allowed is text"
        )
