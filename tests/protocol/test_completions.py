"""The schema of completions: what both sides of the wire share, and what a machine takes of it."""

from dataclasses import fields
from typing import Any

import pytest
from pydantic import ValidationError

from phasesplit.engine.sampling import Sampling
from phasesplit.gateway.legs import whole_leg
from phasesplit.protocol.completions import ChatRequest, CompletionRequest, Sampled, WorkerBody, extras

SET: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.9, "top_k": 3, "presence_penalty": 0.1, "frequency_penalty": 0.2,
    "repetition_penalty": 1.1, "ignore_eos": True, "logit_bias": {"5": 1.5}, "add_special_tokens": False,
}  # fmt: skip
"""Fields that mean the same on both machines of a request."""


def test_every_field_of_the_sampler_is_one_of_the_wire() -> None:
    """A field that the sampler knows could not be asked for, or be filled by another one's name."""
    assert {field.name for field in fields(Sampling)} <= WorkerBody.model_fields.keys()


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, WorkerBody])
def test_all_requests_share_the_fields_of_sampling(kind: type[Sampled]) -> None:
    """A field would be added on one side of the wire and be missing on the other."""
    assert Sampled.model_fields.keys() <= kind.model_fields.keys()


def test_what_a_client_sets_reaches_the_machine_as_it_is() -> None:
    """A field of the schema would need a line of its own in the gateway, or be lost between both sides."""
    derived = {"n", "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "seed"}
    streamed = {"stream", "stream_options"}
    assert Sampled.model_fields.keys() == {"model"} | SET.keys() | derived | streamed
    request = CompletionRequest.model_validate({"model": "m", "prompt": "a", **SET})
    sent = whole_leg(request, 0, [1, 2], most_tokens=4, seed=7)
    taken = WorkerBody.model_validate({name: value if value != (1, 2) else [1, 2] for name, value in sent.items()})
    expected = SET | {"add_special_tokens": None}  # the gateway has made the prompt
    assert {name: getattr(taken, name) for name in SET} == expected


def test_clients_keep_what_machines_ignore() -> None:
    """An extension of vLLM would be lost on its way, or the embedded engine refuse what it does not know."""
    sent = {"model": "m", "prompt": "a", "repetition_detection": {"x": 1}}
    assert extras(CompletionRequest.model_validate(sent)) == {"repetition_detection": {"x": 1}}
    assert not extras(WorkerBody.model_validate(sent))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (CompletionRequest, {"stop": ["a"] * 5}),
        (WorkerBody, {"stop": ["a"] * 17}),
        (WorkerBody, {"stop": [5]}),
        (WorkerBody, {"n": 2}),
        (WorkerBody, {"max_tokens": 0}),
        (CompletionRequest, {"stop_token_ids": [1] * 129}),
        (CompletionRequest, {"logit_bias": {str(token): 1 for token in range(1025)}}),
        (WorkerBody, {"prompt": ["a", "b"]}),
        (WorkerBody, {"kv_transfer_params": {"address": {"boot_id": "a", "tcp": ["host", 0]}}}),
    ],
)
def test_each_side_has_its_own_bounds(kind: type[Sampled], changed: dict[str, Any]) -> None:
    """A machine would be asked for more than its work may cost, or a client for choices that a leg cannot hold."""
    with pytest.raises(ValidationError):
        kind.model_validate({"model": "m", "prompt": "a", **changed})


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (CompletionRequest, {"stop": ["a", 5], "n": 3, "max_tokens": 0}),
        (WorkerBody, {"stop": ["a"] * 16, "stop_token_ids": [1] * 129, "n": 1}),
        (WorkerBody, {"logit_bias": {str(token): 1 for token in range(1025)}}),
    ],
)
def test_within_the_bounds_all_is_taken(kind: type[Sampled], changed: dict[str, Any]) -> None:
    """A request that was served would be refused, for a bound of the other side."""
    assert kind.model_validate({"model": "m", "prompt": "a", **changed}).model == "m"
