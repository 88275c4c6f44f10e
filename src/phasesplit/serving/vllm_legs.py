"""The requests that are on a vLLM machine, as the process beside it knows them."""

from dataclasses import dataclass


@dataclass(slots=True)
class Leg:
    """One request.

    Attributes:
        key: The gateway's name for it; empty where it has none.
        prompt_tokens: Tokens of its prompt.
        sends: Its KV leaves when its prompt is computed, and has not left.
        awaits: Its KV comes from another machine.
        tokens: Output tokens so far.
        answers: Its answer has begun.
    """

    key: str
    prompt_tokens: int
    sends: bool = False
    awaits: bool = False
    tokens: int = 0
    answers: bool = False


class Legs:
    """All requests that are on their way, and KV that is kept although its request has been answered."""

    def __init__(self) -> None:
        self._legs: dict[int, Leg] = {}
        self._kept: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._legs) + len(self._kept)

    def begin(self, leg: Leg) -> None:
        """Take note of a request."""
        self._legs[id(leg)] = leg

    def end(self, leg: Leg) -> None:
        """Take note that a request was answered, or given up; KV of an answered one that leaves stays until `left`."""
        self._legs.pop(id(leg), None)
        if leg.sends and leg.tokens:
            self._kept[leg.key] = leg.prompt_tokens

    def left(self, key: str) -> bool:
        """Take note that the KV of a key is gone, maybe before its request is answered; return whether it was here."""
        was_here = self._kept.pop(key, None) is not None
        for leg in self._legs.values():
            if leg.key == key and leg.sends:
                leg.sends, was_here = False, True
        return was_here

    def keys(self) -> list[str]:
        """Return the gateway's names of all that is here."""
        return [*{leg.key for leg in self._legs.values() if leg.key} | set(self._kept)]

    def held_tokens(self) -> dict[str, int]:
        """Return the tokens whose KV each key holds here, at most."""
        return self._kept | {leg.key: leg.prompt_tokens + leg.tokens for leg in self._legs.values() if leg.key}

    def pending_tokens(self) -> int:
        """Return the prompt tokens still to be computed here, and one for each decode."""
        return sum(1 if leg.tokens or leg.awaits else leg.prompt_tokens for leg in self._legs.values())
