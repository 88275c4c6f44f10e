"""YAML and JSON text as mappings. An error is one line that names the file, the line and the field."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phasesplit.errors import SpecError

if TYPE_CHECKING:
    import yaml


Where = Callable[[str], str]
"""From a field (`port`, `serve.port`, `pools[0].count`) to how the person who wrote it knows its place."""


def fields_of(place: str) -> Where:
    """Return where the fields of a place are that has no lines: of `--set`, `--set, field transfer`."""
    return lambda field: f"{place}, field {field}"


def inside(where: Where, section: str) -> Where:
    """Return where the fields of a section are."""
    return lambda field: where(f"{section}.{field}")


@dataclass(frozen=True, slots=True)
class Places:
    """Where the fields of a YAML file are; hyphens in their names count as underscores.

    Attributes:
        path: The file.
        lines: Field to line.
    """

    path: Path
    lines: Mapping[str, int]

    def __call__(self, field: str) -> str:
        """Return file, line and name of a field: its own line, or that of the innermost field it would stand in."""
        lines = {name.replace("-", "_"): line for name, line in self.lines.items()}
        known = field.replace("-", "_")
        while known and known not in lines:
            known = known[: max(known.rfind("."), known.rfind("["), 0)]
        return f"{self.path}, line {lines[known]}, {field}" if known else f"{self.path}, {field}"


LARGEST_FILE_BYTES = 1 << 20
"""A spec is written by hand: a larger file is a mistake (a trace, a results file)."""


def read_text(path: Path) -> str:
    """Return the text of a small file.

    Raises:
        SpecError: It is not there, not a file, too large, or not UTF-8.
    """
    try:
        if not path.is_file() and path.exists():
            raise SpecError(f"{path}: cannot be read, it is not a file")
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise SpecError.bad(f"{path}, size", path.stat().st_size, f"at most {LARGEST_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise SpecError(f"{path}: cannot be read, {reason}") from problem


def read_yaml(path: Path) -> tuple[dict[str, Any], Places]:
    """Return the mapping of a YAML file, and where its fields are: `name`, `name.inner`, `name[0].inner`.

    Raises:
        SpecError: It cannot be read, is not YAML, is not a mapping, names a field twice, or uses aliases.
    """
    import yaml

    try:
        root = yaml.compose(read_text(path), Loader=yaml.SafeLoader)
        top = _checked(path, root)
        content = yaml.SafeLoader("").construct_document(top)
        places = Places(path, dict(_lines(top)))
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        mark = getattr(problem, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else str(path)
        reason = getattr(problem, "problem", None) or "nested too deeply or not a value"
        raise SpecError(f"{where}: not YAML ({' '.join(str(reason).split())})") from problem
    return content, places


def _lines(node: "yaml.Node", place: str = "") -> Iterator[tuple[str, int]]:
    """Yield the place of each field below a node, and its line."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{place}.{key.value}" if place else str(key.value)
            yield inner, key.start_mark.line + 1
            yield from _lines(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield f"{place}[{number}]", value.start_mark.line + 1
            yield from _lines(value, f"{place}[{number}]")


def read_json(path: Path) -> dict[str, Any]:
    """Return the mapping of a JSON file.

    Raises:
        SpecError: It cannot be read, is not JSON, is not a mapping, or names a field twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"{path}: field {name} is there twice")
        return dict(pairs)

    try:
        content = json.loads(read_text(path), object_pairs_hook=unique)
    except (ValueError, RecursionError) as problem:
        line = f", line {problem.lineno}" if isinstance(problem, json.JSONDecodeError) else ""
        raise SpecError(
            f"{path}{line}: not JSON ({getattr(problem, 'msg', 'nested too deeply or a number too long')})"
        ) from problem
    if not isinstance(content, dict):
        raise SpecError(f"{path}: got a {type(content).__name__}, allowed is a mapping of fields")
    return content


def _checked(path: Path, root: "yaml.Node | None") -> "yaml.MappingNode":
    """Return the mapping at the top, refusing what YAML allows and nobody means: fields named twice, aliases."""
    import yaml

    if not isinstance(root, yaml.MappingNode):
        found = "nothing" if root is None else "no mapping"
        raise SpecError(f"{path}: got {found}, allowed is a mapping of fields (name: value)")
    seen: set[int] = set()
    waiting: list[yaml.Node] = [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            raise SpecError(
                f"{path}, line {node.start_mark.line + 1}: an alias, allowed is YAML without aliases (*name)"
            )
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            names: set[str] = set()
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise SpecError(f"{path}, line {key.start_mark.line + 1}: a field name must be plain text")
                if key.value in names:
                    raise SpecError(f"{path}, line {key.start_mark.line + 1}: field {key.value} is there twice")
                names.add(key.value)
                waiting.append(value)
    return root
