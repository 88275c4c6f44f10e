"""Requests of mixed shape, drawn from a seed, and what a client reads as an answer."""

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
LATE_S = 120.0
AGAIN_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What a model's prompts and stops are made of.

    Attributes:
        model: Its name.
        ids: Tokens that prompts are drawn from.
        letters: Tokens that a bias may let an output be made of.
        end: The token that ends a text.
        stops: Stop strings that such an output is likely to hold.
        texts: Pieces of text prompts.
        longest: Tokens of the longest prompt.
    """

    model: str
    ids: range
    letters: tuple[int, ...]
    end: int
    stops: tuple[str, ...]
    texts: tuple[str, ...] = ("the quick brown fox ", "漢字 ", "jumps\nover ", "a lazy dog. ", "é ", "12345 ")
    longest: int = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request.

    Attributes:
        is_chat: Whether it goes to the chats' endpoint.
        body: Its fields.
        streams: Whether its answer is read as it grows.
        leaves_after: Events (of a stream) or hundredths of a second (else) after which the client leaves; None: never.
    """

    is_chat: bool
    body: dict[str, Any] = field(hash=False)
    streams: bool
    leaves_after: int | None

    def turned(self) -> "Asked":
        """Return the same request, read the other way, by a client that stays."""
        return replace(self, streams=not self.streams, leaves_after=None)


def drawn(seed: int, count: int, words: Words) -> list[Asked]:
    """Return requests."""
    rng = random.Random(seed)  # noqa: S311 - picks what is tested
    return [_one(rng, words) for _ in range(count)]


def _one(rng: random.Random, words: Words) -> Asked:
    is_chat = rng.random() < 0.25
    body = {"model": words.model, "return_token_ids": True, **_chances(rng, words), **_ends(rng, words, is_chat)}
    if rng.random() < 0.3:
        body["n"] = rng.randint(2, 3)
    if is_chat:
        roles = ("system", "user", "assistant", "user")[-rng.randint(1, 4) :]
        body["messages"] = [{"role": role, "content": _text(rng, words, 30)} for role in roles]
    elif rng.random() < 0.15:
        prompts: tuple[Any, ...] = ([_ids(rng, words), _ids(rng, words)], [_text(rng, words, 40), "a"])
        body["prompt"] = rng.choice(prompts)
    else:
        body["prompt"] = _text(rng, words, 120) if rng.random() < 0.3 else _ids(rng, words)
    if rng.random() < 0.4:
        body |= _scores(rng, is_chat)
    if not is_chat and rng.random() < 0.25:
        body["echo"] = True
    leaves_after = rng.randint(0, 25) if rng.random() < 0.15 else None
    return Asked(is_chat=is_chat, body=body, streams=rng.random() < 0.5, leaves_after=leaves_after)


