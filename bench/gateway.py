"""What the gateway costs: latency it adds, streams it holds, short requests it serves, on one core.

Two processes on two cores: the gateway alone on the last one; the fake machines and the load together on the first. The
machines answer at once, or a token every 50 ms, so that what is measured is the gateway and the sockets on both sides
of it. Latency is that of the same request sent through the gateway and to a machine directly, in turns. At high rates
the load itself fills its core; the gateway's own processor time is printed next to each figure.

Run with `python bench/gateway.py [--seconds 5]` on a machine that is idle.
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # for the tests' codec

PROMPT_TOKENS = 64
NAMES = ("prefill", "decode")
DECODE_S = 0.05


# Fake machines


def facts(name: str, port: int) -> dict[str, Any]:
    """Return what a fake machine says of itself."""
    return {
        "name": name, "epoch": 1, "home": name, "model": "fake", "layout": {}, "capacity_blocks": 1_000_000,
        "used_blocks": 0, "block_tokens": 32, "context_tokens": 1_000_000, "held": {},
        "address": {"boot_id": "here", "unix": None, "tcp": ["127.0.0.1", port]},
    }  # fmt: skip


async def machine(name: str, port: int, decode_s: float) -> asyncio.Server:
    """Serve as one fake machine."""
    loop = asyncio.get_running_loop()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

    def chunk(body: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(body), body)

    def token(place: int, finish: str | None) -> bytes:
        choice = {"index": 0, "text": "", "token_ids": [97 + place % 26], "finish_reason": finish}
        return chunk(b"data: " + orjson.dumps({"id": "x", "choices": [choice]}) + b"\n\n")

    tokens = [token(place, None) for place in range(26)]
    lasts = [token(place, "length") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n" for place in range(26)]
    answer = orjson.dumps({
        "id": "x", "choices": [{"index": 0, "text": "", "token_ids": [97], "finish_reason": "length"}]
    })  # fmt: skip
    whole = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer)
    empty = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                lower = request.lower()
                at = lower.find(b"content-length:")
                length = int(lower[at + 15 : lower.index(b"\r\n", at)]) if at >= 0 else 0
                body = await reader.readexactly(length) if length else b"{}"
                if request.startswith(b"GET /events"):
                    writer.write(head)
                    while True:
                        writer.write(chunk(orjson.dumps({"facts": facts(name, port)}) + b"\n"))
                        await asyncio.sleep(0.25)
                elif request.startswith(b"GET /facts"):
                    told = orjson.dumps(facts(name, port))
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(told), told))
                    continue
                elif not request.startswith(b"POST /v1/completions"):
                    writer.write(empty)
                    continue
                fields = orjson.loads(body)
                if not fields["stream"]:
                    writer.write(whole)
                    continue
                most = fields["max_tokens"]
                if not decode_s:
                    middle = b"".join(tokens[place % 26] for place in range(most - 1))
                    writer.write(head + middle + lasts[(most - 1) % 26])
                    continue
                writer.write(head)
                due_s = loop.time()
                for place in range(most):
                    writer.write(lasts[place % 26] if place == most - 1 else tokens[place % 26])
                    due_s += decode_s
                    await asyncio.sleep(max(0.0, due_s - loop.time()))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", port, backlog=2048)


# The gateway


def gateway_process(port: int, machines: list[str], core: int) -> None:
    """Serve as the gateway, on one core."""
    import uvicorn

    from doubles import ByteCodec
    from phasesplit.gateway.app import make_app
    from phasesplit.gateway.clock import LoopClock
    from phasesplit.gateway.dispatcher import Dispatcher
    from phasesplit.gateway.gateway import Gateway
    from phasesplit.gateway.http_worker import HttpWorker
    from phasesplit.launcher.listening import bounded_protocol
    from phasesplit.scheduler.rules import Rules

    os.sched_setaffinity(0, {core})
    gateway = Gateway(
        codec=ByteCodec(), dispatcher=Dispatcher(Rules(block_tokens=32)), connect=HttpWorker, models=("fake",),
        clock=LoopClock(),
    )  # fmt: skip
    app = make_app(gateway)

    async def serve() -> None:
        server = uvicorn.Server(
            uvicorn.Config(
                app, port=port, http=bounded_protocol(10.0), log_level="warning", access_log=False, backlog=2048
            )
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        for url in machines:
            await gateway.workers.join(url)
        await serving

    if importlib.util.find_spec("uvloop"):
        importlib.import_module("uvloop").run(serve())
    else:
        asyncio.run(serve())


# The load


class Connection:
    """One kept connection of a client."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._opened: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        """Close it."""
        if self._opened is not None:
            self._opened[1].close()

    async def ask(self, body: bytes) -> tuple[float, list[float]]:
        """Send a request; return the seconds it took and the instants of its events."""
        if self._opened is None:
            self._opened = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._opened
        begun_s = time.perf_counter()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r}")
        instants: list[float] = []
        lower = head.lower()
        at = lower.find(b"content-length:")
        if at >= 0:
            await reader.readexactly(int(lower[at + 15 : lower.index(b"\r\n", at)]))
            return time.perf_counter() - begun_s, instants
        while length := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            part = await reader.readexactly(length + 2)
            instants += [time.perf_counter()] * part.count(b"data: {")
        await reader.readexactly(2)
        return time.perf_counter() - begun_s, instants


def body_of(most: int, *, streams: bool) -> bytes:
    """Return a request."""
    body = {"model": "fake", "prompt": list(range(PROMPT_TOKENS)), "max_tokens": most, "stream": streams}
    return orjson.dumps(body | {"return_token_ids": True})


async def closed_loop(port: int, clients: int, seconds: float, body: bytes) -> tuple[int, str]:
    """Let clients ask without pause; return how many requests were served, and how fast."""
    latencies: list[float] = []
    end_s = time.perf_counter() + seconds

    async def client() -> None:
        connection = Connection(port)
        while time.perf_counter() < end_s:
            latencies.append((await connection.ask(body))[0])
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    p50_ms = share_of(latencies, 0.5) * 1e3
    return len(latencies), f"{len(latencies) / seconds:,.0f} requests/s, p50 {p50_ms:.1f} ms"


async def added_latency(port: int, machine_port: int, seconds: float) -> None:
    """Print what the gateway adds to one request at a time, in turns with the same request to a machine."""
    for name, most, has_stream in (
        ("whole answer of 1 token (one leg)", 1, False),
        ("first token of a stream of 16 (two legs)", 16, True),
    ):
        through, direct = Connection(port), Connection(machine_port)
        body, added = body_of(most, streams=has_stream), []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            took_s = []
            for connection in (through, direct):
                begun_s = time.perf_counter()
                whole_s, instants = await connection.ask(body)
                took_s.append(instants[0] - begun_s if has_stream else whole_s)
            added.append((took_s[0] - took_s[1]) * 1e3)
            await asyncio.sleep(0.002)
        through.close()
        direct.close()
        print(f"  {name}: p50 {share_of(added, 0.5):.2f} ms, p99 {share_of(added, 0.99):.2f} ms")


async def streams(port: int, count: int, most: int, decode_s: float) -> tuple[int, str]:
    """Let many streams run at once; return how many tokens came, and how evenly."""
    body = body_of(most, streams=True)
    started_s = time.perf_counter()

    async def one(delay_s: float) -> list[float]:
        await asyncio.sleep(delay_s)
        connection = Connection(port)
        instants = (await connection.ask(body))[1]
        connection.close()
        return instants

    all_instants = await asyncio.gather(*(one(decode_s * 4 * i / count) for i in range(count)))
    took_s = time.perf_counter() - started_s
    gaps_ms = [(b - a) * 1e3 for instants in all_instants for a, b in itertools.pairwise(instants)]
    tokens = sum(map(len, all_instants))
    gaps = f"gaps p50 {share_of(gaps_ms, 0.5):.1f}, p99 {share_of(gaps_ms, 0.99):.1f} ms"
    return tokens, f"{tokens:,} of {count * most:,} tokens, {tokens / took_s:,.0f} tokens/s; {gaps}"


def share_of(values: list[float], share: float) -> float:
    """Return a percentile."""
    return sorted(values)[int(len(values) * share)]


def cpu_s(process: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measured(name: str, process: int, work: Callable[[], Awaitable[tuple[int, str]]]) -> None:
    """Do something, and print what it cost the gateway; its processor time hardly depends on who else is busy."""
    before_s, begun_s = cpu_s(process), time.perf_counter()
    count, found = await work()
    used_s, took_s = cpu_s(process) - before_s, time.perf_counter() - begun_s
    print(f"  {name}: {found}; gateway's core {used_s / took_s:.0%} busy, {used_s / count * 1e6:.0f} us each")


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


async def main(seconds: float) -> None:
    """Run everything."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for decode_s in (0.0, DECODE_S):
        port, ports = free_port(), [free_port() for _ in NAMES]
        servers = [await machine(name, at, decode_s) for name, at in zip(NAMES, ports, strict=True)]
        urls = [f"http://127.0.0.1:{at}" for at in ports]
        process = subprocess.Popen([sys.executable, __file__, "--gateway", json.dumps([port, urls, cores[-1]])])
        try:
            await ready(port)
            await (at_once(process.pid, port, ports[1], seconds) if not decode_s else steadily(process.pid, port))
        finally:
            process.terminate()
            process.wait()
            for server in servers:
                server.close()


