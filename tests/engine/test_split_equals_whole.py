"""A request served by a pair of machines gets what one machine would give it; whatever goes wrong, nothing stays."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_machines import TINY, Machine, Pair, Received, StandIn, asked, served, served_split, turn, turn_until
from phasesplit.engine.checkpoint import open_checkpoint
from phasesplit.engine.engine_events import Failed, Finished, KvLeft, KvReady, Refused, Started, Token
from phasesplit.engine.forward import Forward
from phasesplit.engine.iteration import Batch
from phasesplit.engine.packed import packed_model
from phasesplit.engine.sampling import Sampling
from phasesplit.kv_transfer.messages import TransferTimeouts
from phasesplit.kv_transfer.transfer_states import InboundState, OutboundState
from phasesplit.protocol.worker import Address, SendKv, TakeKv
from phasesplit.scheduler.rules import Batching

SHORT = TransferTimeouts(lease_s=0.3, heartbeat_s=0.02, answer_s=0.3, transfer_s=1.0)
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 150)
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, logprobs=3),
    "seeded": Sampling(temperature=1.0, seed=7, logprobs=0),
    "nucleus": Sampling(temperature=0.8, top_p=0.7, seed=-3),
    "top-k": Sampling(temperature=1.3, top_k=9, seed=1 << 40),
    "min-p": Sampling(temperature=1.0, min_p=0.2, seed=11),
    "presence": Sampling(temperature=0.7, presence_penalty=1.5, frequency_penalty=0.5, seed=5),
    "repetition": Sampling(temperature=0.7, repetition_penalty=1.8, seed=5),
    "bias": Sampling(temperature=1.0, logit_bias=((17, 4.0), (18, -100.0)), seed=2),
    "min-tokens": Sampling(temperature=1.0, logit_bias=((2, 50.0),), min_tokens=4, seed=2),
    "stop-tokens": Sampling(temperature=1.0, logit_bias=((40, 3.0),), stop_token_ids=(40,), seed=9),
}


@pytest.fixture(scope="module", params=["stand-in", "real"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_path: Path) -> dict[str, Any]:
    """Return what a machine needs to compute: with KV that is checked as it is read, or as it really is."""
    if request.param == "stand-in":
        return {"config": TINY, "forward": StandIn}
    packed = packed_model(open_checkpoint(tiny_path), tmp_path_factory.mktemp("packed"))
    return {"config": packed.config, "forward": lambda _, cache: Forward(packed, cache)}


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Return tokens that end no text."""
    return np.random.default_rng([tokens, seed]).integers(3, 300, tokens).tolist()


def require_equal(whole: Received, prefill_leg: Received, decode_leg: Received) -> None:
    """Fail unless both legs together are the whole."""
    assert not prefill_leg.bad
    assert not decode_leg.bad
    assert decode_leg.tokens == whole.tokens
    assert prefill_leg.tokens == whole.tokens[:1]
    assert decode_leg.finished == whole.finished
    assert prefill_leg.scores == whole.scores
    first = next(event for event in prefill_leg.events if isinstance(event, Token))
    taken = next(event for event in decode_leg.events if isinstance(event, Token))
    assert first.times is not None
    assert taken.times == first.times, "both legs tell how long the prompt took: one of the answers may come late"


