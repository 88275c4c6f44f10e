"""A step: iterations with an unchanged batch, timed in closed form, and cut short when work arrives."""

import math

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline
from phasesplit.scheduling.ledger import Ledger
from phasesplit.scheduling.published import iteration_s
from phasesplit.simulation.events import schedule
from phasesplit.simulation.world import KNOT_S, KNOT_TOKENS, TOKEN_S, World


@jit_inline
def prompt_time_s(world: World, kind: int, tokens: float) -> float:
    """Return f(tokens) of `domain.profile.PhaseTimes`: linear between knots, end segments extended, never below 0."""
    last = world.kinds[kind]["knots"] - 1
    left = 0
    curve = world.curves[kind]
    while left < last - 1 and tokens >= curve[KNOT_TOKENS, left + 1]:
        left += 1
    x = curve[KNOT_TOKENS, left]
    y = curve[KNOT_S, left]
    slope = (curve[KNOT_S, left + 1] - y) / (curve[KNOT_TOKENS, left + 1] - x)
    return float(max(y + slope * (tokens - x), 0.0))


@jit_inline
def time_step(ledger: Ledger, world: World, machine: int) -> None:
    """Set the time of the batch's first iteration, and by how much each further one is longer.

    Source: `domain.profile.PhaseTimes`.

    Mutates: machines["step_first_s"], ["step_growth_s"], world's counts of extrapolated steps.
    """
    machines = ledger.machines
    kind = machines[machine]["kind"]
    kinds = world.kinds
    tokens = machines[machine]["batch_tokens"]
    requests = machines[machine]["lanes"] - machines[machine]["prompt_lanes"]
    context_s = kinds[kind]["token_context_s"] * machines[machine]["context_tokens"]
    machines[machine]["step_growth_s"] = 0.0
    if requests > kinds[kind]["measured_requests"]:
        world.clock[0]["steps_beyond_requests"] += 1
    if tokens == requests:
        machines[machine]["step_first_s"] = world.curves[kind, TOKEN_S, requests] + context_s
        machines[machine]["step_growth_s"] = kinds[kind]["token_context_s"] * requests
        return
    if tokens > kinds[kind]["measured_prompt_tokens"]:
        world.clock[0]["steps_beyond_prompt"] += 1
    prompt_s = prompt_time_s(world, kind, tokens)
    if ledger.settings[0]["published"]:
        machines[machine]["step_first_s"] = iteration_s(prompt_s, requests)
        return
    if requests > 0:
        prompt_s = max(prompt_s, world.curves[kind, TOKEN_S, requests])
    pairs_s = kinds[kind]["prompt_pair_s"] * machines[machine]["pair_tokens"]
    machines[machine]["step_first_s"] = prompt_s + pairs_s + context_s


@jit_inline
def time_of(machines: NDArray[np.void], machine: int, iterations: int) -> float:
    """Return how long so many iterations of the present step take."""
    first_s = machines[machine]["step_first_s"]
    growth_s = machines[machine]["step_growth_s"]
    return float(iterations * first_s + growth_s * (0.5 * iterations * (iterations - 1)))


@jit
def iterations_by(machines: NDArray[np.void], machine: int, now_s: float) -> int:
    """Return how many iterations of the present step will have run when the one in progress ends."""
    elapsed_s = now_s - machines[machine]["step_start_s"]
    first_s = machines[machine]["step_first_s"]
    growth_s = machines[machine]["step_growth_s"]
    if growth_s <= 0.0:
        return int(elapsed_s / first_s) + 1
    half = first_s - 0.5 * growth_s
    count = int((math.sqrt(half * half + 2.0 * growth_s * elapsed_s) - half) / growth_s) + 1
    # The root is exact only up to rounding; the definition decides.
    while count > 1 and time_of(machines, machine, count - 1) > elapsed_s:
        count -= 1
    while time_of(machines, machine, count) <= elapsed_s:
        count += 1
    return count


@jit
def cut(
    machines: NDArray[np.void], clock: NDArray[np.void], future: NDArray[np.void], machine: int, now_s: float
) -> None:
    """End the present step after the iteration in progress, unless a prompt is in the batch (then it is the only one).

    Mutates: machines["step_iterations"], future, clock.
    """
    if machines[machine]["prompt_lanes"] > 0 or machines[machine]["step_iterations"] <= 1:
        return
    iterations = iterations_by(machines, machine, now_s)
    if iterations < machines[machine]["step_iterations"]:
        machines[machine]["step_iterations"] = iterations
        schedule(clock, future, machine, machines[machine]["step_start_s"] + time_of(machines, machine, iterations))
