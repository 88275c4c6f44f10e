"""Pages for whoever runs the cluster: machines that join, pools, leases, requests, health."""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from phasesplit.errors import GatewayError, RequestError
from phasesplit.gateway import metrics
from phasesplit.gateway.body import bounded_body
from phasesplit.gateway.gateway import Gateway
from phasesplit.gateway.keys import bearer_key, key_accepted
from phasesplit.protocol.asgi import ClientGoneError, JsonAnswer
from phasesplit.protocol.bodies import json_object, typed_field
from phasesplit.protocol.errors import error_answer, wrong_key
from phasesplit.protocol.roles import is_loopback

Page = Callable[[Request], Awaitable[ASGIApp]]


class AdminPages:
    """The pages of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        """Make them.

        Args:
            gateway: The gateway.
        """
        self._gateway = gateway

    async def health(self, _: Request) -> JsonAnswer:
        """Say that the process lives."""
        return JsonAnswer(200, {"status": "ok"})

    async def ready(self, _: Request) -> JsonAnswer:
        """Say whether a request would find machines for both phases."""
        lacks, degraded = self._gateway.lacks, list(self._gateway.dispatcher.degraded)
        return JsonAnswer(503 if lacks else 200, {"ready": not lacks, "why": lacks or None, "degraded": degraded})

    async def metrics(self, _: Request) -> Response:
        """Show what Prometheus reads."""
        return Response(metrics.exposition(self._gateway.in_flight), headers={"content-type": metrics.CONTENT_TYPE})

    async def kv(self, request: Request) -> JsonAnswer:
        """List all KV leases."""
        self._gateway.demand_client(request.headers.get("authorization"))
        leases, now_s = self._gateway.dispatcher.leases, self._gateway.clock.now_s()
        ended = {str(reason): count for reason, count in leases.ended.items()}
        return JsonAnswer(200, {"leases": leases.listed(now_s), "blocks": leases.machines(), "ended": ended})

    async def requests(self, request: Request) -> JsonAnswer:
        """List all choices that are served now."""
        self._gateway.demand_client(request.headers.get("authorization"))
        return JsonAnswer(200, {
            "requests": [
                {
                    "request": choice.name,
                    "state": choice.progress.state,
                    "attempts": choice.progress.attempts,
                    "has_content": choice.progress.sent,
                    "age_s": round(choice.age_s, 3),
                    "prompt_tokens": len(choice.order.prompt_ids),
                    "output_tokens": len(choice.output.ids),
                    "prompt_machine": choice.pair.prompt if choice.pair else None,
                    "token_machine": choice.pair.token if choice.pair else None,
                }
                for choice in self._gateway.in_flight.live
            ]
        })  # fmt: skip

    async def story(self, request: Request) -> JsonAnswer:
        """Tell what has happened to one request, served now or not long ago, in order."""
        self._gateway.demand_client(request.headers.get("authorization"))
        name = request.path_params["request"]
        stories = self._gateway.in_flight.story(name)
        if not stories:
            raise RequestError(f"request {name[:80]}: it is not served now, and not among the last ones", status=404)
        return JsonAnswer(200, {"choices": [story.shown() for story in stories]})

    async def pools(self, request: Request) -> JsonAnswer:
        """Show all machines and the moves between pools."""
        self._demand_admin(request)
        dispatcher, now_s = self._gateway.dispatcher, self._gateway.clock.now_s()
        called = {machine.name: machine for machine in dispatcher.registry.connected()}
        return JsonAnswer(200, {
            "machines": [
                view._asdict()
                | {
                    "silent_s": round(now_s - view.heard_s, 3),
                    "url": called[view.name].url if view.name in called else None,
                    "facts": dict(called[view.name].facts) if view.name in called else None,
                }
                for view in dispatcher.pools(now_s)
            ],
            "moves": dispatcher.moves(),
            "degraded": list(dispatcher.degraded),
            "counts": dict(dispatcher.counts),
        })  # fmt: skip

    async def change_pool(self, request: Request) -> JsonAnswer:
        """Give a machine another home, or let it drain or serve again."""
        self._demand_admin(request)
        order = await self._object(request)
        dispatcher, now_s = self._gateway.dispatcher, self._gateway.clock.now_s()
        name = typed_field(order, "machine", str)
        if "drain" in order:
            (dispatcher.drain if typed_field(order, "drain", bool) else dispatcher.undrain)(name, now_s)
        else:
            dispatcher.set_home(name, typed_field(order, "home", str), typed_field(order, "epoch", int), now_s)
        return await self.pools(request)

    async def join(self, request: Request) -> JsonAnswer:
        """Let a machine join."""
        join = self._gateway.keys.join
        if join:
            if not key_accepted(bearer_key(request.headers.get("authorization")), join):
                raise wrong_key()
        elif request.client is None or not is_loopback(request.client.host):
            raise RequestError("machines of other hosts need a join key, and this gateway has none", status=403)
        announced = await self._object(request)
        machine = await self._gateway.workers.join(typed_field(announced, "url", str), announced.get("facts"))
        return JsonAnswer(200, {"name": machine.name, "epoch": machine.facts["epoch"]})

    def _demand_admin(self, request: Request) -> None:
        admin = self._gateway.keys.admin
        if not admin:
            raise RequestError("this gateway has no admin key, so nobody may see or change pools", status=403)
        if not key_accepted(bearer_key(request.headers.get("authorization")), admin):
            raise wrong_key()

    async def _object(self, request: Request) -> dict[str, Any]:
        return json_object(await bounded_body(request.scope, request.receive, self._gateway.limits))


def guarded(page: Page) -> Page:
    """Return a page whose errors are answered in OpenAI's shape."""

    async def answered(request: Request) -> ASGIApp:
        try:
            return await page(request)
        except ClientGoneError:
            return Response(status_code=499)
        except GatewayError as error:
            answer = error_answer(error)
            return JsonAnswer(answer.status, answer.body, answer.headers)

    return answered
