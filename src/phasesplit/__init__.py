"""Plan, simulate and run phase-split serving of large language models.

The names below are loaded when they are first used, so that `import phasesplit` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from phasesplit._version import __version__

if TYPE_CHECKING:
    from phasesplit import errors
    from phasesplit.domain.cluster import Cluster, Pool, Role
    from phasesplit.domain.machine import Machine
    from phasesplit.domain.model import Model
    from phasesplit.domain.profile import PhaseTimes
    from phasesplit.domain.request import Trace
    from phasesplit.errors import InfeasibleError, PhasesplitError, SimulationError, SpecError
    from phasesplit.io.catalog import build_cluster
    from phasesplit.io.specs import load_cluster, load_machine, load_model
    from phasesplit.io.traces import read_trace
    from phasesplit.io.workloads import load_workload
    from phasesplit.planner.provision import plan
    from phasesplit.scheduler.rules import Batching, Placement, Rules, Transfer
    from phasesplit.simulator.result import Result
    from phasesplit.simulator.run import Facts, simulate

__all__ = [
    "Batching",
    "Cluster",
    "Facts",
    "InfeasibleError",
    "Machine",
    "Model",
    "PhaseTimes",
    "PhasesplitError",
    "Placement",
    "Pool",
    "Result",
    "Role",
    "Rules",
    "SimulationError",
    "SpecError",
    "Trace",
    "Transfer",
    "__version__",
    "build_cluster",
    "errors",
    "load_cluster",
    "load_machine",
    "load_model",
    "load_workload",
    "plan",
    "read_trace",
    "simulate",
]

_HOME = {
    "Batching": "scheduling.rules",
    "Cluster": "domain.cluster",
    "Facts": "simulation.run",
    "InfeasibleError": "errors",
    "Machine": "domain.machine",
    "Model": "domain.model",
    "PhaseTimes": "domain.profile",
    "PhasesplitError": "errors",
    "Placement": "scheduling.rules",
    "Pool": "domain.cluster",
    "Result": "simulation.result",
    "Role": "domain.cluster",
    "Rules": "scheduling.rules",
    "SimulationError": "errors",
    "SpecError": "errors",
    "Trace": "domain.request",
    "Transfer": "scheduling.rules",
    "build_cluster": "files.catalog",
    "load_cluster": "files.specs",
    "load_machine": "files.specs",
    "load_model": "files.specs",
    "load_workload": "files.workloads",
    "plan": "provision",
    "read_trace": "files.traces",
    "simulate": "simulation.run",
}
"""Each public name's module."""


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("phasesplit.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'phasesplit' has no attribute {name!r}")
    value = getattr(import_module(f"phasesplit.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