@pytest.mark.parametrize("way", ["shared-memory", "tcp"])
@pytest.mark.parametrize("threshold_tokens", [0, 10_000])
@pytest.mark.parametrize(
    ("batching", "chunk"), [(Batching.WHOLE, 2_048), (Batching.CHUNKED, 48), (Batching.CHUNKED, 32)]
)
def test_lengths_around_the_block_size(
    model: dict[str, Any], way: str, threshold_tokens: int, batching: Batching, chunk: int
) -> None:
    """KV at the border of a block or a chunk would be lost, doubled, or sent before it is final."""
    rules = {"batching": batching, "batch_prompt_tokens": chunk}
    alone = Machine(**model)
    with Pair(way, threshold_tokens=threshold_tokens, **rules, **model) as pair:
        for number, tokens in enumerate(LENGTHS):
            request = asked(prompt(tokens), 5, SAMPLINGS["greedy"], prompt_logprobs=1 if number % 3 == 0 else None)
            legs = Received(), Received()
            pair.submit_decode(request, f"r{number}", legs[1])
            turn(*pair.machines)
            pair.submit_prefill(request, f"r{number}", legs[0])
            pair.run_until(lambda legs=legs: legs[0].has(KvLeft) and legs[1].finished is not None)
            require_equal(served(alone, request), *legs)
        pair.settle()
        sent = pair.prefill.engine.facts()
        assert sent.layerwise + sent.serialized == len(LENGTHS)
        assert (sent.layerwise if threshold_tokens == 0 else sent.serialized) >= len(LENGTHS) - 1


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("max_tokens", [1, 2, 12])
def test_every_way_of_choosing_tokens(model: dict[str, Any], name: str, max_tokens: int) -> None:
    """The two machines would draw, penalise or stop differently from one."""
    alone = Machine(**model)
    sampling = SAMPLINGS[name]
    if sampling.min_tokens > max_tokens:
        sampling = replace(sampling, min_tokens=max_tokens)
    with Pair(**model) as pair:
        for number in range(3):
            request = asked(prompt(40, number), max_tokens, sampling, stop=("qz", "ab"))
            require_equal(served(alone, request), *served_split(pair, request, f"r{number}"))
        pair.settle()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_an_output_goes_on_elsewhere_as_if_it_had_never_stopped(model: dict[str, Any], name: str) -> None:
    """Draws would begin again, or penalties and bounds take the output so far for prompt, where a machine was lost."""
    alone = Machine(**model)
    for number in range(2):
        request = asked(prompt(40, number), 14, SAMPLINGS[name])
        whole = served(alone, request)
        with Pair(**model) as pair:
            for resumed in range(1, len(whole.tokens)):
                going_on = replace(
                    request,
                    prompt_ids=(*request.prompt_ids, *whole.ids[:resumed]),
                    resumed_tokens=resumed,
                    max_tokens=14 - resumed,
                )
                rest = served(alone, going_on)
                assert [*whole.tokens[:resumed], *rest.tokens] == whole.tokens
                assert rest.finished == whole.finished
                require_equal(rest, *served_split(pair, going_on, f"r{resumed}"))


@pytest.mark.parametrize("threshold_tokens", [0, 60])
@pytest.mark.parametrize("batching", [Batching.WHOLE, Batching.CHUNKED])
def test_many_at_once(model: dict[str, Any], batching: Batching, threshold_tokens: int) -> None:
    """Requests that share the machines, and evict one another there, would get each other's KV."""
    rng = np.random.default_rng(3)
    requests = {
        f"r{n}": asked(prompt(int(rng.integers(1, 130)), n), int(rng.integers(1, 30)), Sampling(seed=n))
        for n in range(14)
    }
    options = {"blocks": 14, "batching": batching, "batch_prompt_tokens": 64, "threshold_tokens": threshold_tokens}
    with Pair(**options, **model) as pair:
        legs = {}
        for key, request in requests.items():
            legs[key] = pair.submit(request, key)
            turn(*pair.machines)
        pair.run_until(lambda: all(legs[key][1].finished or legs[key][1].bad for key in legs))
        pair.settle()
        assert pair.decode.engine.facts().evictions > 0
        alone = Machine(**model)
        for key, request in requests.items():
            require_equal(served(alone, request), *legs[key])


def test_events_of_both_legs() -> None:
    """Whoever books the two machines would free blocks before they are free, or wait for what has come."""
    with Pair() as pair:
        legs = served_split(pair, asked(prompt(40), 2))
        assert [type(event) for event in legs[0].events] == [Started, Token, Finished, KvLeft]
        assert [type(event) for event in legs[1].events] == [KvReady, Token, Token, Finished]


