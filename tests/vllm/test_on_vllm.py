"""Two real vLLM machines, in float32 so that outputs can be compared token for token. `make test-vllm` runs this."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vllm_machines import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    CONTEXT_TOKENS,
    MODEL_VARIABLE,
    Machine,
    Pair,
    prompt_of,
    started,
)

pytestmark = [
    pytest.mark.skipif(MODEL_VARIABLE not in os.environ, reason="needs vLLM and its own environment: make test-vllm"),
    pytest.mark.timeout(600),
]

MOST = 8
TIMEOUTS = {"lease_s": 3.0, "heartbeat_s": 0.5, "answer_s": 5.0, "transfer_s": 20.0}
KEY = {"PHASESPLIT_JOIN_KEY": "a key that both know"}
EDGES = [
    tokens + around
    for tokens in (BLOCK_TOKENS, 2 * BLOCK_TOKENS, CHUNK_TOKENS, 2 * CHUNK_TOKENS, 3 * CHUNK_TOKENS + BLOCK_TOKENS)
    for around in (-1, 0, 1)
]
LENGTHS = [*EDGES, 1, 2, 7, 12, 20, 40, 50, 77, 88, 100, 111, 130, 150, 200, 222, 400]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Return two machines whose prefix caches and reports every test leaves as they are."""
    with started(tmp_path_factory.mktemp("vllm"), timeouts=TIMEOUTS, environment=KEY) as machines:
        yield machines


