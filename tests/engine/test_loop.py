"""The engine on one machine: what a request gets, and that nothing of it is left."""

import codecs

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_machines import BLOCK, GREEDY, TINY, Machine, Received, asked, served, turn, turn_until
from phasesplit.engine.engine_events import Failed, Finished, Refused, Started, Token
from phasesplit.engine.sampling import Sampling
from phasesplit.engine.sequences import sequence_of
from phasesplit.scheduler.rules import Batching

RULES = [Batching.WHOLE, Batching.CHUNKED]


def prompt(tokens: int, seed: int = 0) -> list[int]:
    """Return tokens that end no text."""
    return np.random.default_rng([tokens, seed]).integers(3, 300, tokens).tolist()


@pytest.mark.parametrize("batching", RULES)
def test_tokens_do_not_hang_on_neighbours_or_chunks(batching: Batching) -> None:
    """A request's text would change with what else the machine happens to compute."""
    requests = {f"r{n}": asked(prompt(n), 5 + n % 7) for n in (1, 31, 32, 33, 63, 64, 65, 100, 150)}
    alone = Machine()
    expected = {key: served(alone, request).ids for key, request in requests.items()}
    together = Machine(batching=batching, batch_prompt_tokens=40)
    received = {key: Received() for key in requests}
    for key, request in requests.items():
        together.engine.submit(key, request, received[key])
        turn(together)
    turn_until(lambda: all(one.finished for one in received.values()), together)
    assert {key: one.ids for key, one in received.items()} == expected
    together.require_empty()


def test_events_come_in_order() -> None:
    """Who streams an answer could not tell its beginning from its end."""
    received = served(Machine(), asked(prompt(10), 3))
    assert [type(event) for event in received.events] == [Started, Token, Token, Token, Finished]
    assert received.finished == Finished("length")


@pytest.mark.parametrize("batching", RULES)
def test_eviction_is_not_seen(batching: Batching) -> None:
    """A request that lost its KV because memory ran out would say something else, or say it twice."""
    requests = [asked(prompt(60, seed), 60) for seed in range(4)]
    expected = [served(Machine(), request).ids for request in requests]
    small = Machine(blocks=9, batching=batching, batch_prompt_tokens=64)
    received = [Received() for _ in requests]
    for number, request in enumerate(requests):
        small.engine.submit(f"r{number}", request, received[number])
    turn_until(lambda: all(one.finished for one in received), small)
    assert small.engine.facts().evictions > 0
    assert [one.ids for one in received] == expected
    assert sum(stages.evictions for stages in small.engine.stages) == small.engine.facts().evictions
    small.require_empty()


def test_evicted_prompt_begins_again() -> None:
    """A prompt that lost its first chunks to the growth of others would go on behind a hole."""
    machine = Machine(blocks=7, batch_prompt_tokens=16)
    short, long = asked(prompt(60), 100), asked(prompt(150), 20)
    received = Received(), Received()
    machine.engine.submit("short", short, received[0])
    turn_until(lambda: len(received[0].ids) > 1, machine)
    machine.engine.submit("long", long, received[1])
    turn_until(lambda: all(one.finished for one in received), machine)
    ended = {stages.key: stages for stages in machine.engine.stages}
    assert ended["long"].evictions > 0
    assert [one.ids for one in received] == [served(Machine(), request).ids for request in (short, long)]
    assert sum(isinstance(event, Started) for event in received[1].events) == 1
    machine.require_empty()


def test_evicted_request_finds_its_known_prefix_again() -> None:
    """An evicted request would compute again the blocks that are still kept, if none has come or gone meanwhile."""
    machine = Machine(blocks=6, prefix_identity=b"tiny")
    served(machine, asked(prompt(70), 1), "before")
    older, younger = Received(), Received()
    machine.engine.submit("older", asked(prompt(90), 20), older)
    turn_until(lambda: bool(older.ids), machine)
    machine.engine.submit("younger", asked(prompt(70), 20), younger)
    turn_until(lambda: machine.engine.facts().evictions > 0, machine)
    assert not younger.finished
    assert machine.engine.facts().kept_blocks == 2
    before = len(machine.forward.rows)
    turn_until(lambda: bool(older.finished and younger.finished), machine)
    assert max(machine.forward.rows[before:]) < 2 * BLOCK
    assert younger.ids == served(Machine(), asked(prompt(70), 20)).ids
    machine.require_empty()


