"""What happens to a request when machines fail, clients leave, or reports cross: in every state."""

from typing import Any

import pytest

from gateways import TWICE, Call, Rig, play, settle
from phasesplit.gateway.leases import LeaseEnd
from phasesplit.gateway.limits import Limits
from phasesplit.gateway.request_states import Event, RequestState
from phasesplit.gateway.worker_client import LegError
from phasesplit.protocol.worker import PrefillTimes

HELD_IN = {
    RequestState.PREFILLING: ("prefill", ["prefill"]),
    RequestState.TRANSFERRING: ("prefill", ["send"]),
    RequestState.WAITING: ("decode", ["token 1"]),
    RequestState.DECODING: ("decode", ["token 2"]),
}
"""For each state with machines: which side to hold, and at which stages, to keep a request there."""
STATES = list(HELD_IN)


def hold(rig: Rig, state: RequestState) -> None:
    """Let requests come to a state, and stay there."""
    side, stages = HELD_IN[state]
    for name in (name for name, home in rig.pools if home == side):
        for stage in stages:
            rig.workers[name].hold(stage)


def go(rig: Rig) -> None:
    """Let all requests go on."""
    for worker in rig.workers.values():
        for _, stages in HELD_IN.values():
            for stage in stages:
                worker.go(stage)


def of(rig: Rig, side: str) -> Any:
    """Return the machine of one side that the one request is on."""
    pair = rig.gateway.in_flight.live[0].pair
    assert pair is not None
    return rig.workers[pair.prefill if side == "prefill" else pair.decode]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_frees_everything(state: RequestState, stream: bool) -> None:
    """An abort in some state would leave KV on a machine, or in the books."""

    async def scenario() -> None:
        async with Rig() as rig:
            hold(rig, state)
            call = rig.complete(stream=stream)
            await settle()
            assert rig.gateway.in_flight.live[0].progress.state is state
            call.leave()
            await call.answer()
            await settle()
            rig.require_nothing_held()
            assert rig.records[0]["outcome"] == "client_gone"
            go(rig)
            await settle()
            assert (await rig.complete().answer()).status == 200
            rig.require_nothing_held()

    play(scenario())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_machine_that_is_lost_before_content_is_a_pause(state: RequestState, side: str) -> None:
    """A lost machine would cost the client an error, other tokens, or the wait for some time-out."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            hold(rig, state)
            call = rig.complete(max_tokens=5)
            await settle()
            victim = of(rig, side)
            victim.die()
            await settle()
            go(rig)
            await call.answer()
            assert call.json["choices"][0]["text"] == "fghij", rig.story()
            assert call.json["usage"]["completion_tokens"] == 5, rig.story()
            goes_on_alone = side == "prefill" and state in (RequestState.WAITING, RequestState.DECODING)
            assert rig.records[0]["attempts"] == (1 if goes_on_alone else 2), rig.story()
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_headers_wait_for_content() -> None:
    """A failure after an early 200 could be neither tried again nor answered with its status."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].hold("prefill")
            call = rig.chat(stream=True)
            await settle()
            assert call.status is None
            rig.workers["p"].go("prefill")
            await call.answer()
            assert call.status == 200

    play(scenario())