def test_prompt_that_began_before_its_offer_came() -> None:
    """An offer that comes while the prompt is computed would have to wait for its end."""
    request = asked(prompt(70), 4)
    with Pair(threshold_tokens=0) as pair:
        legs = Received(), Received()
        states = []
        run = pair.prefill.forward.run

        def offered_in_mid_pass(batch: Batch, after_layer: Callable[[int], None]) -> NDArray[np.float32]:
            def after(layer: int) -> None:
                if layer == 1:
                    pair.submit_decode(request, "late", legs[1])
                    for _ in range(5):
                        turn(pair.decode)
                        pair.prefill.endpoint.poll()
                after_layer(layer)
                states.append(pair.prefill.endpoint.outgoing.state("late"))

            return run(batch, after)

        pair.prefill.forward.run = offered_in_mid_pass
        pair.submit_prefill(request, "late", legs[0])
        pair.run_until(lambda: legs[0].has(KvLeft) and legs[1].finished is not None)
        require_equal(served(Machine(), request), *legs)
        assert states == [OutboundState.AWAITED, OutboundState.OPEN]
        assert pair.prefill.engine.facts().layerwise == 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("way", ["shared-memory", "tcp"])
def test_aborts_at_random_leave_nothing(seed: int, way: str) -> None:
    """A client that hangs up in any state would leave blocks on a machine that nobody owns, or spoil its neighbours."""
    rng = np.random.default_rng(seed)
    batching = Batching.WHOLE if seed % 2 else Batching.CHUNKED
    options = {"blocks": 24, "batch_prompt_tokens": 48, "batching": batching, "threshold_tokens": 60 * (seed % 3)}
    with Pair(way, **options) as pair:
        requests, legs = {}, {}
        doomed = {f"r{n}" for n in range(16) if rng.random() < 0.6}
        left = sorted(doomed)
        for number in range(16):
            key = f"r{number}"
            requests[key] = asked(prompt(int(rng.integers(1, 140)), number), int(rng.integers(1, 20)))
            legs[key] = pair.submit(requests[key], key)
            for _ in range(int(rng.integers(3))):
                turn(*pair.machines)
            if left and left[0] in requests and rng.random() < 0.8:
                key = left.pop(0)
                for machine in rng.permutation([pair.prefill, pair.decode]):
                    machine.engine.abort(key)
                    turn(*pair.machines)
        for key in left:
            pair.prefill.engine.abort(key)
            pair.decode.engine.abort(key)
        pair.run_until(lambda: all(legs[key][1].finished for key in requests.keys() - doomed))
        pair.settle()
        alone = Machine()
        for key in requests.keys() - doomed:
            require_equal(served(alone, requests[key]), *legs[key])
        for key in doomed:
            assert legs[key][0].events[-1] == KvLeft()


def test_blocks_that_are_still_written_to_stay_booked() -> None:
    """Room would be promised to others while the prefill machine may still write there."""
    with Pair(threshold_tokens=0, batch_prompt_tokens=32) as pair:
        legs = Received(), Received()
        pair.submit_decode(asked(prompt(150), 5), "r", legs[1])
        turn(*pair.machines)
        pair.submit_prefill(asked(prompt(150), 5), "r", legs[0])
        pair.run_until(lambda: pair.decode.endpoint.incoming.state("r") is InboundState.RECEIVING)
        pair.decode.engine.abort("r")
        facts = pair.decode.engine.facts()
        assert (facts.held, facts.used_blocks) == ({"r": 5}, 5)
        again = Received()
        pair.submit_decode(asked(prompt(150), 5), "r", again)
        turn(pair.decode)
        assert again.bad[0].status == 409
        pair.settle()


