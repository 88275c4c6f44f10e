"""Answers of every kind whose machines are killed in the middle, in one cluster of real processes."""

# ruff: noqa: S310 - the addresses are those of our own processes

import json
import signal
import socket
import threading
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest

from chaos.clusters import Cluster, cluster
from phasesplit.gateway.decisions import replay
from phasesplit.gateway.meters import STAGES, intervals
from waiting import eventually

pytestmark = [pytest.mark.timeout(180), pytest.mark.alone, pytest.mark.slow]

TOKENS = 1000
"""Of most answers; long enough that machines are lost, and are back, before the end."""
LAYERWISE_FROM_TOKENS = 128
"""Prompts of these tests are shorter, what goes on in the middle of an answer is longer."""
HALVES = {str(3 + byte): 100.0 for byte in (0xF0, 0x9F, 0x98, 0x80)}
"""Biases that leave the four bytes of one character, a token each, in any order: most tokens end within one."""
SAMPLED = {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": 0.2}


class Running(NamedTuple):
    """A cluster, and the files that it writes."""

    cluster: Cluster
    decisions: Path
    requests: Path

    def records(self) -> list[dict[str, Any]]:
        """Return what each finished choice has left."""
        return [json.loads(line) for line in self.requests.read_text(encoding="utf-8").splitlines()]

    def pauses_s(self) -> dict[str, list[float]]:
        """Return how long each later attempt took to its first token, by choice; those that had none are left out."""
        found: dict[str, list[float]] = defaultdict(list)
        open_: dict[int, tuple[str, float]] = {}
        for line in map(json.loads, self.decisions.read_text(encoding="utf-8").splitlines()):
            if line.get("call") == "place":
                open_[line["gives"][0]] = (line["args"][0], line["args"][1])
            elif line.get("call") == "end_prefill_phase":
                key, since_s = open_[line["args"][0]]
                name, _, attempt = key.rpartition(".")
                if attempt != "1":
                    found[name].append(line["args"][1] - since_s)
        return found

    def is_whole(self) -> bool:
        """Return whether all machines serve, and nothing is held."""
        serving = self.cluster.metric("phasesplit_machine_state", state="serving")
        return serving == 3 and self.cluster.metric("phasesplit_live_requests") == 0 and self.cluster.holds_nothing()

    def transfers(self) -> float:
        """Return how often KV has left the prefill machine; whether by layers depends on when it was offered room."""
        modes = ("layerwise", "serialized")
        return sum(self.cluster.metric("phasesplit_transfers_total", machine="prefill-0", mode=mode) for mode in modes)

    def busy(self) -> list[str]:
        """Return the machines of live decode phases, one for each choice."""
        return [lease["machine"] for lease in self.cluster.get("/debug/kv")["leases"] if lease["purpose"] == "decode"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("logs")
    decisions, requests = place / "decisions.jsonl", place / "requests.jsonl"
    with cluster(
        "--prefill", "1", "--decode", "2", "--set", f"layerwise_from_tokens={LAYERWISE_FROM_TOKENS}",
        "--log-decisions", str(decisions), "--log-requests", str(requests),
    ) as found:  # fmt: skip
        yield Running(found, decisions, requests)


@pytest.fixture
def running(shared: Running) -> Running:
    eventually(shared.is_whole)
    return shared


def asked(url: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what is new with each request: by choice all that it said, and the usage."""
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = {"model": "tiny", "max_tokens": TOKENS, "ignore_eos": True, "stream": True} | fields
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    found: dict[Any, Any] = defaultdict(lambda: {"text": "", "scores": [], "ids": [], "ends": []})
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().split(b"\n")
    events = [line.removeprefix(b"data: ") for line in lines if line]
    if body["stream"]:
        assert events.pop() == b"[DONE]"
    for event in map(json.loads, events):
        assert "error" not in event, event
        found["usage"] = event["usage"] or found.get("usage")
        for choice in event["choices"]:
            one = found[choice["index"]]
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text", "")}
            one["text"] += said.get("content", "")
            one["ids"] += choice.get("token_ids") or []
            scores = choice["logprobs"] or {}
            # A chat's come by token, a completion's by kind.
            one["scores"] += scores.get("content") or list(zip(*scores.values(), strict=True))
            one["ends"] += [end for end in (choice["finish_reason"], choice.get("stop_reason")) if end]
    return dict(found)


def together(calls: dict[str, Callable[[], Any]]) -> Callable[[], dict[str, Any]]:
    """Begin calls all at once; what is returned waits for their results."""
    found: dict[str, Any] = {}
    threads = [
        threading.Thread(target=lambda name=name, call=call: found.update({name: call()}), daemon=True)
        for name, call in calls.items()
    ]
    for thread in threads:
        thread.start()

    def results() -> dict[str, Any]:
        for thread in threads:
            thread.join(60)
        return found

    return results


GREEDY: dict[str, Any] = {"prompt": "the cat", "temperature": 0, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY | {"return_token_ids": True},
    "sampled": {"prompt": "the cat", "min_tokens": TOKENS} | SAMPLED,
    "halves": {"prompt": "the cat", "logit_bias": HALVES, "temperature": 2.0, "seed": 5},
    "chat": {"messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 2} | SAMPLED,
    "echo": {"prompt": "in the end", "echo": True, "logprobs": 2, "temperature": 0},
    "choices": {"prompt": ["the cat", "there"], "n": 2, "temperature": 0.7, "seed": -3},
    "not streamed": {"prompt": "the cat", "stream": False, "logprobs": 1} | SAMPLED,
}
"""Requests of every kind, ten choices in all."""


def test_answers_of_every_kind_go_on_without_a_seam(running: Running) -> None:
    """Some kind of answer would show the place where its machine was lost, or its log and records would not add up."""
    whole = running.cluster
    first = {name: lambda fields=fields: asked(whole.url, fields) for name, fields in KINDS.items()}
    expected = together(first)()
    assert set(expected) == set(KINDS)
    # A stop that begins before the cut and is complete behind it.
    stop = expected["greedy"][0]["text"][60:960]
    kinds = KINDS | {"stop": GREEDY | {"stop": ["\N{SNOWMAN}", stop]}}
    expected["stop"] = asked(whole.url, kinds["stop"])
    assert expected["stop"][0]["text"] == expected["greedy"][0]["text"][:60]
    assert expected["stop"][0]["ends"] == ["stop", stop]
    assert expected["halves"][0]["text"].count("\N{REPLACEMENT CHARACTER}") > TOKENS / 4
    undisturbed, continued = len(running.records()), whole.metric("phasesplit_continued_total")
    time.sleep(1)  # machines tell of transfers every quarter of a second
    transfers = running.transfers()

    made = whole.metric("phasesplit_output_tokens_total")
    results = together({name: lambda fields=fields: asked(whole.url, fields) for name, fields in kinds.items()})
    for victim in ("decode-0", "decode-1"):
        made += 11 * 2 * LAYERWISE_FROM_TOKENS
        eventually(lambda made=made: whole.metric("phasesplit_output_tokens_total") > made)
        assert victim in running.busy(), "no answer was on the machine that is killed"
        whole.signal(victim, signal.SIGKILL)
    found = results()
    for name in kinds:
        assert found[name] == expected[name], name

    eventually(running.is_whole)
    records = running.records()[undisturbed:]
    assert len(records) == 11
    # What went on was long enough for a pair of machines.
    eventually(lambda: running.transfers() > transfers + len(records))
    assert whole.metric("phasesplit_continued_total") == continued + sum(record["continued"] for record in records)
    pauses_s = running.pauses_s()
    for record in records:
        assert (record["outcome"], record["continued"]) == ("completed", record["attempts"] - 1)
        names = ("assigned", "prefill_started", "first_token", "second_token", "last_token")
        instants = [record[f"{name}_s"] for name in names]
        assert instants == sorted(instants)
        assert sum(end_s - start_s for start_s, end_s in intervals(record).values()) == pytest.approx(instants[-1])
        assert record["longest_gap_s"] >= max(pauses_s[f"{record['request']}-{record['choice']}"], default=0.0)
    assert sum(map(len, pauses_s.values())) > 0
    stages_s = [whole.metric("phasesplit_stage_seconds_sum", stage=stage) for stage in STAGES]
    assert sum(stages_s) == pytest.approx(whole.metric("phasesplit_e2e_seconds_sum"))
    log = running.decisions.read_bytes().splitlines(keepends=True)
    made_again = replay(log)
    assert (made_again.difference, made_again.equal) == (None, len(log) - 1)


def begun(running: Running, **fields: Any) -> tuple[Callable[[], dict[str, Any]], str]:
    """Begin an answer; return what waits for it, and the machine of its decode phase, which is at work."""
    results = together({"it": lambda: asked(running.cluster.url, GREEDY | fields)})
    eventually(lambda: running.cluster.metric("phasesplit_live_requests", state="decoding") == 1)
    (busy,) = running.busy()
    return results, busy


def test_the_machines_that_go_on_may_be_lost_too(running: Running) -> None:
    """A second loss, in the prefill phase behind the first, would break an answer off that could go on."""
    whole = running.cluster
    expected = asked(whole.url, GREEDY)
    results, busy = begun(running)
    whole.signal("prefill-0", signal.SIGSTOP)
    whole.signal(busy, signal.SIGKILL)
    eventually(lambda: whole.metric("phasesplit_live_requests", state="prefilling") == 1)
    whole.signal("prefill-0", signal.SIGKILL)
    assert results()["it"] == expected
    assert running.records()[-1]["continued"] == 2


def test_a_client_that_leaves_at_the_cut_leaves_nothing(running: Running) -> None:
    """The machines that go on would serve nobody, and hold KV for it."""
    whole, place = running.cluster, urlsplit(running.cluster.url)
    body = json.dumps({"model": "tiny", "max_tokens": TOKENS, "stream": True} | GREEDY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((place.hostname or "", place.port or 0), timeout=10) as client:
        client.sendall(head.encode() + body)
        eventually(lambda: whole.metric("phasesplit_live_requests", state="decoding") == 1)
        (busy,) = running.busy()
        whole.signal("prefill-0", signal.SIGSTOP)
        whole.signal(busy, signal.SIGKILL)
        eventually(lambda: whole.metric("phasesplit_live_requests", state="prefilling") == 1)
    eventually(lambda: whole.metric("phasesplit_live_requests") == 0)
    whole.signal("prefill-0", signal.SIGCONT)
    eventually(running.is_whole)
    eventually(lambda: whole.metric("phasesplit_machine_kv_used_blocks") == 0)
    assert running.records()[-1]["outcome"] == "client_gone"
