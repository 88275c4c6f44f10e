"""What an OpenAI-compatible endpoint says of itself before work is sent to it."""

from dataclasses import dataclass
from typing import Any

import aiohttp

from phasesplit.errors import SpecError
from phasesplit.serving.addresses import http_address, unreached

_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """An endpoint that answered.

    Attributes:
        url: Its base, without /v1.
        model: The model asked for, or the only one it has.
        context_tokens: Longest prompt plus output, None where it does not say (vLLM and phasesplit do).
    """

    url: str
    model: str
    context_tokens: int | None


async def find_endpoint(
    url: str, *, model: str | None = None, api_key: str | None = None, where: str = "URL"
) -> Endpoint:
    """Ask an endpoint for its models.

    Args:
        url: Its base, with or without /v1.
        model: The model wanted; None: the only one.
        api_key: Sent as a bearer token.
        where: The option or argument that the address was given with.

    Raises:
        SpecError: It is no address, cannot be reached, does not list models, or not the one wanted.
    """
    base = url.rstrip("/").removesuffix("/v1")
    http_address(base, where)
    if api_key is not None and not api_key.isprintable():
        raise SpecError("PHASESPLIT_API_KEY: holds a line break or another character that no key can have")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = aiohttp.ClientTimeout(total=_PATIENCE_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limits, headers=headers) as session,
            session.get(f"{base}/v1/models") as answer,
        ):
            if answer.status in (401, 403):
                why = "does not take this key" if api_key else "wants a key"
                raise SpecError(f"{base}: {why}; PHASESPLIT_API_KEY holds the one that is sent")
            if answer.status != 200:
                raise SpecError(f"{base}/v1/models: answers with status {answer.status}")
            listed = await answer.json()
    except (aiohttp.ContentTypeError, ValueError):
        raise SpecError(f"{base}/v1/models: answers with something else than JSON; no OpenAI-compatible API") from None
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise SpecError(f"{base}: {unreached(getattr(error, 'os_error', error))}") from None
    return _chosen(base, listed, model)


def _chosen(base: str, listed: Any, model: str | None) -> Endpoint:
    rows = listed.get("data") if isinstance(listed, dict) else None
    names = {row["id"]: row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)}
    if not names:
        raise SpecError(f"{base}/v1/models: lists no model")
    if model is None and len(names) > 1:
        raise SpecError(f"{base}: has several models, name one with --model: {', '.join(names)}")
    name = next(iter(names)) if model is None else model
    if name not in names:
        raise SpecError.unknown("--model", name, list(names))
    context = names[name].get("max_model_len")
    return Endpoint(url=base, model=name, context_tokens=context if isinstance(context, int) else None)
