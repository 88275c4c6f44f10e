"""The life of a chat as ARCHITECTURE.md tells it, held against a cluster that serves one."""

import json
import os
import re
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from chaos.clusters import cluster
from waiting import eventually

pytestmark = pytest.mark.timeout(240)

TRACED = Path(__file__).parent / "traced"
STEP = re.compile(
    r"^\d+\. \*\*(?P<process>gateway|prefill|decode)\*\* `(?P<file>[\w/]+\.py)` `(?P<function>[\w.]+)`", re.M
)
MOST_FILES = 14
"""Of one process, that a reader opens to follow one request."""
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "abc abc"}], "max_tokens": 6, "stream": True}


class Step(NamedTuple):
    process: str
    file: str
    function: str


def steps(repository: Path) -> list[Step]:
    """Return the steps of the page, in order."""
    text = (repository / "ARCHITECTURE.md").read_text(encoding="utf-8")
    life = text.partition("## The life of a chat")[2].partition("\n## ")[0]
    return [Step(*match.group("process", "file", "function")) for match in STEP.finditer(life)]


def ask(url: str) -> str:
    """Return the stream of one chat."""
    request = urllib.request.Request(  # noqa: S310 - our own process
        f"{url}/v1/chat/completions", json.dumps(CHAT).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - our own process
        return str(answer.read().decode())


def process_of(command: list[str]) -> str:
    """Return which process of a cluster a command line starts."""
    if "worker" not in command:
        return "gateway"
    return command[command.index("--name") + 1].partition("-")[0]


@pytest.fixture(scope="module")
def first_s(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Return for each process when it first called each function, while one chat was served."""
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASESPLIT_TRACED", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TRACED), *filter(None, [os.environ.get("PYTHONPATH")])]))
        with cluster() as running:
            assert "[DONE]" in ask(running.url)
            (folder / "go").touch()
            eventually(lambda: len(list(folder.glob("*.on"))) == 3)
            assert "[DONE]" in ask(running.url)
            (folder / "go").unlink()
            eventually(lambda: len(list(folder.glob("*.json"))) == 3)
    traces = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    return {process_of(trace["argv"]): trace["first_s"] for trace in traces}


def test_every_step_happens_where_the_page_says(repository: Path, first_s: dict[str, dict[str, float]]) -> None:
    """A reader who follows the page would look for a step in a file or a function that does not take it."""
    told = steps(repository)
    assert len(told) > 20
    assert [step for step in told if f"{step.file}:{step.function}" not in first_s[step.process]] == []


@pytest.mark.parametrize("process", ["gateway", "prefill", "decode"])
def test_steps_of_a_process_come_in_their_order(
    repository: Path, first_s: dict[str, dict[str, float]], process: str
) -> None:
    """The page would tell a request's life in another order than it happens."""
    mine = [step for step in steps(repository) if step.process == process]
    called_s = first_s[process]
    late = [
        (before, after)
        for before, after in pairwise(mine)
        if called_s[f"{before.file}:{before.function}"] > called_s[f"{after.file}:{after.function}"]
    ]
    assert late == []


@pytest.mark.parametrize("process", ["gateway", "prefill", "decode"])
def test_a_reader_opens_about_a_dozen_files(repository: Path, process: str) -> None:
    """The path of one request through one process would be too long to follow."""
    assert len({step.file for step in steps(repository) if step.process == process}) <= MOST_FILES
