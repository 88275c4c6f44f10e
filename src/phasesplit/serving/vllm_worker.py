"""The process of one vLLM worker: it starts vLLM's API server, speaks for it to the gateway, and ends with it."""

import os
from collections.abc import Callable
from typing import Any

import aiohttp
from starlette.routing import Route

from phasesplit.engine.server import speaker_app
from phasesplit.serving.listening import Listening
from phasesplit.serving.start_up import start_up_s
from phasesplit.serving.vllm_proxy import VllmProxy
from phasesplit.serving.vllm_server import VllmServer, VllmSettings
from phasesplit.serving.vllm_speaker import VllmSpeaker
from phasesplit.serving.worker import WorkerPlace, live


async def run_vllm_worker(
    settings: VllmSettings,
    place: WorkerPlace,
    *,
    ready: Callable[[dict[str, Any]], None],
    say: Callable[[str], None],
) -> int:
    """Run a vLLM worker until it is told to stop, and return the process's exit code; see `worker.run_worker`.

    Args:
        settings: What it is.
        place: Where it is.
        ready: Told once it can be reached: `url`, and its facts.
        say: Takes one line for the log.

    Raises:
        SpecError: vLLM does not start or does not serve, or the address cannot be had.
    """
    line = os.path.join(settings.sockets, f"{os.getpid()}.{settings.epoch}.line")
    server = VllmServer(settings, line)
    headers = {"Authorization": f"Bearer {place.key}"} if place.key else {}
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=server.headers) as session,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as peers,
    ):
        speaker = VllmSpeaker(settings, server, session, line)
        try:
            await server.start(session)
            listening = Listening(place.host, place.port)
            await speaker.start(place.url(listening))
            await speaker.warm_up()
            proxy = VllmProxy(speaker, peers)
            computing = [
                Route("/v1/completions", proxy, methods=["POST"]),
                Route("/handover", proxy.handover, methods=["POST"]),
            ]
            await listening.start(speaker_app(speaker, computing, key=place.key))
            speaker.start_up_s = round(start_up_s(), 3)
            return await live(speaker, place, listening, ready=ready, say=say)
        finally:
            speaker.close()
            await server.stop()