def _ids(rng: random.Random, words: Words) -> list[int]:
    """Return a prompt around the border of a block, or one whose needle lies over the border of a chunk."""
    if rng.random() < 0.3:
        length = rng.randint(CHUNK_TOKENS + 8, words.longest)
        ids = [words.ids[index % 7] for index in range(length)]
        at = rng.randint(1, length // CHUNK_TOKENS) * CHUNK_TOKENS - 4
        ids[at : at + 8] = rng.choices(words.ids, k=8)
        return ids[:length]
    blocks = rng.randint(0, words.longest // BLOCK_TOKENS)
    return rng.choices(words.ids, k=max(1, blocks * BLOCK_TOKENS + rng.randint(-1, 1)))


def _text(rng: random.Random, words: Words, most: int) -> str:
    return "".join(rng.choices(words.texts, k=rng.randint(1, max(1, most // 12))))


def _chances(rng: random.Random, words: Words) -> dict[str, Any]:
    """Return how tokens are chosen; with a seed wherever anything is left to chance."""
    chosen: dict[str, Any] = {"temperature": 0} if rng.random() < 0.3 else {"seed": rng.getrandbits(40)}
    if "seed" in chosen:
        options: dict[str, Any] = {
            "temperature": rng.choice([0.3, 0.8, 1, 1.7]),
            "top_p": rng.choice([0.2, 0.9, 1]),
            "top_k": rng.choice([-1, 0, 1, 5, 40]),
            "min_p": rng.choice([0.0, 0.05, 0.3]),
        }
        chosen |= {name: value for name, value in options.items() if rng.random() < 0.5}
    options = {
        "presence_penalty": rng.choice([-1.5, 0.7]),
        "frequency_penalty": rng.choice([-0.5, 0.5, 2]),
        "repetition_penalty": rng.choice([0.8, 1.3]),
        "logit_bias": {str(token): rng.choice([6, 9]) for token in rng.sample(words.letters, 4)},
    }
    return chosen | {name: value for name, value in options.items() if rng.random() < 0.35}


def _ends(rng: random.Random, words: Words, is_chat: bool) -> dict[str, Any]:
    """Return what ends the output."""
    most = rng.choice([0, 1, 1, 2, 2, 3, 8, 20, 40, 70, None])
    options: dict[str, Any] = {
        "stop": rng.choice([*words.stops, rng.sample(words.stops, 3)]),
        "stop_token_ids": rng.sample(words.letters, 2),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": min(rng.choice([0, 1, 2, 9]), 9 if most is None else most),
    }
    ends = {name: value for name, value in options.items() if rng.random() < 0.35}
    if most is None:
        # Without a bound the end has to come by itself.
        ends.pop("ignore_eos", None)
        return ends | {"logit_bias": {str(words.end): 12}, "frequency_penalty": 0, "presence_penalty": 0}
    return ends | {"max_completion_tokens" if is_chat and rng.random() < 0.5 else "max_tokens": most}


def _scores(rng: random.Random, is_chat: bool) -> dict[str, Any]:
    count = rng.choice([0, 1, 4, 20])
    return {"logprobs": True, "top_logprobs": count} if is_chat else {"logprobs": count}


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a client has read.

    Attributes:
        choices: Per choice its text, token ids, reasons for its end, and log-probabilities.
        usage: As the answer has it.
        is_whole: Whether the client has read it to its end.
    """

    choices: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, int] | None = None
    is_whole: bool = False

    def choice(self, index: int) -> dict[str, Any]:
        """Return a choice, empty where nothing has come of it yet."""
        while len(self.choices) <= index:
            self.choices.append({"text": "", "ids": [], "finish": None, "stop": None, "logprobs": {}})
        return self.choices[index]

    def add(self, chunk: dict[str, Any]) -> None:
        """Take a chunk of a stream, or a whole answer."""
        assert "error" not in chunk, chunk["error"]
        for part in chunk["choices"]:
            one, said = self.choice(part["index"]), part.get("message") or part.get("delta") or part
            one["text"] += said.get("content") or said.get("text") or ""
            one["ids"] += part.get("token_ids") or []
            if part["finish_reason"] is not None:
                one["finish"], one["stop"] = part["finish_reason"], part["stop_reason"]
            for name, values in (part["logprobs"] or {}).items():
                if values is not None:
                    one["logprobs"].setdefault(name, []).extend(values)
        self.usage = chunk.get("usage") or self.usage

    def require_begins(self, whole: "Answer") -> None:
        """Fail unless this is how another answer begins."""
        for part, all_of_it in zip(self.choices, whole.choices, strict=False):
            assert all_of_it["text"].startswith(part["text"])
            assert all_of_it["ids"][: len(part["ids"])] == part["ids"]


async def answers(url: str, requests: Sequence[Asked], *, at_once: int, seed: int) -> list[Answer]:
    """Ask a cluster, with many requests under way at a time, in an order of its own; return the answers in ours.

    Args:
        url: Where it is.
        requests: What to ask.
        at_once: Requests under way at a time.
        seed: Of the order.
    """
    order = random.Random(seed).sample(range(len(requests)), len(requests))  # noqa: S311 - picks what is tested
    found = [Answer() for _ in requests]
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=LATE_S)) as session:

        async def client() -> None:
            while order:
                number = order.pop()
                await _ask(session, requests[number], found[number])

        await asyncio.gather(*(client() for _ in range(at_once)))
    return found


async def _ask(session: aiohttp.ClientSession, asked: Asked, answer: Answer) -> None:
    if asked.leaves_after is not None and not asked.streams:
        with suppress(TimeoutError):
            async with asyncio.timeout(asked.leaves_after / 100):
                await _read(session, asked, answer)
        return
    await _read(session, asked, answer)


async def _read(session: aiohttp.ClientSession, asked: Asked, answer: Answer) -> None:
    path = "/v1/chat/completions" if asked.is_chat else "/v1/completions"
    body = asked.body | ({"stream": True, "stream_options": {"include_usage": True}} if asked.streams else {})
    while True:
        async with session.post(path, json=body) as response:
            if response.status == 503:  # the cluster is full: come back, as OpenAI's client does
                await asyncio.sleep(AGAIN_S)
                continue
            assert response.status == 200, (await response.text(), body)
            await _take(response, asked, answer)
            return


async def _take(response: aiohttp.ClientResponse, asked: Asked, answer: Answer) -> None:
    if not asked.streams:
        answer.add(await response.json())
        answer.is_whole = True
        return
    events = 0
    async for line in response.content:
        if line.startswith(b"data: "):
            if line.strip() == b"data: [DONE]":
                answer.is_whole = True
                return
            answer.add(json.loads(line[6:]))
            events += 1
            if events == asked.leaves_after:
                return
    raise AssertionError("a stream without an end")
