"""A vLLM server's first requests, which no client waits for, and what they say of its prefill."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import numpy as np

from phasesplit.errors import SpecError
from phasesplit.transfer.chooser import Floats

_FIRST_TOKENS, _FIRST_OUTPUT_TOKENS = 256, 4
_SHORTEST_TOKENS, _STEP = 64, 4
_ENOUGH_S = 1.0
_TOKENS = range(1, 128)
"""Ids that every vocabulary has. Drawn from them, no block of a prompt comes twice, so prefix caches do not help."""


class FirstRequests:
    """What a server is asked before clients may ask it.

    Args:
        session: For calls.
        url: The server's.
        model: Name that it serves.
        context_tokens: Tokens of its longest request, >= 2.
        within_s: What an answer may take.
    """

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, context_tokens: int, *, within_s: float
    ) -> None:
        self._session, self._url, self._model, self._context_tokens = session, url, model, context_tokens
        self._timeout = aiohttp.ClientTimeout(total=within_s)
        self._random = random.Random(0)  # noqa: S311 - no secret

    async def warm_up(self) -> None:
        """Let the server load, and compile, what it leaves to the first requests of a kind.

        Raises:
            SpecError: It does not answer as it should.
        """
        outputs = min(_FIRST_OUTPUT_TOKENS, self._context_tokens - 1)
        tokens = min(_FIRST_TOKENS, self._context_tokens - outputs)
        await self._ask(tokens, max_tokens=outputs, temperature=1.0, top_p=1.0, top_k=0, ignore_eos=True)
        await self._ask(1, max_tokens=1, temperature=1.0, top_p=0.9, top_k=50)
        # Whoever starts the server may forbid log-probabilities.
        await self._ask(1, max_tokens=1, temperature=0.0, logprobs=1, or_refuses=True)

    async def prompt_times_s(self) -> Mapping[int, float]:
        """Return the shortest time of prompts of some lengths, in tokens: of two, and of longer ones in about a second.

        All of a request counts, also what the server does around prefill, which takes it milliseconds.

        Raises:
            SpecError: It does not answer as it should.
        """
        best: dict[int, float] = {}
        end_s, most, tokens = time.monotonic() + _ENOUGH_S, self._context_tokens - 1, _SHORTEST_TOKENS
        if most < _STEP * tokens:
            tokens = max(1, most // _STEP)
        while tokens <= most and (len(best) < 2 or time.monotonic() + _STEP * best[tokens // _STEP] < end_s):
            best[tokens] = await self._prompt_s(tokens)
            tokens *= _STEP
        for tokens, took_s in tuple(best.items()):
            if time.monotonic() + took_s < end_s:
                best[tokens] = min(took_s, await self._prompt_s(tokens))
        return best

    async def _prompt_s(self, tokens: int) -> float:
        since_s = time.perf_counter()
        await self._ask(tokens, max_tokens=1, temperature=0.0)
        return time.perf_counter() - since_s

    async def _ask(self, tokens: int, *, or_refuses: bool = False, **fields: Any) -> None:
        """Send a prompt that the server has not seen, and wait for its end."""
        prompt = self._random.choices(_TOKENS, k=tokens)
        body = {"model": self._model, "prompt": prompt, **fields}
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body, timeout=self._timeout) as answer:
                text, status = await answer.text(), answer.status
        except TimeoutError:
            raise SpecError(f"vLLM does not answer its first request within {self._timeout.total:g} s") from None
        except (aiohttp.ClientError, OSError) as problem:
            raise SpecError(f"vLLM does not answer its first request: {problem}; its log is above") from None
        if status != 200 and not (or_refuses and status == 400):
            raise SpecError(f"vLLM does not serve a prompt of {tokens} tokens: {status} {' '.join(text.split())[:300]}")


def between(times_s: Mapping[int, float]) -> Callable[[Floats], Floats]:
    """Return the time of prefill by prompt tokens: straight lines through what was measured.

    Beyond the longest prompt measured the last line goes on: attention, which grows faster, would make layer-wise
    transfers pay even earlier. Below the shortest the first one does, down to 0.

    Args:
        times_s: Prompt tokens, >= 1 and growing, to time; at least one.
    """
    tokens, times = np.array([*times_s], np.float64), np.array([*times_s.values()], np.float64)
    slopes = np.maximum(0.0, np.diff(times) / np.diff(tokens)) if len(tokens) > 1 else times / tokens
    first_s = max(0.0, times[0] - slopes[0] * tokens[0])

    def prompt_time_s(prompt_tokens: Floats) -> Floats:
        within_s: Floats = np.interp(prompt_tokens, [0.0, *tokens], [first_s, *times])
        return within_s + np.asarray(slopes[-1] * np.maximum(0.0, prompt_tokens - tokens[-1]), np.float64)

    return prompt_time_s
