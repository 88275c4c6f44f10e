"""Two vLLM machines as a test drives them."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

MODEL_VARIABLE = "PHASESPLIT_VLLM_MODEL"
"""Names a directory with the default model's weights as vLLM reads them; `make test-vllm` makes it."""
BLOCK_TOKENS, CHUNK_TOKENS, CONTEXT_TOKENS = 32, 96, 1024
_START_S, _ANSWER_S = 600.0, 300.0
"""Bounds on waiting, far above what two busy cores need."""
_PROCESS = Path(__file__).with_name("vllm_process.py")


class Machine:
    """One machine.

    Attributes:
        name: Its name.
        reports: What its connector has reported, in order.
        free: Free KV blocks when it came up.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        *,
        epoch: int = 1,
        vllm: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **connector: Any,
    ) -> None:
        self.name, self.epoch = name, epoch
        self.reports: list[dict[str, Any]] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = str(directory / f"{name}.{epoch}.reports")
        self._listener.bind(path)
        self._listener.listen(1)
        extra = {
            "machine": name, "epoch": epoch, "sockets": str(directory), "reports": path, "threshold_tokens": 64,
        } | connector  # fmt: skip
        settings = {
            "model": os.environ[MODEL_VARIABLE], "dtype": "float32", "block_size": BLOCK_TOKENS,
            "max_num_batched_tokens": CHUNK_TOKENS,
            "max_model_len": CONTEXT_TOKENS, "max_num_seqs": 8, "enable_prefix_caching": True,
            "kv_transfer_config": {
                "kv_connector": "PhaseSplitConnector", "kv_connector_module_path": "phasesplit.vllm.connector",
                "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra,
            },
        } | (vllm or {})  # fmt: skip
        self.log = directory / f"{name}.{epoch}.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(_PROCESS), json.dumps(settings)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**os.environ, **(environment or {})},
            )  # fmt: skip
        self._buffer = b""
        self._answers: list[dict[str, Any]] = []
        self._results: dict[str, dict[str, Any]] = {}
        self._arrivals: dict[str, float] = {}
        self._line: socket.socket | None = None
        self.free = -1

    def wait_up(self, *, has_reports: bool = True) -> None:
        """Wait until it serves.

        Args:
            has_reports: Its connector is ours.
        """
        self.free = self._next("up", _START_S)["free"]
        if has_reports:
            self._line, _ = self._listener.accept()
            self._line.setblocking(False)
            self.await_report("hello")

    @property
    def address(self) -> dict[str, Any]:
        """Where it takes KV."""
        return dict(next(report["hello"]["address"] for report in self.reports if "hello" in report))

    def order(self, **order: Any) -> None:
        """Tell it to do something."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def abort_key(self, key: str) -> None:
        """Tell its connector to drop a key, as the gateway would."""
        assert self._line is not None
        self._line.send(json.dumps({"abort": key}).encode())

    def state(self) -> dict[str, Any]:
        """Return how many blocks are free, and how many requests there are."""
        self.order(do="state")
        return self._next("free", _ANSWER_S)

    def forget(self) -> None:
        """Empty its prefix cache."""
        self.order(do="forget")
        assert self._next("forgot", _ANSWER_S)["forgot"]

    def whole(self, name: str, prompt: Sequence[int], most: int) -> list[int]:
        """Return the output of a request that it serves alone."""
        self.order(do="add", id=name, prompt=list(prompt), most=most)
        return list(self.result(name)["tokens"])

    def result(self, name: str, within_s: float = _ANSWER_S) -> dict[str, Any]:
        """Wait for the end of a request."""
        end_s = time.monotonic() + within_s
        while name not in self._results:
            assert time.monotonic() < end_s, f"{name} does not end; {self.log.read_text()[-3000:]}"
            self._read(0.05)
        return self._results.pop(name)

    def arrival_s(self, name: str) -> float:
        """Wait until vLLM's scheduler knows that the KV of a request is here; return when it learned that."""
        end_s = time.monotonic() + _ANSWER_S
        while name not in self._arrivals:
            assert time.monotonic() < end_s, f"no KV for {name}; {self.log.read_text()[-3000:]}"
            self._read(0.05)
        return self._arrivals.pop(name)

    def disconnect(self, peer: str) -> None:
        """Let it forget the way to another machine, so that the next address counts."""
        self.order(do="disconnect", peer=peer)

    def await_report(self, kind: str, key: str | None = None, within_s: float = _ANSWER_S) -> dict[str, Any]:
        """Wait for a report."""
        end_s = time.monotonic() + within_s
        while True:
            for report in self.reports:
                if kind in report and (key is None or report[kind] == key):
                    return report
            assert time.monotonic() < end_s, f"no {kind} {key or ''}: {self.reports}"
            self._read(0.01)

    def await_free(self, within_s: float = _ANSWER_S) -> None:
        """Wait until every KV block is free and no request is left."""
        end_s = time.monotonic() + within_s
        while (state := self.state()) and (state["free"] != self.free or state["requests"]):
            assert time.monotonic() < end_s, f"{self.name} does not come back to {self.free} free blocks: {state}"
            time.sleep(0.05)

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        for end in (self._listener, self._line):
            if end is not None:
                end.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _next(self, kind: str, within_s: float) -> dict[str, Any]:
        end_s = time.monotonic() + within_s
        while True:
            for answer in self._answers:
                if kind in answer:
                    self._answers.remove(answer)
                    return answer
            assert time.monotonic() < end_s, f"no answer; {self.log.read_text()[-3000:]}"
            self._read(0.05)

    def _read(self, within_s: float) -> None:
        assert self.process.stdout is not None
        ends = [self.process.stdout, *([self._line] if self._line is not None else [])]
        ready, _, _ = select.select(ends, [], [], within_s)
        if self.process.stdout in ready:
            read = os.read(self.process.stdout.fileno(), 1 << 20)
            assert read, f"the machine has ended: {self.log.read_text()[-4000:]}"
            self._buffer += read
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                answer = json.loads(line)
                if "kv" in answer:
                    self._arrivals[answer["kv"]] = answer["at_s"]
                elif "id" in answer:
                    self._results[answer["id"]] = answer
                else:
                    self._answers.append(answer)
        if self._line in ready and self._line is not None:
            with contextlib.suppress(BlockingIOError):
                while text := self._line.recv(1 << 16):
                    self.reports.append(json.loads(text))


