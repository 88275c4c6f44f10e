"""`phasesplit serve`: a phase-split cluster on this host behind an OpenAI-compatible endpoint."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasesplit.console.options import option
from phasesplit.errors import SpecError
from phasesplit.launcher.worker_command import bytes_of, port_of

if TYPE_CHECKING:
    from phasesplit.io.cluster_file import ServedCluster
    from phasesplit.launcher.ready import Ready

_OTLP, _OTLP_TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_LAST_WORD = "phasesplit: "
"""How the line starts with which a process of ours says why it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """How many workers each pool has."""

    prefill: Annotated[
        int | None, option("--prefill", "--prompt", text="Workers for prefill; by default 1.", metavar="N")
    ] = None
    decode: Annotated[
        int | None, option("--decode", "--token", text="Workers for decode; by default 1.", metavar="N")
    ] = None
    mixed: Annotated[int | None, option("--mixed", text="Workers that do both, in the mixed pool.", metavar="N")] = None
    unsplit: Annotated[
        int | None, option("--unsplit", text="Workers that serve requests whole, instead of a split.", metavar="N")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFileOptions:
    """Files of the keys that the gateway asks for."""

    api_key_file: Annotated[
        str | None, option("--api-key-file", text="File of keys, one a line, that let clients in.", metavar="FILE")
    ] = None
    admin_key_file: Annotated[str | None, option("--admin-key-file", text="The same for /admin.", metavar="FILE")] = (
        None
    )
    join_key_file: Annotated[
        str | None,
        option("--join-key-file", text="File with the key that workers of other hosts bring.", metavar="FILE"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What is written while the cluster serves."""

    log_decisions: Annotated[
        str | None,
        option("--log-decisions", text="Write each decision of the scheduler, for replay-decisions.", metavar="FILE"),
    ] = None
    log_requests: Annotated[
        str | None, option("--log-requests", text="Write a JSON line for each request that has ended.", metavar="FILE")
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        option(
            "--otlp-endpoint",
            text="OpenTelemetry collector that takes a span for each stage of each request; by default what "
            "OTEL_EXPORTER_OTLP_ENDPOINT says. Needs the extra otel.",
            metavar="URL",
        ),
    ] = None
    logs: Annotated[
        str | None,
        option("--logs", text="Directory for the workers' logs; by default they come here.", metavar="DIR"),
    ] = None


def serve(
    *,
    cluster: Annotated[
        str | None, typer.Argument(help="Cluster file; what the options say goes before it.", metavar="[YAML]")
    ] = None,
    model: Annotated[
        str | None,
        option(
            "--model",
            text="default (SmolLM2-135M-Instruct, fetched once), tiny (random, no network), a GGUF file or a "
            "directory with safetensors.",
            metavar="NAME|PATH",
        ),
    ] = None,
    pools: PoolOptions,
    host: Annotated[str | None, option("--host", text="Address; by default 127.0.0.1.", metavar="ADDRESS")] = None,
    port: Annotated[
        int | None, option("--port", text="Port; by default 8080, 0 takes any free one.", metavar="N")
    ] = None,
    kv_memory: Annotated[
        str | None,
        option("--kv-memory", text="Memory for KV of each worker; 512MB, taken as it is used.", metavar="BYTES"),
    ] = None,
    prefix_cache: Annotated[
        bool, option("--prefix-cache", text="Keep the KV of prompts for later ones that start the same.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        option("--set", text="A field of the scheduling rules, such as elastic=false; may be repeated.", metavar="F=V"),
    ] = None,
    keys: KeyFileOptions,
    logged: LogOptions,
) -> int:
    """Serve a model: prefill in one pool of processes, decode in another, KV moving between them.

    Example: phasesplit serve --model tiny --prefill 1 --decode 2
    """
    import asyncio
    import contextlib

    from phasesplit.engine.fetch import model_path
    from phasesplit.launcher.local_cluster import Watchers, run_cluster

    asked = _asked(
        cluster,
        model=model,
        pools=asdict(pools),
        host=host,
        port=port,
        kv_memory=kv_memory,
        prefix_cache=prefix_cache,
        settings=settings or [],
        keys=keys,
    )
    with contextlib.ExitStack() as open_files:
        decisions, log_ended = _decisions(logged.log_decisions, open_files)
        terminal = WorkersHere()

        def on_ready(ready: "Ready") -> None:
            terminal.is_starting = False
            typer.echo(ready.text())

        watchers = Watchers(
            ready=on_ready,
            say=_say,
            log=_log(logged.logs, terminal),
            decisions=decisions,
            log_ended=log_ended,
            records=_records(logged.log_requests, logged.otlp_endpoint, open_files),
        )
        return asyncio.run(run_cluster(asked, model_path(asked.model, _say), watchers))


def _asked(
    file: str | None,
    *,
    model: str | None,
    pools: dict[str, int | None],
    host: str | None,
    port: int | None,
    kv_memory: str | None,
    prefix_cache: bool,
    settings: list[str],
    keys: KeyFileOptions,
) -> "ServedCluster":
    """Return what the file says, changed by what the options say."""
    from dataclasses import replace

    from phasesplit.io.cluster_file import ServedCluster, load_served_cluster, only_key, read_keys, served_rules
    from phasesplit.io.rule_settings import rules_setting
    from phasesplit.io.text import fields_of

    asked = load_served_cluster(file) if file is not None else ServedCluster()
    changes: dict[str, Any] = {}
    if any(count is not None for count in pools.values()):
        changes["pools"] = _pools(pools)
    if kv_memory is not None:
        changes["kv_bytes"] = bytes_of(kv_memory, "--kv-memory")
    if port is not None:
        changes["port"] = port_of(port)
    if settings:
        changes["rules"] = served_rules(dict(map(rules_setting, settings)), fields_of("--set"), asked.rules)
    if keys.api_key_file is not None:
        changes["client_keys"] = read_keys(keys.api_key_file, "--api-key-file")
    if keys.admin_key_file is not None:
        changes["admin_keys"] = read_keys(keys.admin_key_file, "--admin-key-file")
    if keys.join_key_file is not None:
        changes["join_key"] = only_key(read_keys(keys.join_key_file, "--join-key-file"), "--join-key-file")
    changes |= {name: value for name, value in (("model", model), ("host", host)) if value is not None}
    return replace(asked, has_prefix_cache=prefix_cache or asked.has_prefix_cache, **changes)


def _pools(counts: dict[str, int | None]) -> dict[str, int]:
    """Return the pools that the options ask for; a split has at least one worker on each side."""
    from phasesplit.io.cluster_schema import MOST_WORKERS

    for role, count in counts.items():
        if count is not None and not 0 <= count <= MOST_WORKERS:
            raise SpecError.bad(f"--{role}", count, f"a whole number from 0 to {MOST_WORKERS}")
    asked = {role: count for role, count in counts.items() if count is not None}
    if "unsplit" not in asked and "mixed" not in asked:
        asked = {"prefill": 1, "decode": 1} | asked
    if asked.get("unsplit") and any(asked.get(role) for role in ("prefill", "decode", "mixed")):
        raise SpecError("--unsplit: a cluster is either split (--prefill, --decode, --mixed) or not")
    if not any(asked.values()) or (bool(asked.get("prefill")) != bool(asked.get("decode")) and not asked.get("mixed")):
        raise SpecError("--prefill, --decode: a split cluster needs workers for both phases, or mixed ones")
    return {role: count for role, count in asked.items() if count}


class WorkersHere:
    """What workers write, on this terminal.

    A worker that cannot start says why in its last line, and so do its supervisor, the other workers, and this program
    when it therefore ends. The last one is enough.

    Attributes:
        is_starting: Not all workers have joined yet; one that cannot start ends the program.
    """

    def __init__(self) -> None:
        self.is_starting = True

    def write(self, name: str, line: str) -> None:
        """Write a line of a worker's log, or about it."""
        if not (self.is_starting and line.startswith((_LAST_WORD, f"worker {name} cannot run: "))):
            _say(f"[{name}] {line}")


def _log(directory: str | None, terminal: WorkersHere) -> Callable[[str, str], None]:
    if directory is None:
        return terminal.write
    from phasesplit.io.decision_log import WorkerLogs

    return WorkerLogs(Path(directory)).write


def _decisions(path: str | None, open_files: Any) -> tuple[Callable[[bytes], object] | None, Callable[[], str]]:
    """Return what takes decisions, None for nothing, and a function that says why the log has ended early."""
    if path is None:
        return None, str
    from phasesplit.io.decision_log import DecisionLog

    log = DecisionLog(path)

    def close() -> None:
        log.close()
        if log.broken:
            _say(f"{path}: the decision log is not whole: {log.broken}")

    open_files.callback(close)
    return log.write, lambda: log.broken


def _records(path: str | None, otlp_endpoint: str | None, open_files: Any) -> Callable[[Any], object] | None:
    """Return what takes the record of each request that has ended: a file, a collector of traces, both, or nothing."""
    takers: list[Callable[[Any], object]] = []
    if path is not None:
        from phasesplit.io.decision_log import RequestLog

        log = RequestLog(Path(path))
        open_files.callback(log.close)
        takers.append(log.write)
    endpoint = traces_url(otlp_endpoint, os.environ)
    if endpoint is not None:
        from phasesplit.gateway.metrics import spans_to

        try:
            spans = spans_to(endpoint)
            open_files.callback(spans.close)
            takers.append(spans)
        except SpecError as problem:
            if otlp_endpoint is not None:
                raise
            _say(str(problem))  # a variable that is there for other programs is no reason not to serve
    if not takers:
        return None

    def take_record(record: Any) -> None:
        for take in takers:
            take(record)

    return take_record


def traces_url(option: str | None, environment: Mapping[str, str]) -> str | None:
    """Return where spans go, None for nowhere.

    Args:
        option: What the person says: the collector, or its page for traces.
        environment: May say so in OpenTelemetry's own variables.

    Raises:
        SpecError: It is not a URL.
    """
    given = option or environment.get(_OTLP_TRACES) or environment.get(_OTLP)
    if not given:
        return None
    where = "--otlp-endpoint" if option else _OTLP_TRACES if environment.get(_OTLP_TRACES) else _OTLP
    if not given.startswith(("http://", "https://")):
        raise SpecError.bad(where, given, "a URL, such as http://localhost:4318")
    # Source: OpenTelemetry's specification of the exporter: only the variable for traces names the page itself.
    is_page = where == _OTLP_TRACES or given.rstrip("/").endswith("/v1/traces")
    return given if is_page else f"{given.rstrip('/')}/v1/traces"


def _say(line: str) -> None:
    typer.echo(line, err=True)
