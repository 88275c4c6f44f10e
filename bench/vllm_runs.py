"""Prompts whose KV moves between two vLLM machines, over memory or a paced link, in each way that vllm.py compares."""

import itertools
import json
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from paced_link import ADDRESSES, DEVICE, PacedLink

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from vllm_machines import MODEL_VARIABLE, Machine, Pair, prompt_of

BLOCK_TOKENS = 128
"""vLLM's default on a CPU."""
REPEATS = 5
IDLE_S = 2.0
SHARED = "shared memory"
TCP: dict[str, float | None] = {"TCP, unpaced": None, "TCP, 1 GB/s": 1e9, "TCP, 100 MB/s": 100e6}
"""Bytes a second of the link; None: as fast as the machine can."""
LINKS = (SHARED, *TCP)
OURS: dict[str, int | None] = {"layer by layer": 1, "in one go": 1 << 30}
"""Prompts of so many tokens and more leave layer by layer."""
PULL: dict[str, int | None] = {"vLLM's NixlConnector, pull": None}
NIXL_SETTINGS = {
    "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
    "kv_buffer_device": "cpu",
}  # fmt: skip


class Run(NamedTuple):
    """One prompt whose KV moved.

    Attributes:
        exposed_ms: From the first token on the prefill machine until vLLM on the decode machine knows that the KV is
            there; below 0 it was there before the token was.
        prefill_ms: Time of the prefill phase.
    """

    exposed_ms: float
    prefill_ms: float


Found = dict[tuple[str, str, int], list[Run]]
"""Runs by link, way and prompt tokens."""


def measured(link: PacedLink, lengths_tokens: tuple[int, ...]) -> tuple[Found, dict[str, float]]:
    """Return `REPEATS` runs of each way over each link; and by way, the cores that both machines take when idle.

    Args:
        link: What lies between the machines.
        lengths_tokens: Of prompts, the longest last, in multiples of a block, so that each way moves the same bytes.
    """
    found: Found = {}
    idle_cores: dict[str, float] = {}
    for ways, names in ((OURS, LINKS), (PULL, (SHARED,)), (PULL, tuple(TCP))):
        with tempfile.TemporaryDirectory() as scratch:
            pair = machines(link, Path(scratch), is_ours=ways is OURS, has_memory=SHARED in names)
            try:
                for name in names:
                    link.pace(TCP.get(name))
                    measure(found, link, pair, lengths_tokens, ways, name)
                idle_cores |= dict.fromkeys(ways, sum(map(cores_taken, (pair.prefill, pair.decode))))
            finally:
                pair.close()
    return found, idle_cores


def machines(link: PacedLink, directory: Path, *, is_ours: bool, has_memory: bool) -> Pair:
    """Return a pair in bfloat16, as it would serve, each at its end of the link.

    Args:
        link: What lies between them.
        directory: For logs and sockets.
        is_ours: The connector is ours, not NIXL's.
        has_memory: NIXL may take memory that the machines share.
    """
    vllm: dict[str, Any] = {
        "dtype": "bfloat16", "block_size": BLOCK_TOKENS, "max_model_len": 8192, "max_num_batched_tokens": 8192,
    }  # fmt: skip
    if not is_ours:
        vllm["kv_transfer_config"] = NIXL_SETTINGS
    both = []
    for number, name in enumerate(("prefill-0", "decode-0")):
        environment = {
            "VLLM_HOST_IP": ADDRESSES[number], "VLLM_NIXL_SIDE_CHANNEL_HOST": ADDRESSES[number],
            # UCX takes memory between processes of one machine unless it may have nothing but TCP.
            "UCX_TLS": "tcp,posix,sysv,cma,self" if has_memory else "tcp,self", "UCX_NET_DEVICES": DEVICE,
        }  # fmt: skip
        start = partial(
            Machine, name, directory, vllm=vllm, environment=environment, transfer_host=ADDRESSES[number]
        )  # fmt: skip
        both.append(link.at(number, start))
    for machine in both:
        machine.wait_up(has_reports=is_ours)
    return Pair(*both)


def measure(
    found: Found,
    link: PacedLink,
    pair: Pair,
    lengths_tokens: tuple[int, ...],
    ways: dict[str, int | None],
    name: str,
) -> None:
    """Add runs over one link to what was found; ways are measured in turns, and which comes first alternates.

    Args:
        found: Taken and given.
        link: What lies between the machines, paced.
        pair: Machines.
        lengths_tokens: Of prompts.
        ways: `OURS` or `PULL`.
        name: Of `LINKS`.
    """
    address = None
    if ways is OURS:
        address = pair.decode.address | ({} if name == SHARED else {"unix": None, "nixl": None})
        pair.prefill.disconnect(pair.decode.name)
        time.sleep(0.5)  # until the other end has seen it
    for repeat, tokens in itertools.product(range(REPEATS + 1), lengths_tokens):
        turns = list(ways.items())
        for way, threshold_tokens in turns if repeat % 2 else reversed(turns):
            if repeat == 0 and tokens != lengths_tokens[-1]:
                continue  # the longest alone fits connections and buffers to the link
            if threshold_tokens is not None:
                pair.prefill.order(do="threshold", tokens=threshold_tokens)
            sent_bytes = link.sent_bytes()
            run = moved(pair, tokens, address)
            passed_bytes = link.sent_bytes() - sent_bytes
            if (passed_bytes >= kv_bytes(tokens)) is (name == SHARED):
                sys.exit(f"{way}, {name}: {passed_bytes:,} bytes took the link for {kv_bytes(tokens):,} bytes of KV")
            if repeat:
                found.setdefault((name, way, tokens), []).append(run)
    print(f"done: {', '.join(ways)}; {name}", file=sys.stderr, flush=True)


_numbers = itertools.count()


def moved(pair: Pair, tokens: int, address: dict[str, Any] | None) -> Run:
    """Return the times of a prompt that nobody has seen before.

    Args:
        pair: Machines.
        tokens: Its length.
        address: Where the prefill machine sends the KV; None: the decode machine pulls it.
    """
    number = next(_numbers)
    key, prompt = f"r{number}", prompt_of(tokens, number)
    began_s = time.monotonic()
    if address is not None:
        pair.submit(key, prompt, 2, address=address)
        first = pair.prefill.result(f"p.{key}")
    else:
        first = pair.pull(key, prompt, 2)
    arrived_s = pair.decode.arrival_s(f"d.{key}")
    pair.decode.result(f"d.{key}")
    for machine in (pair.prefill, pair.decode):
        machine.await_free()
        machine.forget()
    return Run(1e3 * (arrived_s - first["at_s"]), 1e3 * (first["at_s"] - began_s))


def cores_taken(machine: Machine) -> float:
    """Return core seconds a second of a machine that has nothing to do."""
    taken_s = []
    for wait_s in (IDLE_S, 0.0):
        ticks = Path(f"/proc/{machine.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11:13]
        taken_s.append(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))
        time.sleep(wait_s)
    return (taken_s[1] - taken_s[0]) / IDLE_S


def kv_bytes(tokens: int) -> int:
    """Return the bytes of a prompt's keys and values in bfloat16."""
    model = json.loads((Path(os.environ[MODEL_VARIABLE]) / "config.json").read_text(encoding="utf-8"))
    return int(tokens * 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_dim"] * 2)