def test_attempts_are_bounded() -> None:
    """A request that kills machines would be given one after the other."""

    async def scenario() -> None:
        async with Rig(TWICE, limits=Limits(attempts=2)) as rig:
            for name in ("p1", "p2"):
                rig.workers[name].faults["prefill"] = LegError("broken", Event.PREFILL_LOST)
            call = await rig.complete(stream=True).answer()
            assert (call.status, call.json["error"]["code"]) == (502, "worker_error")
            assert sum(len(rig.workers[name].seen) for name in ("p1", "p2")) == 2
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_failing_machine_is_avoided() -> None:
    """The second attempt would go to the machine that failed the first."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            rig.workers["p1"].faults["prefill"] = LegError("broken", Event.PREFILL_LOST)
            rig.workers["t1"].faults["accept"] = LegError("broken", Event.DECODE_LOST)
            for _ in range(6):
                call = rig.complete()
                await rig.pass_time(0.5)
                assert (await call.answer()).status == 200
            assert len(rig.workers["p1"].seen) <= 4
            rig.require_nothing_held()

    play(scenario())


def test_decode_machine_that_refuses_frees_the_prefill_machine_at_once() -> None:
    """The prefill machine's KV would stay until a time-out, because there is no connection left to close."""

    async def scenario() -> None:
        async with Rig(limits=Limits(attempts=1)) as rig:
            rig.workers["p"].hold("send")
            rig.workers["t"].hold("accept")
            call = rig.complete()
            await settle()
            assert rig.workers["p"].held
            rig.workers["t"].faults["kv"] = LegError("full", Event.WORKER_REFUSED, machine_status=503)
            rig.workers["t"].faults["accept"] = LegError("full", Event.WORKER_REFUSED, machine_status=503)
            rig.wire.end(next(iter(rig.workers["p"].held)), LegError("full", Event.WORKER_REFUSED))
            rig.workers["t"].go("accept")
            await call.answer()
            await settle()
            assert call.status == 502
            assert len(rig.workers["p"].aborted) == 1
            rig.require_nothing_held()

    play(scenario())


