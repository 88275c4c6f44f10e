"""What a cluster file that is served may hold, checked by pydantic. Imported only when a file is read."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from phasesplit.domain.cluster import Role
from phasesplit.io.cluster_file import EMBEDDED, WORKERS, core_share_of
from phasesplit.io.schema import Bytes, Name, Spec, quantity_in, whole
from phasesplit.io.specs import is_path

MOST_WORKERS = 64
"""Largest pool of processes on one host that is believed."""
_MOST_THREADS = 1_024


def _role(value: object) -> Role:
    try:
        return Role(str(value))
    except ValueError:
        raise ValueError(" or ".join(Role)) from None


def _machine(value: object) -> str:
    if value == EMBEDDED or (isinstance(value, str) and is_path(value)):
        return str(value)
    raise ValueError(f"{WORKERS}; machines of other kinds join by themselves")


def _pools(value: object) -> object:
    if not isinstance(value, (list, tuple)) or not value:
        raise ValueError("a list of pools, each with role and count")
    return value


def _port(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 16:
        raise ValueError("a whole number from 0 to 65535")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


Seconds = Annotated[float, quantity_in("s", 1e6)]


class WorkerPoolSpec(Spec):
    """One pool of workers on this host.

    Attributes:
        role: What they are for.
        count: How many.
        machine: What they are: `embedded`, or the path of a machine file.
    """

    role: Annotated[Role, BeforeValidator(_role)]
    count: Annotated[int, whole(MOST_WORKERS)]
    machine: Annotated[str, BeforeValidator(_machine)] = EMBEDDED


class KeySource(Spec):
    """Where keys are: a file with one a line, or an environment variable that holds one. Never the keys themselves.

    Attributes:
        file: Path of the file.
        env: Name of the environment variable.
    """

    file: Name | None = None
    env: Name | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> "KeySource":
        if (self.file is None) == (self.env is None):
            raise ValueError("either file or env")
        return self


class KeysSpec(Spec):
    """Whose keys are asked for.

    Attributes:
        clients: Of clients.
        admin: Of whoever changes pools.
        join: Of workers of other hosts.
    """

    clients: KeySource | None = None
    admin: KeySource | None = None
    join: KeySource | None = None


def _engine(value: object) -> str:
    if value not in ("embedded", "vllm"):
        raise ValueError("embedded or vllm")
    return str(value)


def _connector(value: object) -> str:
    if value not in ("phasesplit", "nixl", "none"):
        raise ValueError("phasesplit, nixl or none")
    return str(value)


class VllmSpec(Spec):
    """How vLLM is started, where the engine is vllm.

    Attributes:
        python: Interpreter that has vLLM and phasesplit; None: the one that runs `serve`.
        connector: How KV moves.
        threads: Threads that each server computes with on a CPU.
        arguments: Further arguments of vLLM's API server, such as "--dtype", "float16".
    """

    python: Name | None = None
    connector: Annotated[str, BeforeValidator(_connector)] = "phasesplit"
    threads: Annotated[int, whole(_MOST_THREADS)] | None = None
    arguments: tuple[str, ...] = ()


class ServeSettings(Spec):
    """How the cluster is served.

    Attributes:
        host: Where the gateway listens.
        port: The same.
        kv_memory: Memory for KV of each worker.
        prefix_cache: Whether workers keep the KV of prompts.
        core_share: What each worker uses of its core at most.
        limits: Bounds by name.
        keys: Whose keys are asked for.
        drain: Time that requests have to end in when the cluster is stopped.
        stalled: A worker that has not answered for so long is started again.
        vllm: How vLLM is started, where the engine is vllm.
    """

    host: Name = "127.0.0.1"
    port: Annotated[int, BeforeValidator(_port)] = 8080
    kv_memory: Bytes = 512e6
    prefix_cache: Annotated[bool, BeforeValidator(_flag)] = False
    core_share: Annotated[float, BeforeValidator(core_share_of)] = 1.0
    limits: dict[str, Any] = Field(default_factory=dict)
    keys: KeysSpec = Field(default_factory=KeysSpec)
    drain: Seconds = 30.0
    stalled: Seconds = 10.0
    vllm: VllmSpec = Field(default_factory=VllmSpec)


class ServedSpec(Spec):
    """A cluster file as `serve` reads it: one whose machines are processes of this host, and a section of its own.

    Attributes:
        name: As in reports.
        model: `default`, `tiny`, or the path of a model or of a profile of one.
        engine: What computes: `embedded` or `vllm`.
        pools: At least one.
        rules: Settings of the scheduling rules.
        serve: The section.
    """

    name: Name = "cluster"
    model: Name = "default"
    engine: Annotated[str, BeforeValidator(_engine)] = "embedded"
    pools: Annotated[tuple[WorkerPoolSpec, ...], BeforeValidator(_pools)]
    rules: dict[str, Any] = Field(default_factory=dict)
    serve: ServeSettings = Field(default_factory=ServeSettings)
