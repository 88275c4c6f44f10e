"""The connector's settings: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from phasesplit.errors import TransferError

USUAL_THRESHOLD_TOKENS = 256
"""Shortest prompt that leaves layer by layer if nobody sets or measures it. Source: assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One machine's settings.

    Attributes:
        machine: Its name in the cluster.
        epoch: Grows with each of its starts, >= 0.
        sockets: Directory for the Unix socket over which machines of this host share memory; None: they do not.
        transfer_host: Address, as a number, at which other hosts reach its KV; None: they do not.
        transfer_port: Port of the same; 0 takes any free one.
        nixl_port: Port for machines that have NIXL too, at the same address; 0 takes any free one; None: no NIXL.
        reports: Path of the Unix socket of the worker that reports for it; None: there is none.
        model: Text that is equal where weights are; empty: made from parts of the model's files, or from its name.
        staging_bytes: Memory of the host between vLLM's blocks and the wire; 0: room for two prompts of the longest
            length that leave and two that come in, and with a GPU, which has all of it pinned at once, at most 8 GiB
            unless one of each needs more.
        threshold_tokens: The shortest prompt that leaves layer by layer, >= 0; None: what its worker derives from
            measurements, and `USUAL_THRESHOLD_TOKENS` until then.
        timeouts: Seconds by name, for `kv_transfer.messages.TransferTimeouts`.
    """

    machine: str
    epoch: int
    sockets: str | None = None
    transfer_host: str | None = "127.0.0.1"
    transfer_port: int = 0
    nixl_port: int | None = None
    reports: str | None = None
    model: str = ""
    staging_bytes: int = 0
    threshold_tokens: int | None = None
    timeouts: Mapping[str, float] | None = None

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> "Settings":
        """Read the settings.

        Raises:
            TransferError: A field is unknown or missing.
        """
        known = {field.name for field in fields(cls)}
        for name in extra:
            if name not in known:
                raise TransferError(f"kv_connector_extra_config: unknown name {name!r}, known are {sorted(known)}")
        for name, kind in {"machine": str, "epoch": int}.items():
            if not isinstance(extra.get(name), kind):
                raise TransferError(
                    f"kv_connector_extra_config.{name}: got {extra.get(name)!r}, allowed is {kind.__name__}"
                )
        return cls(**extra)
