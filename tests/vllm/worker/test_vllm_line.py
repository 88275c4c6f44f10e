"""The line to vLLM's connector, the end of the process that speaks for the machine."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

from phasesplit.vllm.worker.state import ConnectorLine


def test_what_is_not_json_is_not_the_end(tmp_path: Path) -> None:
    """Wrong if after one report that was cut off the gateway gets no report of a machine that goes on computing."""
    received: list[dict[str, Any]] = []

    async def run() -> None:
        line = ConnectorLine(str(tmp_path / "line"), received.append)
        line.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connector:
            connector.connect(str(tmp_path / "line"))
            connector.send(b'{"gone": "kkkk')
            connector.send(json.dumps({"kv_left": "k"}).encode())
            async with asyncio.timeout(30):
                while not received:
                    await asyncio.sleep(0.01)
        line.close()

    asyncio.run(run())
    assert received == [{"kv_left": "k"}]
