"""The parts of one machine's connector, put together where its model runs. No vLLM in here: values go in."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import BlockPool
from phasesplit.kv_transfer.calibration import measure_link
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import KvLayout, PeerInfo
from phasesplit.kv_transfer.messages import TransferTimeouts
from phasesplit.kv_transfer.outgoing import Sent
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.protocol.roles import JOIN_KEY_VARIABLE
from phasesplit.vllm.reports import Reports
from phasesplit.vllm.settings import USUAL_THRESHOLD_TOKENS, Settings
from phasesplit.vllm.staging import Device, Slots, slots_for
from phasesplit.vllm.transfer_thread import TransferThread
from phasesplit.vllm.worker_half import WorkerHalf

_SAMPLES, _SAMPLE_BYTES = 16, 1 << 16
"""What is read of each file of weights: at most 1 MiB, from its start to its end."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Source: vllm 0.32, model_executor/model_loader/default_loader.py; GGUF is read by plugins."""
_LINK_ROUNDS, _LINK_S = 30, 1.0
"""Little next to vLLM's own start, during which others of the host keep its processors busy."""
_USUAL_PROMPTS, _LEAST_PROMPTS = 4, 2
_PINNED_BYTES = 8 << 30
"""What pinned memory is taken for more than the fewest prompts: the system cannot use it meanwhile. Source: ours."""


def worker_half(
    settings: Settings,
    layout: KvLayout,
    longest_tokens: int,
    device_over: Callable[[SharedPool], Device],
    *,
    key: bytes | None = None,
    is_pinned: bool = False,
) -> WorkerHalf:
    """Return the connector's half where the model runs, listening.

    Args:
        settings: The connector's.
        layout: vLLM's KV blocks.
        longest_tokens: Tokens of the longest prompt, >= 1.
        device_over: Makes the device from the staging slots.
        key: The cluster's, see `join_key`.
        is_pinned: The device wants all of the staging memory at once, and for itself.

    Raises:
        TransferError: The staging memory is too small, or more than the device can have.
        OSError: It cannot listen, or no worker listens for its reports.
    """
    slot_bytes = layout.layers * layout.block_bytes
    longest_bytes = layout.blocks_for(longest_tokens) * slot_bytes
    size_bytes = settings.staging_bytes or usual_staging_bytes(longest_bytes, is_pinned=is_pinned)
    count = slots_for(size_bytes, slot_bytes, longest_tokens, layout.block_tokens)
    pool = SharedPool(layout, 2 * count)
    device = device_over(pool)
    endpoint = KvEndpoint(
        PeerInfo(machine=settings.machine, epoch=settings.epoch, layout=layout, blocks=2 * count),
        pool,
        BlockPool(count),
        directory=settings.sockets,
        tcp=_listening(settings, settings.transfer_port),
        nixl=_listening(settings, settings.nixl_port),
        clock=time.monotonic,
        timeouts=TransferTimeouts(**(settings.timeouts or {})),
        secret=key,
    )
    reports, threshold_tokens = Reports(settings.reports), settings.threshold_tokens
    if reports.is_connected:
        link = measure_link(
            endpoint, transport="unix" if settings.sockets is not None else "tcp", rounds=_LINK_ROUNDS, enough_s=_LINK_S
        )
        endpoint.outgoing.sent = Sent()  # what was sent to measure is no traffic
        hello = {"layout": asdict(layout), "address": endpoint.address, "link": asdict(link), "staging_slots": count}
        reports.send({"hello": hello | {"threshold_tokens": threshold_tokens}})
    slots = Slots(count, count)
    transfers = TransferThread(
        endpoint, device, slots, reports, USUAL_THRESHOLD_TOKENS if threshold_tokens is None else threshold_tokens
    )
    return WorkerHalf(transfers, device, slots, reports, layout)


def _listening(settings: Settings, port: int | None) -> tuple[str, int] | None:
    return None if settings.transfer_host is None or port is None else (settings.transfer_host, port)


def join_key(environment: Mapping[str, str]) -> bytes | None:
    """Return the cluster's key, which machines prove to one another before KV moves between them, or None.

    Args:
        environment: This process's.
    """
    return environment.get(JOIN_KEY_VARIABLE, "").encode() or None


def usual_staging_bytes(longest_bytes: int, *, is_pinned: bool) -> int:
    """Return the default size of staging memory: for both shares, as many of the longest prompts.

    Args:
        longest_bytes: KV of the longest prompt, in whole blocks.
        is_pinned: As for `worker_half`.
    """
    usual = _USUAL_PROMPTS * longest_bytes
    return max(_LEAST_PROMPTS * longest_bytes, min(usual, _PINNED_BYTES)) if is_pinned else usual


def weights_text(model: str, revision: str | None, *, loaded_as: str = "") -> str:
    """Return a text that is equal where weights are, from parts of each file: reading them whole takes minutes.

    Where two trainings differ in few tensors only, `Settings.model` tells them apart for certain.

    Args:
        model: Directory, file, or a hub's name.
        revision: The hub's revision, None for its latest.
        loaded_as: What is made of the weights on loading.

    Raises:
        TransferError: There are no weights in the directory that could be compared.
    """
    place = Path(model)
    if not place.exists():
        return f"{model}@{revision or 'main'}" + (f" {loaded_as}" if loaded_as else "")
    files = [place] if place.is_file() else sorted(path for suffix in _WEIGHTS for path in place.glob(suffix))
    if not files:
        raise TransferError(
            f"{model}: no {', '.join(_WEIGHTS)} to tell these weights from others by; set"
            " kv_connector_extra_config.model to a text that is equal where the weights are"
        )
    digest = hashlib.sha256(loaded_as.encode())
    for path in (place / "config.json", place / "params.json"):
        if path.is_file():
            digest.update(path.read_bytes())
    for path in files:
        with path.open("rb") as file:
            size_bytes = path.stat().st_size
            digest.update(f"{path.name} {size_bytes} ".encode())
            for start in _starts(size_bytes):
                file.seek(start)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _starts(size_bytes: int) -> Sequence[int]:
    """Return where the samples of a file begin: evenly from its first byte to its last."""
    last = max(0, size_bytes - _SAMPLE_BYTES)
    return sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
