"""Profiles that `phasesplit profile` writes: read as phase times, as a model, and written as a machine file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.domain.profile import PhaseTimes
from phasesplit.errors import SpecError
from phasesplit.io.results import written_whole
from phasesplit.io.specs import checked, is_profile
from phasesplit.io.text import read_json
from phasesplit.scheduler.rules import Rules

if TYPE_CHECKING:
    from phasesplit.io.profile_schema import ProfileSpec

ENDING = ".json"
"""Of profile files; measurements with another ending are CSV."""

_MODEL_SIZES = ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "parameters", "weights_bytes", "value_bytes")
_WHOLE_SIZES = ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "max_context_tokens")
_ASSUMED_LINK_BYTES_PER_S = 12.5e9
_UNKNOWN_PRICE = "unknown: no price was given to `phasesplit profile`, 0 stands for it"
_UNKNOWN_POWER = "unknown ({}), 0 stands for it"


def read_profile_file(path: str | Path) -> "ProfileSpec":
    """Return what a profile file holds.

    Raises:
        SpecError: It cannot be read, or holds something that is not allowed.
    """
    from phasesplit.io.profile_schema import FORMAT, VERSION, ProfileSpec

    path = Path(path)
    content = read_json(path)
    if not is_profile(content):
        raise SpecError.bad(f"{path}, format", content.get("format"), f"{FORMAT!r}, as `phasesplit profile` writes it")
    if content.get("version") != VERSION:
        raise SpecError.bad(f"{path}, version", content.get("version"), f"{VERSION}, or a newer phasesplit")
    return checked(content, ProfileSpec, lambda field: f"{path}, {field}", str(path))


def write_profile_file(profile: "ProfileSpec", path: str | Path) -> None:
    """Write a profile file, whole or not at all.

    Raises:
        SpecError: It cannot be written.
    """
    with written_whole(path) as part:
        part.write_text(profile.model_dump_json(indent=1), encoding="utf-8")


def measured_times(path: str | Path, model: Model, machine: Machine) -> PhaseTimes:
    """Return the phase times of a profile file, before the machine's time factors.

    Args:
        path: The file.
        model: The model; it must be the one that was measured.
        machine: The machine; it must have the name of the one that was measured, or be a machine whose file names the
            profile.

    Raises:
        SpecError: The file is wrong, has no phase times, or measured something else.
    """
    path = Path(path)
    profile = read_profile_file(path)
    _check_model(path, profile, model)
    is_named = bool(machine.profile) and Path(machine.profile).resolve() == path.resolve()
    is_alike = profile.machine.name in (machine.name, machine.profile_name)
    if machine.instances_per_server > 1 or not (is_named or is_alike):
        raise SpecError.bad(
            f"{path}, machine {profile.machine.name}",
            machine.name,
            "that machine, or one whose file names the profile (profile: FILE)",
        )
    times = profile.times
    if times is None:
        raise SpecError(f"{path}: holds too few iterations for phase times; go on with phasesplit profile --resume")
    error = profile.errors["all"].mean if "all" in profile.errors else None
    shown = "held-out error unknown" if error is None else f"held-out error {error:.1%}"
    return PhaseTimes(
        source=f"measured: {profile.model.name} on {profile.machine.name} ({path.name}, {profile.taken[:10]}), {shown}",
        prefill_knots_tokens=np.array(times.prefill_knots_tokens),
        prefill_knots_s=np.array(times.prefill_knots_s),
        decode_knots_requests=np.array(times.decode_knots_requests),
        decode_knots_s=np.array(times.decode_knots_s),
        prefill_pair_s=times.prefill_pair_s,
        decode_context_s=times.decode_context_s,
        measured_prompt_tokens=times.measured_prompt_tokens,
        measured_requests=times.measured_requests,
        mean_error=math.nan if error is None else error,
    )


def profiled_model(path: str | Path) -> Model:
    """Return the model of a profile file.

    Raises:
        SpecError: The file is wrong, or does not know the model's sizes.
    """
    profile = read_profile_file(path)
    if profile.model.sizes is None:
        raise SpecError(f"{path}, model: its sizes are not known, name the model itself instead")
    return _model(profile.model.name, profile.model.sizes, f"{Path(path).name}, as measured")


def write_machine_file(
    profile: "ProfileSpec",
    path: str | Path,
    profile_path: str | Path,
    *,
    price_usd_per_hour: float | None = None,
    power_w: tuple[float, float, float] | None = None,
) -> None:
    """Write the machine that was measured as a machine file that names its profile, whole or not at all.

    Its memory is such that a simulation with the default share of it (`hbm_share`) has the KV blocks that were
    measured. What nobody knows is 0, and its source says so.

    Args:
        profile: The profile.
        path: The machine file.
        profile_path: Where the profile is; named relative to the machine file if it is in the same folder or below.
        price_usd_per_hour: Price, None where it is not known.
        power_w: Idle, prefill and decode power where they are known better than measured.

    Raises:
        SpecError: The profile has no phase times, sizes or KV capacity, or the file cannot be written.
    """
    import yaml

    if profile.times is None or profile.model.sizes is None or profile.kv is None:
        missing = "phase times" if profile.times is None else "the model's sizes" if profile.kv else "the KV capacity"
        raise SpecError(f"{path}: a machine file needs {missing}, which the profile does not have")
    fields, sources = _machine_fields(profile)
    idle_w, prefill_w, decode_w = power_w or (
        (0.0, 0.0, 0.0)
        if profile.power is None
        else (profile.power.idle_w, max(profile.power.prefill_w, profile.power.idle_w),
              max(profile.power.decode_w, profile.power.idle_w))
    )  # fmt: skip
    known = "given to `phasesplit profile`" if power_w else profile.power.source if profile.power else ""
    fields |= {
        "provisioned_w": max(prefill_w, decode_w),
        "idle_w": idle_w,
        "prefill_w": prefill_w,
        "decode_w": decode_w,
    }
    sources |= dict.fromkeys(
        ("provisioned_w", "idle_w", "prefill_w", "decode_w"),
        known or _UNKNOWN_POWER.format(profile.unknown.get("power", "not measured")),
    )
    fields["price_usd_per_hour"] = price_usd_per_hour or 0.0
    sources["price_usd_per_hour"] = _UNKNOWN_PRICE if price_usd_per_hour is None else "given to `phasesplit profile`"
    fields["embodied_kg_co2e"] = 0.0
    sources["embodied_kg_co2e"] = "unknown, 0 stands for it"
    fields["profile"] = _relative(Path(profile_path), Path(path))
    with written_whole(path) as part:
        text = yaml.safe_dump({**fields, "sources": sources}, sort_keys=False, allow_unicode=True, width=1000)
        part.write_text(text, encoding="utf-8")


def _machine_fields(profile: "ProfileSpec") -> tuple[dict[str, Any], dict[str, str]]:
    times, sizes, kv, link = profile.times, profile.model.sizes, profile.kv, profile.link
    assert times is not None and sizes is not None and kv is not None  # noqa: S101, PT018 - checked by the caller
    share = Rules().hbm_share
    kv_bytes_per_token = _model("", sizes, "").kv_bytes_per_token
    # Half a block more than the blocks: no rounding may take one away.
    memory_bytes = sizes["weights_bytes"] + (kv.blocks + 0.5) * kv.block_tokens * kv_bytes_per_token
    tokens = np.array(times.prefill_knots_tokens)
    prefill_s = np.array(times.prefill_knots_s) + times.prefill_pair_s * tokens**2 / 2
    flops_per_s = float(np.max(2 * sizes["active_parameters"] * tokens / prefill_s))
    fields: dict[str, Any] = {
        "name": profile.machine.name,
        "accelerators": 1,
        "hbm_bytes": memory_bytes / share,
        "hbm_bytes_per_s": sizes["weights_bytes"] / max(times.decode_knots_s[0], 1e-9),
        "flops_per_s": flops_per_s,
        "nic_bytes_per_s": _ASSUMED_LINK_BYTES_PER_S if link is None else link.bytes_per_s,
    }
    sources = {
        "accelerators": f"{profile.machine.processor}, taken as one",
        "hbm_bytes": f"what makes {kv.blocks} KV blocks of {kv.block_tokens} tokens ({kv.source}) when {share:.0%} of "
        "it are filled, the rules' default",
        "hbm_bytes_per_s": "implied by the decode iteration of one request; only a roofline uses it",
        "flops_per_s": "implied by the fastest prefill iteration; only a roofline uses it",
        "nic_bytes_per_s": f"assumed, 100 Gb/s ({profile.unknown.get('link', '')})" if link is None else link.source,
    }
    if link is not None:
        fields["link"], sources["link"] = link.model_dump(exclude={"source"}), link.source
    return fields, sources


def _model(name: str, sizes: Mapping[str, float], source: str) -> Model:
    fields: dict[str, Any] = {field: int(value) if field in _WHOLE_SIZES else value for field, value in sizes.items()}
    return Model(name=name, sources=dict.fromkeys(fields, source), **fields)


def _check_model(path: Path, profile: "ProfileSpec", model: Model) -> None:
    sizes = profile.model.sizes
    if sizes is None:
        if profile.model.name != model.name:
            raise SpecError.bad(f"{path}, model {profile.model.name}", model.name, "the model that was measured")
        return
    for name in _MODEL_SIZES:
        if not math.isclose(sizes[name], getattr(model, name), rel_tol=1e-6):
            raise SpecError.bad(
                f"{path}, model {profile.model.name}",
                f"{model.name} with {name} {getattr(model, name):g}",
                f"the model that was measured, with {name} {sizes[name]:g} (--model {path} is that)",
            )


def _relative(profile_path: Path, machine_path: Path) -> str:
    """Return how a machine file names a profile: in the same folder or below it by its relative path."""
    target, folder = profile_path.resolve(), machine_path.resolve().parent
    if not target.is_relative_to(folder):
        return str(target)
    relative = str(target.relative_to(folder))
    return relative if relative.endswith(ENDING) else f"./{relative}"
