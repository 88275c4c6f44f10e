"""Every command's help ends with examples, and they run: shorter, on a tiny model, against a cluster of our own."""

import inspect
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer

from endpoints import Server, running_server
from phasesplit import cli
from phasesplit.planner.study import reproduce_command
from planner.study.studies import made_up_findings
from waiting import eventually

pytestmark = pytest.mark.slow

TRACE = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i / 4},{40 + i},{4 + i % 3}\n" for i in range(8))
BURST_GPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,20,8,28,Conversation log\n"
QUESTION = "model: llama-3.1-8b\nmachines: [dgx-h100]\nworkload: trace.csv\nrate: 4\nduration: 10\nseeds: 1\n"
CLUSTER = "model: tiny\npools:\n  - {role: prefill, count: 1}\n  - {role: decode, count: 1}\nserve: {port: 0}\n"
FILES = {
    "trace.csv": TRACE,
    "BurstGPT_1.csv": BURST_GPT,
    "question.yaml": QUESTION,
    "cluster.yaml": CLUSTER,
    "join.key": "0123456789abcdef\n",
    "deployed.key": "0123456789abcdef\n",
}
SHORTER = {
    "plan": "--quick --seeds 1 --duration 5",
    "profile": "--budget 2s",
    "replay": "--duration 2 --clip 64:4",
    "verify": "--profile-time 2s --duration 2 --clip 64:4",
    "top": "--once",
    "simulate": "--duration 10",
    "trace resample": "--duration 20",
}
"""What is typed behind an example, so that it is quick; the last one of two equal options counts."""
OUTPUTS = {"-o", "--html", "--png", "--requests", "--write", "--machine"}
"""Options whose file has to be there afterwards."""
SERVER = re.compile(r"http://\d+\.\d+\.\d+\.\d+:8080")
START_S, STOP_S = 100.0, 40.0


class Example(NamedTuple):
    """One line of a command's help, and the command's name."""

    command: str
    words: list[str]


