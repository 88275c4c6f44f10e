"""The name under which clients ask for a model, from what a person called it."""

from pathlib import Path

_DEFAULT = "smollm2-135m-instruct"


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
