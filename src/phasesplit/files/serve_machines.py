"""Workers of this host in a cluster file: named so, or by the file of the machine that a plan was made with."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phasesplit.errors import SpecError
from phasesplit.files.places import Where
from phasesplit.files.specs import is_path, is_profile, load_machine
from phasesplit.files.text import read_json

if TYPE_CHECKING:
    from phasesplit.files.profile_schema import ProfileSpec

EMBEDDED = "embedded"
"""The machine of a pool that `serve` starts itself: a process on this host."""

WORKERS = "embedded (a process on this host), or the file of a machine that `phasesplit profile engine` measured"
"""The machines that `serve` starts, for messages."""

_ENGINE = "engine"
"""Target of a profile of the embedded engine."""


def profile_of_workers(machines: Sequence[str], folder: Path, where: Where) -> "ProfileSpec | None":
    """Return the profile that workers of this host were planned with, None where their file names none.

    Args:
        machines: Of each pool, EMBEDDED or the path of a machine file relative to the folder.
        folder: Where the cluster file is.
        where: From a field of the cluster file to its place.

    Raises:
        SpecError: A machine file is wrong, was not measured on the embedded engine, or is of another machine than
            another pool's.
    """
    from phasesplit.files.profile_files import read_profile_file

    found: ProfileSpec | None = None
    for number, machine in enumerate(machines):
        if machine == EMBEDDED:
            continue
        place, file = where(f"pools[{number}].machine"), folder / machine
        # A slice or a capped machine is no file; there are no such processes.
        profile = load_machine(file).profile if file.is_file() else ""
        measured = read_profile_file(profile) if is_path(profile) and profile.endswith(".json") else None
        if measured is None or measured.target != _ENGINE:
            raise SpecError.bad(place, machine, WORKERS)
        if found is not None and measured != found:
            raise SpecError.bad(place, machine, "the machine of the other pools: workers of one host are alike")
        found = measured
    return found


def served_model(model: str, folder: Path) -> str:
    """Return what `serve` takes for a model: a path as an absolute one, and a profile's model by its name.

    Args:
        model: As the cluster file has it.
        folder: Where that is.

    Raises:
        SpecError: A JSON file cannot be read, or is a profile with something wrong.
    """
    from phasesplit.files.profile_files import read_profile_file

    if not (is_path(model) or model.endswith(".gguf")):
        return model
    path = (folder / model).resolve()
    if path.suffix == ".json" and is_profile(read_json(path)):
        return read_profile_file(path).model.name
    return str(path)
