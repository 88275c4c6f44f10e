"""Machines, models and clusters from YAML (or a model's Hugging Face config.json), by name or by path."""

import re
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from phasesplit.atomic_files import atomic_path
from phasesplit.domain.machine import Link, Machine, split_name, variant
from phasesplit.domain.model import Model
from phasesplit.errors import SpecError
from phasesplit.io.hf_config import model_from_config
from phasesplit.io.text import Places, Where, read_json, read_yaml

if TYPE_CHECKING:
    from pydantic import ValidationError

    from phasesplit.io.schema import ClusterSpec, SpecType

MACHINE_ALIASES = {
    "a100": "dgx-a100",
    "h100": "dgx-h100",
    "dgx-h100cap": "dgx-h100-capped",
    "h200": "dgx-h200",
    "b200": "dgx-b200",
}
"""Short names to names of shipped machines."""

_ALLOWED = {
    "dict_type": "a mapping (name: value)",
    "model_type": "a mapping (name: value)",
    "string_type": "text",
    "tuple_type": "a list",
    "invalid_key": "field names in plain text",
}
"""What pydantic calls a mistake to what is allowed instead."""


def known_machines() -> list[str]:
    """Return the names of the shipped machines, sorted."""
    return _shipped_names("machines")


def known_models() -> list[str]:
    """Return the names of the shipped models, sorted."""
    return _shipped_names("models")


def load_machine(name_or_path: str | Path, *, where: str = "machine") -> Machine:
    """Return a machine.

    Args:
        name_or_path: A name from `known_machines` or `MACHINE_ALIASES`, or the path of a YAML file with the fields of
            `Machine`, figures in base units or as text with a unit. Either may be followed by `/tp4` (an instance on
            four of the server's accelerators) and then `@50%` (their power limited to half), see `domain.machine`.
        where: What an error calls the place that the name stands in.

    Raises:
        SpecError: The name is not known, or the file holds something that is not allowed.
    """
    base, ending = _machine_and_variant(name_or_path)
    return variant(_whole_machine(base, where), ending)


def _whole_machine(name_or_path: str | Path, where: str) -> Machine:
    from phasesplit.io.schema import MachineSpec

    if is_path(name_or_path):
        return _machine(*_validated(Path(name_or_path), MachineSpec))
    name = MACHINE_ALIASES.get(str(name_or_path), str(name_or_path))
    if name not in known_machines():
        raise SpecError.unknown(where, name, [*known_machines(), *MACHINE_ALIASES])
    with as_file(files("phasesplit") / "profiles" / "machines" / f"{name}.yaml") as path:
        return _machine(*_validated(path, MachineSpec))


def load_model(name_or_path: str | Path, *, where: str = "model") -> Model:
    """Return a model.

    Args:
        name_or_path: A name from `known_models`, the path of a YAML file with the fields of `Model`, the path of a
            Hugging Face config.json or of a directory that holds one, or the path of a profile of the model.
        where: What an error calls the place that the name stands in.

    Raises:
        SpecError: The name is not known, or the file holds something that is not allowed.
    """
    from phasesplit.io.schema import ModelSpec

    if is_path(name_or_path):
        path = Path(name_or_path)
        path = path / "config.json" if path.is_dir() else path
        if path.suffix == ".json":
            content = read_json(path)
            if is_profile(content):
                from phasesplit.io.profiles import profiled_model

                return profiled_model(path)
            return model_from_config(path, content)
        return _model(*_validated(path, ModelSpec))
    name = str(name_or_path)
    if name not in known_models():
        raise SpecError.unknown(where, name, known_models())
    with as_file(files("phasesplit") / "profiles" / "models" / f"{name}.yaml") as path:
        return _model(*_validated(path, ModelSpec))


def load_cluster(path: str | Path) -> "ClusterSpec":
    """Return the cluster that a YAML file describes; paths in it are relative to the file.

    Raises:
        SpecError: The file holds something that is not allowed.
    """
    return read_cluster(path)[0]


def read_cluster(path: str | Path) -> "tuple[ClusterSpec, Places]":
    """Return the cluster as `load_cluster` does, and where the fields of its file are."""
    from phasesplit.io.schema import ClusterSpec

    spec, places = _validated(Path(path), ClusterSpec)
    return _with_absolute_paths(spec, Path(path).parent), places


def write_cluster(spec: "ClusterSpec", path: str | Path) -> None:
    """Write a cluster as a YAML file that `load_cluster` reads back; either whole or not at all.

    Paths of machine and model files, relative to the working directory in `spec`, are written as absolute ones.

    Raises:
        SpecError: The file cannot be written.
    """
    import yaml

    target = Path(path)
    content = _with_absolute_paths(spec, Path()).model_dump(mode="json")
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    try:
        with atomic_path(target) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as problem:
        raise SpecError(f"{target}: cannot be written, {problem.strerror}") from problem


def _with_absolute_paths(spec: "ClusterSpec", folder: Path) -> "ClusterSpec":
    def absolute(name: str) -> str:
        return str((folder / name).resolve()) if is_path(name) else name

    def absolute_machine(name: str) -> str:
        base, ending = _machine_and_variant(name)
        return absolute(str(base)) + ending

    pools = tuple(pool.model_copy(update={"machine": absolute_machine(pool.machine)}) for pool in spec.pools)
    return spec.model_copy(update={"model": absolute(spec.model), "pools": pools})


