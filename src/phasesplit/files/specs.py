"""Machines, models and clusters from YAML (or a model's Hugging Face config.json), by name or by path."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasesplit.domain.machine import Machine
from phasesplit.domain.model import Model
from phasesplit.errors import SpecError
from phasesplit.files.hf_config import model_from_config
from phasesplit.files.text import read_json, read_yaml

if TYPE_CHECKING:
    from pydantic import ValidationError

    from phasesplit.files.schema import ClusterSpec, SpecType

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
            `Machine`, figures in base units or as text with a unit.
        where: What an error calls the place that the name stands in.

    Raises:
        SpecError: The name is not known, or the file holds something that is not allowed.
    """
    from phasesplit.files.schema import MachineSpec

    if _is_path(name_or_path):
        return _machine(*_validated(Path(name_or_path), MachineSpec))
    name = MACHINE_ALIASES.get(str(name_or_path), str(name_or_path))
    if name not in known_machines():
        raise SpecError.unknown(where, name, [*known_machines(), *MACHINE_ALIASES])
    with as_file(files("phasesplit") / "profiles" / "machines" / f"{name}.yaml") as path:
        return _machine(*_validated(path, MachineSpec))


def load_model(name_or_path: str | Path) -> Model:
    """Return a model.

    Args:
        name_or_path: A name from `known_models`, the path of a YAML file with the fields of `Model`, or the path of a
            Hugging Face config.json or of a directory that holds one.

    Raises:
        SpecError: The name is not known, or the file holds something that is not allowed.
    """
    from phasesplit.files.schema import ModelSpec

    if _is_path(name_or_path):
        path = Path(name_or_path)
        path = path / "config.json" if path.is_dir() else path
        if path.suffix == ".json":
            return model_from_config(path, read_json(path))
        return _model(*_validated(path, ModelSpec))
    name = str(name_or_path)
    if name not in known_models():
        raise SpecError.unknown("model", name, known_models())
    with as_file(files("phasesplit") / "profiles" / "models" / f"{name}.yaml") as path:
        return _model(*_validated(path, ModelSpec))


def load_cluster(path: str | Path) -> "ClusterSpec":
    """Return the cluster that a YAML file describes; paths in it are relative to the file.

    Raises:
        SpecError: The file holds something that is not allowed.
    """
    from phasesplit.files.schema import ClusterSpec

    spec, _ = _validated(Path(path), ClusterSpec)
    return _with_absolute_paths(spec, Path(path).parent)


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
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as problem:
        partial.unlink(missing_ok=True)
        raise SpecError(f"{target}: cannot be written, {problem.strerror}") from problem


def _with_absolute_paths(spec: "ClusterSpec", folder: Path) -> "ClusterSpec":
    def absolute(name: str) -> str:
        return str((folder / name).resolve()) if _is_path(name) else name

    pools = tuple(pool.model_copy(update={"machine": absolute(pool.machine)}) for pool in spec.pools)
    return spec.model_copy(update={"model": absolute(spec.model), "pools": pools})


def _shipped_names(kind: str) -> list[str]:
    folder = files("phasesplit") / "profiles" / kind
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _is_path(name_or_path: str | Path) -> bool:
    text = str(name_or_path)
    return isinstance(name_or_path, Path) or "/" in text or Path(text).suffix in {".yaml", ".yml", ".json"}


class _Where:
    """Names a field of a file together with its line."""

    def __init__(self, path: Path, lines: Mapping[str, int]) -> None:
        self.path = path
        self.lines = lines

    def __call__(self, field: str) -> str:
        line = self.lines.get(field.split(".")[0].split("[")[0])
        return f"{self.path}, line {line}, {field}" if line else f"{self.path}, {field}"


def _validated(path: Path, schema: "type[SpecType]") -> "tuple[SpecType, _Where]":
    from pydantic import ValidationError

    content, lines = read_yaml(path)
    where = _Where(path, lines)
    try:
        return schema.model_validate(content), where
    except ValidationError as problem:
        raise _one_line(where, schema, problem) from problem


def _one_line(where: _Where, schema: "type[SpecType]", problem: "ValidationError") -> SpecError:
    """Return the first thing wrong as a SpecError; a misspelt field goes before a missing one, since it explains it."""
    found = sorted(problem.errors(), key=lambda error: error["type"] != "extra_forbidden")[0]
    location = [part for part in found["loc"] if part not in ("function-after", "function-before")]
    field = str(location[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location[1:])
    if found["type"] == "extra_forbidden":
        known = _fields(schema, location)
        near = get_close_matches(str(location[-1]), known, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
        return SpecError(f"{where(field)}: unknown field, {hint}")
    if found["type"] == "missing":
        return SpecError(f"{where.path}: field {field} is missing")
    allowed = (
        str(found["ctx"]["error"]) if found["type"] == "value_error" else _ALLOWED.get(found["type"], found["msg"])
    )
    value = repr(found["input"])
    return SpecError(f"{where(field)}: got {value[:60]}{'...' * (len(value) > 60)}, allowed is {allowed}")


def _fields(schema: "type[SpecType]", location: list[Any]) -> list[str]:
    from phasesplit.files.schema import PoolSpec

    return list((PoolSpec if "pools" in location[:-1] else schema).model_fields)


def _machine(spec: Any, where: _Where) -> Machine:
    for field in ("idle_w", "prompt_w", "token_w"):
        if getattr(spec, field) > spec.provisioned_w:
            raise SpecError.bad(where(field), getattr(spec, field), f"at most provisioned_w ({spec.provisioned_w:g})")
    for field in ("prompt_w", "token_w"):
        if getattr(spec, field) < spec.idle_w:
            raise SpecError.bad(where(field), getattr(spec, field), f"at least idle_w ({spec.idle_w:g})")
    return Machine(**{**spec.model_dump(), "profile": spec.profile or ""})


def _model(spec: Any, where: _Where) -> Model:
    if spec.query_heads % spec.kv_heads:
        raise SpecError.bad(where("kv_heads"), spec.kv_heads, f"a divisor of query_heads ({spec.query_heads})")
    if spec.active_parameters > spec.parameters:
        raise SpecError.bad(
            where("active_parameters"), spec.active_parameters, f"at most parameters ({spec.parameters:g})"
        )
    if spec.experts_per_token > spec.experts:
        raise SpecError.bad(where("experts_per_token"), spec.experts_per_token, f"at most experts ({spec.experts})")
    return Model(**spec.model_dump())
