"""vLLM's tensors as blocks of bytes. Needs torch, so `make test-vllm` runs this."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from phasesplit.errors import TransferError

torch: Any = pytest.importorskip("torch", reason="needs torch: make test-vllm", exc_type=ImportError)


def test_blocks_are_seen_whatever_the_order_inside() -> None:
    """Wrong if a block's bytes are taken from another block where a backend stores heads behind tokens."""
    from phasesplit.vllm.device_blocks import rows_of

    plain = torch.arange(5 * 2 * 3 * 4, dtype=torch.float32).reshape(5, 2, 3, 4)
    stored_by_tokens = plain.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    for tensor in (plain, stored_by_tokens):
        rows = rows_of(tensor, 5, "layer")
        assert rows.shape == (5, 2 * 3 * 4 * 4)
        assert rows.data_ptr() == tensor.data_ptr()
        values = rows[3].numpy().view(np.float32)
        assert set(values.tolist()) == set(plain[3].flatten().tolist())


def test_a_block_of_several_parts_is_one() -> None:
    """Wrong if a backend that cuts vLLM's blocks into smaller ones has only the first part of each sent."""
    from phasesplit.vllm.device_blocks import rows_of

    rows = rows_of(torch.arange(6 * 4, dtype=torch.float32).reshape(6, 1, 4, 1), 3, "layer")
    assert rows.shape == (3, 2 * 4 * 4)
    assert rows[1].numpy().view(np.float32).tolist() == [float(value) for value in range(8, 16)]


def test_blocks_that_do_not_lie_together_are_refused() -> None:
    """Wrong if keys and values in two stretches are taken for one."""
    from phasesplit.vllm.device_blocks import rows_of

    keys_then_values = torch.zeros(2, 5, 4).permute(1, 0, 2)
    with pytest.raises(TransferError, match="layer x"):
        rows_of(keys_then_values, 5, "x")


def test_what_goes_out_comes_in() -> None:
    """Wrong if a copy to a slot or back misses the block."""
    from phasesplit.kv_transfer.layout import KvLayout
    from phasesplit.kv_transfer.shared_memory import SharedPool
    from phasesplit.vllm.device_blocks import device_of, rows_of

    layout = KvLayout(model="m", layers=2, kv_heads=1, head_dim=4, dtype="float32", block_tokens=2, block_layout="test")
    tensors = [torch.arange(40, dtype=torch.float32).reshape(5, 1, 2, 4) + 100 * layer for layer in range(2)]
    tensors = [torch.cat([tensor, tensor], dim=3) for tensor in tensors]
    before = [tensor.clone() for tensor in tensors]
    device = device_of([rows_of(tensor, 5, "x") for tensor in tensors], SharedPool(layout, 4))
    for layer in range(2):
        assert device.gather(layer, (3, 0), (1, 2)) is None
    device.scatter((2, 1), (4, 3))
    for tensor, was in zip(tensors, before, strict=True):
        assert torch.equal(tensor[4], was[0])
        assert torch.equal(tensor[[0, 1, 2, 3]], was[[0, 1, 2, 3]])


class Stream:
    """Records the calls of a stream of a GPU."""

    def __init__(self, *_: Any) -> None:
        self.told: list[tuple[str, Any]] = []

    def wait_stream(self, other: Any) -> None:
        self.told.append(("wait", other))

    def synchronize(self) -> None:
        self.told.append(("synchronize", None))


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for CUDA; return the memory that its driver is asked to pin, and its answers."""
    calls: list[tuple[int, int, int]] = []
    driver = SimpleNamespace(calls=calls, status=0)

    def register(*call: int) -> int:
        calls.append(call)
        return driver.status

    for name, stands_in in {
        "Stream": Stream, "stream": lambda _: nullcontext(), "device": lambda _: nullcontext(),
        "cudart": lambda: SimpleNamespace(cudaHostRegister=register),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stands_in)
    return driver


def test_a_copy_in_comes_after_the_copies_out(pinned: Any) -> None:
    """Wrong if, on a GPU, KV that comes in is sent on in place of what its block held before."""
    from phasesplit.vllm.device_blocks import AcceleratorDevice

    rows = [torch.zeros(2, 8, dtype=torch.uint8)]
    device = AcceleratorDevice(rows, np.arange(24, dtype=np.uint8).reshape(1, 3, 8))
    assert [size for _, size, _ in pinned.calls] == [24]
    device.scatter((2,), (1,))
    assert device._in.told == [("wait", device._out), ("synchronize", None)]
    assert rows[0].tolist() == [[0] * 8, list(range(16, 24))]


def test_memory_that_cannot_be_pinned_is_named(pinned: Any) -> None:
    """Wrong if a machine with too little memory ends without saying which setting takes it."""
    from phasesplit.vllm.device_blocks import AcceleratorDevice

    pinned.status = 2
    with pytest.raises(TransferError, match="staging_bytes: the driver refuses to pin 24 bytes"):
        AcceleratorDevice([torch.zeros(2, 8, dtype=torch.uint8)], np.zeros((1, 3, 8), np.uint8))