def test_penalties_see_the_output() -> None:
    """What a request has said already would count for nothing in what it says next."""
    likely = Sampling(temperature=0.0, logit_bias=((17, 50.0),))
    assert served(Machine(), asked(prompt(20), 6, likely)).ids == [17] * 6
    once = Sampling(temperature=0.0, logit_bias=((17, 50.0),), presence_penalty=100.0)
    assert served(Machine(), asked(prompt(20), 6, once)).ids.count(17) == 1


def test_stop_token_ends_the_text() -> None:
    """The machine would compute tokens that nobody reads, or say that a bound was reached."""
    ids = served(Machine(), asked(prompt(20), 30)).ids
    stopped = served(Machine(), asked(prompt(20), 30, Sampling(temperature=0.0, stop_token_ids=(ids[4],))))
    first = ids.index(ids[4])
    assert stopped.ids == ids[: first + 1]
    assert stopped.finished == Finished("stop", ids[4])


def test_own_end_of_the_text_has_no_number() -> None:
    """A client would get a stop token that it never named."""
    always = Sampling(temperature=0.0, logit_bias=((2, 100.0),))
    received = served(Machine(), asked(prompt(20), 30, always))
    assert (received.ids, received.finished) == ([2], Finished("stop", None))
    ignored = Sampling(temperature=0.0, logit_bias=((2, 100.0),), ignore_eos=True)
    assert served(Machine(), asked(prompt(20), 4, ignored)).finished == Finished("length")


def test_stop_string_ends_the_text() -> None:
    """The machine would run on behind a stop string that lies across two tokens."""
    ids = served(Machine(), asked(prompt(20), 30)).ids
    text = "".join(chr(97 + token % 26) for token in ids)
    received = served(Machine(), asked(prompt(20), 30, stop=(text[6:9], "no such text")))
    assert received.finished == Finished("stop", text[6:9])
    assert len(received.ids) == text.index(text[6:9]) + 3


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.sampled_from([b"a", b"b", b"ab", b"ba", b"", b"\xc3", b"\xa9", "é".encode()]), max_size=12),
    stops=st.lists(st.sampled_from(["a", "ab", "ba", "aab", "bé", "é", "�"]), min_size=1, max_size=3, unique=True),
    min_tokens=st.integers(0, 3),
)
def test_stop_strings_end_a_sequence_where_they_are_complete_first(
    pieces: list[bytes], stops: list[str], min_tokens: int
) -> None:
    """The machine would stop before or behind the place where the gateway cuts the text."""
    request = asked(prompt(20), len(pieces) + 1, Sampling(min_tokens=min_tokens), stop=tuple(stops))
    sequence = sequence_of("a", request, lambda _: None, len(pieces) + 1, 0.0)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, exempt = "", 0
    for place, piece in enumerate(pieces, start=1):
        text += decoder.decode(piece)
        exempt = len(text) if place <= min_tokens else exempt
        complete = [[stop for stop in stops if text[:end].endswith(stop)] for end in range(exempt + 1, len(text) + 1)]
        first = next(filter(None, complete), None)
        assert sequence.add(1000, piece, ()) == (Finished("stop", max(first, key=len)) if first else None)
        if first:
            break