def commands(group: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and command of all commands, also those of groups."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def examples_of(help_text: str) -> list[str]:
    """Return the examples that a help ends with; without any, the list is empty."""
    last = inspect.cleandoc(help_text).replace("\b", "").rstrip().split("\n\n")[-1].strip()
    head, _, body = last.partition(":")
    if head not in ("Example", "Examples"):
        return []
    lines = re.sub(r"\\\n\s*", "", body).strip().splitlines()
    return [line.strip() for line in lines]


ALL = dict(commands(typer.main.get_command(cli.app)))
EXAMPLES = [
    Example(name, shlex.split(line)[1:]) for name, command in ALL.items() for line in examples_of(command.help or "")
]
BY_HAND = ("serve", "worker", "vllm-worker", "reproduce", "doctor", "replay-decisions")
"""Commands with a test of their own below."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with the files that examples speak of."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def running(words: list[str], ready: str, where: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a command that goes on until Ctrl-C; give the process and what it had said when it was ready."""
    log = where / f"{words[0]}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "phasesplit", *words], stdout=file, stderr=subprocess.STDOUT, cwd=where, text=True
        )
    try:
        eventually(lambda: ready in log.read_text() or process.poll() is not None, within_s=START_S, why=log.read_text)
        assert process.poll() is None, log.read_text()
        yield process, log.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the example of `serve`, with a key for workers and a log of decisions; give its address."""
    where = tmp_path_factory.mktemp("cluster")
    (where / "join.key").write_text(FILES["join.key"])
    (words,) = [example.words for example in EXAMPLES if example.command == "serve"]
    more = ["--port", "0", "--join-key-file", "join.key", "--log-decisions", "decisions.jsonl"]
    with running([*words, *more], "(ready in", where) as (_, said):
        found = re.search(r"http://127\.0\.0\.1:\d+", said)
        assert found is not None
        yield found[0]
    # What the cluster leaves is what the example of replay-decisions reads.
    (example,) = [example.words for example in EXAMPLES if example.command == "replay-decisions"]
    done = subprocess.run([sys.executable, "-m", "phasesplit", *example], cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def paced() -> Iterator[Server]:
    """Run an endpoint with known delays."""
    with running_server() as server:
        yield server


@pytest.mark.parametrize("name", ALL)
def test_every_help_ends_with_an_example(name: str) -> None:
    """A person would have to put a first command together from a list of options."""
    found = examples_of(ALL[name].help or "")
    assert found, f"{name}: the help does not end with `Example: phasesplit ...`"
    assert all(line.startswith(f"phasesplit {name}") for line in found), found


def test_a_help_without_an_example_is_found() -> None:
    """The test above would let a command without an example pass."""
    assert examples_of("Do it.\n\nExample: phasesplit it\n\nAnd more.") == []
    assert examples_of("Do it.\n\n\b\nExamples:\nphasesplit a \\\n   --b\nphasesplit c\n") == [
        "phasesplit a --b",
        "phasesplit c",
    ]


@pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if example.command not in BY_HAND],
    ids=lambda example: " ".join(example.words)[:50],
)
def test_the_example_runs(example: Example, folder: Path, request: pytest.FixtureRequest) -> None:
    """The first thing that a person copies from the help would fail."""
    words = list(example.words)
    if words[0] == "profile" and SERVER.search(words[1]):
        # The tiny model is done with a batch before all of it streams, so the endpoint is one with known delays.
        words[1] = request.getfixturevalue("paced").url
    elif SERVER.search(" ".join(words)):
        address = request.getfixturevalue("cluster")
        words = [SERVER.sub(address, word) for word in words]
    more = shlex.split(SHORTER.get(example.command, ""))
    more += ["--model", "tiny"] if words[:2] == ["profile", "engine"] else []
    more += ["--token-ids", "0:300"] if words[0] == "replay" else []
    assert cli.run([*words, *more]) == 0
    for option, value in pairwise(words):
        assert option not in OUTPUTS or (folder / value).stat().st_size > 0, f"{value} was not written"


def test_the_example_of_worker_joins(cluster: str, tmp_path: Path) -> None:
    """The command for a second host would not bring it into the cluster."""
    (words,) = [example.words for example in EXAMPLES if example.command == "worker"]
    (tmp_path / "join.key").write_text(FILES["join.key"])
    words = [SERVER.sub(cluster, word) for word in words]
    with running([*words, "--model", "tiny", "--name", "another"], "serves", tmp_path):
        eventually(lambda: "another" in _top(cluster))


def _top(url: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "phasesplit", "top", url, "--once"], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_example_of_vllm_worker_gets_as_far_as_vllm(folder: Path) -> None:
    """The example would be turned down for its options, before anybody looks for vLLM."""
    (words,) = [example.words for example in EXAMPLES if example.command == "vllm-worker"]
    words = [SERVER.sub("http://127.0.0.1:1", word) for word in words]
    without_vllm = [sys.executable, "-m", "phasesplit", *words, "--python", str(folder / "no-python")]
    done = subprocess.run(without_vllm, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no-python" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_example_of_reproduce_writes_its_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study, which takes a minute and has tests of its own, would not be written where the example says."""
    monkeypatch.setattr(reproduce_command, "run_study", lambda _quick, _workers: made_up_findings())
    (words,) = [example.words for example in EXAMPLES if example.command == "reproduce"]
    assert cli.run(words) == 0
    assert (folder / "study.html").stat().st_size > 1000


def test_the_example_of_doctor_says_whether_serve_would_work(capsys: pytest.CaptureFixture[str]) -> None:
    """The first command that a person runs when something is wrong would not run."""
    (words,) = [example.words for example in EXAMPLES if example.command == "doctor"]
    assert cli.run(words) in (0, 1)
    assert "`phasesplit serve` would" in capsys.readouterr().out


def test_the_shells_can_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A person would get no completion, or one that ends with an error the shell prints."""
    command = shutil.which("phasesplit", path=str(Path(sys.executable).parent))
    assert command is not None
    for shell, asked, wanted in (
        ("bash", {"COMP_WORDS": "phasesplit replay-", "COMP_CWORD": "1"}, "replay-decisions"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "phasesplit trace re"}, "resample"),
        ("fish", {"_TYPER_COMPLETE_ARGS": "phasesplit doc", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}, "doctor"),
    ):
        for name, value in {"_PHASESPLIT_COMPLETE": f"complete_{shell}", **asked}.items():
            monkeypatch.setenv(name, value)
        done = subprocess.run([command], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert wanted in done.stdout
    monkeypatch.delenv("_PHASESPLIT_COMPLETE")
    # Which shell a person has is told by the process that starts the command.
    in_bash = ["/bin/bash", "-c", f"{shlex.quote(command)} --show-completion; exit $?"]
    done = subprocess.run(in_bash, capture_output=True, text=True)
    assert done.returncode == 0
    assert "_PHASESPLIT_COMPLETE=complete_bash" in done.stdout
