"""A request as it reaches a worker: the body of POST /v1/completions, checked.

OpenAI's completions with vLLM's extensions and `kv_transfer_params`, one prompt and one choice a request. Whatever
changes the answer is honoured or refused; fields that are not known are ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from phasesplit.engine.sampling import Sampling
from phasesplit.errors import RequestError
from phasesplit.protocol.worker import Address, SendKv, TakeKv

if TYPE_CHECKING:
    from pydantic import ValidationError

    from phasesplit.engine.wire_fields import Body, TransferFields


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
        prompt_logprobs: Likeliest tokens to tell at each place of the prompt, None for none of it.
        return_token_ids: Tell the tokens' ids.
        names_by_id: Where log-probabilities are told, tokens are named by id instead of by text.
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

    def demand_epoch(self, epoch: int) -> None:
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

    from phasesplit.engine.wire_fields import Body, refusal

    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(found, dict):
        raise RequestError("the body is not a JSON object", code="invalid_json")
    reason = refusal(found)
    if reason is not None:
        raise RequestError(f"{reason[0]}: {reason[1]}", param=reason[0], code="unsupported_parameter")
    try:
        fields = Body.model_validate(found)
    except ValidationError as error:
        raise _of_validation(error) from None
    if fields.model not in served.models:
        shown = repr(fields.model)[:80]
        raise RequestError(f"the model {shown} does not exist", status=404, param="model", code="model_not_found")
    return _request(fields, served, seed)


def _request(fields: "Body", served: Served, seed: int) -> WorkerRequest:
    prompt_ids = _prompt_ids(fields, served)
    resumed = _resumed_tokens(fields, len(prompt_ids))
    transfer, epoch = _transfer(fields.kv_transfer_params)
    request = WorkerRequest(
        model=fields.model,
        prompt_ids=prompt_ids,
        max_tokens=_most_tokens(fields, len(prompt_ids), served.context_tokens),
        sampling=_sampling(fields, served.vocab, seed),
        stop=fields.stop,
        include_stop=bool(fields.include_stop_str_in_output),
        stream=bool(fields.stream),
        include_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage),
        echo=bool(fields.echo),
        prompt_logprobs=fields.prompt_logprobs,
        return_token_ids=bool(fields.return_token_ids),
        names_by_id=bool(fields.return_tokens_as_token_ids),
        transfer=transfer,
        epoch=epoch,
        resumed_tokens=resumed,
    )
    if fields.stream_options is not None and not request.stream:
        raise _invalid("stream_options", "only allowed when stream is true")
    if (fields.min_tokens or 0) > request.max_tokens:
        raise _invalid("min_tokens", f"{fields.min_tokens} is above max_tokens {request.max_tokens}")
    if isinstance(transfer, SendKv) and request.max_tokens != 1:
        raise _invalid("max_tokens", "has to be 1 where the KV is sent away after the prompt phase")
    if isinstance(transfer, TakeKv) and (request.echo or request.prompt_logprobs is not None):
        name = "echo" if request.echo else "prompt_logprobs"
        raise _invalid(name, "asks about the prompt, which another worker computes; ask that one")
    return request


def _prompt_ids(fields: "Body", served: Served) -> tuple[int, ...]:
    if isinstance(fields.prompt, str):
        # Half of a surrogate pair never gets here: it is no JSON text.
        ids = served.encode(fields.prompt, fields.add_special_tokens is not False)
        if not ids:
            raise _invalid("prompt", "has no tokens; at least one is needed")
        return tuple(ids)
    if max(fields.prompt) >= served.vocab:
        raise _invalid("prompt", f"got token id {max(fields.prompt)}, allowed are 0 to {served.vocab - 1}")
    return fields.prompt


def _resumed_tokens(fields: "Body", prompt_tokens: int) -> int:
    resumed = fields.resumed_tokens or 0
    if resumed >= prompt_tokens:
        raise _invalid("resumed_tokens", f"got {resumed}, allowed is less than the prompt's {prompt_tokens} tokens")
    if resumed and (fields.echo or fields.prompt_logprobs is not None):
        raise _invalid("resumed_tokens", "an output that goes on tells nothing about its prompt again")
    return resumed


def _most_tokens(fields: "Body", prompt_tokens: int, context_tokens: int) -> int:
    newer, older = fields.max_completion_tokens, fields.max_tokens
    if newer is not None and older is not None and newer != older:
        raise _invalid("max_tokens", "differs from max_completion_tokens; give one of the two")
    wanted = newer if older is None else older
    if prompt_tokens + (wanted or 1) > context_tokens:
        output = "" if wanted is None else f" and {wanted} output tokens"
        raise RequestError(
            f"the longest context is {context_tokens} tokens; the request has {prompt_tokens} prompt tokens{output}",
            param="prompt",
            code="context_length_exceeded",
        )
    return context_tokens - prompt_tokens if wanted is None else wanted


def _sampling(fields: "Body", vocab: int, seed: int) -> Sampling:
    for token in fields.logit_bias:
        if token >= vocab:
            raise _invalid("logit_bias", f"got token id {token}, allowed are 0 to {vocab - 1}")
    if fields.top_logprobs is not None and fields.logprobs is not True:
        raise _invalid("top_logprobs", "only allowed when logprobs is true")
    logprobs = fields.logprobs
    if isinstance(logprobs, bool):
        logprobs = (fields.top_logprobs or 0) if logprobs else None
    return Sampling(
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(0, fields.top_k or 0),
        min_p=fields.min_p or 0.0,
        seed=seed if fields.seed is None else fields.seed,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=tuple(fields.logit_bias.items()),
        # Positions in an output that goes on are counted from its beginning.
        min_tokens=(fields.resumed_tokens or 0) + fields.min_tokens if fields.min_tokens else 0,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=fields.stop_token_ids,
        logprobs=logprobs,
    )


def _transfer(fields: "TransferFields | None") -> tuple[SendKv | TakeKv | None, int | None]:
    if fields is None:
        return None, None
    sends, takes = bool(fields.do_remote_decode), bool(fields.do_remote_prefill)
    if sends and takes:
        raise _invalid("kv_transfer_params", "do_remote_decode and do_remote_prefill cannot both be true")
    if not sends and not takes:
        return None, fields.epoch
    for name in ("key", "peer", "peer_epoch", "epoch", *(("address",) if sends else ())):
        if getattr(fields, name) is None:
            param = f"kv_transfer_params.{name}"
            raise RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    key, peer, peer_epoch, there = str(fields.key), str(fields.peer), int(fields.peer_epoch or 0), fields.address
    if sends and there is not None:
        return SendKv(key, peer, peer_epoch, Address(there.boot_id, there.unix, there.tcp)), fields.epoch
    return TakeKv(key, peer, peer_epoch), fields.epoch


def _of_validation(error: "ValidationError") -> RequestError:
    """Return the first thing that is wrong."""
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return RequestError(f"{param}: {first['msg']}, got {repr(first['input'])[:80]}", param=param, code=code)


def _invalid(param: str, message: str) -> RequestError:
    return RequestError(f"{param}: {message}", param=param, code="invalid_value")
