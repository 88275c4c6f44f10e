"""A machine that measures the way to itself."""

import tempfile

import numpy as np
import pytest

from phasesplit.errors import TransferError
from phasesplit.kv_transfer import calibration
from phasesplit.kv_transfer.block_pool import BlockPool, Use
from phasesplit.kv_transfer.calibration import link_text, measure_link
from phasesplit.kv_transfer.chooser import threshold_tokens
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.layout import KvLayout, PeerInfo
from phasesplit.kv_transfer.shared_memory import SharedPool

pytestmark = pytest.mark.alone

LAYOUT = KvLayout(
    model="small", layers=8, kv_heads=4, head_dim=64, dtype="float32", block_tokens=32, block_layout="any"
)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_link_is_measured_and_nothing_is_left(transport: str) -> None:
    """The threshold would come from a figure that nobody measured, or the pool be dirty, used or connected."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        memory, free = SharedPool(LAYOUT, 32), BlockPool(32)
        endpoint = KvEndpoint(
            PeerInfo(machine="a", epoch=1, layout=LAYOUT), memory, free, directory=folder, tcp=("127.0.0.1", 0)
        )
        local = free.hold("own", Use.COMPUTE, 4).blocks
        memory.blocks[:, list(local)] = 9
        link = measure_link(endpoint, transport=transport)
        assert 1e7 < link.bytes_per_s < 1e12
        assert 0 <= link.latency_s < 0.1
        assert 0 <= link.per_layer_s < 0.1
        assert 0 < link.streaming_slowdown <= 1
        assert free.used == 4
        assert (memory.blocks[:, list(local)] == 9).all()
        assert memory.blocks.sum(dtype=np.int64) == 9 * memory.blocks[:, list(local)].size
        assert len(endpoint.descriptors()) == 2
        assert threshold_tokens(LAYOUT, lambda tokens: tokens * 1e-2, link) >= 1
        assert "layer by layer from 1,024 tokens" in link_text(link, 1_024)
        free.hold("more", Use.COMPUTE, 26)
        with pytest.raises(TransferError, match="2 blocks are free, a measurement needs 4"):
            measure_link(endpoint, transport=transport)
        endpoint.close()
        memory.close()


def test_a_way_that_is_not_open_is_not_measured() -> None:
    """A machine without TCP would wait for itself."""
    memory = SharedPool(LAYOUT, 8)
    endpoint = KvEndpoint(PeerInfo(machine="a", epoch=1, layout=LAYOUT), memory, BlockPool(8))
    with pytest.raises(TransferError, match="transport tcp: the endpoint does not listen there"):
        measure_link(endpoint, transport="tcp")
    endpoint.close()
    memory.close()


def test_a_measurement_ends_when_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker on a busy machine would take seconds to start, or not start because its times make no sense."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        memory = SharedPool(LAYOUT, 32)
        endpoint = KvEndpoint(PeerInfo(machine="a", epoch=1, layout=LAYOUT), memory, BlockPool(32), directory=folder)
        link = measure_link(endpoint, transport="unix", enough_s=0.0)
        assert sum(endpoint.outgoing.sent.transfers.values()) == 3
        assert link.bytes_per_s > 0

        def shorter_for_more(_: KvEndpoint, __: object, blocks: int, *, layerwise: bool) -> calibration._Times:
            return calibration._Times(0.5 / blocks, 0.1 / blocks)

        monkeypatch.setattr(calibration, "_transfer", shorter_for_more)
        link = measure_link(endpoint, transport="unix")
        assert link.bytes_per_s == 16 * LAYOUT.layers * LAYOUT.block_bytes * 16 / 0.5
        assert (link.latency_s, link.per_layer_s, link.streaming_slowdown) == (0.0, 0.0, 0.2)
        endpoint.close()
        memory.close()


def test_more_rounds_outlast_what_disturbs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that starts while others compute would take their work for the link's, for as long as it lives."""
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        memory = SharedPool(LAYOUT, 32)
        endpoint = KvEndpoint(PeerInfo(machine="a", epoch=1, layout=LAYOUT), memory, BlockPool(32), directory=folder)
        rounds: dict[tuple[int, bool], int] = {}

        def disturbed_at_first(_: KvEndpoint, __: object, blocks: int, *, layerwise: bool) -> calibration._Times:
            rounds[blocks, layerwise] = rounds.get((blocks, layerwise), 0) + 1
            time_s = 1e-3 * (blocks + layerwise) * (1 if rounds[blocks, layerwise] > 3 else 50)
            return calibration._Times(time_s, time_s / 2)

        monkeypatch.setattr(calibration, "_transfer", disturbed_at_first)
        link = measure_link(endpoint, transport="unix", rounds=4)
        assert link.bytes_per_s == pytest.approx(LAYOUT.layers * LAYOUT.block_bytes / 1e-3)
        assert link.per_layer_s == pytest.approx(1e-3 / LAYOUT.layers)
        endpoint.close()
        memory.close()