@pytest.mark.parametrize("batch_prompt_tokens", [2_048, 50])
def test_prompt_is_scored(batch_prompt_tokens: int) -> None:
    """The log-probabilities of a prompt's tokens would be those of others, or depend on how it is cut."""
    sampling = Sampling(temperature=0.0, logprobs=1)
    request = asked(prompt(300), 2, sampling, prompt_logprobs=2)
    received = served(Machine(batch_prompt_tokens=batch_prompt_tokens), request)
    assert received.scores is not None
    assert [scored.token for scored in received.scores] == list(request.prompt_ids)
    assert received.scores[0].logprob is None
    assert received.ids == served(Machine(), asked(prompt(300), 2)).ids
    for cut in (1, 32, 129, 299):
        shorter = served(Machine(), asked(prompt(300)[:cut], 1, Sampling(temperature=0.0, logprobs=2)))
        assert received.scores[cut].top == shorter.tokens[0].top


def test_scored_rows_are_few_at_a_time() -> None:
    """A long prompt whose tokens are scored would fill the memory with logits."""
    machine = Machine()
    served(machine, asked(prompt(300), 1, prompt_logprobs=0))
    assert machine.forward.rows == [128, 128, 44]


@pytest.mark.parametrize(
    ("tokens", "blocks", "says"), [(2_048, 200, "the context holds 2048"), (128, 4, "the KV memory holds 128 tokens")]
)
def test_too_long_a_prompt_is_refused(tokens: int, blocks: int, says: str) -> None:
    """A prompt that never fits would wait for ever, or be found out only when others had waited for it."""
    machine = Machine(blocks=blocks)
    received = served(machine, asked(prompt(tokens), 1))
    assert [type(event) for event in received.events] == [Refused]
    assert received.bad[0].status == 400
    assert says in received.bad[0].message
    machine.require_empty()


@pytest.mark.parametrize("batching", RULES)
def test_output_ends_with_the_memory(batching: Batching) -> None:
    """A request that outgrows the whole memory would be evicted and computed again for ever."""
    received = served(Machine(blocks=3, batching=batching), asked(prompt(90), 1_000))
    assert (len(received.ids), received.finished) == (6, Finished("length"))


def test_legs_need_an_endpoint() -> None:
    """A leg would wait for ever on a machine that moves no KV."""
    from phasesplit.protocol.worker import TakeKv

    received = served(Machine(), asked(prompt(4), transfer=TakeKv("k", "p", 1)), "k")
    assert received.bad[0].status == 400


def test_key_is_used_once() -> None:
    """Two requests of one name would get each other's tokens."""
    machine = Machine()
    first, second = Received(), Received()
    machine.engine.submit("same", asked(prompt(4), 3), first)
    machine.engine.submit("same", asked(prompt(5), 3), second)
    turn_until(lambda: first.finished is not None, machine)
    assert second.bad[0].status == 409


def test_draining_finishes_what_is_here() -> None:
    """A machine that is to leave would take new work, or drop what it has."""
    machine = Machine()
    here, late = Received(), Received()
    machine.engine.submit("here", asked(prompt(4), 3), here)
    machine.engine.drain()
    machine.engine.submit("late", asked(prompt(4), 3), late)
    turn_until(lambda: here.finished is not None, machine)
    assert late.bad[0].status == 503
    assert machine.engine.facts().is_draining


@pytest.mark.parametrize("batching", RULES)
@pytest.mark.parametrize("seed", range(6))
def test_aborts_leave_nothing(batching: Batching, seed: int) -> None:
    """A client that hangs up would leave blocks behind that nobody owns, or stop its neighbours."""
    rng = np.random.default_rng(seed)
    machine = Machine(blocks=14, batching=batching, batch_prompt_tokens=48)
    requests = {f"r{n}": asked(prompt(int(rng.integers(1, 120)), n), int(rng.integers(1, 40))) for n in range(12)}
    received = {key: Received() for key in requests}
    doomed = set(rng.choice(list(requests), 5, replace=False))
    gone = set()
    for key, request in requests.items():
        machine.engine.submit(key, request, received[key])
    while not all(one.finished for key, one in received.items() if key not in doomed) or gone != doomed:
        turn(machine)
        if rng.random() < 0.2 and gone != doomed:
            key = rng.choice(sorted(doomed - gone))
            gone.add(key)
            machine.engine.abort(key)
            machine.engine.abort(key)
            known = len(received[key].events)
            machine.engine.take_events()
            assert len(received[key].events) == known
    machine.require_empty()
    for key in requests.keys() - doomed:
        assert received[key].ids == served(Machine(), requests[key]).ids