def test_blocks_that_are_still_read_stay_booked() -> None:
    """Another prompt would be computed into blocks that are still on their way out."""
    with Pair("tcp", threshold_tokens=0) as pair:
        legs = Received(), Received()
        pair.submit_decode(asked(prompt(150), 5), "r", legs[1])
        turn(*pair.machines)
        pair.submit_prefill(asked(prompt(150), 5), "r", legs[0])
        may_free = pair.prefill.endpoint.outgoing.may_free
        pair.prefill.endpoint.outgoing.may_free = lambda _: False
        pair.run_until(
            lambda: pair.prefill.endpoint.outgoing.state("r") not in (OutboundState.AWAITED, OutboundState.OFFERED)
        )
        pair.prefill.engine.abort("r")
        for _ in range(3):
            turn(*pair.machines)
        facts = pair.prefill.engine.facts()
        assert (facts.held, facts.used_blocks, pair.prefill.free.used) == ({"r": 5}, 5, 5)
        assert not legs[0].has(KvLeft)
        pair.prefill.endpoint.outgoing.may_free = may_free
        pair.run_until(lambda: legs[0].has(KvLeft))
        pair.decode.engine.abort("r")
        pair.settle()


@pytest.mark.parametrize("way", ["shared-memory", "tcp"])
@pytest.mark.parametrize("turns", range(7))
def test_prompt_machine_is_gone(way: str, turns: int) -> None:
    """Tokens would come from KV that never arrived whole, or its place would stay taken."""
    with Pair(way, threshold_tokens=0, batch_prompt_tokens=32, timeouts=SHORT) as pair:
        received = [pair.submit(asked(prompt(150, n), 40), f"r{n}")[1] for n in range(3)]
        for _ in range(turns):
            turn(*pair.machines)
        pair.prefill.close()
        turn_until(lambda: all(one.finished or one.bad for one in received), pair.decode)
        turn_until(lambda: not pair.decode.engine.facts().held, pair.decode)
        pair.decode.require_empty()
        alone = Machine()
        for number, one in enumerate(received):
            whole = served(alone, asked(prompt(150, number), 40))
            assert one.ids == (whole.ids if one.finished else [])
            assert not one.bad or isinstance(one.bad[0], Failed)


@pytest.mark.parametrize("way", ["shared-memory", "tcp"])
@pytest.mark.parametrize("turns", range(7))
def test_token_machine_is_gone(way: str, turns: int) -> None:
    """The prefill machine would keep KV for a machine that is gone, or take its neighbours down with it."""
    with Pair(way, threshold_tokens=0, batch_prompt_tokens=32, timeouts=SHORT) as pair:
        received = [pair.submit(asked(prompt(150, n), 400), f"r{n}")[0] for n in range(3)]
        whole = Received()
        pair.prefill.engine.submit("whole", asked(prompt(50), 20), whole)
        for _ in range(turns):
            turn(*pair.machines)
        pair.decode.close()
        turn_until(lambda: all(one.has(KvLeft) for one in received) and whole.finished is not None, pair.prefill)
        pair.prefill.require_empty()
        assert whole.ids == served(Machine(), asked(prompt(50), 20)).ids


def test_prompt_that_never_comes_is_given_up() -> None:
    """A decode machine would hold room for ever for a prefill machine that stays silent."""
    timeouts = TransferTimeouts(lease_s=0.05, heartbeat_s=0.01, answer_s=0.05, transfer_s=0.1)
    with Pair(timeouts=timeouts) as pair:
        received = Received()
        pair.submit_decode(asked(prompt(40), 4), "silent", received)
        turn_until(lambda: bool(received.bad), pair.decode)
        turn_until(lambda: not pair.decode.engine.facts().held, pair.decode)
        pair.decode.require_empty()


def test_offer_that_never_comes_is_given_up() -> None:
    """A prefill machine would keep KV for ever for a decode machine that never offers room."""
    with Pair(timeouts=TransferTimeouts(lease_s=0.05, heartbeat_s=0.01, answer_s=0.05, transfer_s=0.1)) as pair:
        received = Received()
        pair.submit_prefill(asked(prompt(40), 4), "silent", received)
        pair.run_until(lambda: received.has(KvLeft))
        assert [type(event) for event in received.events] == [Started, Token, Finished, Failed, KvLeft]
        pair.settle()


