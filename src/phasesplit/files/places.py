"""Where the fields of a file or a command line stand, as the person who wrote them finds them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
