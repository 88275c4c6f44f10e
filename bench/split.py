"""What a split costs between first and second token: transfers in both modes, next to one machine that does both.

Run with `python bench/split.py` on an idle machine: a prefill machine and a decode machine as `serve` starts them,
each in a process with a core of its own, with the default model. The decode machine serves the same prompts whole as
well: its own time between tokens is what the second token of a split is compared with. Whole, serialized and layer by
layer take turns; figures are medians. Then the same as a client of `phasesplit serve` sees it.
"""

import contextlib
import http.client
import itertools
import json
import multiprocessing
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from kv_transfer import stay_on
from phasesplit.engine.engine_events import Event, Failed, Finished, KvLeft, Refused, Started, Token
from phasesplit.engine.fetch import default_model
from phasesplit.engine.kernels.plain import BLOCK_TOKENS
from phasesplit.engine.sampling import Sampling
from phasesplit.engine.wire import WorkerRequest
from phasesplit.launcher.embedded import EmbeddedWorker, WorkerSettings
from phasesplit.protocol.worker import Address, SendKv, TakeKv
from phasesplit.scheduler.rules import Rules
from speed import about_machine

ROUNDS = {64: 9, 256: 7, 512: 5, 1_024: 3, 1_500: 5, 4_096: 1}
"""Prompt tokens, and how often each is measured; long ones take long."""
CLIENT_ROUNDS = 3
OUTPUT_TOKENS = 8
GOAL_TOKENS = 1_500
MOST_OVER = 0.165
"""Source: Splitwise, section VI: the second token after a layer-wise transfer, over one machine's."""
MODES = {"serialized": 1 << 30, "layerwise": 0}
"""The threshold, in prompt tokens, that forces a mode."""
KV_BYTES = 512_000_000
MODEL = "smollm2-135m-instruct"
EPOCH = 1


def main() -> None:
    """Print all tables."""
    about_machine()
    between_machines()
    as_a_client_sees_it()


def between_machines() -> None:
    """Print the second token's delay and the prefill phase's, by prompt length."""
    print("\nby the engines' clock, medians of 1 to 9; the second token counts from the first, on the other machine")
    print("          one engine       serialized                 layer by layer             KV left         prefill")
    print(
        "  tokens  2nd  later       2nd     over 2nd, later    2nd     over 2nd, later   serial. layers  serial. layers"
    )
    with (
        tempfile.TemporaryDirectory(prefix="kv") as folder,
        Machine("prefill", folder) as prefill,
        Machine("decode", folder) as decode,
    ):
        for mode in MODES:
            prefill.split_with(decode, 64, mode)
        for tokens, rounds in ROUNDS.items():
            print(line(tokens, prefill, decode, rounds), flush=True)


def line(tokens: int, prefill: "Machine", decode: "Machine", rounds: int) -> str:
    """Measure one prompt length and return its line."""
    wholes: list[list[float]] = []
    splits: dict[str, list[Split]] = {mode: [] for mode in MODES}
    for _ in range(rounds):
        wholes.append(decode.whole(tokens))
        for mode, of_mode in splits.items():
            of_mode.append(prefill.split_with(decode, tokens, mode))
    second_s = statistics.median(gaps_s[0] for gaps_s in wholes)
    later_s = statistics.median(itertools.chain.from_iterable(gaps_s[1:] for gaps_s in wholes))
    serialized, layers = (Split(*map(statistics.median, zip(*splits[mode], strict=True))) for mode in MODES)
    shown = "".join(
        f"{one.second_s * 1e3:8.1f} ms {one.second_s / second_s - 1:7.1%} {one.second_s / later_s - 1:6.1%} "
        for one in (serialized, layers)
    )
    return (
        f"  {tokens:6,}{second_s * 1e3:6.1f} {later_s * 1e3:5.1f} ms{shown}"
        f"{serialized.exposed_s * 1e3:7.1f} {layers.exposed_s * 1e3:5.1f} ms "
        f"{serialized.prefill_s * 1e3:8.0f} {layers.prefill_s * 1e3:6.0f} ms"
        f" ({layers.prefill_s / serialized.prefill_s - 1:+.1%})"
        + (f"   goal {MOST_OVER:.1%}" if tokens == GOAL_TOKENS else "")
    )


class Split(NamedTuple):
    """What one split request took.

    Attributes:
        prefill_s: The prefill phase.
        second_s: From the first token, on the prefill machine, to the second, on the decode machine.
        exposed_s: From the last layer handed over to the completion of the transfer.
    """

    prefill_s: float
    second_s: float
    exposed_s: float


class Machine:
    """A worker without its HTTP server, in a process with a core of its own."""

    def __init__(self, home: str, folder: str) -> None:
        self._orders, there = multiprocessing.get_context("spawn").Pipe()
        core = 0 if home == "prefill" else 1
        self._process = multiprocessing.get_context("spawn").Process(
            target=be_machine, args=(home, core, folder, there)
        )
        self._process.start()
        self.name, self.address = self._orders.recv()
        self._numbers = itertools.count()

    def whole(self, tokens: int) -> list[float]:
        """Serve a prompt alone; return the times between tokens, in seconds."""
        self._orders.send(Order(f"whole.{next(self._numbers)}", tokens, None, 0))
        measured: Measured = self._orders.recv()
        return [later - earlier for earlier, later in itertools.pairwise(measured.tokens_s)]

    def split_with(self, other: "Machine", tokens: int, mode: str) -> Split:
        """Serve a prompt here and its tokens there."""
        key = f"split.{next(self._numbers)}"
        other._orders.send(Order(key, tokens, TakeKv(key, self.name, EPOCH), 0))
        self._orders.send(Order(key, tokens, SendKv(key, other.name, EPOCH, other.address), MODES[mode]))
        first: Measured = self._orders.recv()
        rest: Measured = other._orders.recv()
        if first.mode != mode:
            raise SystemExit(f"a prompt of {tokens} tokens was sent {first.mode}, not {mode}")
        second_s = rest.tokens_s[1] - first.tokens_s[0]
        return Split(first.tokens_s[0] - first.started_s, second_s, first.exposed_s)

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None:
        self._orders.send(None)
        self._process.join()


