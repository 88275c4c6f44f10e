"""Machines that join, fall silent, come back, restart, and learn their pool."""

from typing import Any

import pytest

from gateways import SPLIT, Rig, play, settle
from phasesplit.errors import RequestError
from phasesplit.gateway.gateway import Keys
from phasesplit.gateway.limits import key_digest


def state_of(rig: Rig, name: str) -> str:
    """Return a machine's state."""
    return next(view.state for view in rig.gateway.dispatcher.pools(rig.clock.now_s()) if view.name == name)


def test_silent_machine_is_lost_and_comes_back() -> None:
    """A stalled machine would be given requests, or stay out for ever once it goes on."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].stall()
            await rig.pass_time(6.0)
            assert (state_of(rig, "p"), state_of(rig, "t")) == ("serving", "off")
            rig.workers["t"].wake()
            await rig.pass_time(2.0)
            assert state_of(rig, "t") == "serving"
            assert (await rig.complete().answer()).status == 200

    play(scenario())


def test_silent_machine_gives_up_its_requests() -> None:
    """A request on a stalled machine would wait for a time-out of its own."""

    async def scenario() -> None:
        async with Rig((*SPLIT, ("t2", "decode"))) as rig:
            for name in ("t", "t2"):
                rig.workers[name].hold("token 2")
            call = rig.complete()
            await settle()
            pair = rig.gateway.in_flight.live[0].pair
            assert pair is not None
            rig.workers[pair.decode].stall()
            await rig.pass_time(6.0)
            assert state_of(rig, pair.decode) == "off"
            for name in ("t", "t2"):
                rig.workers[name].go("token 2")
            await call.answer()
            assert (call.status, rig.records[0]["attempts"]) == (200, 2)
            await settle()
            rig.require_nothing_held()

    play(scenario())


def test_a_gateway_that_stood_still_gives_up_nothing() -> None:
    """A host that pauses for a while would lose all its machines at once, and every request with them."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].hold("token 2")
            call = rig.complete()
            await settle()
            rig.clock.stand_still(100.0)
            assert (state_of(rig, "p"), state_of(rig, "t")) == ("serving", "serving")
            await rig.pass_time(1.0)
            rig.workers["t"].go("token 2")
            await call.answer()
            assert (call.status, rig.records[0]["attempts"]) == (200, 1)
            rig.workers["t"].stall()
            await rig.pass_time(6.0)
            assert (state_of(rig, "p"), state_of(rig, "t")) == ("serving", "off")

    play(scenario())


def test_a_gateway_that_stands_still_again_and_again_finds_what_is_lost() -> None:
    """A machine that is gone would be given requests for as long as the gateway is overloaded."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].stall()
            for _ in range(8):
                rig.clock.stand_still(3.0)
                await rig.pass_time(0.25)
            assert (state_of(rig, "p"), state_of(rig, "t")) == ("serving", "off")

    play(scenario())


def test_restart_joins_with_a_new_epoch_and_an_old_life_cannot() -> None:
    """Orders and KV of a machine's last life would be taken for its new one's."""

    async def scenario() -> None:
        async with Rig() as rig:
            old = rig.workers["t"]
            await rig.join("t", "decode", epoch=2)
            await settle()
            assert (await rig.complete().answer()).status == 200
            assert not old.seen
            assert rig.workers["t"].seen[0]["kv_transfer_params"]["epoch"] == 2
            with pytest.raises(RequestError) as refused:
                await rig.gateway.workers.join("http://t", old.snapshot(home="decode", epoch=1))
            assert refused.value.status == 409

    play(scenario())


def test_announcing_twice_changes_nothing() -> None:
    """A machine that repeats its announcement would lose its requests."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].hold("token 2")
            call = rig.complete()
            await settle()
            await rig.gateway.workers.join("http://t", rig.workers["t"].snapshot(home="decode"))
            rig.workers["t"].go("token 2")
            await call.answer()
            assert (call.status, rig.records[0]["attempts"]) == (200, 1)

    play(scenario())


def test_other_kv_is_refused_with_the_reason() -> None:
    """KV of another model, or in another order, would be read as our own."""

    async def scenario() -> None:
        async with Rig() as rig:
            other = rig.worker("x")
            for layout, words in (
                (
                    {"model": "0123456789abcdef" * 4},
                    "in model: fake (weights 0123456789ab) against fake (weights 'fake');",
                ),
                ({"model": "fake", "block_tokens": 16}, "in block_tokens: 16 against None; start both machines with"),
            ):
                facts = other.snapshot(home="decode", layout=layout)
                call = await rig.call("/workers", {"url": "http://x", "facts": facts}).answer()
                assert (call.status, call.json["error"]["code"]) == (409, "layout_mismatch")
                assert words in call.json["error"]["message"]

    play(scenario())


_WRONG_CONTEXT = {"name": "x", "epoch": 1, "home": "decode", "capacity_blocks": 9, "context_tokens": "4096"}


