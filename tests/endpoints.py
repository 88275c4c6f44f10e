"""An endpoint of OpenAI's protocol with known delays, for what measures endpoints from outside."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import orjson
from aiohttp import web

DECODE_S, GAP_S = 0.001, 0.02


@dataclass
class Server:
    """Answers a prompt after DECODE_S a token, then a token each GAP_S; one prompt at a time, as engines do."""

    url: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    facts: dict[str, object] | None = None
    metrics: str = ""
    status: int = 200

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if self.status != 200:
            return web.Response(status=self.status, text="full")
        self.prompts.append(body["prompt"])
        answer = web.StreamResponse()
        await answer.prepare(request)
        async with self.lock:
            await asyncio.sleep(DECODE_S * len(body["prompt"]))
        for index in range(body["max_tokens"]):
            await asyncio.sleep(GAP_S if index else 0)
            chunk = {"choices": [{"text": "x", "token_ids": [1]}]}
            await answer.write(b"data: " + orjson.dumps(chunk) + b"\n\n")
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def about(self, request: web.Request) -> web.Response:
        if request.path == "/facts" and self.facts is not None:
            return web.json_response(self.facts)
        if request.path == "/metrics" and self.metrics:
            return web.Response(text=self.metrics)
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "m", "max_model_len": 600}]})
        raise web.HTTPNotFound

    async def start(self) -> web.AppRunner:
        self.lock = asyncio.Lock()
        app = web.Application()
        app.router.add_post("/v1/completions", self.complete)
        app.router.add_get("/{path:.*}", self.about)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner


@contextmanager
def running_server() -> Iterator[Server]:
    """Run a server on a thread of its own, for what measures it runs event loops of its own."""
    server, loop, ready = Server(), asyncio.new_event_loop(), threading.Event()

    def serve() -> None:
        runner = loop.run_until_complete(server.start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
