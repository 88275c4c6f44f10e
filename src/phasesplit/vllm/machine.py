"""The parts of one machine's connector, put together where its model runs. No vLLM in here: values go in."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from phasesplit.transfer.blocks import BlockPool
from phasesplit.transfer.calibration import measure_link
from phasesplit.transfer.layout import Greeting, KvLayout
from phasesplit.transfer.outgoing import Sent
from phasesplit.transfer.post import Post
from phasesplit.transfer.shared_memory import SharedPool
from phasesplit.transfer.timing import Patience
from phasesplit.vllm.mover import Mover
from phasesplit.vllm.reports import Reports
from phasesplit.vllm.settings import USUAL_THRESHOLD_TOKENS, Settings
from phasesplit.vllm.staging import Device, Slots, slots_for
from phasesplit.vllm.worker_half import WorkerHalf

JOIN_KEY_VARIABLE = "PHASESPLIT_JOIN_KEY"
"""Names the cluster's key in the environment: arguments of a process can be read by every user of its host."""
_HEAD_BYTES = 1 << 16
_LINK_ROUNDS, _LINK_S = 30, 1.0
"""Little beside vLLM's own start, during which others of the host keep its processors busy."""
_USUAL_PROMPTS = 4


def worker_half(
    settings: Settings,
    layout: KvLayout,
    longest_tokens: int,
    device_over: Callable[[SharedPool], Device],
    *,
    key: bytes | None = None,
) -> WorkerHalf:
    """Return the connector's half where the model runs, listening.

    Args:
        settings: What the connector is told.
        layout: vLLM's KV blocks.
        longest_tokens: Tokens of the longest prompt, >= 1.
        device_over: Makes the device from the staging slots.
        key: The cluster's, see `join_key`.

    Raises:
        TransferError: The staging memory is too small.
        OSError: It cannot listen, or nobody listens for its reports.
    """
    slot_bytes = layout.layers * layout.block_bytes
    size_bytes = settings.staging_bytes or _USUAL_PROMPTS * layout.blocks_for(longest_tokens) * slot_bytes
    count = slots_for(size_bytes, slot_bytes, longest_tokens, layout.block_tokens)
    pool = SharedPool(layout, 2 * count)
    device = device_over(pool)
    post = Post(
        Greeting(machine=settings.machine, epoch=settings.epoch, layout=layout, blocks=2 * count),
        pool,
        BlockPool(count),
        directory=settings.sockets,
        tcp=_listening(settings, settings.transfer_port),
        nixl=_listening(settings, settings.nixl_port),
        clock=time.monotonic,
        patience=Patience(**(settings.patience or {})),
        secret=key,
    )
    reports, threshold_tokens = Reports(settings.reports), settings.threshold_tokens
    if reports.is_wanted:
        link = measure_link(
            post, transport="unix" if settings.sockets is not None else "tcp", rounds=_LINK_ROUNDS, enough_s=_LINK_S
        )
        post.outgoing.sent = Sent()  # what was sent to measure is no traffic
        hello = {"layout": asdict(layout), "address": post.address, "link": asdict(link), "staging_slots": count}
        reports.tell({"hello": hello | {"threshold_tokens": threshold_tokens}})
    slots = Slots(count, count)
    mover = Mover(
        post, device, slots, reports, USUAL_THRESHOLD_TOKENS if threshold_tokens is None else threshold_tokens
    )
    return WorkerHalf(mover, device, slots, reports, layout)


def _listening(settings: Settings, port: int | None) -> tuple[str, int] | None:
    return None if settings.transfer_host is None or port is None else (settings.transfer_host, port)


def join_key(environment: Mapping[str, str]) -> bytes | None:
    """Return the cluster's key, which machines prove to one another before KV moves between them, or None.

    Args:
        environment: This process's.
    """
    return environment.get(JOIN_KEY_VARIABLE, "").encode() or None


def weights_text(model: str, revision: str | None) -> str:
    """Return a text that is equal where weights are, without reading them whole.

    Args:
        model: Directory, or a hub's name.
        revision: The hub's revision, None for its latest.
    """
    directory = Path(model)
    if not directory.is_dir():
        return f"{model}@{revision or 'main'}"
    digest = hashlib.sha256()
    for path in _weights(directory):
        with path.open("rb") as file:
            digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(_HEAD_BYTES))
    return digest.hexdigest()


def _weights(directory: Path) -> Sequence[Path]:
    return [directory / "config.json", *sorted(directory.glob("*.safetensors"))]