class Order(NamedTuple):
    """One request for a machine."""

    key: str
    tokens: int
    transfer: SendKv | TakeKv | None
    threshold_tokens: int


class Measured(NamedTuple):
    """When a request began, when each of its tokens was there; and of what was sent, in which mode, what was left."""

    started_s: float
    tokens_s: list[float]
    mode: str
    exposed_s: float


def be_machine(home: str, core: int, folder: str, orders: Connection) -> None:
    """Be a machine until the orders end."""
    stay_on(core)
    settings = WorkerSettings(
        name=home, epoch=EPOCH, home=home, model=default_model(say=print), model_name="bench", kv_bytes=KV_BYTES,
        rules=Rules(block_tokens=BLOCK_TOKENS), has_prefix_cache=False, core_share=1.0,
        sockets=folder, transfer_host="127.0.0.1",
    )  # fmt: skip
    embedded = EmbeddedWorker(
        settings, lambda happened: [receive(event) for receive, event in happened], lambda _: None
    )
    embedded.start()
    where = embedded.worker.facts()["address"]
    orders.send((home, Address(where["boot_id"], where["unix"], None)))
    while (order := orders.recv()) is not None:
        orders.send(served(embedded, order))
    embedded.close()


def served(embedded: EmbeddedWorker, order: Order) -> Measured:
    """Serve one request to its end."""
    received: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
    ids = tuple(np.random.default_rng(order.tokens).integers(1_000, 40_000, order.tokens).tolist())
    request = WorkerRequest(
        model="bench",
        prompt_ids=ids,
        max_tokens=1 if isinstance(order.transfer, SendKv) else OUTPUT_TOKENS,
        sampling=Sampling(temperature=0, ignore_eos=True),
        transfer=order.transfer,
    )
    worker = embedded.worker
    layerwise: queue.SimpleQueue[int] = queue.SimpleQueue()
    worker.thread.call(lambda engine: layerwise.put(engine.facts().layerwise))
    worker.thread.call(lambda engine: engine.set_threshold(order.threshold_tokens))
    worker.thread.submit(order.key, request, lambda event: received.put((time.monotonic(), event)))
    started_s, tokens_s = 0.0, []
    last = KvLeft if isinstance(order.transfer, SendKv) else Finished
    while True:
        at_s, event = received.get(timeout=60)
        if isinstance(event, Refused | Failed):
            raise SystemExit(f"{order} came to nothing: {event}")
        if isinstance(event, Started):
            started_s = at_s
        if isinstance(event, Token):
            tokens_s.append(at_s)
        if isinstance(event, last):
            break
    worker.thread.call(lambda engine: layerwise.put(engine.facts().layerwise))
    mode = "layerwise" if layerwise.get() < layerwise.get() else "serialized"
    return Measured(started_s, tokens_s, mode, worker.facts()["transfers"]["last_exposed_s"])


def as_a_client_sees_it() -> None:
    """Print what a client of `serve` sees of the same: first token, second token, and the time between later ones."""
    print(f"\nas a client of `phasesplit serve` sees it, {GOAL_TOKENS:,} prompt tokens, medians of {CLIENT_ROUNDS}")
    print("                        first token   second token after it   later ones")
    for name, options in (
        ("unsplit", ("--unsplit", "1")),
        ("split, serialized", ("--set", "transfer=serialized")),
        ("split, layer by layer", ("--set", "transfer=layerwise")),
    ):
        with serving(*options) as url:
            streamed(url)
            streams = [streamed(url) for _ in range(CLIENT_ROUNDS)]
        first, second, later = (statistics.median(parts) for parts in zip(*streams, strict=True))
        print(f"  {name:22}{first * 1e3:8.0f} ms {second * 1e3:17.1f} ms {later * 1e3:15.1f} ms")


def streamed(url: str) -> tuple[float, float, float]:
    """Stream one answer; return the time to its first token, to the second after that, and the median of later ones."""
    ids = np.random.default_rng(GOAL_TOKENS).integers(1_000, 40_000, GOAL_TOKENS).tolist()
    body = {
        "model": MODEL, "prompt": ids, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    times_s = [time.monotonic()]
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        times_s += [
            time.monotonic()
            for text in connection.getresponse()
            if text.startswith(b"data: {") and json.loads(text[6:])["choices"][0]["token_ids"]
        ]
    first, second, *later = [after - before for before, after in itertools.pairwise(times_s)]
    return first, second, statistics.median(later)


@contextlib.contextmanager
def serving(*options: str) -> Iterator[str]:
    """Serve the default model for as long as the block runs; give the URL."""
    command = [sys.executable, "-m", "phasesplit", "serve", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for said in process.stdout or ():
            if found := re.search(r"on (http://\S+)", said):
                break
        else:
            raise SystemExit("phasesplit serve did not start")
        yield found[1]
        process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
