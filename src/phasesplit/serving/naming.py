"""The name under which clients ask for a model, and that of a worker, from what a person called them."""

import os
import re
from pathlib import Path

from phasesplit.errors import SpecError

_DEFAULT = "smollm2-135m-instruct"
_WORKER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def model_name(model: str) -> str:
    """Return the name of a model.

    Args:
        model: `default`, `tiny`, a path, or a hub's name.
    """
    if model.lower() in ("default", "smollm2-135m"):
        return _DEFAULT
    if model.lower() == "tiny":
        return "tiny"
    path = Path(model.removeprefix("hf:"))
    return (path.stem if path.suffix == ".gguf" else path.name).lower()


def worker_name(given: str | None, home: str) -> str:
    """Return the name of a worker: the one that a person gave it, or one of host, role and process.

    Raises:
        SpecError: It is none that may stand in logs, figures and paths.
    """
    if given is None:
        return f"{os.uname().nodename}-{home}-{os.getpid()}"
    if _WORKER.fullmatch(given) is None:
        raise SpecError.bad("--name", given, "1 to 128 letters, digits, and . _ - behind the first one")
    return given
