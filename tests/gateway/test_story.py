"""The story of a request: what a person reads who asks why it failed or took so long."""

from typing import Any

from gateways import TWICE, Rig, play, settle
from phasesplit.gateway.gateway import Keys
from phasesplit.gateway.limits import key_digest
from phasesplit.gateway.request_states import Event
from phasesplit.gateway.story import MOST_EVENTS, MOST_STORIES, Stories, Story


def told(page: Any, *fields: str) -> list[tuple[Any, ...]]:
    """Return some fields of the events of the first choice on a page."""
    return [tuple(event.get(field) for field in fields) for event in page["choices"][0]["events"]]


def test_a_lost_machine_is_in_the_story_with_its_reason() -> None:
    """Nobody could tell from outside which machine failed a request, when, and what was done about it."""

    async def scenario() -> None:
        async with Rig(TWICE) as rig:
            rig.workers["p1"].hold("prefill")
            rig.workers["p2"].hold("prefill")
            call = rig.complete(max_tokens=5)
            await settle()
            (choice,) = rig.gateway.in_flight.live
            assert choice.pair is not None
            first = choice.pair
            await rig.pass_time(0.5)
            rig.workers[first.prefill].die()
            await settle()
            page = (await rig.call(f"/debug/requests/{choice.name}").answer()).json
            assert told(page, "at_s", "event", "state", "attempt") == [
                (0.0, "arrived", "queued", 0),
                (0.0, "assigned", "prefilling", 1),
                (0.0, "prefill_started", "prefilling", 1),
                (0.5, "prefill_lost", "queued", 1),
                (0.5, "assigned", "prefilling", 2),
                (0.5, "prefill_started", "prefilling", 2),
            ]
            whys = [why for (why,) in told(page, "why")]
            assert whys[1] == f"prefill machine {first.prefill}, decode machine {first.decode}"
            assert first.prefill not in whys[4]
            assert whys[3]
            for name in ("p1", "p2"):
                rig.workers[name].go("prefill")
            await call.answer()
            for name in (call.json["id"], call.headers["x-request-id"], choice.name):
                page = (await rig.call(f"/debug/requests/{name}").answer()).json
                assert told(page, "event", "state")[-1] == ("last_token", "done"), rig.story()
                assert ("token", 3) in told(page, "event", "count"), rig.story()

    play(scenario())


def test_each_choice_has_its_story_and_strangers_are_unknown() -> None:
    """The events of several choices would be mixed, or a wrong name would look like a request without events."""

    async def scenario() -> None:
        async with Rig() as rig:
            call = await rig.complete(n=3).answer()
            page = (await rig.call(f"/debug/requests/{call.json['id']}").answer()).json
            number = call.headers["x-request-id"]
            assert [one["request"] for one in page["choices"]] == [f"{number}-{index}" for index in range(3)]
            assert (await rig.call("/debug/requests/nobody").answer()).status == 404

    play(scenario())


def test_stories_are_for_clients_with_a_key() -> None:
    """Anybody could read which machines serve whom."""

    async def scenario() -> None:
        async with Rig(keys=Keys(client=(key_digest("secret"),))) as rig:
            key = {"authorization": "Bearer secret"}
            assert (await rig.call("/debug/requests/x").answer()).status == 401
            assert (await rig.call("/debug/requests/x", headers=key).answer()).status == 404

    play(scenario())


def test_a_request_that_waits_says_for_what_once() -> None:
    """Each look at the queue would add a line, or the time without machines would have no reason."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["p"].hold("prefill")
            call = rig.complete()
            await settle()
            for worker in rig.workers.values():
                worker.die()
                worker.stall()
            await rig.pass_time(2.0)
            (choice,) = rig.gateway.in_flight.live
            waits = [entry for entry in choice.story.entries() if entry.event == "waits"]
            assert [entry.why for entry in waits] == ["no machine serves"], rig.story()
            choice.apply(Event.TOKEN)
            assert choice.story.entries()[-1].changed is False
            call.leave()
            await call.answer()

    play(scenario())


def test_stories_are_bounded() -> None:
    """A gateway that runs for months would keep every request, or one request with many events fill its memory."""
    story = Story("1-0")
    for second in range(3 * MOST_EVENTS):
        story.add(float(second), "kv_ready", "waiting", 1, why="x" * 10_000)
    entries = story.entries()
    assert len(entries) == MOST_EVENTS
    assert (entries[0].at_s, entries[-1].at_s, story.omitted) == (0.0, 3.0 * MOST_EVENTS - 1, 2 * MOST_EVENTS)
    assert max(len(entry.why) for entry in entries) == 300
    stories = Stories()
    for number in range(MOST_STORIES + 1):
        stories.keep(Story(f"n{number}-0"))
    assert stories.of("n0", ()) == []
    assert [story.name for story in stories.of("n1", ())] == ["n1-0"]
    assert [story.name for story in stories.of("chatcmpl-live", [Story("live-0")])] == ["live-0"]
