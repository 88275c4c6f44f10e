"""A request as it reaches a worker: the body of POST /v1/completions, checked.

OpenAI's completions with vLLM's extensions and `kv_transfer_params`, one prompt and one choice a request. Whatever
changes the answer is honoured or refused; fields that are not known are ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from phasesplit.engine.sampling import Sampling
from phasesplit.errors import RequestError
from phasesplit.protocol.bodies import json_object
from phasesplit.protocol.openai_errors import invalid, of_validation, too_long_context, unknown_model, unsupported
from phasesplit.protocol.worker import Address, SendKv, TakeKv

if TYPE_CHECKING:
    from phasesplit.protocol.completions import TransferFields, WorkerBody


_NO_GRAMMAR = "the engine cannot restrict output to a grammar"
_NO_TOOLS = "the engine calls no tools"
_REFUSED = {
    "tools": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "structured_outputs": _NO_GRAMMAR,
    "grammar": _NO_GRAMMAR,
    "use_beam_search": "beam search is not offered",
    "suffix": "text after the completion is not offered",
    "bad_words": "banning words is not offered; logit_bias bans tokens",
    "allowed_token_ids": "allowing a set of tokens is not offered; logit_bias biases them",
    "logits_processors": "the engine runs no code of clients",
    "truncate_prompt_tokens": "prompts are not cut; send the tokens that are meant",
    "prompt_embeds": "prompts are text or token ids",
    "messages": "a worker takes one prompt; the gateway makes it from the messages of a chat",
}
"""Fields that would change the answer, and why they cannot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a worker serves.

    Attributes:
        models: Names under which its model may be asked for.
        vocab: Tokens of the vocabulary; ids are below.
        context_tokens: Longest prompt plus output.
        encode: Text to tokens; the second argument says whether the model's start token comes first. Raises SpecError.
    """

    models: tuple[str, ...]
    vocab: int
    context_tokens: int
    encode: Callable[[str, bool], list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRequest:
    """One choice to compute.

    Attributes:
        model: The model's name, as asked for.
        prompt_ids: The prompt's tokens, at least one; behind them those of an output that goes on.
        max_tokens: Most output tokens from here on, >= 1; prompt and output fit into the context.
        sampling: How tokens are chosen.
        stop: Stop strings.
        include_stop: The stop string ends the text instead of being cut.
        stream: Send each token as it comes.
        include_usage: A stream ends with a chunk of usage.
        echo: The text begins with the prompt.
        prompt_logprobs: Likeliest tokens to return at each place of the prompt, None for none of it.
        return_token_ids: Return the tokens' ids.
        names_by_id: In log-probabilities, tokens are named by id instead of by text.
        transfer: What happens to the KV; None where this worker takes both phases.
        epoch: The epoch in which the sender believes this worker, None where it does not say.
        resumed_tokens: Last tokens of `prompt_ids` that another machine has put out already, fewer than all.
    """

    model: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    names_by_id: bool = False
    transfer: SendKv | TakeKv | None = None
    epoch: int | None = None
    resumed_tokens: int = 0

    @property
    def wants_prompt_logprobs(self) -> int | None:
        """Likeliest tokens to score at each place of the prompt; None where its log-probabilities are not wanted.

        Not None: the logits of every row of the prompt are needed, not only those of its last.
        """
        asked = [self.prompt_logprobs, self.sampling.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    def require_epoch(self, epoch: int) -> None:
        """Compare with the epoch that this worker is in.

        Raises:
            RequestError: 409: the sender means an earlier (or a later) start of this worker.
        """
        if self.epoch is not None and self.epoch != epoch:
            raise RequestError(
                f"kv_transfer_params.epoch: got {self.epoch}, this worker is in epoch {epoch}",
                status=409,
                param="kv_transfer_params.epoch",
                code="stale_epoch",
            )


def parsed_request(body: bytes, served: Served, *, seed: int) -> WorkerRequest:
    """Return the request in a body.

    Args:
        body: The body's bytes.
        served: What this worker serves.
        seed: For a request that brings none.

    Raises:
        RequestError: 404 for another model, 400 for anything else that is wrong with it.
    """
    # Only a request needs pydantic; a worker is ready without.
    from pydantic import ValidationError

    from phasesplit.protocol.completions import WorkerBody

    found = json_object(body)
    reason = refusal(found)
    if reason is not None:
        raise unsupported(*reason)
    try:
        asked = WorkerBody.model_validate(found)
    except ValidationError as error:
        raise of_validation(error) from None
    if asked.model not in served.models:
        raise unknown_model(asked.model)
    return _request(asked, served, seed)


def refusal(body: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the first field that the engine cannot honour, and why; None where there is none.

    A field that asks for nothing (null, false, empty) is not refused.

    Args:
        body: The body.
    """
    for name, value in body.items():
        if not value:
            continue
        if name in _REFUSED:
            return name, _REFUSED[name]
        if name.startswith("guided_"):
            return name, _NO_GRAMMAR
        if name == "response_format" and (not isinstance(value, dict) or value.get("type") != "text"):
            return name, f'{_NO_GRAMMAR}; allowed is {{"type": "text"}}'
    return None


