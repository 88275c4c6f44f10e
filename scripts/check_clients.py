"""Does the cluster serve clients that other people wrote, as they come? Run by `make test-clients`.

Starts `phasesplit serve` with the tiny model (or talks to `--url`), and lets plain curl, the openai package and the
load generator aiperf loose on it, the latter two from an environment of their own. Exit code 1, and what was wrong,
where something is.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S, RUN_S = 120.0, 180.0
OPENAI = """
import sys
from openai import BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=sys.argv[1] + "/v1", api_key="none")
model = client.models.list().data[0].id
chat = [{"role": "user", "content": "Hello!"}]
whole = client.chat.completions.create(model=model, messages=chat, max_tokens=12, seed=3, logprobs=True, top_logprobs=2)
choice = whole.choices[0]
assert whole.usage.completion_tokens == len(choice.logprobs.content) <= 12, whole
stream = client.chat.completions.create(
    model=model, messages=chat, max_tokens=12, seed=3, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == choice.message.content, (text, choice.message.content)
assert chunks[-1].usage == whole.usage
two = client.completions.create(model=model, prompt=["a b c", "d"], max_tokens=4, n=2, temperature=0)
assert [one.index for one in two.choices] == [0, 1, 2, 3]
assert two.choices[0].text == two.choices[1].text
for wrong, error in (({"model": "none"}, NotFoundError), ({"max_tokens": 10**9}, BadRequestError)):
    try:
        client.chat.completions.create(**({"model": model, "messages": chat} | wrong))
    except error:
        continue
    raise AssertionError(f"{wrong} was taken")
print(f"openai {__import__('openai').__version__}: whole, streamed, n, logprobs, errors")
"""


@contextmanager
def cluster() -> Iterator[str]:
    """Run a cluster, and give its URL."""
    command = [sys.executable, "-m", "phasesplit", "serve", "--model", "tiny", "--port", "0"]
    with tempfile.TemporaryFile("w+") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:  # noqa: S603
        try:
            deadline_s, found = time.monotonic() + START_S, None
            while found is None:
                output.seek(0)
                found = re.search(r"on (http://\S+) \(ready", output.read())
                if process.poll() is not None or time.monotonic() > deadline_s:
                    output.seek(0)
                    raise SystemExit(f"the cluster did not start:\n{output.read()}")
                time.sleep(0.1)
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


def ran(*command: str) -> str:
    """Run a client, and return what it printed; stop where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False)  # noqa: S603
    if done.returncode:
        raise SystemExit(
            f"{command[0]} failed with exit code {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done.stdout


def check_curl(url: str) -> str:
    """Return what curl got, once it is right."""
    body = json.dumps(
        {"model": "tiny", "stream": True, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
    )
    text = ran("curl", "-sSN", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body)
    lines = [line for line in text.splitlines() if line]
    if lines[-1] != "data: [DONE]" or not all(line.startswith("data: ") for line in lines):
        raise SystemExit(f"curl got:\n{text}")
    return f"curl: {len(lines) - 1} chunks"


def check_openai(url: str, environment: Path) -> str:
    """Return what the openai package did, once all of it was right."""
    return ran(str(environment / "bin" / "python"), "-c", OPENAI, url).strip()


def check_aiperf(url: str, environment: Path) -> str:
    """Return what the load generator measured, once no request of it has failed."""
    with tempfile.TemporaryDirectory() as out:
        tokenizer = str(_tokenizer(Path(out) / "tokenizer"))
        ran(
            str(environment / "bin" / "aiperf"), "profile", "--model", "tiny", "--url", url, "--endpoint-type", "chat",
            "--streaming", "--request-count", "40", "--concurrency", "4", "--synthetic-input-tokens-mean", "50",
            "--output-tokens-mean", "20", "--tokenizer", tokenizer, "--artifact-dir", out, "--ui", "none",
        )  # fmt: skip
        found = sorted(Path(out).rglob("profile_export_aiperf.json"))
        if not found:
            raise SystemExit(f"aiperf left no result in {out}")
        result = json.loads(found[0].read_text())
        served, failed = result["request_count"]["avg"], (result.get("error_request_count") or {"avg": 0})["avg"]
        if served != 40 or failed:
            raise SystemExit(f"aiperf: {served} of 40 requests were served, {failed} failed")
        return f"aiperf: {served:.0f} requests, TTFT p50 {result['time_to_first_token']['p50']:.1f} ms"


def _tokenizer(folder: Path) -> Path:
    """Write a tokenizer that needs no network; it only has to make prompts."""
    folder.mkdir()
    words = {word: number for number, word in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz ,.;:'\n"])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    split = {"type": "Split", "pattern": {"String": ""}, "behavior": "Isolated", "invert": False}
    content = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
               "pre_tokenizer": split, "post_processor": None, "decoder": None, "model": model}  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def main() -> None:
    """Check them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environment", type=Path, default=Path(".venv-clients"), help="where openai and aiperf are")
    parser.add_argument("--url", help="a cluster that runs already")
    asked = parser.parse_args()
    if shutil.which("curl") is None:
        raise SystemExit("curl is not installed")

    def check(url: str) -> None:
        print(check_curl(url))
        print(check_openai(url, asked.environment))
        print(check_aiperf(url, asked.environment))

    if asked.url:
        check(asked.url)
        return
    with cluster() as url:
        check(url)


if __name__ == "__main__":
    main()
