"""From which prompt length on KV leaves layer by layer: what a link and this processor's prompt phase say."""

import time
from typing import NamedTuple

import numpy as np

from phasesplit.engine.batch import Batch
from phasesplit.engine.iteration import Computes
from phasesplit.scheduling.rules import Rules
from phasesplit.transfer.blocks import Use
from phasesplit.transfer.calibration import link_text, measure_link
from phasesplit.transfer.chooser import Floats, ruled_tokens, threshold_tokens
from phasesplit.transfer.endpoint import KvEndpoint


class Calibrated(NamedTuple):
    """What was measured.

    Attributes:
        threshold_tokens: Shortest prompt that is sent layer by layer.
        text: The link, for people.
    """

    threshold_tokens: int
    text: str


def calibrated(endpoint: KvEndpoint, forward: Computes, rules: Rules, *, transport: str) -> Calibrated:
    """Measure the link and the prompt phase, in about 0.1 s; nothing else may use either meanwhile.

    The prompt phase is taken to grow with the prompt alone: attention, which grows faster, would make layer-wise
    transfers pay even earlier.

    Args:
        endpoint: The machine's endpoint.
        forward: Its model.
        rules: Their `transfer` and `layerwise_from_tokens` overrule what was measured.
        transport: The way, as the endpoint's address calls it.

    Raises:
        TransferError: A transfer failed, or there is no room for one.
    """
    s_per_token = _prompt_s_per_token(endpoint, forward)

    def prompt_time_s(tokens: Floats) -> Floats:
        return s_per_token * tokens

    link = measure_link(endpoint, transport=transport)
    threshold = ruled_tokens(rules)
    if threshold is None:
        threshold = threshold_tokens(endpoint.info.layout, prompt_time_s, link)
    return Calibrated(threshold, link_text(link, threshold))


def _prompt_s_per_token(endpoint: KvEndpoint, forward: Computes) -> float:
    """Return the seconds that a token of a prompt of one block keeps this thread computing: waiting is left out."""
    tokens = endpoint.info.layout.block_tokens
    own = endpoint.free.hold("calibration", Use.COMPUTE, 1)
    batch = Batch(
        tokens=np.zeros(tokens, np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        owners=np.zeros(tokens, np.int32),
        tables=np.array([own.blocks], np.int32),
        wanted=np.array([tokens - 1], np.int32),
    )
    since_s = time.thread_time()
    forward.run(batch)
    took_s = time.thread_time() - since_s
    endpoint.free.give(own)
    return took_s / tokens