class Pair:
    """A prefill machine and a decode machine, and requests that both work on.

    Attributes:
        prefill: The prefill machine.
        decode: The decode machine.
    """

    def __init__(self, prefill: Machine, decode: Machine) -> None:
        self.prefill, self.decode = prefill, decode

    def submit(
        self, key: str, prompt: Sequence[int], most: int, *, sides: str = "pd", address: dict[str, Any] | None = None
    ) -> None:
        """Send both legs of a request, at the same time.

        Args:
            key: What both call it.
            prompt: Its prompt.
            most: Output tokens.
            sides: `p` and `d`: the legs that are sent.
            address: Where the decode machine is, if not where it says.
        """
        if "d" in sides:
            kv = {"do_remote_prefill": True, "key": key, "peer": self.prefill.name, "peer_epoch": self.prefill.epoch}
            self.decode.order(do="add", id=f"d.{key}", prompt=list(prompt), most=most, kv=kv)
        if "p" in sides:
            kv = {
                "do_remote_decode": True, "key": key, "peer": self.decode.name, "peer_epoch": self.decode.epoch,
                "address": address or self.decode.address,
            }  # fmt: skip
            self.prefill.order(do="add", id=f"p.{key}", prompt=list(prompt), most=1, kv=kv)

    def split(self, key: str, prompt: Sequence[int], most: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return how both legs ended."""
        self.submit(key, prompt, most)
        return self.prefill.result(f"p.{key}"), self.decode.result(f"d.{key}")

    def whole(self, prompts: Mapping[str, Sequence[int]], most: int) -> dict[str, list[int]]:
        """Return the output of each prompt as one machine gives it, and let both forget that they had it.

        The machines take turns, each with one request at a time, so that both cores work.
        """
        found = {}
        for two in zip_longest(*[iter(prompts)] * 2):
            at_work = {key: machine for key, machine in zip(two, (self.prefill, self.decode), strict=True) if key}
            for key, machine in at_work.items():
                machine.order(do="add", id=f"w.{key}", prompt=list(prompts[key]), most=most)
            found |= {key: list(machine.result(f"w.{key}")["tokens"]) for key, machine in at_work.items()}
        self.forget()
        return found

    def forget(self) -> None:
        """Empty both prefix caches."""
        for machine in (self.prefill, self.decode):
            machine.forget()

    def pull(self, key: str, prompt: Sequence[int], most: int) -> dict[str, Any]:
        """Send one leg after the other, as vLLM's NIXL connector wants it; return how the prefill leg ended."""
        kv: dict[str, Any] = {
            "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
            "remote_block_ids": None, "remote_host": None, "remote_port": None,
        }  # fmt: skip
        self.prefill.order(do="add", id=f"p.{key}", prompt=list(prompt), most=1, kv=kv)
        first = self.prefill.result(f"p.{key}")
        self.decode.order(do="add", id=f"d.{key}", prompt=list(prompt), most=most, kv=first["handover"])
        return first

    def close(self) -> None:
        """End both."""
        for machine in (self.prefill, self.decode):
            machine.close()


@contextlib.contextmanager
def started(directory: Path, **connector: Any) -> Iterator[Pair]:
    """Start a pair, and end it."""
    pair = Pair(*(Machine(name, directory, **connector) for name in ("prefill-0", "decode-0")))
    try:
        for machine in (pair.prefill, pair.decode):
            machine.wait_up()
        yield pair
    finally:
        pair.close()


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Return a prompt of random words of the vocabulary."""
    state, made = seed * 7919 + 17, []
    for _ in range(tokens):
        state = (state * 1103515245 + 12345) % (1 << 31)
        made.append(1000 + (state >> 8) % 40_000)
    return made
