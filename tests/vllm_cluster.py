"""`phasesplit serve` over real vLLM servers, as a test starts it, asks it and hurts it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from vllm_machines import MODEL_VARIABLE

START_S, ANSWER_S, STOP_S = 600.0, 300.0, 120.0
"""Bounds on waiting, far above what two busy cores need."""
ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")
_ADMIN_KEY, _JOIN_KEY = "an-admin-key", "a-join-key"
_ADMIN, _JOIN = ({"Authorization": f"Bearer {key}"} for key in (_ADMIN_KEY, _JOIN_KEY))
_CLUSTER = """
model: {model}
engine: vllm
pools: [{pools}]
serve:
  port: 0
  kv_memory: 1GB
  stalled: 60 s
  limits: {{attempt_s: 60, first_token_s: 240, idle_s: 120}}
  keys: {{admin: {{file: admin.key}}, join: {{file: join.key}}}}
  vllm:
    python: {python}
    connector: {connector}
    arguments: [{arguments}]
"""


class VllmCluster:
    """A cluster that serves. Its machines prove its join key to one another as well.

    Attributes:
        model: Directory of its model.
        name: Name that clients ask for.
        key_file: Holds its join key.
        environment: What its processes find there.
        log: What it and its machines have said.
        process: Its gateway.
        url: Where that is.
    """

    def __init__(self, directory: Path, pools: dict[str, int], connector: str, environment: dict[str, str]) -> None:
        self.model = os.environ[MODEL_VARIABLE]
        self.name = Path(self.model).name.lower()
        self.key_file, self.log, file = directory / "join.key", directory / "log", directory / "cluster.yaml"
        (directory / "admin.key").write_text(_ADMIN_KEY)
        self.key_file.write_text(_JOIN_KEY)
        file.write_text(
            _CLUSTER.format(
                model=self.model,
                python=sys.executable,
                connector=connector,
                pools=", ".join(f"{{role: {role}, count: {count}}}" for role, count in pools.items()),
                arguments=json.dumps(ARGUMENTS)[1:-1],
            )
        )
        self.environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        command = [sys.executable, "-m", "phasesplit", "serve", str(file)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)
        self.url = ""

    def wait_up(self) -> None:
        """Wait until all machines serve."""

        def is_up() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            said = [line for line in self.log.read_text().splitlines() if line.startswith("phasesplit serves")]
            self.url = said[0].split()[4] if said else ""
            return bool(said)

        self.until(is_up, "it does not serve", START_S)

    def until(self, holds: Callable[[], object], what: str, within_s: float = ANSWER_S) -> None:
        """Wait until something holds, or fail saying what does not."""
        end_s = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < end_s, f"{what}; {self.log.read_text()[-4000:]}"
            time.sleep(0.1)

    def get(self, path: str, url: str = "", headers: dict[str, str] | None = None) -> Any:
        """Return a page of the gateway, or of a machine."""
        return httpx.get(f"{url or self.url}{path}", headers=headers, timeout=ANSWER_S).raise_for_status().json()

    def machines(self) -> dict[str, dict[str, Any]]:
        """Return the machines by name."""
        return {machine["name"]: machine for machine in self.get("/admin/pools", headers=_ADMIN)["machines"]}

    def facts(self, name: str) -> dict[str, Any]:
        """Return the facts of a machine now; the gateway gets them a beat later."""
        return dict(self.get("/facts", self.machines()[name]["url"], _JOIN))

    def counted(self, metric: str) -> float:
        """Return the sum of a counter of the gateway."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_S).raise_for_status().text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(metric))

    def complete(self, prompt: list[int], most: int, alone: str = "", **fields: Any) -> dict[str, Any]:
        """Return the answer to a prompt: the cluster's, or that of the one machine that is named."""
        url, headers = (self.machines()[alone]["url"], _JOIN) if alone else (self.url, {})
        body = self._body(prompt, most) | fields
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=ANSWER_S)
        return dict(answer.raise_for_status().json())

    def text(self, prompt: list[int], most: int, alone: str = "", **fields: Any) -> str:
        """Return the text of an answer; see `complete`."""
        return str(self.complete(prompt, most, alone, **fields)["choices"][0]["text"])

    def events(self, prompt: list[int], most: int) -> Iterator[dict[str, Any]]:
        """Return the events of a stream, as they come."""
        body = self._body(prompt, most) | {"stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=ANSWER_S) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))

    def kill(self, name: str) -> None:
        """Kill the process that computes for a machine."""
        commands, parents = {}, {}
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                commands[int(place.name)] = (place / "cmdline").read_text()
                parents[int(place.name)] = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        family = {int(self.machines()[name]["facts"]["pid"])}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        (worker,) = (pid for pid in family if commands.get(pid, "").startswith("VLLM::Worker"))
        os.kill(worker, signal.SIGKILL)

    def _body(self, prompt: list[int], most: int) -> dict[str, Any]:
        return {"model": self.name, "prompt": prompt, "max_tokens": most, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def serving(
    directory: Path, pools: dict[str, int], connector: str = "phasesplit", **environment: str
) -> Iterator[VllmCluster]:
    """Start a cluster, and stop it as a person does.

    Args:
        directory: For its files.
        pools: Role to number of machines.
        connector: How KV moves.
        environment: What its processes find there besides.
    """
    cluster = VllmCluster(directory, pools, connector, environment)
    try:
        cluster.wait_up()
        yield cluster
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(timeout=STOP_S) == 0
    finally:
        cluster.process.kill()  # no machine outlives it
        cluster.process.wait()
