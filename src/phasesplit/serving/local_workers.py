"""The workers that `serve` starts on its own host: their names and the commands that start them."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phasesplit.files.rules import rules_settings
from phasesplit.files.serve_files import BLOCK_TOKENS, ServedCluster, VllmOptions
from phasesplit.protocol.roles import JOIN_KEY_VARIABLE
from phasesplit.scheduling.rules import Rules
from phasesplit.serving.listening import ALL_ADDRESSES, outward_host
from phasesplit.serving.supervisor import Command
from phasesplit.transfer.chooser import ruled_tokens


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all workers of a host share.

    Attributes:
        gateway: URL of the gateway.
        model: Path of the model.
        model_name: Name that clients ask for.
        sockets: Directory for Unix sockets.
        host: Where workers listen; empty: at the address that faces the gateway.
    """

    gateway: str
    model: Path
    model_name: str
    sockets: str
    host: str = ""


def worker_commands(cluster: ServedCluster, around: Surroundings) -> dict[str, Command]:
    """Return the workers of a cluster: name to command, in the order of the pools."""
    return {name: _command(name, role, cluster, around) for name, role in cluster.workers.items()}


def workers_host(cluster: ServedCluster) -> str:
    """Return where a cluster's workers listen, empty for the address that faces the gateway.

    With a key workers of other hosts may join, which must reach those of this host too; a gateway that listens at all
    addresses is faced at a loopback one. Without a default route that is all there is.
    """
    return outward_host() if cluster.join_key and cluster.host in ALL_ADDRESSES else ""


def worker_environment(cluster: ServedCluster) -> Mapping[str, str]:
    """Return the environment of a cluster's workers: this process's, with the cluster's key, and how many threads.

    Each library has one; vLLM those that it was given.
    """
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment.pop(JOIN_KEY_VARIABLE, None)
    if cluster.join_key:
        environment[JOIN_KEY_VARIABLE] = cluster.join_key
    if cluster.vllm is not None and cluster.vllm.threads is not None:
        environment["OMP_NUM_THREADS"] = str(cluster.vllm.threads)
    return environment


def _command(name: str, role: str, cluster: ServedCluster, around: Surroundings) -> Command:
    kind = "worker" if cluster.vllm is None else "vllm-worker"
    fixed = [
        sys.executable, "-m", "phasesplit", kind, "--join", around.gateway, "--name", name, "--home", role,
        "--model", str(around.model), "--model-name", around.model_name, "--kv-memory", str(cluster.kv_bytes),
        "--sockets", around.sockets, "--drain", f"{cluster.drain_s:g} s", "--parent", str(os.getpid()),
    ]  # fmt: skip
    if around.host:
        fixed += ["--host", around.host]
    if cluster.vllm is not None:
        return _vllm_command(fixed, cluster.vllm, ruled_tokens(cluster.rules))
    for field, value in _changed(cluster.rules).items():
        fixed += ["--set", f"{field}={value}"]
    if cluster.core_share < 1.0:
        fixed += ["--core-share", f"{cluster.core_share:.4g}"]
    if cluster.has_prefix_cache:
        fixed.append("--prefix-cache")

    def command(epoch: int) -> Sequence[str]:
        return [*fixed, "--epoch", str(epoch)]

    return command


def _vllm_command(fixed: list[str], vllm: VllmOptions, threshold_tokens: int | None) -> Command:
    options = [*fixed, "--connector", vllm.connector, *(["--python", vllm.python] if vllm.python else [])]
    if threshold_tokens is not None:
        options += ["--layerwise-from-tokens", str(threshold_tokens)]
    return lambda epoch: [*options, "--epoch", str(epoch), "--", *vllm.arguments]


def _changed(rules: Rules) -> dict[str, object]:
    """Return the settings that differ from those a worker starts from."""
    usual = rules_settings(Rules(block_tokens=BLOCK_TOKENS))
    return {field: value for field, value in rules_settings(rules).items() if value != usual[field]}
