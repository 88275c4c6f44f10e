"""A worker on a share of a core."""

import numpy as np
import pytest

from phasesplit.engine.iteration import Batch
from phasesplit.engine.paced import Paced

LAYER_S, LAYERS = 0.010, 4
BATCH = Batch(
    tokens=np.zeros(1, np.int32),
    positions=np.zeros(1, np.int32),
    owners=np.zeros(1, np.int32),
    tables=np.zeros((1, 1), np.int32),
    wanted=np.zeros(1, np.int32),
)


class Core:
    """A core whose clock only runs while somebody computes, waits for it, or sleeps."""

    def __init__(self) -> None:
        self.now_s = self.computed_s = 0.0
        self.layers_s: list[float] = []
        self.waits_s = 0.0

    def compute(self, seconds: float) -> None:
        self.now_s += seconds + self.waits_s
        self.computed_s += seconds

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def run(self, _batch, after_layer=None):
        for layer in range(LAYERS):
            self.compute(LAYER_S)
            if after_layer is not None:
                after_layer(layer)
        return np.zeros((1, 1), np.float32)


def paced(core: Core, share: float) -> Paced:
    return Paced(core, share, clock=lambda: core.now_s, computed=lambda: core.computed_s, sleep=core.sleep)


@pytest.mark.parametrize("share", [0.3, 0.45, 1.0])
def test_iterations_last_what_they_compute_over_the_share(share: float) -> None:
    """The machine would be faster than the simulation has it, whenever nobody else wants its core."""
    core = Core()
    core.now_s = 5.0
    forward = paced(core, share)
    for _ in range(3):
        forward.run(BATCH)
        core.compute(0.002)  # telling of it, and forming the next batch
    assert core.now_s - 5.0 == pytest.approx((3 * LAYERS * LAYER_S + 2 * 0.002) / share + 0.002)


def test_layers_are_spread_over_the_iteration() -> None:
    """KV would leave in the first half of the prefill phase, and no transfer would ever be exposed."""
    core, seen = Core(), []
    core.now_s = 5.0
    paced(core, 0.5).run(BATCH, lambda _: seen.append(core.now_s - 5.0))
    assert seen == pytest.approx([0.02, 0.04, 0.06, 0.08])


def test_an_iteration_after_a_rest_begins_anew() -> None:
    """A machine that was idle would compute its next iterations faster than it can."""
    core = Core()
    core.now_s = 5.0
    forward = paced(core, 0.5)
    forward.run(BATCH)
    core.sleep(0.015)
    began_s = core.now_s
    forward.run(BATCH)
    assert core.now_s - began_s == pytest.approx(2 * LAYERS * LAYER_S)


def test_what_others_of_the_core_took_is_made_good() -> None:
    """A worker would lose time that is its own whenever the system lets another one go first."""
    core = Core()
    core.now_s = 5.0
    forward = paced(core, 0.5)
    core.waits_s = 0.009
    forward.run(BATCH)
    assert core.now_s - 5.0 == pytest.approx(2 * LAYERS * LAYER_S)
    core.waits_s = 0.012  # more than its share leaves: late by 8 ms
    forward.run(BATCH)
    core.waits_s = 0.0
    forward.run(BATCH)
    assert core.now_s - 5.0 == pytest.approx(3 * 2 * LAYERS * LAYER_S)
