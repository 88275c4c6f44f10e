"""Cluster files that `phasesplit serve` runs: the workers of this host, their rules, and files of keys.

A worker names its machine, or the file of the machine that a plan was made with.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasesplit.errors import SpecError
from phasesplit.io.rule_settings import ANYWHERE, rules_from
from phasesplit.io.specs import checked, is_path, is_profile, load_machine
from phasesplit.io.text import Where, fields_of, inside, read_json, read_text, read_yaml
from phasesplit.scheduler.rules import Batching, Rules

if TYPE_CHECKING:
    from phasesplit.io.profile_schema import ProfileSpec


EMBEDDED = "embedded"
"""The machine of a pool that `serve` starts itself: a process on this host."""

WORKERS = "embedded (a process on this host), or the file of a machine that `phasesplit profile engine` measured"
"""The machines that `serve` starts, for messages."""

_ENGINE = "engine"
"""Target of a profile of the embedded engine."""


def profile_of_workers(machines: Sequence[str], folder: Path, where: Where) -> "ProfileSpec | None":
    """Return the profile that workers of this host were planned with, None where their file names none.

    Args:
        machines: Of each pool, EMBEDDED or the path of a machine file relative to the folder.
        folder: Where the cluster file is.
        where: From a field of the cluster file to its place.

    Raises:
        SpecError: A machine file is wrong, was not measured on the embedded engine, or is of another machine than
            another pool's.
    """
    from phasesplit.io.profiles import read_profile_file

    found: ProfileSpec | None = None
    for number, machine in enumerate(machines):
        if machine == EMBEDDED:
            continue
        place, file = where(f"pools[{number}].machine"), folder / machine
        # A slice or a capped machine is no file; there are no such processes.
        profile = load_machine(file).profile if file.is_file() else ""
        measured = read_profile_file(profile) if is_path(profile) and profile.endswith(".json") else None
        if measured is None or measured.target != _ENGINE:
            raise SpecError.bad(place, machine, WORKERS)
        if found is not None and measured != found:
            raise SpecError.bad(place, machine, "the machine of the other pools: workers of one host are alike")
        found = measured
    return found


def served_model(model: str, folder: Path) -> str:
    """Return what `serve` takes for a model: a path as an absolute one, and a profile's model by its name.

    Args:
        model: As the cluster file has it.
        folder: Where that is.

    Raises:
        SpecError: A JSON file cannot be read, or is a profile with something wrong.
    """
    from phasesplit.io.profiles import read_profile_file

    if not (is_path(model) or model.endswith(".gguf")):
        return model
    path = (folder / model).resolve()
    if path.suffix == ".json" and is_profile(read_json(path)):
        return read_profile_file(path).model.name
    return str(path)


BLOCK_TOKENS = 32
"""Tokens of a KV block of the embedded engine."""

VLLM_RULES = Rules(block_tokens=BLOCK_TOKENS, batching=Batching.CHUNKED)
"""vLLM forms its batches itself, on every machine: the decode phase first, then chunks of prompts."""

_LEAST_CORE_SHARE = 0.01
_SHORTEST_KEY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """How vLLM is started.

    Attributes:
        python: Interpreter that has vLLM and phasesplit; None: the one that runs `serve`.
        connector: How KV moves: `phasesplit`, `nixl` or `none`.
        threads: Threads that each server computes with on a CPU; None: what the environment says, or all cores.
        arguments: Further arguments of vLLM's API server.
    """

    python: str | None = None
    connector: str = "phasesplit"
    threads: int | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedCluster:
    """What `serve` is to run.

    Attributes:
        name: As in reports.
        model: `default`, `tiny`, or the path of a model.
        pools: Role to number of workers on this host.
        rules: Settings of the scheduling rules.
        host: Where the gateway listens.
        port: The same; 0 takes any free one.
        kv_bytes: Memory for KV of each worker.
        has_prefix_cache: Whether workers keep the KV of prompts for later ones that start the same.
        core_share: What each worker uses of its core at most, 0 to 1.
        limits: Bounds by name, see `gateway.limits.Limits`; whoever builds them checks them.
        client_keys: Any of them lets a client in; empty: no key is needed.
        admin_keys: The same for /admin; empty: nobody may.
        join_key: What workers bring to join, and the gateway to talk to them; None: only this host's may join.
        drain_s: Seconds that requests have to end in when the cluster is stopped.
        stalled_s: A worker of this host that has not answered for so many seconds is started again.
        vllm: How vLLM is started; None: workers have the embedded engine.
        limits_place: From a field of the limits to how a person knows its place, for messages.
    """

    name: str = "cluster"
    model: str = "default"
    pools: Mapping[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    rules: Rules = field(default_factory=lambda: Rules(block_tokens=BLOCK_TOKENS))
    host: str = "127.0.0.1"
    port: int = 8080
    kv_bytes: int = 512_000_000
    has_prefix_cache: bool = False
    core_share: float = 1.0
    limits: Mapping[str, Any] = field(default_factory=dict)
    client_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    join_key: str | None = None
    drain_s: float = 30.0
    stalled_s: float = 10.0
    vllm: VllmOptions | None = None
    limits_place: Where = field(default=fields_of("limits"), compare=False)

    @property
    def workers(self) -> dict[str, str]:
        """Name to role of each worker on this host, in the order of the pools."""
        return {f"{role}-{number}": role for role, count in self.pools.items() for number in range(count)}


def load_served_cluster(path: str | Path) -> ServedCluster:
    """Return the cluster that a YAML file describes; paths in it are relative to the file.

    Raises:
        SpecError: The file holds something that is not allowed.
    """
    from phasesplit.io.cluster_schema import ServedSpec

    path = Path(path)
    content, where = read_yaml(path)
    spec = checked(content, ServedSpec, where, str(path))
    serve = spec.serve
    rules = served_rules(spec.rules, inside(where, "rules"), VLLM_RULES if spec.engine == "vllm" else None)
    pools: dict[str, int] = {}
    for pool in spec.pools:
        pools[str(pool.role)] = pools.get(str(pool.role), 0) + pool.count
    planned = profile_of_workers([pool.machine for pool in spec.pools], path.parent, where)
    return ServedCluster(
        name=spec.name,
        model=served_model(spec.model, path.parent),
        pools=pools,
        rules=rules,
        host=serve.host,
        port=serve.port,
        kv_bytes=_kv_bytes(spec, planned),
        has_prefix_cache=serve.prefix_cache,
        core_share=serve.core_share,
        limits=serve.limits,
        client_keys=_keys(serve.keys.clients, path, inside(where, "serve.keys.clients")),
        admin_keys=_keys(serve.keys.admin, path, inside(where, "serve.keys.admin")),
        join_key=only_key(_keys(serve.keys.join, path, inside(where, "serve.keys.join")), where("serve.keys.join")),
        drain_s=serve.drain,
        stalled_s=serve.stalled,
        vllm=_vllm(spec, path, rules) if spec.engine == "vllm" else None,
        limits_place=inside(where, "serve.limits"),
    )


def _kv_bytes(spec: Any, planned: "ProfileSpec | None") -> int:
    """Return the memory for KV of each worker: what the file says, else what was planned with, else the default."""
    kv = None if planned is None or "kv_memory" in spec.serve.model_fields_set else planned.kv
    if kv is None or kv.bytes_per_token is None:
        return int(spec.serve.kv_memory)
    return round(kv.blocks * kv.block_tokens * kv.bytes_per_token)


def _vllm(spec: Any, path: Path, rules: Rules) -> VllmOptions:
    """Return how vLLM is started; bounds of batches that the rules set become its own, unless its arguments say so."""
    python = spec.serve.vllm.python
    if python is not None and is_path(python):
        python = str(path.parent / python)  # not resolved: an environment's interpreter is a link
    vllm = spec.serve.vllm
    bounds = {"batch_prompt_tokens": "--max-num-batched-tokens", "batch_requests": "--max-num-seqs"}
    ruled = [
        part for field, name in bounds.items() if field in spec.rules for part in (name, str(getattr(rules, field)))
    ]
    return VllmOptions(
        python=python, connector=vllm.connector, threads=vllm.threads, arguments=(*ruled, *vllm.arguments)
    )


def served_rules(settings: Mapping[str, Any], where: Where = ANYWHERE, base: Rules | None = None) -> Rules:
    """Return rules for live machines, whose blocks have the size that the embedded engine gives them.

    Args:
        settings: Field of `Rules` to value, as a person writes both.
        where: From a field to how the person knows its place.
        base: The rules to change, by default those of live machines.

    Raises:
        SpecError: A field or value is not allowed, or only a simulation can follow it.
    """
    rules = rules_from(settings, where, base or Rules(block_tokens=BLOCK_TOKENS))
    if rules.published:
        raise SpecError.bad(where("published"), True, "false: the published rules know the output's length")
    if rules.block_tokens != BLOCK_TOKENS:
        raise SpecError.bad(where("block_tokens"), rules.block_tokens, f"{BLOCK_TOKENS}, the engine's")
    return rules


def core_share_of(value: object) -> float:
    """Return what a worker may use of its core, 1 for all of it.

    Raises:
        ValueError: What is allowed, as a phrase that follows "allowed is".
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _LEAST_CORE_SHARE <= value <= 1.0:
        raise ValueError(f"a number from {_LEAST_CORE_SHARE:g} to 1")
    return float(value)


