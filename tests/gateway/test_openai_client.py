"""The official Python client, unmodified, against the gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from gateways import Rig, play
from phasesplit.gateway.gateway import Keys
from phasesplit.gateway.limits import key_digest

CHAT: Any = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client(key: str = "k") -> AsyncIterator[openai.AsyncOpenAI]:
    """Yield a client of a gateway that takes the key "k"."""
    async with Rig(keys=Keys(client=(key_digest("k"),))) as rig:
        transport = httpx.ASGITransport(rig.app)
        async with httpx.AsyncClient(transport=transport) as plain:
            yield openai.AsyncOpenAI(base_url="http://g/v1", api_key=key, http_client=plain, max_retries=0)


def test_chat_and_completion() -> None:
    """A program written for OpenAI would not find what it looks for in an answer."""

    async def scenario() -> None:
        async with client() as asked:
            chat = await asked.chat.completions.create(
                model="fake", messages=CHAT, max_completion_tokens=3, logprobs=True, top_logprobs=2, n=2, seed=3
            )
            assert [choice.message.content for choice in chat.choices] == ["mno", "mno"]
            assert chat.choices[0].logprobs is not None
            assert [len(token.top_logprobs) for token in chat.choices[0].logprobs.content or ()] == [2, 2, 2]
            assert chat.usage is not None
            assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (12, 6)
            text = await asked.completions.create(model="fake", prompt="hello", max_tokens=2, echo=True, stop="z")
            assert (text.choices[0].text, text.choices[0].finish_reason) == ("hellofg", "length")
            assert [model.id async for model in asked.models.list()] == ["fake"]

    play(scenario())


def test_streams() -> None:
    """A program that reads a stream would lose text, or miss its end or its usage."""

    async def scenario() -> None:
        async with client() as asked:
            stream = await asked.chat.completions.create(
                model="fake", messages=CHAT, max_tokens=3, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "mno"
            assert chunks[-2].choices[0].finish_reason == "length"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 3

    play(scenario())


def test_errors_become_the_clients_own() -> None:
    """A program that catches the client's errors would be surprised by another."""

    async def scenario() -> None:
        async with client() as asked:
            with pytest.raises(openai.NotFoundError) as unknown:
                await asked.completions.create(model="other", prompt="x")
            assert unknown.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as wrong:
                await asked.chat.completions.create(model="fake", messages=CHAT, max_tokens=-1)
            assert wrong.value.param == "max_tokens"
        async with client(key="other") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()

    play(scenario())
