"""The public names."""

import subprocess
import sys

import pytest

import phasesplit


@pytest.mark.parametrize("name", phasesplit.__all__)
def test_a_public_name_is_there(name: str) -> None:
    """A documented name could not be imported."""
    assert getattr(phasesplit, name) is not None
    assert name in dir(phasesplit)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """`hasattr` and `from phasesplit import ...` would fail in ways that Python does not expect."""
    assert not hasattr(phasesplit, "simulat")


def test_a_simulation_needs_only_public_names() -> None:
    """A notebook would have to import from modules that may move."""
    cluster = phasesplit.build_cluster("llama2-70b", [(phasesplit.Role.UNSPLIT, 2, "dgx-h100")])
    trace = phasesplit.load_workload("azure-conversation").trace(2.0, 20.0)
    rules = phasesplit.Rules(unsplit_batching=phasesplit.Batching.WHOLE)
    result = phasesplit.simulate(cluster, trace, rules)
    assert result.statuses["completed"] == len(trace)


def test_the_import_loads_nothing_heavy() -> None:
    """Every command, `--help` too, would wait for modules that it does not use."""
    code = "import sys, phasesplit; print([m for m in ('numpy', 'numba', 'pyarrow', 'pydantic') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"