def test_machines_that_no_kv_could_move_between_are_refused() -> None:
    """A cluster of two hosts would start, and every transfer fail, because one listens where only its host reaches."""
    here = {"boot_id": "here", "unix": None, "tcp": ["127.0.0.1", 1], "http": "http://127.0.0.1:2"}

    async def scenario() -> None:
        async with Rig() as rig:
            other = rig.worker("x")

            async def refused(home: str, **address: Any) -> str:
                facts = other.snapshot(home=home, address=here | address)
                call = await rig.call("/workers", {"url": "http://x", "facts": facts}).answer()
                return call.json["error"]["message"] if call.status == 409 else ""

            outward = {"tcp": ["10.0.0.2", 1], "http": "http://10.0.0.2:2"}
            said = await refused("decode", boot_id="there", **outward)
            assert "it is on another host than p, and p listens at 127.0.0.1" in said
            assert "start p with a --host that others reach" in said
            assert "and x listens at 127.0.0.1" in await refused("decode", boot_id="there")
            assert not await refused("unsplit", boot_id="there")
            assert not await refused("decode", boot_id="")

    play(scenario())


def test_machines_of_several_hosts_that_others_reach_join() -> None:
    """Clusters of several hosts could not be built at all."""

    async def scenario() -> None:
        async with Rig(()) as rig:

            async def join(name: str, host: str, **life: int) -> None:
                address = {"boot_id": name, "tcp": [host, 1], "http": f"http://{host}:2"}
                await rig.gateway.workers.join(
                    f"http://{name}", rig.worker(name, **life).snapshot(home="mixed", address=address)
                )

            await join("p", "10.0.0.1")
            await join("t", "10.0.0.2")
            with pytest.raises(RequestError, match=r"t listens at 127\.0\.0\.1, which only its own host reaches"):
                await join("t", "127.0.0.1", epoch=2)

    play(scenario())


@pytest.mark.parametrize(
    "facts", [{}, {"name": "x"}, {"name": "x", "epoch": "1", "home": "decode"}, [], "x", _WRONG_CONTEXT]
)
def test_wrong_facts_are_refused(facts: Any) -> None:
    """A machine that says nonsense would join, and fail later."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.worker("x")
            call = await rig.call("/workers", {"url": "http://x", "facts": facts}).answer()
            assert (call.status, call.json["error"]["type"]) == (400, "invalid_request_error")

    play(scenario())


def test_joining_needs_a_key_or_this_host() -> None:
    """Anybody on the network could add a machine, and read the prompts of others."""

    async def scenario() -> None:
        for keys, host, sent, status in (
            (Keys(), "127.0.0.1", {}, 200),
            (Keys(), "::1", {}, 200),
            (Keys(), "10.0.0.9", {}, 403),
            (Keys(), "elsewhere", {}, 403),
            (Keys(join=(key_digest("j"),)), "127.0.0.1", {}, 401),
            (Keys(join=(key_digest("j"),)), "10.0.0.9", {"Authorization": "Bearer j"}, 200),
        ):
            async with Rig(keys=keys) as rig:
                facts = rig.worker("x").snapshot(home="decode")
                call = rig.call("/workers", {"url": "http://x", "facts": facts}, headers=sent, host=host)
                assert (await call.answer()).status == status

    play(scenario())


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": ""}, 415),
        ({"Origin": "http://elsewhere.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "elsewhere.example"}, 403),
        ({"Host": "10.0.0.9:8000"}, 403),
        ({"Host": "[::1"}, 403),
        ({"Host": "[::1]:8000"}, 200),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
    ],
)
def test_a_web_page_cannot_join(sent: dict[str, str], status: int) -> None:
    """A page in a browser on this host would join as a machine, and get the prompts of all clients."""

    async def scenario() -> None:
        async with Rig() as rig:
            facts = rig.worker("x").snapshot(home="decode")
            call = await rig.call("/workers", {"url": "http://x", "facts": facts}, headers=sent).answer()
            assert call.status == status
            joined = {machine.name for machine in rig.gateway.dispatcher.registry.connected()}
            assert ("x" in joined) == (status == 200)

    play(scenario())


def test_machines_learn_their_pool() -> None:
    """A machine would not know its pool, or get it again at every tick."""

    async def scenario() -> None:
        async with Rig() as rig:
            await rig.pass_time(1.0)
            assert (rig.workers["p"].roles, rig.workers["t"].roles) == (["prefill"], ["decode"])

    play(scenario())


def test_kv_that_nobody_owns_is_dropped() -> None:
    """A machine that missed the end of a request would keep its KV for ever."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].held["old.1"] = 3
            await rig.pass_time(1.0)
            assert rig.workers["t"].aborted[0] == "old.1"
            rig.require_nothing_held()

    play(scenario())


def test_pools_page_needs_the_admin_key() -> None:
    """Anybody could see the machines, or move them."""

    async def scenario() -> None:
        async with Rig() as rig:
            assert (await rig.call("/admin/pools").answer()).status == 403
        async with Rig(keys=Keys(admin=(key_digest("a"),))) as rig:
            assert (await rig.call("/admin/pools").answer()).status == 401
            assert (await rig.call("/admin/pools", {"machine": "t"}).answer()).status == 401

    play(scenario())


