"""A real cluster in real processes, and what tests do to it."""

# ruff: noqa: S310 - the addresses are those of our own processes

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from waiting import eventually

START_S, RECOVERY_S = 90.0, 30.0
MODEL = "tiny"

Prompt = str | list[int]
Seen = Callable[[str], object]


class Answer(NamedTuple):
    """What a client got: `text` so far, why it ended (None: it did not), and an error or an error event."""

    text: str
    finish_reason: str | None
    error: dict[str, Any] | None

    @property
    def is_no_capacity(self) -> bool:
        """Whether the gateway asks to come back later."""
        return self.error is not None and self.error["code"] == "no_capacity"


def is_running(pid: int) -> bool:
    """Return whether a process is there, and is more than an entry that nobody has read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


class Cluster:
    """`phasesplit serve` with the tiny model, on a free port.

    Attributes:
        process: The gateway's process.
        url: Where it is.
        log: What it and its workers wrote.
    """

    def __init__(self, *options: str, program: Sequence[str] = ("-m", "phasesplit")) -> None:
        command = [sys.executable, *program, "serve", "--model", MODEL, "--port", "0", "--kv-memory", "16MB"]
        self._output = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - closed by `end`
        self.process = subprocess.Popen(
            [*command, *options], stdout=self._output, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            eventually(lambda: b"Stop it:" in self._read() or self.process.poll() is not None, within_s=START_S)
            found = re.search(r"on (http://\S+)", self.log)
            assert found is not None, self.log
        except BaseException:
            self.end()
            raise
        self.url = found[1]

    @property
    def log(self) -> str:
        return self._read().decode("utf-8", "replace")

    def workers(self) -> dict[str, int]:
        """Return the workers that run now: name to process id."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode().split("\0")
            except OSError:
                continue
            if "--parent" in words and words[words.index("--parent") + 1] == str(self.process.pid):
                pid = int(path.parent.name)
                if is_running(pid):
                    found[words[words.index("--name") + 1]] = pid
        return found

    def signal(self, worker: str, number: signal.Signals) -> int:
        """Send a signal to a worker, and return its process id."""
        pid = self.workers()[worker]
        os.kill(pid, number)
        return pid

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's values whose labels fit."""
        total = 0.0
        for line in self.get("/metrics").splitlines():
            head, _, value = line.rpartition(" ")
            fits = all(f'{label}="{wanted}"' in head for label, wanted in labels.items())
            if head.partition("{")[0] == name and fits:
                total += float(value)
        return total

    def complete(self, prompt: Prompt, tokens: int = 8, seen: Seen | None = None, **fields: Any) -> Answer:
        """Stream a completion, greedy, to its end; come back when the gateway says so, as OpenAI's client does.

        Args:
            prompt: The prompt.
            tokens: Most output tokens.
            seen: Told of each text as it comes.
            **fields: Further fields of the request.
        """
        deadline_s = time.monotonic() + RECOVERY_S
        while True:
            answer = self.complete_once(prompt, tokens, seen, **fields)
            if not answer.is_no_capacity or time.monotonic() > deadline_s:
                return answer
            time.sleep(0.1)

    def complete_once(self, prompt: Prompt, tokens: int, seen: Seen | None = None, **fields: Any) -> Answer:
        """Stream a completion, once; see `complete`."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body | {"stream": True} | fields).encode(),
            {"Content-Type": "application/json"},
        )
        text, finish, error = "", None, None
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                for line in answer:
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    error = chunk.get("error", error)
                    for choice in chunk.get("choices", ()):
                        text += choice["text"]
                        finish = choice["finish_reason"] or finish
                        if seen is not None and choice["text"]:
                            seen(text)
        except urllib.error.HTTPError as problem:
            said = problem.read()
            error = json.loads(said)["error"] if said.startswith(b"{") else {"code": None, "message": said.decode()}
        except (OSError, http.client.HTTPException) as problem:
            error = {"code": None, "message": str(problem)}
        return Answer(text, finish, error)

    def later(self, *arguments: Any, **fields: Any) -> Callable[[], Answer]:
        """Start a completion in a thread of its own; the result waits for it."""
        kept: list[Answer] = []
        thread = threading.Thread(target=lambda: kept.append(self.complete(*arguments, **fields)), daemon=True)
        thread.start()

        def result() -> Answer:
            thread.join(60)
            assert kept, "no answer within a minute"
            return kept[0]

        return result

    def heal(self) -> None:
        """Wait until all workers serve and nothing is held.

        A worker that has just been started is a process, and nobody watches whether it answers before it is up.
        """
        for pid in self.workers().values():
            os.kill(pid, signal.SIGCONT)
        eventually(lambda: len(self.workers()) == 2)
        eventually(lambda: all(map(self._serves, self.workers())))
        eventually(lambda: self.complete("the", 2).finish_reason == "length")
        eventually(self.holds_nothing)

    def _serves(self, worker: str) -> bool:
        """Return whether the gateway knows the start of a worker that runs now, and gives it work."""
        try:
            words = Path(f"/proc/{self.workers()[worker]}/cmdline").read_bytes().decode().split("\0")
        except (KeyError, OSError):  # it has just ended
            return False
        epoch = words[words.index("--epoch") + 1]
        is_known = self.metric("phasesplit_machine_pool", machine=worker, epoch=epoch) == 1
        return is_known and self.metric("phasesplit_machine_state", machine=worker, state="serving") == 1

    def holds_nothing(self) -> bool:
        """Return whether no KV is owned by anybody."""
        return not self.get("/debug/kv")["leases"]

    def end(self) -> None:
        """End everything at once, and see that nothing is left."""
        workers = self.workers().values()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        eventually(lambda: not any(map(is_running, workers)))
        self._output.close()

    def _read(self) -> bytes:
        return os.pread(self._output.fileno(), 1 << 24, 0)


@contextmanager
def cluster(*options: str, program: Sequence[str] = ("-m", "phasesplit")) -> Iterator[Cluster]:
    """Run a cluster for as long as the block runs; `program` is what stands before `serve`."""
    running = Cluster(*options, program=program)
    try:
        yield running
    finally:
        running.end()
