"""Wrong input to a cluster of real processes: the right 4xx, nothing leaked, and nobody else notices."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from chaos.clusters import Cluster, cluster
from waiting import eventually

pytestmark = [pytest.mark.timeout(240), pytest.mark.alone, pytest.mark.slow]

HEADER_S = 1.0
FILE = f"""\
model: tiny
pools:
  - {{role: prefill, count: 1, machine: embedded}}
  - {{role: decode, count: 1, machine: embedded}}
serve:
  limits: {{header_s: {HEADER_S}, body_bytes: 1000000}}
"""
GOOD = {"model": "tiny", "prompt": "the heat", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the"}]}


class Running:
    """The cluster, what it answers to a good request, and what its log says."""

    def __init__(self, running: Cluster, log: Path) -> None:
        self.cluster, self._log = running, log
        self.host, self.port = str(urlsplit(running.url).hostname), int(urlsplit(running.url).port or 0)
        self.expected = self.text()

    def records(self) -> list[dict[str, Any]]:
        """Return what it says of the requests that have ended."""
        return [json.loads(line) for line in self._log.read_text().splitlines()]

    def post(self, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, Any]:
        """Return status and JSON of the answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("POST", path, body, {"Content-Type": "application/json"} | headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def text(self) -> str:
        """Return the text that answers a good request."""
        status, answer = self.post(json.dumps(GOOD).encode())
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def require_well(self) -> None:
        """See that good requests are answered as ever, and that nothing is held anywhere."""
        assert self.text() == self.expected
        eventually(self.cluster.holds_nothing)
        eventually(lambda: self.cluster.metric("phasesplit_machine_kv_used_blocks") == 0)
        for name in ("live_requests", "kv_lease_blocks", "kv_lease_bytes", "pending_prompt_tokens"):
            assert self.cluster.metric(f"phasesplit_{name}") == 0, name
        assert self.cluster.get("/debug/requests") == {"requests": []}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Run one cluster for all tests."""
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "cluster.yaml").write_text(FILE)
    log = folder / "requests.jsonl"
    with cluster(str(folder / "cluster.yaml"), "--log-requests", str(log)) as found:
        yield Running(found, log)


def wrong(**fields: Any) -> bytes:
    return json.dumps(GOOD | fields).encode()


BODIES = {
    "empty": (b"", 400),
    "no JSON": (b"{not json", 400),
    "not an object": (b"[1, 2]", 400),
    "broken UTF-8": (b'{"model": "tiny", "prompt": "\xff\xfe"}', 400),
    "half a surrogate": (b'{"model": "tiny", "prompt": "\\ud800"}', 400),
    "NaN": (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400),
    "a number without end": (b'{"model": "tiny", "prompt": "x", "max_tokens": 1e999}', 400),
    "deep": (b'{"model": "tiny", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400),
    "deep, unknown": (b'{"model": "tiny", "prompt": "x", "y": ' + b"[" * 900 + b"]" * 900 + b"}", 400),
    "unknown model": (wrong(model="gpt-5"), 404),
    "no prompt": (b'{"model": "tiny"}', 400),
    "wrong prompt": (wrong(prompt={"text": "x"}), 400),
    "mixed prompt": (wrong(prompt=["a", 1]), 400),
    "empty prompt": (wrong(prompt=[]), 400),
    "token that is not": (wrong(prompt=[300]), 400),
    "negative token": (wrong(prompt=[-1]), 400),
    "huge token": (wrong(prompt=[1 << 70]), 400),
    "too long for the context": (wrong(prompt=[5] * 5_000), 400),
    "prompt and output too long": (wrong(prompt=[5] * 2_000, max_tokens=1_000), 400),
    "max_tokens absurd": (wrong(max_tokens=10**18), 400),
    "max_tokens negative": (wrong(max_tokens=-1), 400),
    "max_tokens text": (wrong(max_tokens="5"), 400),
    "max_tokens true": (wrong(max_tokens=True), 400),
    "temperature": (wrong(temperature=-1), 400),
    "temperature text": (wrong(temperature="hot"), 400),
    "top_p": (wrong(top_p=1.5), 400),
    "n huge": (wrong(n=1_000_000), 400),
    "n zero": (wrong(n=0), 400),
    "prompts x n": (wrong(prompt=["a"] * 10, n=10), 400),
    "stops": (wrong(stop=[f"s{index}" for index in range(10_000)]), 400),
    "stop a number": (wrong(stop=5), 400),
    "logit_bias": (wrong(logit_bias={"x": 1}), 400),
    "logprobs": (wrong(logprobs=10_000), 400),
    "seed": (wrong(seed="x"), 400),
    "best_of": (wrong(n=2, best_of=5), 400),
}
CHATS = {
    "no messages": (b'{"model": "tiny", "messages": []}', 400),
    "messages a text": (json.dumps(CHAT | {"messages": "hi"}).encode(), 400),
    "many messages": (json.dumps(CHAT | {"messages": CHAT["messages"] * 10_000}).encode(), 400),
    "role a number": (b'{"model": "tiny", "messages": [{"role": 5, "content": "x"}]}', 400),
    "content a number": (b'{"model": "tiny", "messages": [{"role": "user", "content": 5}]}', 400),
    "tools": (json.dumps(CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}]}).encode(), 400),
}


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_bodies_are_refused(running: Running, stream: bool) -> None:
    """A wrong request would be a 500, or stay somewhere, or be taken for a right one."""
    asked = [(name, "/v1/completions", *case) for name, case in BODIES.items()]
    asked += [(name, "/v1/chat/completions", *case) for name, case in CHATS.items()]
    found = {}
    for name, path, body, expected in asked:
        if stream and body.endswith(b"}"):
            body = body[:-1] + b', "stream": true}'
        status, answer = running.post(body, path)
        if status != expected:
            found[name] = (status, str(answer)[:200])
        else:
            assert set(answer["error"]) == {"message", "type", "param", "code"}, name
            assert len(answer["error"]["message"]) < 1_000, name
    assert found == {}
    running.require_well()


def test_bodies_that_never_end_are_not_read(running: Running) -> None:
    """A body of 100 MB would be kept in memory, whether it says its length or not."""
    for head in (b"Content-Length: 100000000\r\n", b"Transfer-Encoding: chunked\r\n"):
        with socket.create_connection((running.host, running.port), timeout=30) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
            sent = 0
            with contextlib.suppress(OSError):
                for _ in range(100):
                    part = b"x" * 1_000_000
                    connection.sendall(b"f4240\r\n" + part + b"\r\n" if b"chunked" in head else part)
                    sent += 1
            answer = b""
            with contextlib.suppress(OSError):
                answer = connection.recv(4096)
            # A reset may overtake the answer; what counts is that nobody took it all.
            assert sent < 100
            assert answer == b"" or answer.startswith(b"HTTP/1.1 413")
    status, answer = running.post(b"x" * 1_000_001)
    assert (status, answer["error"]["code"]) == (413, "body_too_long")
    running.require_well()


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"POST /v1/completions HTTP/1.1\r\nHost:",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "head", "body"],
)
def test_slow_clients_are_hung_up_on(running: Running, begun: bytes) -> None:
    """Clients that send a byte now and then would hold connections until there are none for others."""
    with contextlib.ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection((running.host, running.port), timeout=30)) for _ in range(50)
        ]
        since_s = time.monotonic()
        for connection in connections:
            connection.sendall(begun)
        assert running.text() == running.expected  # beside them
        for connection in connections:
            assert connection.recv(4096).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - since_s > HEADER_S / 2
    running.require_well()


def test_a_stream_goes_on_beside_wrong_requests(running: Running) -> None:
    """Somebody's mistake would cost other clients their answers, or change them."""
    alone = running.cluster.complete("the heat", 300)
    begun = threading.Event()
    later = running.cluster.later("the heat", 300, lambda _: begun.set())
    assert begun.wait(30)
    for body, _ in (*BODIES.values(), *BODIES.values()):
        running.post(body)
    assert later() == alone
    running.require_well()


def test_prompt_started_is_known_of_every_request(running: Running) -> None:
    """Nobody could tell how long requests queue: the report that a prompt has begun may come after its first token."""
    for words in (1, 40):
        for tokens in (1, 2, 8):
            assert running.cluster.complete("the " * words, tokens).finish_reason == "length"
    records = [one for one in running.records() if one["outcome"] == "completed"]
    assert len(records) >= 6
    for one in records:
        assert one["prefill_started_s"] is not None, one
        assert one["assigned_s"] <= one["prefill_started_s"] <= one["first_token_s"], one
