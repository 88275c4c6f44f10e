"""A split cluster of real processes answers as one unsplit worker does, to the last bit."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from agreement.asked import CHUNK_TOKENS, Answer, Asked, Words, answers, drawn
from chaos.clusters import Cluster, cluster
from phasesplit.engine.cached_file import cache_directory
from phasesplit.engine.fetch import DEFAULT, tiny_vocabulary
from phasesplit.engine.kernels import IS_COMPILED
from waiting import eventually

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

TINY = Words(
    model="tiny",
    ids=range(3, 259),
    letters=tuple(map(tiny_vocabulary().index, "abcdefgh")),
    end=2,
    stops=("a", "be", "cad", "hh", "gf", "ec"),
)
SMOL = Words(
    model="smollm2-135m-instruct",
    ids=range(1_000, 40_000),
    letters=(28, 30, 198, 253, 260, 282, 284, 288),
    end=2,
    stops=(" the", ",", ". The", "\n\n", " of a", "ing"),
    texts=("The secret code is 7391. ", "What is the secret code? ", "The sky is blue.\n", "漢字 ", "1, 2, 3, "),
    longest=160,
)
"""Its letters are a comma, a full stop, a line break, and the words `a the of and to`."""
ALTERED = str(Path(__file__).parent / "altered.py")
CHUNKED = ("--set", "batching=chunked", "--set", f"batch_prompt_tokens={CHUNK_TOKENS}")
SMALL = ("--kv-memory", "400kB")
ADMIN_KEY = "a-key-of-the-test"
ASKED = drawn(1, 200, TINY)
FEW = 60


class Whole:
    """An unsplit worker and what it has answered; each request is read the other way than from a split cluster."""

    def __init__(self, running: Cluster) -> None:
        self._running = running
        self._answers: list[Answer] = []

    def answers(self, count: int) -> list[Answer]:
        """Return the answers to the first requests."""
        if count > len(self._answers):
            turned = [asked.turned() for asked in ASKED[len(self._answers) : count]]
            self._answers += asyncio.run(answers(self._running.url, turned, at_once=16, seed=1))
        return self._answers[:count]


@pytest.fixture(scope="module")
def admin_key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "admin"
    path.write_text(ADMIN_KEY)
    return path


@pytest.fixture(scope="module")
def whole() -> Iterator[Whole]:
    with cluster("--unsplit", "1") as running:
        yield Whole(running)


def require_equal(split: Sequence[Answer], whole: Sequence[Answer], asked: Sequence[Asked]) -> None:
    """Fail unless two clusters have answered alike, as far as clients have read."""
    for found, wanted, one in zip(split, whole, asked, strict=True):
        if found.is_whole:
            assert (found.choices, found.usage) == (wanted.choices, wanted.usage), one
        else:
            found.require_begins(wanted)


def require_nothing_held(running: Cluster) -> None:
    """Fail unless all KV is free in time, by the word of the gateway and of its machines."""

    def holds_nothing() -> bool:
        blocks = running.metric("phasesplit_kv_lease_blocks") + running.metric("phasesplit_live_requests")
        used = running.metric("phasesplit_machine_kv_used_blocks")
        return running.holds_nothing() and blocks == used == 0

    eventually(holds_nothing)
    assert running.metric("phasesplit_kv_late_releases_total") == 0


def machine_facts(running: Cluster) -> list[dict[str, Any]]:
    """Return what the machines last said of themselves, in order of their names."""
    request = urllib.request.Request(running.url + "/admin/pools", headers={"Authorization": f"Bearer {ADMIN_KEY}"})  # noqa: S310 - our own process
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - our own process
        return [machine["facts"] for machine in sorted(json.load(answer)["machines"], key=lambda one: one["name"])]


def test_two_hundred_requests(whole: Whole) -> None:
    """What a client reads would depend on whether the two phases run in one process."""
    with cluster() as split:
        found = asyncio.run(answers(split.url, ASKED, at_once=16, seed=2))
        require_nothing_held(split)
        sent, retries = split.metric("phasesplit_transfers_total"), split.metric("phasesplit_retries_total")
    require_equal(found, whole.answers(len(ASKED)), ASKED)
    assert sent > len(ASKED) / 2
    assert retries == 0
    assert sum(one.is_whole for one in found) > 0.8 * len(ASKED)


STATIC = ("--set", "elastic=false")


@pytest.mark.parametrize(
    ("way", "options", "mode"),
    [
        ("shared-memory", (*STATIC, *SMALL, *CHUNKED, "--set", "transfer=layerwise"), "layerwise"),
        ("tcp", (*STATIC, *CHUNKED, "--set", "transfer=layerwise", "--prefix-cache"), "layerwise"),
        ("shared-memory", ("--set", "transfer=serialized", "--prefix-cache"), "serialized"),
        ("tcp", (*STATIC, *SMALL, "--set", "transfer=serialized"), "serialized"),
    ],
)
def test_every_way_that_kv_takes(whole: Whole, admin_key: Path, way: str, options: tuple[str, ...], mode: str) -> None:
    """KV that leaves by another way, in other pieces, or after evictions would not be the same."""
    options = (*options, "--admin-key-file", str(admin_key))
    with cluster(*options, program=(ALTERED, way)) as split:
        found = asyncio.run(answers(split.url, ASKED[:FEW], at_once=16, seed=3))
        require_nothing_held(split)
        decode, prefill = machine_facts(split)
    require_equal(found, whole.answers(FEW), ASKED[:FEW])
    sent = prefill["transfers"]
    assert sent[mode] > FEW / 3
    assert mode == "layerwise" or not sent["layerwise"]
    assert (decode["evictions"] > 0) == ("--kv-memory" in options)
    assert (prefill["kept_blocks"] > 0) == ("--prefix-cache" in options)


@pytest.mark.skipif(not IS_COMPILED, reason="the interpreted kernels take minutes for this model")
@pytest.mark.skipif(not (cache_directory() / DEFAULT.file).is_file(), reason="the default model was never fetched here")
def test_default_model() -> None:
    """A model of real size would answer otherwise where its KV has travelled."""
    asked = drawn(2, 10, SMOL)
    found = []
    for options, requests in (((), asked), (("--unsplit", "1"), [one.turned() for one in asked])):
        with cluster(*options, "--model", "default", "--kv-memory", "200MB") as running:
            found.append(asyncio.run(answers(running.url, requests, at_once=8, seed=4)))
            require_nothing_held(running)
    require_equal(*found, asked)