def test_refusal_of_the_input_reaches_the_client() -> None:
    """A request that a machine finds wrong would be tried on all others, and end as our failure."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            for worker in rig.workers.values():
                worker.faults["accept"] = LegError(
                    "top_k: no", Event.INPUT_REFUSED, machine_status=400, param="top_k", code="invalid_value"
                )
            call = await rig.complete(stream=True).answer()
            assert (call.status, call.json["error"]["param"]) == (400, "top_k")
            assert rig.records[0]["attempts"] == 1
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_failed_transfer_is_prefilled_again() -> None:
    """A token would be made from KV that did not arrive whole, or the client pay for it."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            for name in ("p1", "p2"):
                rig.workers[name].faults["send"] = LegError("torn", Event.TRANSFER_FAILED)
            call = rig.complete()
            await settle()
            assert rig.gateway.in_flight.live[0].progress.attempts == 2
            for name in ("p1", "p2"):
                rig.workers[name].faults.clear()
            await rig.pass_time(0.25)
            await call.answer()
            assert (call.status, rig.records[0]["attempts"], call.json["choices"][0]["text"]) == (200, 3, "fghi")
            assert rig.gateway.dispatcher.leases.ended[LeaseEnd.TRANSFER_FAILED] == 4  # of two attempts, on both sides
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_retry_waits_for_a_machine_to_come_back() -> None:
    """Where no machine is left, a restart would cost the client an error."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].hold("prefill")
            call = rig.complete()
            await settle()
            rig.workers["t"].die()
            rig.workers["p"].die()
            await settle()
            assert call.status is None
            assert rig.gateway.in_flight.queued == 1
            await rig.join("p", "prefill", epoch=2)
            await rig.join("t", "decode", epoch=2)
            await settle()
            await call.answer()
            assert (call.status, call.json["choices"][0]["text"]) == (200, "fghi")
            rig.require_nothing_held()

    play(scenario())


async def queue_of(rig: Rig, prompts: list[str]) -> list[Call]:
    """Return requests that have lost their machines, and wait for others; the youngest has lost them first."""
    rig.workers["p"].hold("prefill")
    calls = []
    for prompt in prompts:
        calls.append(rig.complete(prompt))
        await settle()
    for choice in reversed(rig.gateway.in_flight.live):
        choice.apply(Event.DECODE_LOST)
    await settle()
    for name in ("t", "p"):
        rig.workers[name].die()
        rig.workers[name].stall()  # else it answers when it is called again
    await rig.pass_time(0.5)
    assert rig.gateway.in_flight.queued == len(prompts)
    return calls


def waiting(rig: Rig) -> list[str]:
    """Return the prompts of the requests that wait, in the order in which they will be tried."""
    return [bytes(choice.spec.prompt_ids).decode() for choice in rig.gateway.in_flight.waiting]


def test_queue_is_oldest_first() -> None:
    """The oldest request would be passed by younger ones whenever the queue is looked at."""

    async def scenario() -> None:
        async with Rig() as rig:
            calls = await queue_of(rig, ["a", "bb", "ccc", "dddd"])
            assert waiting(rig) == ["a", "bb", "ccc", "dddd"]
            for _ in range(7):
                await rig.pass_time(0.25)
                assert waiting(rig) == ["a", "bb", "ccc", "dddd"]
            calls[1].leave()
            await settle()
            assert waiting(rig) == ["a", "ccc", "dddd"]
            await rig.join("p", "prefill", epoch=2)
            await settle()
            assert waiting(rig) == []
            served = rig.workers["p"].seen  # of its new life
            assert [len(body["prompt"]) for body in served] == [1, 3, 4]
            for call in (calls[0], calls[2], calls[3]):
                assert (await call.answer()).status == 200
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_younger_requests_do_not_ask_before_the_oldest_has_a_pair() -> None:
    """A short request would take the room that the oldest one waits for, again and again."""

    async def scenario() -> None:
        async with Rig() as rig:
            calls = await queue_of(rig, ["a", "bb", "ccc"])
            asked = rig.gateway.dispatcher.counts["no_capacity"]
            rig.gateway.in_flight.retry_queued()
            assert rig.gateway.dispatcher.counts["no_capacity"] == asked + 1
            for call in calls:
                call.leave()
                await call.answer()

    play(scenario())


@pytest.mark.parametrize("state", [RequestState.PREFILLING, RequestState.DECODING])
def test_deadlines_end_requests(state: RequestState) -> None:
    """A request whose machines are alive but do nothing would wait for ever."""

    async def scenario() -> None:
        async with Rig(limits=Limits(first_token_s=5.0, request_s=20.0)) as rig:
            hold(rig, state)
            call = rig.complete()
            await settle()
            await rig.pass_time(4.5)
            assert call.status is None
            await rig.pass_time(1.0 if state is RequestState.PREFILLING else 16.0)
            await call.answer()
            assert call.status == 502
            await settle()
            rig.require_nothing_held()

    play(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_stalled_decode_machine_is_given_up(stream: bool) -> None:
    """A machine that sends heartbeats and no tokens would hold its requests until their deadline."""

    async def scenario() -> None:
        async with Rig(TWICE, limits=Limits(idle_s=2.0)) as rig:
            hold(rig, RequestState.DECODING)
            call = rig.complete(stream=stream)
            await settle()
            stalled = of(rig, "decode")
            await rig.pass_time(2.0)
            assert not call.done
            await rig.pass_time(0.5)
            assert stalled.given_up["token 2"] == 1
            go(rig)
            await call.answer()
            assert (call.text if stream else call.json["choices"][0]["text"]) == "fghi"
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_silent_prefill_machine_costs_a_pause() -> None:
    """A machine that sends heartbeats and computes no prompt would cost its requests their whole deadline."""

    async def scenario() -> None:
        async with Rig(TWICE, limits=Limits(attempt_s=2.0)) as rig:
            rig.workers["p1"].hold("prefill")
            rig.workers["p2"].hold("prefill")
            call = rig.complete()
            await settle()
            silent = of(rig, "prefill")
            await rig.pass_time(2.0)
            assert silent.given_up["prefill"] == 0
            await rig.pass_time(1.0)
            assert silent.given_up["prefill"] == 1
            other = of(rig, "prefill")
            assert other is not silent
            other.go("prefill")
            await call.answer()
            assert (call.status, rig.gateway.meters.retries) == (200, 1)
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_prompts_wait_as_long_as_their_machine_gives_tokens() -> None:
    """A prompt in a long queue would lose its place to a machine that is well, again and again."""

    async def scenario() -> None:
        async with Rig(limits=Limits(attempt_s=2.0)) as rig:
            rig.workers["p"].hold("prefill")
            waits = rig.complete()
            await settle()
            for _ in range(4):
                await rig.pass_time(1.5)
                rig.gateway.in_flight.last_token_s["p"] = rig.clock.now_s()
            rig.workers["p"].go("prefill")
            await waits.answer()
            assert (waits.status, rig.gateway.meters.retries) == (200, 0)

    play(scenario())


def test_first_tokens_of_others_count_as_a_sign_of_life() -> None:
    """The gateway would not know that a machine works, and take its queue away from it."""

    async def scenario() -> None:
        async with Rig() as rig:
            await rig.pass_time(3.0)
            call = await rig.complete().answer()
            assert call.status == 200
            assert rig.gateway.in_flight.last_token_s == {"p": rig.clock.now_s(), "t": rig.clock.now_s()}

    play(scenario())


def test_the_prompts_own_time_is_that_of_its_machine() -> None:
    """The queue's time would be null or wrong wherever the report that a prompt has begun comes late."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].hold("prefill")
            call = rig.complete()
            await settle()
            choice = rig.gateway.in_flight.live[0]
            choice.stages.prefill_started_s = None  # the report was lost
            await rig.pass_time(1.0)
            choice.prefill_took(PrefillTimes(queued_s=0.1, prefill_s=0.75), 1)
            assert choice.stages.prefill_started_s == pytest.approx(choice.age_s - 0.75)
            choice.prefill_took(PrefillTimes(queued_s=0.1, prefill_s=500.0), 1)
            assert choice.stages.prefill_started_s == choice.stages.assigned_s
            choice.prefill_took(PrefillTimes(queued_s=0.1, prefill_s=0.0), 2)  # of another attempt
            assert choice.stages.prefill_started_s == choice.stages.assigned_s
            rig.workers["p"].go("prefill")
            await call.answer()

    play(scenario())


