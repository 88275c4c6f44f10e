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
    "Batching": "scheduler.rules",
    "Cluster": "domain.cluster",
    "Facts": "simulator.run",
    "InfeasibleError": "errors",
    "Machine": "domain.machine",
    "Model": "domain.model",
    "PhaseTimes": "domain.profile",
    "PhasesplitError": "errors",
    "Placement": "scheduler.rules",
    "Pool": "domain.cluster",
    "Result": "simulator.result",
    "Role": "domain.cluster",
    "Rules": "scheduler.rules",
    "SimulationError": "errors",
    "SpecError": "errors",
    "Trace": "domain.request",
    "Transfer": "scheduler.rules",
    "build_cluster": "io.catalog",
    "load_cluster": "io.specs",
    "load_machine": "io.specs",
    "load_model": "io.specs",
    "load_workload": "io.workloads",
    "plan": "planner.provision",
    "read_trace": "io.traces",
    "simulate": "simulator.run",
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