def test_pools_page_shows_and_changes() -> None:
    """An operator could not see where machines are, move one, or be stopped by a stale epoch."""

    async def scenario() -> None:
        async with Rig((*SPLIT, ("t2", "decode")), keys=Keys(admin=(key_digest("a"),))) as rig:
            sent = {"Authorization": "Bearer a"}
            shown = (await rig.call("/admin/pools", headers=sent).answer()).json
            assert {one["name"]: one["pool"] for one in shown["machines"]} == {
                "p": "prefill",
                "t": "decode",
                "t2": "decode",
            }
            order = {"machine": "t2", "home": "prefill", "epoch": 1}
            stale = await rig.call("/admin/pools", order | {"epoch": 0}, headers=sent).answer()
            assert stale.status == 409
            assert (await rig.call("/admin/pools", order | {"machine": "x"}, headers=sent).answer()).status == 404
            assert (await rig.call("/admin/pools", order | {"home": 3}, headers=sent).answer()).status == 400
            await rig.pass_time(1.0)
            assert (await rig.call("/admin/pools", order, headers=sent).answer()).status == 200
            await rig.pass_time(1.0)
            assert rig.workers["t2"].roles == ["decode", "prefill"]
            drained = await rig.call("/admin/pools", {"machine": "t2", "drain": True}, headers=sent).answer()
            assert {one["name"]: one["state"] for one in drained.json["machines"]}["t2"] == "draining"

    play(scenario())


def test_debug_pages_show_a_request_and_its_leases() -> None:
    """A person who looks for stuck requests or leaked KV would see nothing."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].hold("token 1")
            rig.workers["p"].hold("send")
            call = rig.complete(stream=True)
            await settle()
            (shown,) = (await rig.call("/debug/requests").answer()).json["requests"]
            assert (shown["state"], shown["has_content"], shown["prefill_machine"]) == ("transferring", True, "p")
            leases = (await rig.call("/debug/kv").answer()).json
            assert {lease["machine"] for lease in leases["leases"]} == {"p", "t"}
            rig.workers["p"].go("send")
            rig.workers["t"].go("token 1")
            await call.answer()
            leases = (await rig.call("/debug/kv").answer()).json
            assert (leases["leases"], leases["ended"]) == ([], {"completed": 2})

    play(scenario())


def test_one_black_hole_does_not_slow_the_others() -> None:
    """A machine that takes requests and answers none would hold up those on healthy machines."""

    async def scenario() -> None:
        async with Rig((("p1", "prefill"), ("p2", "prefill"), ("t", "decode"))) as rig:
            rig.workers["p1"].hold("prefill")
            calls = [rig.complete() for _ in range(12)]
            await settle()
            stuck = len(rig.workers["p1"].seen)
            assert sum(call.done for call in calls) == 12 - stuck
            assert 0 < stuck < 12
            rig.workers["p1"].go("prefill")
            for call in calls:
                assert (await call.answer()).status == 200

    play(scenario())


def test_prompts_without_end_are_turned_away() -> None:
    """An overloaded cluster would queue without bound, or not say when to come back."""

    async def scenario() -> None:
        async with Rig(blocks=1_000_000, context_tokens=100_000) as rig:
            for worker in rig.workers.values():
                worker.hold("prefill")
            calls = [rig.complete("x" * 30_000) for _ in range(12)]
            await settle()
            refused = [call for call in calls if call.done]
            assert refused
            assert {call.status for call in refused} == {503}
            assert all(int(call.headers["retry-after"]) >= 1 for call in refused)
            for worker in rig.workers.values():
                worker.go("prefill")
            for call in calls:
                await call.answer()
            rig.require_nothing_held()

    play(scenario())


def test_degraded_cluster_says_so() -> None:
    """Everything would run on one side without anybody noticing."""

    async def scenario() -> None:
        async with Rig() as rig:
            rig.workers["t"].die()
            await settle()
            ready = (await rig.call("/ready").answer()).json
            assert (ready["ready"], len(ready["degraded"])) == (True, 1)
            call = await rig.complete().answer()
            assert call.status == 200
            assert rig.gateway.dispatcher.counts["degraded"] == 1
            assert b"phasesplit_degraded 1.0" in (await rig.call("/metrics").answer()).body

    play(scenario())


def test_restart_is_seen_without_an_announcement() -> None:
    """A machine that restarts where it was, and whose announcement is lost, would stay out."""

    async def scenario() -> None:
        async with Rig() as rig:
            worker = rig.workers["t"]
            worker.die()
            await settle()
            assert state_of(rig, "t") == "off"
            worker.is_dead, worker.epoch = False, 2
            await rig.pass_time(2.0)
            assert state_of(rig, "t") == "serving"
            assert (await rig.complete().answer()).status == 200
            assert worker.seen[0]["kv_transfer_params"]["epoch"] == 2

    play(scenario())
