"""`phasesplit worker`: one worker of a live cluster, on this host or another."""

import json
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasesplit.console.options import option
from phasesplit.errors import SpecError
from phasesplit.protocol.roles import JOIN_KEY_VARIABLE, is_loopback

if TYPE_CHECKING:
    from phasesplit.launcher.announcing import GatewayAddress
    from phasesplit.launcher.worker_process import WorkerPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """The gateway that a worker joins, and what it is there."""

    join: Annotated[
        str | None, option("--join", text="Gateway to join; without one the worker serves by itself.", metavar="URL")
    ] = None
    name: Annotated[
        str | None,
        option("--name", text="Its name, unique in the cluster; by default of host and role.", metavar="NAME"),
    ] = None
    home: Annotated[
        str,
        option("--home", "--role", text="What it is for; by default unsplit.", metavar="prefill|decode|mixed|unsplit"),
    ] = "unsplit"

    def role(self) -> str:
        """Return the role that --home names.

        Raises:
            SpecError: It names none.
        """
        from phasesplit.domain.cluster import Role

        return str(Role.parse(self.home, "--home"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Where a worker listens, with which key, and how long it takes to stop."""

    host: Annotated[
        str | None,
        option(
            "--host",
            text="Address to listen at; by default the one that faces the gateway, 127.0.0.1 for one on this host.",
            metavar="ADDRESS",
        ),
    ] = None
    port: Annotated[int, option("--port", text="Port to listen at; by default any free one.", metavar="N")] = 0
    key_file: Annotated[
        str | None,
        option(
            "--key-file",
            text=f"File with the cluster's join key; by default the environment variable {JOIN_KEY_VARIABLE}, if set.",
            metavar="FILE",
        ),
    ] = None
    drain: Annotated[
        str,
        option(
            "--drain",
            text="Time that live requests have to end when the worker is stopped; by default 30 s.",
            metavar="S",
        ),
    ] = "30 s"


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedOptions:
    """What a supervisor gives the worker that it starts; not for people."""

    epoch: Annotated[int | None, typer.Option("--epoch", hidden=True)] = None
    parent: Annotated[int | None, typer.Option("--parent", hidden=True)] = None
    sockets: Annotated[str | None, typer.Option("--sockets", hidden=True)] = None

    def end_with_parent(self) -> None:
        """Let this process end when the one that started it ends, however that ends."""
        if self.parent is not None:
            from phasesplit.launcher.supervisor import end_with_parent

            end_with_parent(self.parent)


def worker(
    *,
    joins: JoinOptions,
    model: Annotated[
        str,
        option(
            "--model",
            text="default (SmolLM2-135M-Instruct), tiny (random, no network), a GGUF file or a directory; "
            "the same as the gateway's.",
            metavar="NAME|PATH",
        ),
    ] = "default",
    called: Annotated[
        str | None,
        option("--model-name", text="Name that clients ask for; by default the model's own.", metavar="NAME"),
    ] = None,
    kv_memory: Annotated[
        str, option("--kv-memory", text="Memory for KV; by default 512MB, taken as it is used.", metavar="BYTES")
    ] = "512MB",
    settings: Annotated[
        list[str] | None,
        option("--set", text="A field of the scheduling rules; may be repeated.", metavar="FIELD=VALUE"),
    ] = None,
    prefix_cache: Annotated[
        bool, option("--prefix-cache", text="Keep the KV of prompts for later ones that start the same.")
    ] = False,
    core_share: Annotated[
        float,
        option("--core-share", text="What it uses of its core at most, where several share one; 1.", metavar="SHARE"),
    ] = 1.0,
    listens: ListenOptions,
    supervised: SupervisedOptions,
) -> int:
    """Run one worker, and let it join a gateway; Ctrl-C lets it finish what it has begun.

    Example: phasesplit worker --join http://10.0.0.5:8080 --home decode --key-file join.key
    """
    interpret_scheduling()
    supervised.end_with_parent()
    import asyncio
    import contextlib

    from phasesplit.engine.fetch import model_path
    from phasesplit.io.cluster_file import core_share_of, served_rules
    from phasesplit.io.rule_settings import rules_setting
    from phasesplit.io.text import fields_of
    from phasesplit.launcher.announcing import model_name, worker_name
    from phasesplit.launcher.embedded import WorkerSettings
    from phasesplit.launcher.sockets import socket_directory
    from phasesplit.launcher.worker_process import run_worker

    home, place = joins.role(), worker_place(joins, listens)
    kv_bytes = bytes_of(kv_memory, "--kv-memory")
    try:
        core_share = core_share_of(core_share)
    except ValueError as problem:
        raise SpecError.bad("--core-share", core_share, str(problem)) from None
    rules = served_rules(dict(rules_setting(text) for text in settings or ()), fields_of("--set"))
    with contextlib.nullcontext(supervised.sockets) if supervised.sockets else socket_directory() as directory:
        worker_settings = WorkerSettings(
            name=worker_name(joins.name, home),
            epoch=int(time.time() * 1000) if supervised.epoch is None else supervised.epoch,
            home=home,
            model=model_path(model, say),
            model_name=called or model_name(model),
            kv_bytes=kv_bytes,
            rules=rules,
            has_prefix_cache=prefix_cache,
            core_share=core_share,
            sockets=directory,
            transfer_host=number(place.host, place.gateway),
        )
        ready = say_ready if supervised.parent is None else announce
        return asyncio.run(run_worker(worker_settings, place, ready=ready, say=say))


def worker_place(joins: JoinOptions, listens: ListenOptions) -> "WorkerPlace":
    """Return where a worker listens, and which gateway it joins with which key.

    Raises:
        SpecError: An address, a port, a key or a time is wrong, or others can reach the worker and it has no key.
    """
    from phasesplit.io.cluster_file import only_key, read_keys
    from phasesplit.launcher.announcing import GatewayAddress
    from phasesplit.launcher.worker_process import WorkerPlace

    gateway = GatewayAddress.from_text(joins.join) if joins.join is not None else None
    if listens.key_file:
        key: str | None = only_key(read_keys(listens.key_file, "--key-file"), "--key-file")
    else:
        key = os.environ.get(JOIN_KEY_VARIABLE)
    address = listens.host or facing(gateway)
    require_key(address, key)
    return WorkerPlace(
        host=address,
        port=port_of(listens.port),
        gateway=gateway,
        join_key=key,
        key=key,
        drain_s=seconds_of(listens.drain, "--drain"),
    )


def interpret_scheduling() -> None:
    """Compile the kernels alone: a worker calls the scheduler once an iteration, which takes a thousand times longer.

    See docs/decisions/0012-workers-interpret-scheduling.md. Nothing may have imported either before.
    """
    os.environ["PHASESPLIT_KERNELS"] = os.environ.get("PHASESPLIT_KERNELS") or os.environ.get("PHASESPLIT_JIT", "1")
    os.environ["PHASESPLIT_JIT"] = "0"


def bytes_of(text: str, where: str) -> int:
    """Return a size that a person wrote, in bytes."""
    return int(_quantity(text, "bytes", 1e15, where))


def port_of(port: int) -> int:
    """Return a port to listen at, 0 for any free one.

    Raises:
        SpecError: It is none.
    """
    if not 0 <= port < 1 << 16:
        raise SpecError.bad("--port", port, "a whole number from 0 to 65535")
    return port


def seconds_of(text: str, where: str) -> float:
    """Return a time that a person wrote, in seconds."""
    return _quantity(text, "s", 1e6, where)


def _quantity(text: str, kind: str, most: float, where: str) -> float:
    from phasesplit.io.schema import quantity

    try:
        return quantity(text, kind, most=most)
    except ValueError as problem:
        raise SpecError.bad(where, text, str(problem)) from None


def require_key(host: str, key: str | None) -> None:
    """Demand a key of a worker that other hosts can reach.

    Args:
        host: Where it listens.
        key: The cluster's join key, None or empty where there is none.

    Raises:
        SpecError: It has none.
    """
    if not is_loopback(host) and not key:
        raise SpecError(f"--host {host}: a worker that others can reach needs a key, --key-file or {JOIN_KEY_VARIABLE}")


def facing(gateway: "GatewayAddress | None") -> str:
    """Return the address of this host that a gateway's network sees."""
    if gateway is None or is_loopback(gateway.host):
        return "127.0.0.1"
    return gateway.own_host()


def number(address: str, gateway: "GatewayAddress | None") -> str:
    """Return where workers of other hosts reach this one's KV, as a number."""
    if address in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return gateway.own_host() if gateway is not None else "127.0.0.1"
    return "127.0.0.1" if address == "localhost" else address


def announce(announcement: dict[str, Any]) -> None:
    """Print an announcement for the process that supervises this one."""
    typer.echo(json.dumps(announcement))


def say_ready(announcement: dict[str, Any]) -> None:
    """Print an announcement for people."""
    name, home, model, url = (announcement[field] for field in ("name", "home", "model", "url"))
    say(f"worker {name} ({home}) serves {model} on {url}")


def say(line: str) -> None:
    """Print a line of the log."""
    typer.echo(line, err=True)
