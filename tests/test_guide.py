"""The commands of docs/guide, typed one after the other into an empty folder: on a tiny model, and for shorter times.

A block is run when its fence says so: `sh run`; `sh serve` in the background, until `sh stop` or the page's end.
`yaml NAME` and `csv NAME` are files that the reader is told to write.
"""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from waiting import eventually

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs" / "guide").glob("*.md"))
BLOCK = re.compile(r"^```(\S*)[ ]?(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
START_S, STOP_S, RUN_S = 100.0, 40.0, 110.0

SMALLER = (
    (r"127\.0\.0\.1:8080", "127.0.0.1:{port}"),
    (r"phasesplit serve ", "phasesplit serve --model tiny --port {port} "),
    (r"^model: default", "model: tiny"),
    (r'"model": "smollm2-135m-instruct"', '"model": "tiny"'),
    (r"phasesplit profile engine --budget 30s", "phasesplit profile engine --model tiny --budget 2s"),
    (r"(phasesplit replay .*) --duration 30", r"\1 --token-ids 0:300 --duration 3"),
    (r"(phasesplit verify .*) --rate 0.7 --duration 30", r"\1 --rate 2 --duration 3"),
    (r"phasesplit doctor$", "phasesplit doctor --json > doctor.json || test -s doctor.json"),
    (r" --duration 120\b", " --duration 20"),
)
"""What is typed otherwise than the page says, and how; {port} is a free one. Where 8080 is taken, doctor says so."""
MADE = ("this.json", "this.yaml", "report.html", "mine.csv.gz", "faster.csv", "cluster.yaml", "page.html", "mine.json")


class Block(NamedTuple):
    """A fenced block: language, what else the fence says, and its text."""

    language: str
    mark: str
    text: str


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [Block(*found) for found in BLOCK.findall(page)]


def smaller(text: str, port: int) -> str:
    """Return a block's text as it is typed here."""
    for pattern, instead in SMALLER:
        text = re.sub(pattern, instead.replace("{port}", str(port)), text, flags=re.MULTILINE)
    return text


class Terminal:
    """A shell in a folder, and perhaps a cluster that runs in another one."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port = folder, port
        self._serving: subprocess.Popen[bytes] | None = None
        self._before = f'export PATH="{Path(sys.executable).parent}:$PATH"\nset -euo pipefail\n'

    def run(self, text: str) -> None:
        """Type commands, and see that all of them work."""
        done = subprocess.run(
            ["/bin/bash", "-c", self._before + text], cwd=self.folder, capture_output=True, text=True, timeout=RUN_S
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr

    def serve(self, text: str) -> None:
        """Start a cluster, and wait until it serves."""
        log = self.folder / "serve.log"
        with log.open("w") as file:
            self._serving = subprocess.Popen(
                ["/bin/bash", "-c", f"{self._before}exec {text}"], cwd=self.folder, stdout=file, stderr=file
            )
        eventually(
            lambda: "(ready in" in log.read_text() or self._serving.poll() is not None,
            within_s=START_S,
            why=log.read_text,
        )
        assert self._serving.poll() is None, log.read_text()

    def stop(self) -> None:
        """Press Ctrl-C where the cluster runs."""
        if self._serving is not None:
            self._serving.send_signal(signal.SIGINT)
            assert self._serving.wait(STOP_S) == 0
            self._serving = None

    def kill(self) -> None:
        """End the cluster in any case."""
        if self._serving is not None:
            self._serving.kill()
            self._serving.wait()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Give a shell in an empty folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = Terminal(tmp_path, port)
    yield made
    made.kill()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "limits"], ids=lambda page: page.stem)
def test_the_commands_of_the_page_work(page: Path, terminal: Terminal) -> None:
    """A newcomer who types what the page says would get an error, or a file that it speaks of would not be there."""
    actions: dict[str, Callable[[str], None]] = {
        "run": terminal.run,
        "serve": terminal.serve,
        "stop": lambda _text: terminal.stop(),
    }
    for block in blocks(page.read_text(encoding="utf-8")):
        text = smaller(block.text, terminal.port)
        if block.language == "sh":
            actions[block.mark](text)
            for name in MADE:
                assert name not in text or (terminal.folder / name).stat().st_size > 0
        elif block.mark:
            (terminal.folder / block.mark).write_text(text)
    terminal.stop()


def test_the_marks_are_found() -> None:
    """The test above would run nothing, and pass."""
    tutorial = blocks((ROOT / "docs" / "guide" / "tutorial.md").read_text(encoding="utf-8"))
    marks = [block.mark for block in tutorial if block.language == "sh"]
    assert marks.count("run") >= 8
    assert marks.index("serve") < marks.index("stop")
    typed = "".join(block.text for block in tutorial if block.language == "sh")
    for command in ("doctor", "serve", "replay", "top", "replay-decisions", "profile", "plan", "verify"):
        assert f"phasesplit {command} " in typed or f"phasesplit {command}\n" in typed


def test_every_change_is_of_use() -> None:
    """A command would run as long as the page says, because the page says it otherwise now."""
    pages = "".join(block.text for page in PAGES for block in blocks(page.read_text(encoding="utf-8")))
    for pattern, _ in SMALLER:
        assert re.search(pattern, pages, re.MULTILINE), pattern


def test_a_command_that_fails_is_seen(terminal: Terminal) -> None:
    """A page with a wrong command in the middle of a block would pass."""
    with pytest.raises(AssertionError, match="no such file"):
        terminal.run("phasesplit trace inspect no-such-workload\necho done\n")
