"""Compare the replay client with a public load generator: same trace, same endpoint, whose delays are known.

Usage: python bench/clients.py AIPERF, the program `aiperf` of an environment of its own (pip install aiperf). The
endpoint answers every request with the first token after 80 ms and a further one every 20 ms, whatever the load.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import orjson
from aiohttp import web

from phasesplit.domain.request import Trace
from phasesplit.io.trace_writers import write_trace

FIRST_S, GAP_S = 0.080, 0.020
REQUESTS, APART_S, OUTPUT_TOKENS = 60, 0.15, 24
GOAL = 0.02


def main() -> None:
    """Print both clients' figures."""
    asyncio.run(compared(Path(sys.argv[1])))


async def compared(aiperf: Path) -> None:
    """Run both against one server."""
    draw = np.random.default_rng(0)
    trace = Trace.from_columns(
        "clients",
        np.arange(REQUESTS, dtype=np.float64) * APART_S,
        draw.integers(16, 256, REQUESTS).astype(np.int32),
        np.full(REQUESTS, OUTPUT_TOKENS, np.int32),
    )
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.jsonl"
        write_trace(path, trace, format="mooncake")
        own = json.loads(await output_of(sys.executable, "-m", "phasesplit", "replay", str(path), url, "--json"))
        arguments = {
            "--model": "fake",
            "--url": url,
            "--endpoint-type": "completions",
            "--input-file": str(texts(trace, Path(scratch) / "texts.jsonl")),
            "--custom-dataset-type": "single_turn",
            "--extra-inputs": f"max_tokens:{OUTPUT_TOKENS}",
            "--tokenizer": str(a_tokenizer(Path(scratch) / "tokenizer")),
            "--output-artifact-dir": str(Path(scratch) / "artifacts"),
            "--ui-type": "none",
        }
        flags = [text for pair in arguments.items() for text in pair]
        flags += ["--streaming", "--fixed-schedule", "--use-server-token-count"]
        await output_of(str(aiperf), "profile", *flags)
        (found,) = Path(scratch).rglob("profile_export_aiperf.json")
        theirs = json.loads(found.read_text())
    await runner.cleanup()
    tokens = trace.output_tokens.astype(np.float64)
    table(own, theirs, {"ttft": FIRST_S, "tpot": GAP_S, "e2e": float((FIRST_S + (tokens - 1) * GAP_S).mean())})


def texts(trace: Trace, path: Path) -> Path:
    """Write the requests as aiperf reads them: a text each, and when it is sent; the server looks at neither."""
    lines = [
        orjson.dumps({"text": "word " * int(tokens), "timestamp": round(1e3 * float(at_s))})
        for at_s, tokens in zip(trace.arrival_s, trace.prompt_tokens, strict=True)
    ]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def a_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with one token for each byte; the server counts tokens itself."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


def table(own: dict, theirs: dict, true_s: dict[str, float]) -> None:
    """Print mean TTFT, ITL and E2E of both, and what the server did."""
    names = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
    ours = {"ttft": own["ttft_s"]["mean"], "tpot": own["itl_s"]["mean"], "e2e": own["e2e_s"]["mean"]}
    print(f"{own['answered']} of {own['requests']} answered; aiperf: {theirs['request_count']['avg']:.0f}")
    print("| mean | server | phasesplit replay | aiperf | apart |\n|---|--:|--:|--:|--:|")
    for name, theirs_name in names.items():
        other_s = theirs[theirs_name]["avg"] / 1e3
        apart = ours[name] / other_s - 1
        mark = "" if abs(apart) <= GOAL else " (beyond 2 %)"
        values = " | ".join(f"{1e3 * value:.2f} ms" for value in (true_s[name], ours[name], other_s))
        print(f"| {name} | {values} | {apart:+.1%}{mark} |")


async def output_of(*command: str) -> str:
    """Return what a command prints; where it fails, end with what it said."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode:
        sys.exit(f"{command[0]}: exit code {process.returncode}\n{err.decode()[-2000:]}{out.decode()[-2000:]}")
    return out.decode()


async def answer(request: web.Request) -> web.StreamResponse:
    """Stream as many tokens as were asked for, at the known delays."""
    body = orjson.loads(await request.read())
    since_s = asyncio.get_running_loop().time()
    tokens = body.get("max_tokens") or body.get("max_completion_tokens") or 8
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for index in range(tokens):
        due_s = since_s + FIRST_S + index * GAP_S
        await asyncio.sleep(max(due_s - asyncio.get_running_loop().time(), 0))
        await response.write(event({"choices": [{"index": 0, "text": " one", "finish_reason": None}]}))
    used = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}
    await response.write(event({"choices": [], "usage": used}) + b"data: [DONE]\n\n")
    return response


async def models(_request: web.Request) -> web.Response:
    """Name the one model."""
    return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})


def event(chunk: dict) -> bytes:
    """Return a server-sent event."""
    return b"data: " + orjson.dumps({"id": "c", "object": "text_completion", "model": "fake", **chunk}) + b"\n\n"


if __name__ == "__main__":
    main()
