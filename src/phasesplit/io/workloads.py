"""Shipped workloads by name."""

import json
from importlib.resources import files

import numpy as np

from phasesplit.domain.arrivals import ArrivalModel, Gamma, Hyperexponential
from phasesplit.domain.workload import LengthTable, Workload
from phasesplit.errors import SpecError

_FITTED: dict[str, type[Gamma] | type[Hyperexponential]] = {"gamma": Gamma, "hyperexponential": Hyperexponential}


def workload_names() -> list[str]:
    """Return the names of the shipped workloads, sorted."""
    folder = files("phasesplit") / "profiles" / "workloads"
    return sorted(entry.name.removesuffix(".npz") for entry in folder.iterdir() if entry.name.endswith(".npz"))


def load_workload(name: str) -> Workload:
    """Return a shipped workload.

    Args:
        name: One of `workload_names()`.

    Raises:
        SpecError: No workload has that name.
    """
    if name not in workload_names():
        raise SpecError.unknown("workload", name, workload_names())
    entry = files("phasesplit") / "profiles" / "workloads" / f"{name}.npz"
    with entry.open("rb") as file, np.load(file, allow_pickle=False) as columns:
        about = json.loads(str(columns["about"]))
        lengths = LengthTable(
            columns["prompt_tokens"].astype(np.int32),
            columns["output_tokens"].astype(np.int32),
            columns["requests"].astype(np.int64),
        )
    return Workload(
        name=name,
        lengths=lengths,
        arrivals=_fitted(about["arrivals"]),
        rate_per_s=about["rate_per_s"],
        duration_s=about["duration_s"],
        source=f"{about['source']}; {about['licence']}",
    )


def _fitted(about: dict[str, object]) -> ArrivalModel:
    settings = {key: tuple(value) if isinstance(value, list) else value for key, value in about.items()}
    return _FITTED[str(settings.pop("model"))](**settings)  # type: ignore[arg-type]
