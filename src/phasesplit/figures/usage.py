"""How machines are used: the sizes of their batches, and what they spend their time on."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasesplit.figures import readable
from phasesplit.figures.style import colour, title
from phasesplit.scheduling.pools import POOL_NAMES
from phasesplit.simulation.result import PoolUse, Result

Floats = NDArray[np.float64]

_LEAST_LABELLED = 0.12
_LONGEST_NAME = 34


def batch_bins(batch_share: Floats) -> tuple[list[int], Floats]:
    """Return ranges of batch sizes that double (1, 2, 3-4, 5-8, ...), and the share of busy time in each.

    Args:
        batch_share: float64 (pools, n + 1), share of busy time with batches of 0 .. n requests.

    Returns:
        The largest size in each range, and float64 (pools, ranges).
    """
    sizes: list[int] = []
    shares: list[Floats] = []
    largest = int(np.flatnonzero(batch_share.sum(axis=0)).max(initial=1))
    least, most = 1, 1
    while least <= largest:
        sizes.append(most)
        shares.append(batch_share[:, least : most + 1].sum(axis=1))
        least, most = most + 1, 2 * most
    return sizes, np.array(shares).T


def draw_batches(axes: Any, result: Result) -> None:
    """Draw the share of each pool's busy time by the size of the batch."""
    sizes, shares = batch_bins(result.batch_share)
    pools = [pool for pool in range(len(POOL_NAMES)) if shares[pool].any()]
    title(axes, "Requests in a batch", [(POOL_NAMES[pool], POOL_NAMES[pool]) for pool in pools])
    width = 0.84 / max(len(pools), 1)
    for index, pool in enumerate(pools):
        left = np.arange(len(sizes)) + (index - (len(pools) - 1) / 2) * width
        axes.bar(left, shares[pool], width=0.92 * width, color=colour(POOL_NAMES[pool]))
    axes.set(ylim=(0, None), ylabel="share of the pool's busy time", xlabel="requests in the batch, at most")
    axes.set_xticks(np.arange(len(sizes)), labels=[f"{size:,}" for size in sizes])
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.grid(visible=True, axis="y")


def draw_use(axes: Any, result: Result) -> None:
    """Draw what the machines of each pool of the cluster spend their time on."""
    uses = result.pools
    title(axes, "What machines do", [(name, name) for name in ("prefill", "decode", "mixed", "idle")])
    for row, use in zip(range(len(uses), 0, -1), uses, strict=True):
        _draw_shares(axes, row, use)
        axes.text(0, row + 0.27, readable.shortened(use.name, _LONGEST_NAME), va="bottom", fontweight="bold")
    axes.set(xlim=(0, 1), ylim=(min(0.55, len(uses) - 1.45), len(uses) + 0.62), xlabel="share of machine time")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], labels=["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _draw_shares(axes: Any, row: int, use: PoolUse) -> None:
    begin = 0.0
    idle = max(0.0, 1 - use.busy_share)
    parts = ((use.prompt_share, "prefill"), (use.token_share, "decode"), (use.mixed_share, "mixed"), (idle, "idle"))
    for share, tint in parts:
        axes.barh(row, share, left=begin, height=0.46, color=colour(tint))
        if share > _LEAST_LABELLED:
            ink = colour("ink" if tint == "idle" else "on-strong")
            axes.text(begin + share / 2, row, readable.percent(share), ha="center", va="center", color=ink)
        begin += share
