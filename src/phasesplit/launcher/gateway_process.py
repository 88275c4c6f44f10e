"""The gateway as the process of `phasesplit serve` runs it: codec, dispatcher, limits, keys and the ASGI application.

A module of its own, for it is imported while the workers start: its imports take longer than starting them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from phasesplit.engine.chat_template import ChatTemplate
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.config import ModelConfig
from phasesplit.engine.tokens import Tokenizer
from phasesplit.errors import SpecError
from phasesplit.gateway.app import make_app
from phasesplit.gateway.clock import LoopClock
from phasesplit.gateway.decisions import warm
from phasesplit.gateway.dispatcher import Dispatcher
from phasesplit.gateway.estimates import Backlog
from phasesplit.gateway.gateway import Gateway, Keys
from phasesplit.gateway.http_worker import HttpWorker
from phasesplit.gateway.limits import Limits, key_digest
from phasesplit.gateway.registry import BreakerRule
from phasesplit.io.cluster_file import ServedCluster
from phasesplit.io.text import Where, inside


class Sinks(Protocol):
    """Where the gateway writes what happens; `local_cluster.Watchers` is one."""

    @property
    def decisions(self) -> Callable[[bytes], object] | None:
        """Takes the scheduler's decisions, a line each, or None."""

    @property
    def records(self) -> Callable[[Mapping[str, Any]], object] | None:
        """Takes a record of each request that has ended, or None."""

    @property
    def log_ended(self) -> Callable[[], str]:
        """Returns why the log of decisions has ended early, nothing while it has not."""


class GatewayProcess:
    """The gateway as the process of `serve` runs it.

    Args:
        cluster: What is served.
        model: Path of the model.
        name: Name of the model.
        sinks: Where what happens is written.

    Attributes:
        app: The ASGI application.
        limits: What clients may ask of it.

    Raises:
        SpecError: The model or the limits are wrong.
    """

    def __init__(self, cluster: ServedCluster, model: Path, name: str, sinks: Sinks) -> None:
        self.limits, backlog, breaker = bounds_from(cluster.limits, cluster.limits_place)
        checkpoint = open_checkpoint(model)
        dispatcher = Dispatcher(cluster.rules, self.limits, backlog=backlog, breaker=breaker, sink=sinks.decisions)
        self._gateway = Gateway(
            codec=ModelCodec(checkpoint.config, checkpoint.tokenizer, checkpoint.template),
            dispatcher=dispatcher,
            connect=lambda url: HttpWorker(url, key=cluster.join_key),
            models=(name,),
            clock=LoopClock(),
            limits=self.limits,
            keys=Keys(
                client=_digests(cluster.client_keys),
                admin=_digests(cluster.admin_keys),
                join=_digests((cluster.join_key,) if cluster.join_key else ()),
            ),
            records=sinks.records,
            log_ended=sinks.log_ended,
        )
        self.app = make_app(self._gateway)
        warm(cluster.rules)

    def serving(self) -> set[str]:
        """Return the names of the workers that serve."""
        return {machine.name for machine in self._gateway.dispatcher.registry.connected() if not machine.off}

    def degraded(self) -> tuple[str, ...]:
        """Return in words what keeps the cluster from being split as it should be, nothing where that is well."""
        return self._gateway.dispatcher.degraded

    async def drain(self, within_s: float) -> None:
        """Take no new requests, wait for those that are here, and end the rest."""
        await self._gateway.drain(within_s)


class ModelCodec:
    """A `gateway.codec.Codec`.

    Attributes:
        context_tokens: Longest prompt plus output of the model.
        vocabulary: Token ids are 0 to this, exclusive.
        stop_token_ids: The model's own ends of a text.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.context_tokens = config.context_tokens
        self.vocabulary = config.vocab
        self.stop_token_ids = frozenset(config.stop_token_ids)
        self._tokenizer, self._template = tokenizer, template

    def encode(self, text: str, *, has_start: bool = True) -> list[int]:
        """Return the tokens of a text, with the start token where that is asked for and the model wants one."""
        return self._tokenizer.encode(text, has_start=has_start)

    def chat(self, messages: Sequence[Mapping[str, Any]], given: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a chat, up to where the assistant's answer starts.

        Args:
            messages: As the client sent them.
            given: Further names for the template; `add_generation_prompt` is one of them, and `add_special_tokens` puts
                the start token before what it makes.

        Raises:
            SpecError: The model has no chat template, or the template refuses the messages.
        """
        if self._template is None:
            raise SpecError("this model has no chat template; use /v1/completions")
        names = dict(given)
        wanted = names.pop("add_generation_prompt", True)
        has_start = names.pop("add_special_tokens", False)
        text = self._template.render(messages, has_generation_prompt=bool(wanted), **names)
        return self._tokenizer.encode(text, has_start=bool(has_start))

    def token_bytes(self, token: int) -> bytes:
        """Return what a token stands for, nothing for a special token."""
        return b"" if token in self._tokenizer.special else self._tokenizer.token_bytes(token)

    def token_name(self, token: int) -> str:
        """Return how log-probabilities show a token; bytes that are no character are U+FFFD."""
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


_Kind = TypeVar("_Kind", Limits, Backlog, BreakerRule)


_PARTS = ("backlog", "breaker")
_MOST = 1e18


class GatewayBounds(NamedTuple):
    """What a deployment may set about its gateway.

    Attributes:
        limits: What clients may ask of it.
        backlog: How much prompt work may wait.
        breaker: When a failing machine is left alone.
    """

    limits: Limits
    backlog: Backlog
    breaker: BreakerRule


def bounds_from(settings: Mapping[str, Any], where: Where) -> GatewayBounds:
    """Return bounds with some fields set.

    Args:
        settings: Field of `Limits` to value; `backlog` and `breaker` to the fields of these.
        where: From a field to how the person knows its place.

    Raises:
        SpecError: A field is unknown, or a value is not allowed.
    """
    own = dict(settings)
    parts = [own.pop(name, {}) for name in _PARTS]
    for name, part in zip(_PARTS, parts, strict=True):
        if not isinstance(part, Mapping):
            raise SpecError.bad(where(name), part, "fields with values")
    return GatewayBounds(
        _bounds(Limits, own, where, "limits", (*Limits.__dataclass_fields__, *_PARTS)),
        _bounds(Backlog, parts[0], inside(where, "backlog"), "backlog", Backlog.__dataclass_fields__),
        _bounds(BreakerRule, parts[1], inside(where, "breaker"), "breaker", BreakerRule.__dataclass_fields__),
    )


def _bounds(kind: type[_Kind], settings: Mapping[str, Any], where: Where, word: str, known: Iterable[str]) -> _Kind:
    """Return an object of bounds; `word` is what it calls itself in its errors."""
    usual = kind()
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in usual.__dataclass_fields__:
            raise SpecError.unknown(where(str(name)), str(name), known)
        type_ = type(getattr(usual, name))
        is_number = isinstance(value, int | float) and -_MOST <= value <= _MOST  # no nan, and nothing that is no float
        fits = isinstance(value, bool) if type_ is bool else is_number and value == type_(value)
        if not fits or (isinstance(value, bool) and type_ is not bool):
            allowed = {bool: "true or false", int: "a whole number"}.get(type_, "a number")
            raise SpecError.bad(where(name), value, allowed)
        values[name] = type_(value)
    try:
        return kind(**values)
    except SpecError as problem:
        said = re.sub(rf"{word}, (\w+)", lambda found: where(found[1]), str(problem), count=1)
        raise SpecError(said) from None


def _digests(keys: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(key_digest(key) for key in keys)