@pytest.mark.parametrize("batching", RULES)
def test_known_prefix_changes_nothing_but_the_work(batching: Batching) -> None:
    """A prompt that begins like an earlier one would be computed again, or get the KV of another."""
    start = prompt(100)
    requests = [asked(start + prompt(20, n), 6) for n in range(4)] + [asked(start, 3), asked(start[:64], 3)]
    expected = [served(Machine(), request).ids for request in requests]
    machine = Machine(batching=batching, prefix_identity=b"tiny", batch_prompt_tokens=64)
    assert [served(machine, request).ids for request in requests] == expected
    # 3 full blocks are known of each but the first; of the last, whose end is theirs, one is computed.
    rows = sum(machine.forward.rows) - sum(len(ids) - 1 for ids in expected)
    assert rows == 120 + 3 * 24 + 4 + 32
    machine.require_empty()
    assert machine.engine.facts().kept_blocks > 0


def test_prompt_to_be_scored_is_computed_whole() -> None:
    """The tokens of a known beginning would have no score."""
    machine = Machine(prefix_identity=b"tiny")
    request = asked(prompt(100), 2, prompt_logprobs=1)
    expected = served(machine, request).scores
    assert expected is not None
    assert len(expected) == 100
    assert served(machine, request).scores == expected


@pytest.mark.parametrize("seed", range(4))
def test_known_prefixes_go_when_memory_is_short(seed: int) -> None:
    """Blocks kept for others would starve those who need them, or be given away under a reader."""
    rng = np.random.default_rng(seed)
    machine = Machine(blocks=12, prefix_identity=b"tiny", batch_prompt_tokens=48)
    starts = [prompt(70, n) for n in range(3)]
    requests = [asked(starts[int(rng.integers(3))] + prompt(int(rng.integers(1, 40)), n), 40) for n in range(10)]
    received = [Received() for _ in requests]
    for number, request in enumerate(requests):
        machine.engine.submit(f"r{number}", request, received[number])
        turn(machine)
    turn_until(lambda: all(one.finished for one in received), machine)
    assert [one.ids for one in received] == [served(Machine(), request).ids for request in requests]
    machine.require_empty()


def test_all_are_told_when_the_engine_cannot_go_on() -> None:
    """Clients would wait for ever on a machine that has failed."""
    machine = Machine()
    received = Received()
    machine.engine.submit("r", asked(prompt(40), 100), received)
    turn(machine)
    for on_event, event in machine.engine.fail_all("out of order"):
        on_event(event)
    assert received.bad == [Failed("out of order")]


def test_stages_follow_one_another() -> None:
    """What is shown of a request's time would be in another order than it happened."""
    machine = Machine()
    served(machine, asked(prompt(40), 3, GREEDY))
    (stages,) = machine.engine.stages
    assert (stages.leg, stages.prompt_tokens, stages.output_tokens, stages.evictions) == ("whole", 40, 3, 0)
    assert stages.started_s is not None
    assert stages.first_token_s is not None
    assert stages.last_s is not None
    assert stages.arrived_s <= stages.started_s <= stages.first_token_s <= stages.last_s
    assert TINY.context_tokens == machine.engine.facts().context_tokens > BLOCK


def test_the_first_token_tells_how_long_its_prompt_took() -> None:
    """A gateway would take the queue in front of the engine for the prefill phase, or know neither."""
    machine = Machine()
    received = served(machine, asked(prompt(40), 3, GREEDY))
    (stages,) = machine.engine.stages
    first, *later = [event.times for event in received.events if isinstance(event, Token)]
    assert first is not None
    assert stages.started_s == pytest.approx(stages.arrived_s + first.queued_s)
    assert stages.first_token_s == pytest.approx(stages.arrived_s + sum(first))
    assert later == [None, None]