def test_leases_live_through_a_long_queue() -> None:
    """A request that waits longer than a lease lives would lose its KV though its machines are well."""

    async def scenario() -> None:
        async with Rig(limits=Limits(lease_s=3.0, attempt_s=100.0, first_token_s=100.0)) as rig:
            hold(rig, RequestState.PREFILLING)
            call = rig.complete()
            await settle()
            await rig.pass_time(12.0)
            go(rig)
            await call.answer()
            assert call.status == 200
            assert rig.gateway.dispatcher.leases.ended == {LeaseEnd.COMPLETED: 2}

    play(scenario())


def test_machines_that_disagree_are_not_believed() -> None:
    """The client would read a text whose continuation belongs to another first token."""

    async def scenario() -> None:
        async with Rig(limits=Limits(attempts=1)) as rig:
            rig.workers["p"].hold("send")
            call = rig.complete()
            await settle()
            rig.wire.end(next(iter(rig.workers["p"].held)), ord("z"))
            await settle()
            await call.answer()
            assert (call.status, call.json["error"]["code"]) == (502, "transfer_error")
            rig.workers["p"].go("send")
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_tokens_that_the_model_does_not_have_are_refused() -> None:
    """A broken machine would crash the gateway, or be believed."""

    async def scenario() -> None:
        async with Rig(rule=lambda _, place: 97 + 1000 * place, limits=Limits(attempts=1)) as rig:
            call = await rig.complete().answer()
            assert (call.status, call.json["error"]["code"]) == (502, "worker_error")
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_record_that_cannot_be_written_costs_nobody_an_answer() -> None:
    """A full disk would leave every client without the end of its answer."""

    def full(_: object) -> None:
        raise OSError("no space left")

    async def scenario() -> None:
        async with Rig(records=full) as rig:
            assert (await rig.complete().answer()).status == 200

    play(scenario())


