"""The gateway put together: codec, dispatcher, limits, keys, and the ASGI application over them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.errors import SpecError
from phasesplit.files.serve_files import ServedCluster
from phasesplit.gateway.app import make_app
from phasesplit.gateway.clock import LoopClock
from phasesplit.gateway.decisions import warm
from phasesplit.gateway.dispatcher import Dispatcher
from phasesplit.gateway.gateway import Gateway, Keys
from phasesplit.gateway.http_worker import HttpWorker
from phasesplit.gateway.keys import key_digest
from phasesplit.gateway.limits import Limits
from phasesplit.serving.codec import ModelCodec


class Sinks(Protocol):
    """Where what happens is written."""

    @property
    def decisions(self) -> Any:
        """Takes the scheduler's decisions, a line each, or None."""

    @property
    def records(self) -> Any:
        """Takes a record of each request that has ended, or None."""


class Front:
    """What clients talk to.

    Args:
        cluster: What is served.
        model: Path of the model.
        name: Name of the model.
        sinks: Where what happens is written.

    Attributes:
        app: The ASGI application.

    Raises:
        SpecError: The model or the limits are wrong.
    """

    def __init__(self, cluster: ServedCluster, model: Path, name: str, sinks: Sinks) -> None:
        limits = limits_from(cluster.limits, f"{cluster.source}, serve.limits" if cluster.source else "limits")
        checkpoint = open_checkpoint(model)
        dispatcher = Dispatcher(cluster.rules, limits, sink=sinks.decisions)
        self._gateway = Gateway(
            codec=ModelCodec(checkpoint.config, checkpoint.tokenizer, checkpoint.template),
            dispatcher=dispatcher,
            connect=lambda url: HttpWorker(url, key=cluster.join_key),
            models=(name,),
            clock=LoopClock(),
            limits=limits,
            keys=Keys(
                client=_digests(cluster.client_keys),
                admin=_digests(cluster.admin_keys),
                join=_digests((cluster.join_key,) if cluster.join_key else ()),
            ),
            records=sinks.records,
        )
        self.app = make_app(self._gateway)
        warm(cluster.rules)

    def serving(self) -> set[str]:
        """Return the names of the workers that serve."""
        return {machine.name for machine in self._gateway.fleet.machines() if not machine.is_lost}

    async def drain(self, within_s: float) -> None:
        """Take no new requests, wait for those that are here, and end the rest."""
        await self._gateway.drain(within_s)


def limits_from(settings: Mapping[str, Any], where: str) -> Limits:
    """Return limits with some fields set.

    Args:
        settings: Field of `Limits` to value.
        where: How the person knows their place.

    Raises:
        SpecError: A field is unknown, or a value is not allowed.
    """
    usual = Limits()
    values: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in Limits.__dataclass_fields__:
            raise SpecError.unknown(f"{where}, field", str(name), Limits.__dataclass_fields__)
        kind = type(getattr(usual, name))
        fits = isinstance(value, bool) if kind is bool else isinstance(value, int | float) and value == kind(value)
        if not fits or (isinstance(value, bool) and kind is not bool):
            allowed = {bool: "true or false", int: "a whole number"}.get(kind, "a number")
            raise SpecError.bad(f"{where}, field {name}", value, allowed)
        values[name] = kind(value)
    try:
        return Limits(**values)
    except SpecError as problem:
        raise SpecError(str(problem).replace("limits", where, 1)) from None


def _digests(keys: tuple[str, ...]) -> tuple[bytes, ...]:
    return tuple(key_digest(key) for key in keys)