async def at_once(process: int, port: int, machine_port: int, seconds: float) -> None:
    """Measure with machines that answer at once."""
    print("latency that the gateway adds to one request at a time:")
    await added_latency(port, machine_port, seconds)
    print("short requests without pause:")
    for most, legs in ((1, "one leg"), (2, "two legs"), (8, "two legs")):
        for clients in (8, 64):
            body = body_of(most, streams=False)
            work = partial(closed_loop, port, clients, seconds, body)
            await measured(f"{most} tokens ({legs}), {clients} clients", process, work)


async def steadily(process: int, port: int) -> None:
    """Measure with machines that take their time."""
    print(f"streams of a token each {DECODE_S * 1e3:.0f} ms:")
    for count in (100, 250, 500):
        await measured(f"{count} streams", process, partial(streams, port, count, 60, DECODE_S))


async def ready(port: int) -> None:
    """Wait until a gateway serves."""
    for _ in range(400):
        try:
            if "200" in str((await get(port, "/ready"))[:20]):
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise RuntimeError("the gateway does not start")


async def get(port: int, path: str) -> bytes:
    """Return an answer's head."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
    answer = await reader.read()
    writer.close()
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--gateway", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.gateway:
        gateway_process(*json.loads(given.gateway))
    else:
        asyncio.run(main(given.seconds))
