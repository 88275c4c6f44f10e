"""What a gateway's codec makes of prompts and chats, with a model whose texts begin with a start token."""

from typing import Any

import pytest

from phasesplit.gateway.choice_spec import choice_specs
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.parsing import parsed_chat, parsed_completion
from phasesplit.launcher.gateway_process import ModelCodec

START = 1


class Letters:
    """A tokenizer whose tokens are bytes, behind a start token."""

    special = frozenset({START})

    def encode(self, text: str, *, has_start: bool = True) -> list[int]:
        return [START] * has_start + list(text.encode())


class Template:
    """A template that writes the first message, and demands that it is told of nothing else."""

    def render(self, messages: Any, *, has_generation_prompt: bool) -> str:
        return str(messages[0]["content"]) + ":" * has_generation_prompt


class Sizes:
    """What a codec asks a model's sizes for."""

    context_tokens, vocab, stop_token_ids = 100, 256, (2,)


def codec() -> Any:
    sizes: Any = Sizes()
    tokenizer: Any = Letters()
    template: Any = Template()
    return ModelCodec(sizes, tokenizer, template)


@pytest.mark.parametrize(
    ("wanted", "prompt", "chat"),
    [("", True, False), (', "add_special_tokens": null', True, False), (', "add_special_tokens": true', True, True),
     (', "add_special_tokens": false', False, False)],
)  # fmt: skip
def test_the_start_token_is_there_where_it_is_wanted(wanted: str, prompt: bool, chat: bool) -> None:
    """A client that writes the start token itself would get two of them, and another answer than from vLLM."""
    body = f'{{"model": "m", "max_tokens": 1, "prompt": "ab"{wanted}}}'
    known: Any = {"number": "1", "seed": 0, "context_tokens": 4096, "most_held_tokens": 0}
    (order,) = choice_specs(parsed_completion(body.encode(), Limits()), codec(), **known)
    assert order.prompt_ids == [START] * prompt + list(b"ab")
    body = f'{{"model": "m", "max_tokens": 1, "messages": [{{"role": "user", "content": "ab"}}]{wanted}}}'
    (order,) = choice_specs(parsed_chat(body.encode(), Limits()), codec(), **known)
    assert order.prompt_ids == [START] * chat + list(b"ab:")
