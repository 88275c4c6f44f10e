"""What is counted while the simulation runs: gaps between tokens, batch sizes, and a timeline of the pools."""

import math

import numpy as np
from numpy.typing import NDArray

from phasesplit._jit import jit, jit_inline
from phasesplit.domain.latency import BINS_PER_OCTAVE, LEAST
from phasesplit.scheduling.ledger import LANDING, OFF, POOLS, PREEMPTED, QUEUE, READY, WAITING, Ledger
from phasesplit.scheduling.lists import length
from phasesplit.simulation.world import COMPLETED, REFUSED, World

_SEGMENT_SHARE = 0.004


@jit
def count_gaps(gaps: NDArray[np.int64], gap_s: float, count: int) -> None:
    """Count so many gaps of this length; gaps outside the histogram's range fall into its first or last bin.

    Mutates: gaps.
    """
    mantissa, exponent = math.frexp(max(gap_s, LEAST) / LEAST)
    index = (exponent - 1) * BINS_PER_OCTAVE + int((2.0 * mantissa - 1.0) * BINS_PER_OCTAVE)
    gaps[min(index, gaps.size - 1)] += count


@jit_inline
def see_step(ledger: Ledger, world: World, machine: int, now_s: float) -> None:
    """Count a step that has just been executed: its time by phase, its batch size, the gaps its tokens closed.

    Mutates: machines, lane_gap_s, world's histograms.
    """
    machines = ledger.machines
    lanes = machines[machine]["lanes"]
    prompts = machines[machine]["prompt_lanes"]
    iterations = machines[machine]["step_iterations"]
    duration_s = now_s - machines[machine]["step_start_s"]
    machines[machine]["iterations"] += iterations
    machines[machine]["task_iterations"] += iterations * lanes
    world.batch_s[machines[machine]["pool"], lanes] += duration_s
    if prompts == lanes:
        machines[machine]["busy_prompt_s"] += duration_s
        return
    if prompts > 0:
        machines[machine]["busy_mixed_s"] += duration_s
    else:
        machines[machine]["busy_token_s"] += duration_s
    first_s = machines[machine]["step_first_s"]
    growth_s = machines[machine]["step_growth_s"]
    last_s = first_s + growth_s * (iterations - 1)
    count_gaps(world.gaps, first_s, lanes - prompts - machines[machine]["step_joiners"])
    if iterations > 1:
        _see_gaps(world, first_s + growth_s, growth_s, iterations - 1, lanes - prompts)
    gaps_s = ledger.lane_gap_s[machine]
    for lane in range(lanes):
        gaps_s[lane] = max(gaps_s[lane], last_s)


@jit_inline
def _see_gaps(world: World, first_s: float, growth_s: float, iterations: int, lanes: int) -> None:
    """Count the gaps of so many iterations that get longer by `growth_s` each, in segments narrower than a bin."""
    segments = 1
    if growth_s * (iterations - 1) > _SEGMENT_SHARE * first_s:
        segments = min(iterations, int(growth_s * (iterations - 1) / (_SEGMENT_SHARE * first_s)) + 1)
    begin = 0
    for segment in range(segments):
        end = iterations * (segment + 1) // segments
        middle_s = first_s + growth_s * 0.5 * (begin + end - 1)
        count_gaps(world.gaps, middle_s, lanes * (end - begin))
        begin = end


@jit
def see_end(ledger: Ledger, world: World, slot: int) -> None:
    """Write the record of a request that has ended; one that never came to a machine was refused.

    Mutates: world.done, world.clock.
    """
    requests = ledger.requests
    done = world.done
    index = world.clock[0]["done"]
    world.clock[0]["done"] = index + 1
    done[index]["row"] = requests[slot]["row"]
    done[index]["status"] = REFUSED if requests[slot]["assigned_machine"] < 0 else COMPLETED
    done[index]["prefill_machine"] = requests[slot]["assigned_machine"]
    done[index]["decode_machine"] = requests[slot]["token_machine"]
    done[index]["preemptions"] = requests[slot]["preemptions"]
    done[index]["prompt_tokens"] = requests[slot]["prompt_tokens"]
    done[index]["output_tokens"] = requests[slot]["output_tokens"]
    done[index]["arrival_s"] = requests[slot]["arrival_s"]
    done[index]["prompt_start_s"] = requests[slot]["prompt_start_s"]
    done[index]["first_token_s"] = requests[slot]["first_token_s"]
    done[index]["kv_ready_s"] = requests[slot]["kv_ready_s"]
    done[index]["token_start_s"] = requests[slot]["token_start_s"]
    done[index]["last_token_s"] = requests[slot]["last_token_s"]
    done[index]["gap_max_s"] = requests[slot]["gap_max_s"]


@jit
def sample(ledger: Ledger, world: World) -> None:
    """Add a sample of all pools to the timeline; a full timeline drops every second sample and goes on half as often.

    Mutates: world.samples, world.clock.
    """
    clock = world.clock
    samples = world.samples
    if clock[0]["samples"] == samples.shape[0]:
        half = samples.shape[0] // 2
        for i in range(half):
            for pool in range(POOLS):
                for field in range(samples.shape[2]):
                    samples[i, pool, field] = samples[2 * i + 1, pool, field]
        clock[0]["samples"] = half
        clock[0]["next_sample_s"] += clock[0]["sample_every_s"]
        clock[0]["sample_every_s"] *= 2.0
        return
    row = samples[clock[0]["samples"]]
    row[:] = 0.0
    machines = ledger.machines
    for machine in range(machines.size):
        if machines[machine]["state"] == OFF:
            continue
        pool = machines[machine]["pool"]
        row[pool, 0] += 1.0
        row[pool, 1] += 1.0 if machines[machine]["lanes"] > 0 else 0.0
        row[pool, 2] += machines[machine]["lanes"]
        if ledger.settings[0]["published"]:
            row[pool, 3] += length(ledger.lists[QUEUE, machine])
        else:
            for kind in (WAITING, PREEMPTED, READY, LANDING):
                row[pool, 3] += length(ledger.lists[kind, machine])
        row[pool, 4] += machines[machine]["used_blocks"] / machines[machine]["capacity_blocks"]
    for pool in range(POOLS):
        if row[pool, 0] > 0:
            row[pool, 4] /= row[pool, 0]
    clock[0]["samples"] += 1
    clock[0]["next_sample_s"] += clock[0]["sample_every_s"]