def read_keys(path: str | Path, where: str) -> tuple[str, ...]:
    """Return the keys of a file: one a line, lines that are empty or start with # are left out.

    Args:
        path: The file.
        where: What an error calls the place that names the file.

    Raises:
        SpecError: It cannot be read, holds no key, or one that is too short or has blanks in it.
    """
    try:
        text = read_text(Path(path))
    except SpecError as problem:
        raise SpecError(f"{where}, {problem}") from None
    keys = [line.strip() for line in text.splitlines()]
    keys = [key for key in keys if key and not key.startswith("#")]
    if not keys:
        raise SpecError(f"{where}: {path} holds no key; one a line is expected")
    return tuple(_key(key, f"{where}, {path}") for key in keys)


def only_key(keys: tuple[str, ...], where: str) -> str | None:
    """Return the only one of some keys, None of none.

    Raises:
        SpecError: There are several.
    """
    if len(keys) > 1:
        raise SpecError.bad(where, f"{len(keys)} keys", "one key")
    return keys[0] if keys else None


def key_from_environment(name: str, where: str) -> str:
    """Return the key that an environment variable holds.

    Raises:
        SpecError: It is not set, or what it holds is no key.
    """
    found = os.environ.get(name, "")
    if not found:
        raise SpecError(f"{where}: the environment variable {name} is not set")
    return _key(found, f"{where}, {name}")


def _key(key: str, where: str) -> str:
    if len(key) < _SHORTEST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        # The key itself is not shown: messages end up in logs.
        raise SpecError(f"{where}: a key is wrong; allowed are {_SHORTEST_KEY} or more printable ASCII characters")
    return key


def _keys(source: Any, path: Path, where: Where) -> tuple[str, ...]:
    if source is None:
        return ()
    if source.file is not None:
        return read_keys(path.parent / source.file, where("file"))
    return (key_from_environment(source.env, where("env")),)