def _request(body: "WorkerBody", served: Served, seed: int) -> WorkerRequest:
    prompt_ids = _prompt_ids(body, served)
    resumed = _resumed_tokens(body, len(prompt_ids))
    transfer, epoch = _transfer(body.kv_transfer_params)
    request = WorkerRequest(
        model=body.model,
        prompt_ids=prompt_ids,
        max_tokens=_most_tokens(body, len(prompt_ids), served.context_tokens),
        sampling=_sampling(body, served.vocab, seed),
        stop=body.stop,
        include_stop=bool(body.include_stop_str_in_output),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        echo=bool(body.echo),
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=bool(body.return_token_ids),
        names_by_id=bool(body.return_tokens_as_token_ids),
        transfer=transfer,
        epoch=epoch,
        resumed_tokens=resumed,
    )
    if body.stream_options is not None and not request.stream:
        raise invalid("stream_options", "only allowed when stream is true")
    if (body.min_tokens or 0) > request.max_tokens:
        raise invalid("min_tokens", f"{body.min_tokens} is above max_tokens {request.max_tokens}")
    if isinstance(transfer, SendKv) and request.max_tokens != 1:
        raise invalid("max_tokens", "has to be 1 where the KV is sent away after the prefill phase")
    if isinstance(transfer, TakeKv) and (request.echo or request.prompt_logprobs is not None):
        name = "echo" if request.echo else "prompt_logprobs"
        raise invalid(name, "asks about the prompt, which another worker computes; ask that one")
    return request


def _prompt_ids(body: "WorkerBody", served: Served) -> tuple[int, ...]:
    if isinstance(body.prompt, str):
        # Half of a surrogate pair never gets here: it is no JSON text.
        ids = served.encode(body.prompt, body.add_special_tokens is not False)
        if not ids:
            raise invalid("prompt", "has no tokens; at least one is needed")
        return tuple(ids)
    if max(body.prompt) >= served.vocab:
        raise invalid("prompt", f"got token id {max(body.prompt)}, allowed are 0 to {served.vocab - 1}")
    return body.prompt


def _resumed_tokens(body: "WorkerBody", prompt_tokens: int) -> int:
    resumed = body.resumed_tokens or 0
    if resumed >= prompt_tokens:
        raise invalid("resumed_tokens", f"got {resumed}, allowed is less than the prompt's {prompt_tokens} tokens")
    if resumed and (body.echo or body.prompt_logprobs is not None):
        raise invalid("resumed_tokens", "an output that goes on has no scores of its prompt")
    return resumed


def _most_tokens(body: "WorkerBody", prompt_tokens: int, context_tokens: int) -> int:
    newer, older = body.max_completion_tokens, body.max_tokens
    if newer is not None and older is not None and newer != older:
        raise invalid("max_tokens", "differs from max_completion_tokens; give one of the two")
    wanted = newer if older is None else older
    if prompt_tokens + (wanted or 1) > context_tokens:
        raise too_long_context(context_tokens, prompt_tokens, wanted)
    return context_tokens - prompt_tokens if wanted is None else wanted


def _sampling(body: "WorkerBody", vocab: int, seed: int) -> Sampling:
    """Return how tokens are chosen: as the body says under the same names, but for fields that several decide."""
    bias = {int(token): float(value) for token, value in (body.logit_bias or {}).items()}
    for token in bias:
        if token >= vocab:
            raise invalid("logit_bias", f"got token id {token}, allowed are 0 to {vocab - 1}")
    if body.top_logprobs is not None and body.logprobs is not True:
        raise invalid("top_logprobs", "only allowed when logprobs is true")
    logprobs = body.logprobs
    if isinstance(logprobs, bool):
        logprobs = (body.top_logprobs or 0) if logprobs else None
    named = {field.name: getattr(body, field.name) for field in fields(Sampling)}
    given = {name: value for name, value in named.items() if value is not None}
    given |= {
        "top_k": max(0, body.top_k or 0),
        "seed": seed if body.seed is None else body.seed,
        "logit_bias": tuple(bias.items()),
        # Positions in an output that goes on are counted from its beginning.
        "min_tokens": (body.resumed_tokens or 0) + body.min_tokens if body.min_tokens else 0,
        "logprobs": logprobs,
    }
    return Sampling(**given)


def _transfer(body: "TransferFields | None") -> tuple[SendKv | TakeKv | None, int | None]:
    if body is None:
        return None, None
    sends, takes = bool(body.do_remote_decode), bool(body.do_remote_prefill)
    if sends and takes:
        raise invalid("kv_transfer_params", "do_remote_decode and do_remote_prefill cannot both be true")
    if not sends and not takes:
        return None, body.epoch
    for name in ("key", "peer", "peer_epoch", "epoch", *(("address",) if sends else ())):
        if getattr(body, name) is None:
            param = f"kv_transfer_params.{name}"
            raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    key, peer, peer_epoch, there = str(body.key), str(body.peer), int(body.peer_epoch or 0), body.address
    if sends and there is not None:
        return SendKv(key, peer, peer_epoch, Address(there.boot_id, there.unix, there.tcp)), body.epoch
    return TakeKv(key, peer, peer_epoch), body.epoch