def test_decode_machine_may_be_first() -> None:
    """A first token that the decode machine tells before the prefill machine has answered would be doubled, or lost."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].hold("prefill")
            call = rig.complete(stream=True, logprobs=0, echo=True)
            plain = rig.complete(stream=True)
            await settle()
            for key in list(rig.workers["p"].held):
                rig.wire.end(key, ord("f"))
            await settle()
            assert call.status is None  # the prompt's log-probabilities come with the prefill machine's answer
            assert plain.text == "fghi"
            rig.workers["p"].go("prefill")
            await call.answer()
            await plain.answer()
            assert (call.text, call.events[-1]) == ("hellofghi", "[DONE]")
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_late_and_foreign_reports_are_absorbed() -> None:
    """A report about a request that has ended, twice or was never there, would break the gateway."""

    async def scenario() -> None:
        async with Rig() as rig:
            await rig.complete().answer()
            key = rig.workers["p"].seen[0]["kv_transfer_params"]["key"]
            for report in (
                {"kv_ready": key},
                {"kv_ready": "no.1"},
                {"prefill_started": key},
                {"gone": key, "why": "x"},
            ):
                rig.workers["t"].report(report)
                rig.workers["t"].report(report)
            await settle()
            assert (await rig.complete().answer()).status == 200
            assert rig.gateway.meters.absorbed_events["kv_ready"] >= 4

    play(scenario())


def test_kv_that_a_machine_drops_is_prefilled_again() -> None:
    """A request whose KV was given up on the prefill side would wait for it."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            hold(rig, RequestState.TRANSFERRING)
            call = rig.complete()
            await settle()
            prompt = of(rig, "prefill")
            prompt.report({"gone": next(iter(prompt.held)), "why": "evicted"})
            await settle()
            go(rig)
            await call.answer()
            assert (call.status, rig.records[0]["attempts"]) == (200, 2)
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_abort_storm_leaves_nothing_and_serves_on() -> None:
    """Hundreds of clients that leave at once, in every state, would leave KV behind or stop those that stay."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            stayed = []
            for state in STATES:
                hold(rig, state)
                calls = [rig.complete("x" * (1 + place % 40), stream=place % 2 == 0) for place in range(50)]
                await settle()
                stayed.append(calls.pop())
                for call in calls:
                    call.leave()
                for call in calls:
                    await call.answer()
                go(rig)
                await settle()
            for call in stayed:
                assert (await call.answer()).status == 200
            ended = rig.gateway.meters.outcomes
            assert ended == {"client_gone": 4 * 49, "completed": 4}
            rig.require_nothing_held()

    play(scenario())


def test_one_failed_choice_ends_the_others() -> None:
    """The other choices of a failed request would go on for nobody."""

    async def scenario() -> None:
        async with Rig(limits=Limits(attempts=1)) as rig:
            rig.workers["t"].hold("token 2")
            call = rig.complete(["a", "ab"], stream=True)
            await settle()
            rig.gateway.in_flight.live[0].apply(Event.DECODE_LOST)
            await call.answer()
            assert "error" in call.events[-1]
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_record_of_a_finished_request() -> None:
    """Whoever compares a plan with what happened would miss an instant, or find them out of order."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].prefill_s, rig.workers["t"].decode_s = 1.0, 0.5
            call = rig.complete(max_tokens=3)
            await settle()
            for _ in range(3):
                await rig.pass_time(1.0, step_s=0.25)
            await call.answer()
            (record,) = rig.records
            assert (record["outcome"], record["prefill_machine"], record["decode_machine"]) == ("completed", "p", "t")
            assert (record["prompt_tokens"], record["output_tokens"]) == (5, 3)
            names = ["assigned_s", "prefill_started_s", "first_token_s", "kv_ready_s", "second_token_s", "last_token_s"]
            assert [record[name] for name in names] == [0.0, 0.0, 1.0, 1.0, 1.5, 2.0]
            assert record["longest_gap_s"] == 0.5

    play(scenario())
