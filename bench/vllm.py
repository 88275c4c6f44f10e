"""How long a user waits for KV between two vLLM machines: layer by layer, in one go, and as vLLM's own NIXL pull.

Run by `make bench-vllm`, or in an environment with vLLM: python bench/vllm.py [--lengths 256,1024] [--rate 100e6]
"""

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from vllm_machines import Machine, Pair, prompt_of

NEVER_TOKENS = 1 << 30
BLOCK_TOKENS = 128


class PacedLink:
    """A relay between two machines that lets so many bytes a second through, one way.

    Args:
        target: Where the token machine listens.
        bytes_per_s: Rate.
    """

    def __init__(self, target: tuple[str, int], bytes_per_s: float) -> None:
        self._target, self._rate = target, bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._relay, args=(near, far, self._rate), daemon=True).start()
            threading.Thread(target=self._relay, args=(far, near, float("inf")), daemon=True).start()

    @staticmethod
    def _relay(source: socket.socket, target: socket.socket, rate: float) -> None:
        free_s = time.monotonic()
        while part := source.recv(1 << 16):
            target.sendall(part)
            free_s = max(free_s, time.monotonic() - 0.002) + len(part) / rate
            wait_s = free_s - time.monotonic()
            if wait_s > 0.001:
                time.sleep(wait_s)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)  # closing alone says nothing while the other thread reads


def machines(directory: Path, connector: dict[str, Any] | None, **settings: Any) -> Pair:
    """Return a pair in bfloat16, as it would serve."""
    vllm: dict[str, Any] = {
        "dtype": "bfloat16", "block_size": BLOCK_TOKENS, "max_model_len": 8192, "max_num_batched_tokens": 8192,
    }  # fmt: skip
    both = []
    for number, name in enumerate(("prompt-0", "token-0")):
        environment: dict[str, str] = {}
        if connector is not None:
            vllm["kv_transfer_config"] = connector
            environment = {
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + 10 * number), "UCX_TLS": "tcp,posix,sysv,cma,self",
            }  # fmt: skip
        both.append(Machine(name, directory, vllm=vllm, environment=environment, **settings))
    for machine in both:
        machine.wait_up(has_reports=connector is None)
    return Pair(*both)


def exposed_ms(pair: Pair, key: str, tokens: int, address: dict[str, Any] | None) -> tuple[float, float]:
    """Return milliseconds from the first token until vLLM knows that the KV is there, and of the prompt phase.

    Less than 0: the KV was there before the first token was; all of it was hidden.
    """
    prompt = prompt_of(tokens, hash(key) % 100_000)
    began_s = time.monotonic()
    if address is not None:
        pair.submit(key, prompt, 2, address=address)
        first = pair.prompt.result(f"p.{key}")
    else:
        first = pair.pull(key, prompt, 2)
    arrived_s = pair.token.arrival_s(f"t.{key}")
    pair.token.result(f"t.{key}")
    for machine in (pair.prompt, pair.token):
        machine.await_free()
        machine.forget()
    return 1e3 * (arrived_s - first["at_s"]), 1e3 * (first["at_s"] - began_s)


def measure(pair: Pair, way: str, lengths: list[int], repeats: int, address: dict[str, Any] | None) -> None:
    """Print one line for each length."""
    exposed_ms(pair, f"{way} warm", 300, address)
    for tokens in lengths:
        runs = [exposed_ms(pair, f"{way} {tokens} {number}", tokens, address) for number in range(repeats)]
        exposed, prompt = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"| {tokens:6,} | {way:44} | {prompt:8,.0f} | {exposed:9.1f} |", flush=True)


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--lengths", default="256,1024,2048,4096")
    options.add_argument("--rate", type=float, default=100e6, help="bytes a second of the paced link")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--without-nixl", action="store_true")
    asked = options.parse_args()
    lengths = [int(each) for each in asked.lengths.split(",")]
    print(f"SmolLM2-135M, bfloat16, vLLM on CPU, one thread a machine, {os.cpu_count()} cores for both")
    print("| tokens | way                                          | prompt ms | exposed ms |")
    with tempfile.TemporaryDirectory() as scratch:
        pair = machines(Path(scratch), None)
        try:
            address = pair.token.address
            paced = PacedLink(tuple(address["tcp"]), asked.rate)
            ways = {
                "shared memory": address,
                "TCP loopback": {**address, "unix": None, "nixl": None},
                f"TCP paced to {asked.rate / 1e6:.0f} MB/s": {
                    **address, "unix": None, "nixl": None, "tcp": list(paced.address),
                },
            }  # fmt: skip
            for way, where in ways.items():
                for mode, threshold in (("layer by layer", 1), ("in one go", NEVER_TOKENS)):
                    pair.prompt.order(do="threshold", tokens=threshold)
                    pair.prompt.disconnect(pair.token.name)
                    time.sleep(0.5)  # until the other end has seen it
                    measure(pair, f"{mode}, {way}", lengths, asked.repeats, where)
        finally:
            pair.close()
        if not asked.without_nixl:
            connector = {
                "kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
                "kv_buffer_device": "cpu",
            }  # fmt: skip
            pair = machines(Path(scratch), connector)
            try:
                measure(pair, "NIXL pull, TCP loopback", lengths, asked.repeats, None)
            finally:
                pair.close()


if __name__ == "__main__":
    main()