def test_stale_peer_is_refused() -> None:
    """KV would be sent to a machine that has started anew since the pair was made."""
    with Pair(epoch=5) as pair:
        served_split(pair, asked(prompt(10), 2), "first")
        pair.decode.epoch = 4
        received = Received()
        pair.submit_prefill(asked(prompt(10), 2), "second", received)
        turn(*pair.machines)
        assert isinstance(received.bad[0], Refused)
        assert received.bad[0].status == 409


def test_known_prefixes_make_room_for_what_arrives() -> None:
    """KV that comes from elsewhere would be refused for the sake of prompts that are only kept."""
    with Pair(prefix_identity=b"tiny", blocks=10) as pair:
        served(pair.decode, asked(prompt(290), 2))
        assert pair.decode.engine.facts().kept_blocks == 9
        request = asked(prompt(150), 5)
        require_equal(served(Machine(), request), *served_split(pair, request))
        pair.settle()


def test_prompt_evicted_while_its_kv_leaves_fails() -> None:
    """Blocks would be given to others while the decode machine still reads the prompt's KV from them."""
    with Pair(blocks=7, batch_prompt_tokens=16, threshold_tokens=0) as pair:
        whole, legs, request = Received(), (Received(), Received()), asked(prompt(150), 20)
        pair.prefill.engine.submit("whole", asked(prompt(56), 100), whole)
        pair.run_until(lambda: len(whole.ids) > 1)
        pair.submit_decode(request, "r", legs[1])
        turn(*pair.machines)
        pair.submit_prefill(request, "r", legs[0])
        pair.run_until(lambda: whole.finished is not None and bool(legs[0].bad) and bool(legs[1].bad))
        assert "memory ran out" in legs[0].bad[0].why
        assert not legs[1].ids
        assert whole.ids == served(Machine(), asked(prompt(56), 100)).ids
        pair.settle()


@pytest.mark.parametrize("note", [b"", b"[1]", b"[300, null, []]", b"[true, 0.5, 7]", b"\xff", b"{}"])
def test_first_token_that_is_none_fails(note: bytes) -> None:
    """A defect of the prefill machine would end the decode machine's engine, or become text."""
    with Pair() as pair:
        send = pair.prefill.endpoint.outgoing.note
        pair.prefill.endpoint.outgoing.note = lambda key, _: send(key, note)
        _, decode = served_split(pair, asked(prompt(40), 5))
        assert not decode.ids
        assert isinstance(decode.bad[0], Failed)
        pair.settle()


def test_machines_full_of_kv_for_each_other_go_on() -> None:
    """Two machines whose KV waits for room on the other would wait until a time-out of minutes."""
    now_s = [0.0]
    with Pair(blocks=6, clock=lambda: now_s[0]) as pair:
        first, second, third = Received(), Received(), Received()
        request = asked(prompt(150), 5)
        pair.submit_prefill(request, "there", first)
        where = pair.prefill.endpoint.address
        back = SendKv("back", "p", 1, Address(where["boot_id"], where["unix"], None))
        pair.decode.engine.submit("back", replace(request, max_tokens=1, transfer=back), second)
        pair.run_until(lambda: bool(first.ids) and bool(second.ids))
        pair.submit_decode(request, "there", third)
        pair.prefill.engine.submit("back", replace(request, transfer=TakeKv("back", "t", 1)), Received())
        for _ in range(20):
            turn(*pair.machines)
        assert not third.bad
        now_s[0] = 5.0
        pair.run_until(lambda: bool(third.bad))
        assert "no room" in third.bad[0].why
        for machine in pair.machines:
            machine.engine.abort("there")
            machine.engine.abort("back")
        pair.settle()


def test_known_prefix_leaves_too() -> None:
    """The decode machine would miss the KV that the prefill machine had not computed again."""
    start = prompt(100)
    with Pair(prefix_identity=b"tiny", threshold_tokens=0, batch_prompt_tokens=48) as pair:
        for number in range(4):
            request = asked(start + prompt(30 * number, number), 5)
            require_equal(served(Machine(), request), *served_split(pair, request, f"r{number}"))
        assert sum(pair.prefill.forward.rows) < 100 + 130 + 160 + 190 - 3 * 96 + 1
        pair.settle()
