"""What a plan is asked: from a YAML file, from values as on the command line, or from both."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasesplit.errors import SpecError
from phasesplit.io.specs import checked, is_path
from phasesplit.io.text import Places, fields_of, read_yaml
from phasesplit.planner.question import POLICY_FIELD, Asked, Reader

if TYPE_CHECKING:
    from phasesplit.planner.plan_schema import PlanSpec

_OPTIONS = {
    "workload.prompt": "prompt-percentiles",
    "workload.output": "output-percentiles",
    "workload.source": "workload",
    "rules": "set",
    POLICY_FIELD: "autoscale",
}


def read_problem(file: str | Path | None, values: Mapping[str, Any], *, flag: str = "--") -> Asked:
    """Return what is asked.

    Args:
        file: YAML file with the fields of `PlanSpec`; paths in it are relative to it. None: all is in `values`.
        values: Field to value, as on the command line or as in the file; they override the file.
        flag: What goes before a field's name in messages about `values`.

    Raises:
        SpecError: Something is missing, unknown, not allowed or contradictory.
    """
    from phasesplit.planner.plan_schema import PlanSpec

    content: dict[str, Any] = {}
    places = Places(Path(file or ""), {})
    if file is not None:
        content, places = read_yaml(Path(file))
        content = {name.replace("-", "_"): value for name, value in content.items()}

    def where(field: str) -> str:
        is_option = file is None or _is_option(field, content, values)
        return flag + _option(field) if is_option else places(field)

    merged = {**content, **values}
    for name in ("workload", "rules", "day"):
        if name in content and name in values:
            merged[name] = _overridden(name, content[name], values[name])
    for name in ("model", "workload"):
        if name not in merged:
            raise SpecError(f"{flag if file is None else ''}{name}: missing, say what the plan is for")
    spec = checked(merged, PlanSpec, where, str(file or "plan"))
    if file is not None:
        spec = _from_folder(spec, Path(file).parent, set(content) - set(values))
    return Reader(spec, where).asked()


def _is_option(field: str, content: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Return whether the command line gives a field, and not the file, which may give others of the same section."""
    top, _, entry = re.sub(r"\[.*", "", field).partition(".")
    if top not in values:
        return False
    inner, outer = content.get(top), values[top]
    if not (isinstance(inner, Mapping) and isinstance(outer, Mapping)):
        return True
    return entry not in inner or entry in outer


def _option(field: str) -> str:
    """Return the option that a field is on the command line, and the entry of it that is meant."""
    field = re.sub(r"\[\d+\]", "", field)
    section = next((one for one in _OPTIONS if f"{field}.".startswith(f"{one}.")), None)
    if section is None:
        name, _, entry = field.removeprefix("workload.").partition(".")
    else:
        name, entry = _OPTIONS[section], field[len(section) + 1 :]
    name = name.replace("_", "-")
    if section == "rules":
        return fields_of(name)(entry)
    return f"{name} {entry}" if entry else name


def _overridden(name: str, inner: Any, outer: Any) -> Any:
    """Return a mapping of the file with single fields of the command line put over it; a bare --day takes away none."""
    if name == "day":
        return inner if outer is True and inner else outer
    if isinstance(inner, str):
        inner = {"source": inner} if name == "workload" else {"published": inner == "published"}
    if name == "workload" and isinstance(outer, Mapping) and {"source", "prompt", "output"} & set(outer):
        return outer
    return {**inner, **outer} if isinstance(inner, Mapping) and isinstance(outer, Mapping) else outer


def _from_folder(spec: "PlanSpec", folder: Path, fields: set[str]) -> "PlanSpec":
    """Return the spec with the paths in some of its fields relative to a folder."""

    def placed(name: str) -> str:
        bare = name.split("/tp")[0].split("@")[0]
        return str(folder / name) if is_path(name) and (folder / bare).exists() else name

    changed: dict[str, Any] = {}
    for field in fields & {"model", "reference", "profile"}:
        changed[field] = placed(getattr(spec, field)) if getattr(spec, field) else None
    if "machines" in fields and spec.machines:
        changed["machines"] = tuple(placed(name) for name in spec.machines)
    if "existing" in fields and spec.existing:
        changed["existing"] = {placed(name): count for name, count in spec.existing.items()}
    source = spec.workload.source
    if "workload" in fields and source and (folder / source).is_file():
        changed["workload"] = spec.workload.model_copy(update={"source": str(folder / source)})
    return spec.model_copy(update=changed)
