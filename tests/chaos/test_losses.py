"""Workers that are killed or stopped at every stage of a request, in a cluster of real processes."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

import pytest

from chaos.clusters import Answer, Cluster, cluster, is_running
from waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.timeout(180), pytest.mark.alone, pytest.mark.slow]

LONG = [7 * index % 250 + 3 for index in range(1200)]


@pytest.fixture(scope="module")
def whole() -> Iterator[Cluster]:
    with cluster("--prefill", "1", "--decode", "1") as running:
        yield running


@pytest.fixture
def healthy(whole: Cluster) -> Cluster:
    whole.heal()
    return whole


def test_a_prompt_worker_killed_in_its_prompt_phase_costs_a_pause(healthy: Cluster) -> None:
    """The client would get an error for something that another attempt can do."""
    expected = healthy.complete(LONG)
    healthy.signal("prefill-0", signal.SIGSTOP)
    answer = healthy.later(LONG)
    eventually(lambda: healthy.metric("phasesplit_live_requests", state="prefilling") == 1)
    healthy.signal("prefill-0", signal.SIGKILL)
    assert answer() == expected
    assert healthy.metric("phasesplit_retries_total") >= 1


def test_a_prompt_worker_that_is_gone_already_costs_a_pause(healthy: Cluster) -> None:
    """A request that comes just after a crash would fail with it."""
    expected = healthy.complete(LONG)
    healthy.signal("prefill-0", signal.SIGKILL)
    assert healthy.complete(LONG) == expected


def test_a_token_worker_killed_before_the_first_content_costs_a_pause(healthy: Cluster) -> None:
    """The prefill phase would be thrown away together with the request."""
    expected = healthy.complete(LONG)
    healthy.signal("decode-0", signal.SIGSTOP)
    answer = healthy.later(LONG)
    time.sleep(0.3)
    healthy.signal("decode-0", signal.SIGKILL)
    given = answer()
    # The first token comes from the prefill worker: whether it was out decides which of the two must hold.
    if given.error is None:
        assert given == expected
    else:
        assert expected.text.startswith(given.text)
        assert given.finish_reason is None


SEEDED = {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": 0.2}


def cut(running: Cluster, at: Sequence[int], **fields: Any) -> Answer:
    """Stream a completion, and kill the worker of its decode phase whenever so many characters have come."""
    left = list(at)

    def seen(text: str) -> None:
        if left and len(text) > left[0]:
            del left[0]
            (busy,) = {lease["machine"] for lease in running.get("/debug/kv")["leases"] if lease["purpose"] == "decode"}
            running.signal(busy, signal.SIGKILL)

    answer = running.complete("the cat", 1900, seen, **fields)
    assert not left, "the stream was over before the worker was killed"
    return answer


@pytest.mark.parametrize("pools", [("--prefill", "1", "--decode", "2"), ("--unsplit", "2")], ids=["split", "unsplit"])
def test_a_worker_killed_in_mid_stream_costs_a_pause(pools: tuple[str, ...]) -> None:
    """A stream would break off, or go on with a gap, a repetition or other tokens."""
    with cluster(*pools) as running:
        workers = len(running.workers())
        continued = 0
        for at, fields in (((20,), {}), ((20, 300), SEEDED)):
            expected = running.complete("the cat", 1900, **fields)
            assert cut(running, at, **fields) == expected
            continued += len(at)
            assert running.metric("phasesplit_continued_total") == continued
            eventually(lambda: len(running.workers()) == workers)
        eventually(running.holds_nothing)


def test_a_stream_whose_attempts_are_used_up_ends_with_an_error_event() -> None:
    """A stream that broke off would look finished, or be tried for ever."""
    with cluster("--unsplit", "3") as running:
        expected = running.complete("the cat", 1900)
        given = cut(running, (20, 200, 400))
        assert given.finish_reason is None
        assert given.error is not None
        assert expected.text.startswith(given.text)
        assert running.metric("phasesplit_requests_total", outcome="decode_lost") == 1
        eventually(running.holds_nothing)


@pytest.mark.parametrize("worker", ["prefill-0", "decode-0"])
def test_a_restarted_worker_is_used_again(healthy: Cluster, worker: str) -> None:
    """A cluster would shrink with each crash until nothing is left."""
    before = healthy.signal(worker, signal.SIGKILL)
    eventually(lambda: healthy.workers().get(worker, before) != before)
    assert healthy.complete("the cat").finish_reason == "length"


def test_a_stopped_worker_does_not_hold_its_requests_for_ever(healthy: Cluster) -> None:
    """A process that hangs would hold every request that was given to it."""
    expected = healthy.complete(LONG)
    stopped = healthy.signal("prefill-0", signal.SIGSTOP)
    assert healthy.complete(LONG) == expected
    eventually(lambda: not is_running(stopped))


def abandon(url: str, after_s: float) -> None:
    """Begin a request, and close its connection after a while."""
    place = urlsplit(url)
    body = b'{"model": "tiny", "prompt": "the cat sat", "max_tokens": 200, "stream": true, "ignore_eos": true}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(after_s)


def test_a_storm_of_aborts_leaves_nothing_behind(healthy: Cluster) -> None:
    """KV of clients that gave up would be held until the machines are full."""
    draw = random.Random(4)  # noqa: S311 - times of a test
    delays_s = [draw.choice([0.0, 0.005, 0.02, 0.1, 0.3]) * draw.random() for _ in range(200)]
    for start in range(0, len(delays_s), 40):
        threads = [threading.Thread(target=abandon, args=(healthy.url, s)) for s in delays_s[start : start + 40]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    eventually(healthy.holds_nothing)
    eventually(lambda: healthy.metric("phasesplit_live_requests") == 0)
    eventually(lambda: healthy.metric("phasesplit_machine_kv_used_blocks") == 0)
    assert healthy.complete("the cat").finish_reason == "length"


def test_killing_the_gateway_takes_the_workers_with_it() -> None:
    """Processes would be left behind that hold memory and ports."""
    with cluster() as running:
        workers = running.workers()
        assert len(workers) == 2
        os.kill(workers["decode-0"], signal.SIGSTOP)
        running.process.kill()
        running.process.wait(10)
        eventually(lambda: not any(map(is_running, workers.values())))


def test_the_first_interrupt_drains_and_the_second_does_not_wait() -> None:
    """Ctrl-C would cut clients off, or leave no way to stop at once."""
    with cluster() as running:
        workers = running.workers()
        begun = threading.Event()
        answer = running.later("the cat", 400, lambda _: begun.set())
        assert begun.wait(30)
        os.kill(running.process.pid, signal.SIGINT)
        eventually(lambda: "stopping" in running.log)
        assert running.complete_once("the", 8).is_no_capacity
        assert answer().finish_reason == "length"
        assert running.process.wait(PATIENCE_S) == 0
        assert not any(map(is_running, workers.values()))
    with cluster() as running:
        workers = running.workers()
        answer = running.later("the cat", 2000)
        eventually(lambda: running.metric("phasesplit_live_requests") == 1)
        os.kill(running.process.pid, signal.SIGINT)
        eventually(lambda: "stopping" in running.log)
        os.kill(running.process.pid, signal.SIGINT)
        assert running.process.wait(PATIENCE_S) == 130
        assert answer().finish_reason is None  # cut off, not drained
        assert not any(map(is_running, workers.values()))
