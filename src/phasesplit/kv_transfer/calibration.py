"""What a way between machines can do, measured by a machine that sends to itself over it."""

import itertools
import select
import time
from dataclasses import dataclass, replace

from phasesplit.domain.machine import Link
from phasesplit.errors import TransferError
from phasesplit.kv_transfer.block_pool import Use
from phasesplit.kv_transfer.chooser import fit_link
from phasesplit.kv_transfer.endpoint import KvEndpoint
from phasesplit.kv_transfer.outgoing import Address
from phasesplit.kv_transfer.transfer_states import OutboundState

_LARGEST_BYTES = 12 * 1024 * 1024
_ROUNDS = 3
_ENOUGH_S = 0.15
_LONGEST_TOKENS = 131_072
"""A threshold above it is never reached: `domain.machine.layerwise_threshold_tokens` looks no further."""
_NUMBERS = itertools.count()  # a key is used once


@dataclass(frozen=True, slots=True, order=True)
class _Times:
    """What one transfer took: in all, and of that in the calls that send."""

    all_s: float
    sending_s: float


@dataclass(frozen=True, slots=True)
class _Probe:
    """A transfer that is timed: how large it is, and whether it goes layer by layer."""

    blocks: int
    layerwise: bool = False


def measure_link(endpoint: KvEndpoint, *, transport: str, rounds: int = _ROUNDS, enough_s: float = _ENOUGH_S) -> Link:
    """Return latency, bandwidth, cost per layer and slowdown of the prefill phase; it takes less than 0.1 s by default.

    The endpoint sends zeros from free blocks of its pool to others of them, which leaves the pool as it was. Both ends
    share one thread here, so the bandwidth is that of two machines on one core; with a core each they are faster. The
    slowdown is the share of a transfer that the sender itself works for: it cannot compute meanwhile.

    On a busy machine it ends with what it has when time is up. Where what disturbed it is larger than what it measures,
    the bandwidth is that of the largest transfer, latency included.

    Args:
        endpoint: An endpoint that is doing nothing else.
        transport: `unix`, `tcp` or `nixl`: the way, as the endpoint's address calls it.
        rounds: How often each transfer is repeated, >= 1; the shortest time of each counts.
        enough_s: No transfer begins after so long, once a small one, a large one and one by layers are done, >= 0.

    Raises:
        TransferError: The endpoint does not listen there, fewer than 4 blocks are free, or a transfer failed.
    """
    if not endpoint.address.get(transport):
        raise TransferError(f"transport {transport}: the endpoint does not listen there")
    layout = endpoint.info.layout
    block_bytes = layout.layers * layout.block_bytes
    most = min(endpoint.free.free // 2, max(2, _LARGEST_BYTES // block_bytes))
    sizes = [1 << power for power in range(most.bit_length())]
    if len(sizes) < 2:
        raise TransferError(f"{endpoint.free.free} blocks are free, a measurement needs 4")
    address = {**endpoint.address, "unix": None, "tcp": None, "nixl": None, transport: endpoint.address[transport]}
    try:
        best = _best_times(endpoint, address, sizes, rounds, enough_s)
    finally:
        endpoint.outgoing.disconnect(endpoint.info.machine)
        endpoint.poll()
    layerwise = best.pop(_Probe(1, layerwise=True))
    smallest, largest = best[_Probe(sizes[0])], best[_Probe(sizes[-1])]
    try:
        link = fit_link([probe.blocks * block_bytes for probe in best], [times.all_s for times in best.values()])
    except TransferError:
        link = Link(bytes_per_s=sizes[-1] * block_bytes / largest.all_s, latency_s=0.0)
    return replace(
        link,
        per_layer_s=max(0.0, layerwise.all_s - smallest.all_s) / layout.layers,
        streaming_slowdown=min(1.0, largest.sending_s / largest.all_s),
    )


def link_text(link: Link, threshold_tokens: int) -> str:
    """Return a measured link and what follows from it, for people, on one line."""
    from_there = f"from {threshold_tokens:,} tokens" if threshold_tokens <= _LONGEST_TOKENS else "never"
    return (
        f"{link.bytes_per_s / 1e9:.1f} GB/s, latency {link.latency_s * 1e6:.0f} us, "
        f"{link.per_layer_s * 1e6:.0f} us a layer, slowdown {link.streaming_slowdown:.0%}; "
        f"layer by layer {from_there}"
    )


def _best_times(
    endpoint: KvEndpoint, address: Address, sizes: list[int], rounds: int, enough_s: float
) -> dict[_Probe, _Times]:
    """Return the shortest times of each kind of transfer; the three without which there is no link come first."""
    end_s = time.perf_counter() + enough_s
    needed = [_Probe(sizes[0]), _Probe(sizes[-1]), _Probe(1, layerwise=True)]
    probes = needed + [_Probe(blocks) for blocks in sizes[1:-1]]
    best: dict[_Probe, _Times] = {}
    for place, probe in enumerate(probes * rounds):
        if place >= len(needed) and time.perf_counter() >= end_s:
            break
        times = _transfer(endpoint, address, probe.blocks, layerwise=probe.layerwise)
        best[probe] = min(times, best.get(probe, times))
    return best


def _transfer(endpoint: KvEndpoint, address: Address, blocks: int, *, layerwise: bool = False) -> _Times:
    """Send so many blocks from this machine to itself."""
    name, epoch, layout = endpoint.info.machine, endpoint.info.epoch, endpoint.info.layout
    key = f"measurement.{next(_NUMBERS)}"
    sources = endpoint.free.hold(key, Use.SEND, blocks)
    try:
        endpoint.incoming.expect(key, blocks * layout.block_tokens, name, wants_note=False)
        endpoint.outgoing.await_offer(key, name, address, epoch)
        _drive_while(endpoint, key, OutboundState.AWAITED)
        began_s = time.perf_counter()
        endpoint.outgoing.open(key, sources.blocks)
        for layer in range(layout.layers if layerwise else 0):
            endpoint.outgoing.send_layer(key, layer)
            endpoint.poll()
        if not layerwise:
            endpoint.outgoing.send_all(key)
        sent_s = time.perf_counter()
        _drive_while(endpoint, key, OutboundState.OPEN, OutboundState.SENT)
        ended_s = time.perf_counter()
        if endpoint.outgoing.state(key) is not OutboundState.COMPLETED:
            raise TransferError(f"the link could not be measured: {endpoint.outgoing.why(key)}")
    finally:
        endpoint.outgoing.forget(key)
        endpoint.incoming.release(key)
        endpoint.free.give(sources)
    return _Times(ended_s - began_s, sent_s - began_s)


def _drive_while(endpoint: KvEndpoint, key: str, *states: OutboundState) -> None:
    """Drive an endpoint until the transfer has left some states; the endpoint's own deadlines bound it."""
    while endpoint.outgoing.state(key) in states:
        poller = select.poll()
        for descriptor, events in endpoint.descriptors().items():
            poller.register(descriptor, events)
        poller.poll(100)
        endpoint.poll()