def _shipped_names(kind: str) -> list[str]:
    folder = files("phasesplit") / "profiles" / kind
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _machine_and_variant(name_or_path: str | Path) -> tuple[str | Path, str]:
    """Return the name or path of a machine, and what asks for a variant of it.

    A text with a slash is a path unless what goes before is a machine: a shipped one, or a YAML file.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or Path(text).is_file():
        return name_or_path, ""
    base, ending = split_name(text)
    named = re.split("[/@]", text, maxsplit=1)[0]
    if named != base and (named in known_machines() or named in MACHINE_ALIASES):
        return named, text[len(named) :]  # no variant that there is: its error says which there are
    return base, ending


def is_profile(content: Mapping[str, Any]) -> bool:
    """Return whether what a JSON file holds is meant as a profile that `phasesplit profile` wrote."""
    return "profile" in str(content.get("format"))


def is_path(name_or_path: str | Path) -> bool:
    """Return whether a name is the path of a file rather than the name of something shipped."""
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or "/" in text or Path(text).suffix in {".yaml", ".yml", ".json"}


def _validated(path: Path, schema: "type[SpecType]") -> "tuple[SpecType, Places]":
    content, places = read_yaml(path)
    return checked(content, schema, places, str(path)), places


def checked(content: Mapping[str, Any], schema: "type[SpecType]", where: Where, source: str) -> "SpecType":
    """Return what fields hold, checked by a schema.

    Args:
        content: Field to value, as a person wrote them.
        schema: What is allowed.
        where: From a field to how the person knows its place.
        source: The same for all of them.

    Raises:
        SpecError: A field is unknown, missing, or holds something that is not allowed.
    """
    from pydantic import ValidationError

    try:
        return schema.model_validate(content)
    except ValidationError as problem:
        raise _one_line(where, source, schema, problem) from problem


def _one_line(where: Where, source: str, schema: "type[SpecType]", problem: "ValidationError") -> SpecError:
    """Return the first thing wrong as a SpecError; a misspelt field goes before a missing one, since it explains it."""
    from phasesplit.io.schema import EntryError

    found = sorted(problem.errors(), key=lambda error: error["type"] != "extra_forbidden")[0]
    location = [part for part in found["loc"] if part not in ("function-after", "function-before")]
    field = str(location[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])
    if found["type"] == "extra_forbidden":
        known = _fields(schema, location)
        near = get_close_matches(str(location[-1]), known, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
        return SpecError(f"{where(field)}: unknown field, {hint}")
    if found["type"] == "missing":
        outer, _, name = field.rpartition(".")
        return SpecError(f"{where(outer) if outer else source}: field {name} is missing")
    allowed = (
        str(found["ctx"]["error"])
        if found["type"] == "value_error"
        else _ALLOWED.get(found["type"], found["msg"].removeprefix("Input should be "))
    )
    value = repr(found["input"])
    if isinstance(inner := found.get("ctx", {}).get("error"), EntryError):
        field, value = f"{field}.{inner.name}", repr(inner.value)
    return SpecError(f"{where(field)}: got {value[:60]}{'...' * (len(value) > 60)}, allowed is {allowed}")


def _fields(schema: Any, location: list[Any]) -> list[str]:
    """Return the fields that are known where one is not: of the schema, or of that of a field in it."""
    for part in location[:-1]:
        if part in schema.model_fields:
            written = schema.model_fields[part].annotation
            inner = [one for one in (written, *get_args(written)) if hasattr(one, "model_fields")]
            schema = inner[0] if inner else schema
    return list(schema.model_fields)


def _machine(spec: Any, where: Places) -> Machine:
    for field in ("idle_w", "prefill_w", "decode_w"):
        if getattr(spec, field) > spec.provisioned_w:
            raise SpecError.bad(where(field), getattr(spec, field), f"at most provisioned_w ({spec.provisioned_w:g})")
    for field in ("prefill_w", "decode_w"):
        if getattr(spec, field) < spec.idle_w:
            raise SpecError.bad(where(field), getattr(spec, field), f"at least idle_w ({spec.idle_w:g})")
    if spec.accelerators_limit_w > spec.prefill_w:
        raise SpecError.bad(
            where("accelerators_limit_w"), spec.accelerators_limit_w, f"at most prefill_w ({spec.prefill_w:g})"
        )
    profile = spec.profile or ""
    if is_path(profile):
        profile = str((where.path.parent / profile).resolve())
    link = None if spec.link is None else Link(**spec.link.model_dump())
    return Machine(**{**spec.model_dump(), "profile": profile, "link": link})


def _model(spec: Any, where: Places) -> Model:
    if spec.query_heads % spec.kv_heads:
        raise SpecError.bad(where("kv_heads"), spec.kv_heads, f"a divisor of query_heads ({spec.query_heads})")
    if spec.active_parameters > spec.parameters:
        raise SpecError.bad(
            where("active_parameters"), spec.active_parameters, f"at most parameters ({spec.parameters:g})"
        )
    if spec.experts_per_token > spec.experts:
        raise SpecError.bad(where("experts_per_token"), spec.experts_per_token, f"at most experts ({spec.experts})")
    return Model(**spec.model_dump())
