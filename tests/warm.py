"""Compile what many tests need, once and without a limit of time, before they run: `python tests/warm.py`.

Two processes that meet a cold cache would both compile, and tests that wait for machines would wait for the compiler.
"""

from doubles import tiny_cluster, tiny_trace
from engine_machines import Machine, Received, asked, turn
from phasesplit.engine import kernels
from phasesplit.gateway.decisions import warm
from phasesplit.scheduler.rules import Rules
from phasesplit.simulator.run import simulate


def compile_all() -> None:
    """Run each kind of compiled code once."""
    warm(Rules())
    simulate(tiny_cluster(), tiny_trace((0.0, 100, 4)))
    compile_engine()


def compile_engine() -> None:
    """Serve one request whole, however long it takes: kernels, and the rules of batches."""
    kernels.warm_up()
    machine, received = Machine(), Received()
    machine.engine.submit("whole", asked(range(3, 60), 3), received)
    while received.finished is None:
        turn(machine)


if __name__ == "__main__":
    compile_all()