@contextmanager
def another(name: str, directory: Path, **settings: Any) -> Iterator[Machine]:
    """Start a machine in addition to the pair, without waiting until it is up, and end it."""
    machine = Machine(name, directory, timeouts=TIMEOUTS, environment=KEY, **settings)
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(autouse=True)
def _all_blocks_come_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wrong if, after any test, a KV block or a request is left on a machine that still lives."""
    yield
    if "pair" in request.fixturenames:
        both: Pair = request.getfixturevalue("pair")
        for machine in (both.prefill, both.decode):
            machine.await_free()
            machine.forget()


def test_there_are_thirty_prompts() -> None:
    """Wrong if the list of prompts shrinks below what the product promises to have compared."""
    assert len(set(LENGTHS)) >= 30


def test_outputs_are_those_of_one_machine(pair: Pair) -> None:
    """Wrong if a split request, around edges of blocks and chunks, gives other tokens than an unsplit one."""
    prompts = {f"k{tokens}": prompt_of(tokens, tokens) for tokens in LENGTHS}
    whole, wrong = pair.whole(prompts, MOST), {}
    for key, prompt in prompts.items():
        first, rest = pair.split(key, prompt, MOST)
        if (first["tokens"], rest["tokens"]) != (whole[key][:1], whole[key]):
            wrong[key] = (whole[key], first, rest)
        # The last position of the prompt is computed again in order to sample: one token, and not the prompt.
        assert rest["computed"] == MOST, key
        assert first["computed"] == len(prompt)
    assert not wrong


@pytest.mark.parametrize(("on_prefill", "on_decode"), [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (2, 2)])
def test_prefix_hits_change_nothing(pair: Pair, on_prefill: int, on_decode: int) -> None:
    """Wrong if KV from a prefix cache, of none, some or all of the blocks on either side, is mixed up with KV sent."""
    shared, end = prompt_of(5 * BLOCK_TOKENS, 3), prompt_of(50, 4)
    prompt, name = shared + end, f"{on_prefill}{on_decode}"
    whole = pair.decode.whole(f"w{name}", prompt, MOST)
    pair.decode.forget()
    for machine, hit in ((pair.prefill, on_prefill), (pair.decode, on_decode)):
        if hit:
            machine.whole(f"{machine.name}{name}", prompt if hit == 2 else shared + prompt_of(20, 5), 2)
    first, rest = pair.split(f"h{name}", prompt, MOST)
    assert (first["tokens"], rest["tokens"]) == (whole[:1], whole)
    assert rest["computed"] == MOST
    assert first["computed"] == len(prompt) - {0: 0, 1: 5, 2: 6}[on_prefill] * BLOCK_TOKENS


def test_many_at_once(pair: Pair) -> None:
    """Wrong if requests that share steps, or wait for each other's blocks, get each other's KV."""
    prompts = {f"m{number}": prompt_of(20 + 30 * number, 30 + number) for number in range(10)}
    whole = pair.whole(prompts, MOST)
    for key, prompt in prompts.items():
        pair.submit(key, prompt, MOST)
    assert {key: pair.decode.result(f"d.{key}")["tokens"] for key in prompts} == whole
    for key in prompts:
        pair.prefill.result(f"p.{key}")


@pytest.mark.parametrize("who", ["prefill", "decode", "both"])
@pytest.mark.parametrize("when", ["before", "computing", "after"])
def test_aborts(pair: Pair, who: str, when: str) -> None:
    """Wrong if an abort, on either side and in any state, leaves blocks held or stops a machine."""
    key, prompt = f"a-{who}-{when}", prompt_of(800 if when == "computing" else 200, 6)
    sides = {"before": "d" if who == "decode" else "p", "computing": "pd", "after": "pd"}[when]
    if when == "before":
        # Another prompt is computed first, so this one has not begun.
        pair.prefill.order(do="add", id=f"other-{key}", prompt=prompt_of(600, 7), most=1)
    pair.submit(key, prompt, 40, sides=sides)
    if when == "computing":
        pair.prefill.await_report("prefill_started", key)
    elif when == "after":
        pair.decode.await_report("kv_ready", key)
    if who in ("prefill", "both"):
        pair.prefill.order(do="abort", id=f"p.{key}")
    if who in ("decode", "both"):
        pair.decode.order(do="abort", id=f"d.{key}")
    elif when != "before":
        # It goes on: behind the KV that came, or by computing the prompt itself.
        result = pair.decode.result(f"d.{key}")
        assert len(result["tokens"]) == 40
        assert result["computed"] >= (len(prompt) if when == "computing" else 40)


def test_kv_that_nobody_takes_goes(pair: Pair) -> None:
    """Wrong if a prefill machine keeps KV for a request that the gateway has given up."""
    pair.submit("nobody", prompt_of(100, 9), MOST, sides="p")
    pair.prefill.result("p.nobody")
    assert pair.prefill.state()["free"] < pair.prefill.free
    pair.prefill.abort_key("nobody")
    pair.prefill.await_report("gone", "nobody")


def test_kv_that_never_comes_is_computed(pair: Pair) -> None:
    """Wrong if a decode machine waits for ever, or answers from blocks that hold nothing."""
    prompt = prompt_of(100, 10)
    whole = pair.decode.whole("w-never", prompt, MOST)
    pair.decode.forget()
    pair.submit("never", prompt, MOST, sides="d")
    result = pair.decode.result("d.never")
    assert (result["tokens"], result["computed"]) == (whole, len(prompt) + MOST - 1)


def test_a_full_cache_preempts_and_still_answers(pair: Pair, tmp_path: Path) -> None:
    """Wrong if a request that loses its blocks after its KV came hangs, or goes on from KV that is gone."""
    with another("small-0", tmp_path, vllm={"num_gpu_blocks_override": CONTEXT_TOKENS // BLOCK_TOKENS + 1}) as small:
        small.wait_up()
        tight = Pair(pair.prefill, small)
        prompts = {f"f{number}": prompt_of(230, 40 + number) for number in range(4)}
        whole = tight.whole(prompts, 40)
        for side, machine in (("p", pair.prefill), ("d", small)):  # all prompts first, so that all texts grow at once
            for key, prompt in prompts.items():
                tight.submit(key, prompt, 40, sides=side)
            results = {key: machine.result(f"{side}.{key}") for key in prompts}
        assert {key: result["tokens"] for key, result in results.items()} == whole
        assert not any("missed" in report for report in small.reports)
        assert any(result["computed"] > 40 for result in results.values()), "nothing was preempted"
        small.await_free()


def test_kv_of_another_layout_is_refused(pair: Pair, tmp_path: Path) -> None:
    """Wrong if a machine reads KV as what it is not, or the error does not name the setting that differs."""
    prompt = prompt_of(200, 12)
    whole = pair.whole({"differs": prompt}, MOST)["differs"]
    with (
        another("prefill-1", tmp_path, vllm={"block_size": 2 * BLOCK_TOKENS}) as wide,
        another("prefill-2", tmp_path, vllm={"dtype": "bfloat16"}) as half,
    ):
        for other, why in (
            (wide, f"layout block_tokens: ours is {BLOCK_TOKENS}, the peer's is {2 * BLOCK_TOKENS}"),
            (half, "layout dtype: ours is 'float32', the peer's is 'bfloat16'"),
        ):
            other.wait_up()
            Pair(other, pair.decode).submit(other.name, prompt, MOST)
            assert why in other.await_report("gone", other.name)["why"]
            result = pair.decode.result(f"d.{other.name}")
            assert (result["tokens"], result["computed"]) == (whole, len(prompt) + MOST - 1)
            other.result(f"p.{other.name}")
            other.await_free()
            pair.decode.forget()


def test_a_killed_prefill_machine_and_its_next_start(pair: Pair, tmp_path: Path) -> None:
    """Wrong if its loss in mid-transfer shows in the text, or its next start is taken for the last."""
    prompt = prompt_of(900, 11)
    whole = pair.decode.whole("w", prompt, MOST)
    pair.decode.forget()
    pair.submit("killed", prompt, MOST)
    pair.prefill.await_report("prefill_started", "killed")
    pair.prefill.close()
    # From here on it is the pair's, whichever test comes next.
    pair.prefill = Machine("prefill-0", tmp_path, epoch=pair.prefill.epoch + 1, timeouts=TIMEOUTS, environment=KEY)
    assert pair.decode.result("d.killed")["tokens"] == whole
    pair.decode.await_free()
    pair.decode.forget()
    pair.prefill.wait_up()
    first, rest = pair.split("next", prompt, MOST)
    assert (first["tokens"], rest["tokens"], rest["computed"]) == (whole[:1], whole, MOST)
