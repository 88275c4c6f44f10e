"""vLLM's KV tensors seen as blocks of bytes, on the host or on a GPU. Imports torch."""

from collections.abc import Sequence

import torch

from phasesplit.errors import TransferError
from phasesplit.kv_transfer.shared_memory import SharedPool
from phasesplit.vllm.staging import Bytes, Device, HostDevice, IsDone


def rows_of(tensor: torch.Tensor, blocks: int, name: str) -> torch.Tensor:
    """Return a KV tensor as bytes, (blocks, block bytes), without copying.

    Args:
        tensor: Blocks first; the order of the numbers inside a block is free, as long as they lie together.
        blocks: vLLM's blocks; a backend may cut each into several of its own.
        name: The layer's name.

    Raises:
        TransferError: The numbers of a block do not lie together.
    """
    inner = sorted(range(1, tensor.dim()), key=lambda axis: -tensor.stride(axis))
    ordered = tensor.permute(0, *inner)
    if tensor.shape[0] % blocks or not ordered[0].is_contiguous():
        raise TransferError(
            f"layer {name}: KV of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not"
            f" {blocks} blocks that each lie together"
        )
    parts = tensor.shape[0] // blocks
    if parts > 1 and not ordered.is_contiguous():
        raise TransferError(f"layer {name}: a block is cut into {parts} parts that do not lie together")
    return ordered.flatten(1).view(torch.uint8).view(blocks, -1) if parts > 1 else ordered.flatten(1).view(torch.uint8)


def device_of(rows: Sequence[torch.Tensor], pool: SharedPool) -> Device:
    """Return the device that holds the layers.

    Args:
        rows: Results of `rows_of`, by layer.
        pool: The staging slots.
    """
    if rows[0].device.type == "cpu":
        return HostDevice([each.numpy() for each in rows], pool.blocks)
    return AcceleratorDevice(rows, pool.blocks)


class AcceleratorDevice:
    """KV blocks in the memory of a GPU. Copies go through streams of their own.

    Not verified on a GPU: see docs/vllm.md.

    Args:
        layers: For each layer vLLM's blocks as bytes, (blocks, block bytes).
        staging: The slots, (layers, slots, block bytes); pinned here, so that copies do not hold up the thread.
    """

    def __init__(self, layers: Sequence[torch.Tensor], staging: Bytes) -> None:
        self._layers = layers
        self._staging = torch.from_numpy(staging)
        self._device = layers[0].device
        self._out, self._in = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        status = torch.cuda.cudart().cudaHostRegister(self._staging.data_ptr(), self._staging.numel(), 0)
        if int(status) != 0:
            raise TransferError(
                f"staging_bytes: the driver refuses to pin {self._staging.numel()} bytes of the host ({status}); set it"
                " lower, or max_model_len: two prompts of the longest length have to fit in"
            )

    def gather(self, layer: int, blocks: Sequence[int], slots: Sequence[int]) -> IsDone:
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        copied = torch.cuda.Event()
        with torch.cuda.stream(self._out):
            for block, slot in zip(blocks, slots, strict=True):
                self._staging[layer, slot].copy_(self._layers[layer][block], non_blocking=True)
            copied.record(self._out)
        is_done: IsDone = copied.query
        return is_done

    def scatter(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        # A block may be this request's while a copy of what another had in it is still to be read.
        self._in.wait_stream(self._out)
        with torch.cuda.device(self._device), torch.cuda.stream(self._in):
            for source, target in zip(self._staging, self._layers, strict=True):
                for slot, block in zip(slots, blocks, strict=True):
                    target[block].copy_(source[slot], non_blocking=True)
        self._in.synchronize()

    def order_after_copies(self) -> None:
        """See `Device.order_after_copies`: freed blocks may be written to by the very next step."""
        torch.cuda.current_stream(self._device).wait_stream(self._out)
