"""`serve`, `worker` and `top`: what people type, and what they are told when it is wrong."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from phasesplit.cli import run
from phasesplit.io.cluster_file import ServedCluster
from phasesplit.io.profile_schema import ProfileSpec
from phasesplit.io.profiles import write_machine_file, write_profile_file
from phasesplit.launcher.serve_command import KeyFileOptions, WorkersHere, _asked, traces_url
from profile_contents import content

FILE = """\
name: here
model: tiny
pools:
  - {role: prefill, count: 2, machine: embedded}
  - {role: decode, count: 1}
rules: {elastic: false}
serve:
  port: 9000
  kv_memory: 64MB
  limits: {live_requests: 5}
"""


def asked(file: str | None = None, **changes: object) -> ServedCluster:
    nothing: dict[str, object] = {
        "model": None, "pools": dict.fromkeys(("prefill", "decode", "mixed", "unsplit")), "host": None, "port": None,
        "kv_memory": None, "prefix_cache": False, "settings": [], "keys": KeyFileOptions(),
    }  # fmt: skip
    return _asked(file, **(nothing | changes))  # type: ignore[arg-type]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that has to end with exit code 2 and one line; return the line."""
    assert run(arguments) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert caught.err.count("\n") == 1
    return caught.err.removeprefix("phasesplit: ").rstrip()


def test_options_go_before_the_file(tmp_path: Path) -> None:
    """What a person types would be overruled by a file, or a file's fields be lost."""
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE)
    plain = asked(str(path))
    assert (plain.model, dict(plain.pools), plain.port, plain.kv_bytes) == (
        "tiny",
        {"prefill": 2, "decode": 1},
        9000,
        64e6,
    )
    assert not plain.rules.elastic
    changed = asked(str(path), port=0, pools={"prefill": None, "decode": None, "mixed": None, "unsplit": 3})
    assert (changed.port, dict(changed.pools)) == (0, {"unsplit": 3})
    assert changed.limits == {"live_requests": 5}


def machine_file(folder: Path, name: str, **changes: object) -> None:
    """Write a machine and its profile."""
    profile = ProfileSpec(**content(**changes))
    write_profile_file(profile, folder / f"{name}.json")
    write_machine_file(profile, folder / f"{name}.yaml", folder / f"{name}.json")


def test_machines_that_were_measured_here_are_served_with_the_memory_that_was_planned_with(tmp_path: Path) -> None:
    """A cluster file that `plan --write` made would be refused, or served with other KV memory than was planned."""
    machine_file(tmp_path, "this")
    path = tmp_path / "cluster.yaml"
    planned = FILE.replace("tiny", "this.json").replace("embedded", "this.yaml")
    path.write_text(planned.replace("  kv_memory: 64MB\n", ""))
    served = asked(str(path))
    assert (served.model, dict(served.pools)) == ("smol", {"prefill": 2, "decode": 1})
    assert served.kv_bytes == 347 * 32 * 46_080
    path.write_text(planned)
    assert asked(str(path)).kv_bytes == 64e6
    assert asked(str(path), model="tiny").model == "tiny"


@pytest.mark.parametrize(
    ("machine", "allowed"),
    [
        ("afar.yaml", "embedded (a process on this host), or the file of a machine that `phasesplit profile engine`"),
        ("plain.yaml", "embedded (a process on this host)"),
        ("missing.yaml", "embedded (a process on this host)"),
        ("this.yaml/tp1", "embedded (a process on this host)"),
        ("other.yaml", "the machine of the other pools: workers of one host are alike"),
    ],
)
def test_machines_that_are_no_workers_of_this_host_are_not_served(
    tmp_path: Path, machine: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan for other machines would be served by processes that have nothing to do with it."""
    machine_file(tmp_path, "this")
    machine_file(tmp_path, "afar", target="http://10.0.0.7:8000")
    machine_file(tmp_path, "other", elapsed_s=61.0)
    (tmp_path / "plain.yaml").write_text((tmp_path / "this.yaml").read_text().replace("profile: this.json\n", ""))
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.replace("embedded", "this.yaml").replace("count: 1}", f"count: 1, machine: {machine}}}"))
    assert f"line 5, pools[1].machine: got '{machine}', allowed is {allowed}" in told(capsys, "serve", str(path))


def test_without_anything_it_is_a_split_of_the_default_model() -> None:
    """The first thing that a newcomer types would do something else than the page says."""
    plain = asked()
    assert (plain.model, dict(plain.pools), plain.host, plain.port) == (
        "default", {"prefill": 1, "decode": 1}, "127.0.0.1", 8080,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("tiny", "5", "line 2, model: got 5"),
        ("role: decode", "role: tokens", "line 5, pools[1].role: got 'tokens', allowed is prefill or decode"),
        ("count: 2", "count: 0", "line 4, pools[0].count: got 0, allowed is a whole number from 1 to 64"),
        ("embedded", "dgx-h100", "line 4, pools[0].machine: got 'dgx-h100', allowed is embedded"),
        ("64MB", "64 cows", "line 9, serve.kv_memory: got '64 cows'"),
        ("elastic: false", "elastic: maybe", "line 6, rules.elastic: got 'maybe', allowed is true or false"),
        ("elastic: false", "spill_tokens: -1", "line 6, rules.spill_tokens: got -1, allowed is a whole number"),
        ("elastic: false", "block_tokens: 16", "line 6, rules.block_tokens: got 16, allowed is 32"),
        ("elastic: false", "published: true", "line 6, rules.published"),
        ("port: 9000", "port: 99999", "line 8, serve.port: got 99999, allowed is a whole number from 0 to 65535"),
        ("port", "prot", "line 8, serve.prot: unknown field, did you mean port"),
        (
            "live_requests: 5",
            "live_request: 5",
            "line 10, serve.limits.live_request: unknown name 'live_request', did you mean",
        ),
        (
            "live_requests: 5",
            "live_requests: -5",
            "line 10, serve.limits.live_requests: got -5, allowed is a positive number",
        ),
        ("live_requests: 5", "live_requests: .nan", "live_requests: got nan, allowed is a whole number"),
        ("live_requests: 5", f"live_requests: 1{'0' * 400}", "limits.live_requests: got 1000"),
        ("live_requests: 5", "header_s: .inf", "limits.header_s: got inf, allowed is a number"),
        (
            "live_requests: 5",
            "live_requests: x",
            "line 10, serve.limits.live_requests: got 'x', allowed is a whole number",
        ),
        (
            "  limits:",
            "  keys: {clients: {env: NOT_SET_HERE}}\n  limits:",
            "line 10, serve.keys.clients.env: the environment variable NOT_SET_HERE is not",
        ),
        (
            "  limits:",
            "  keys:\n    clients:\n      file: absent.key\n  limits:",
            "line 12, serve.keys.clients.file, ",
        ),
        (
            "  limits:",
            "  vllm: {arguments: --dtype}\n  limits:",
            "serve.vllm.arguments: got '--dtype', allowed is a list",
        ),
        ("  limits:", "  keys: {clients: {}}\n  limits:", "allowed is either file or env"),
        ("pools:", "pool:", "line 3, pool: unknown field, did you mean pools"),
        ("{elastic: false}", "\n  elastic: false\n  spill_tokens: -1", "line 8, rules.spill_tokens: got -1"),
        ("{live_requests: 5}", "\n    live_requests: 5\n    header_s: -1", "line 12, serve.limits.header_s: got -1"),
        (
            "{live_requests: 5}",
            "\n    backlog:\n      most_wait_s: 0",
            "line 12, serve.limits.backlog.most_wait_s: got 0",
        ),
    ],
)
def test_a_wrong_cluster_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, line: str
) -> None:
    """A person would have to guess what is wrong with a file, or a wrong one would be served."""
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.replace("port: 9000", "port: 0") if old != "port: 9000" else FILE)
    path.write_text(path.read_text().replace(old, new, 1))
    said = told(capsys, "serve", str(path))
    assert said.startswith(str(path))
    assert line in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--unsplit", "2", "--prefill", "1"), "--unsplit: a cluster is either split"),
        (("--prefill", "1", "--decode", "0"), "a split cluster needs workers for both phases"),
        (("--prefill", "99"), "--prefill: got 99"),
        (("--port", "70000"), "--port: got 70000"),
        (("--kv-memory", "lots"), "--kv-memory: got 'lots'"),
        (("--set", "elastic"), "--set: got 'elastic', allowed is FIELD=VALUE"),
        (("--model", "no/such/model.gguf"), "no/such/model.gguf"),
        (("--api-key-file", "no-such-file"), "--api-key-file, no-such-file: cannot be read"),
        (("no-such.yaml",), "no-such.yaml: cannot be read"),
    ],
)
def test_wrong_options_of_serve_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    """A typing error would end in a traceback, or in another cluster than was meant."""
    assert line in told(capsys, "serve", *arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--home", "king"), "--home: unknown name 'king'"),
        (("--join", "ftp://x"), "--join: got 'ftp://x', allowed is http://HOST:PORT"),
        (("--model", "tiny", "--kv-memory", "1kB"), "--kv-memory: got 1000, allowed is"),
        (("--model", "tiny", "--kv-memory", "9e14"), "--kv-memory: got 900000000000000, allowed is what"),
        (("--model", "tiny", "--host", "10.1.2.3"), "a worker that others can reach needs a key"),
        *(
            (("--core-share", share), f"--core-share: got {share}, allowed is a number from 0.01 to 1")
            for share in ("0.001", "0.0", "2.0", "nan")
        ),
        (("--join", "h:99999"), "--join http://h:99999, port: got '99999', allowed is a whole number from 1 to 65535"),
        (("--model", "no-such", "--port", "99999"), "--port: got 99999, allowed is a whole number from 0 to 65535"),
        (("--model", "no-such", "--drain", "-1"), "--drain: got '-1'"),
    ],
)
def test_wrong_options_of_worker_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    """A worker would start in a place where it does harm, or fail without a reason."""
    assert line in told(capsys, "worker", *arguments)


def test_a_damaged_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Five restarts and a traceback would stand in for `this file is no model`."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + b"\x00" * 60)
    line = told(capsys, "serve", "--port", "0", "--model", str(path))
    assert line.startswith(f"{path}: not a usable GGUF file")


def test_what_only_workers_find_wrong_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A person would read the same sentence five times, from each worker, about each worker, and at the end."""
    line = told(capsys, "serve", "--port", "0", "--model", "tiny", "--kv-memory", "1kB")
    assert line.startswith("worker ")
    assert " cannot run: --kv-memory: got 1000, allowed is" in line


def test_the_last_words_of_workers_are_left_out_only_while_the_cluster_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nobody would learn why a worker of a running cluster is gone, or what it says before it ends."""
    lines = ("compiling", "phasesplit: no memory", "worker a cannot run: no memory")
    terminal = WorkersHere()
    for is_starting in (True, False):
        terminal.is_starting = is_starting
        for line in lines:
            terminal.write("a", line)
    said = capsys.readouterr().err.splitlines()
    assert said == [f"[a] {line}" for line in (lines[0], *lines)]


def test_keys_are_read_but_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A key would end up in a log, or a comment would be one."""
    path = tmp_path / "keys"
    path.write_text("# ours\n\nsecret-key-1\nsecret-key-2\n")
    assert asked(keys=KeyFileOptions(api_key_file=str(path))).client_keys == ("secret-key-1", "secret-key-2")
    path.write_text("short\n")
    said = told(capsys, "serve", "--api-key-file", str(path))
    assert "a key is wrong" in said
    assert "short" not in said


def test_a_key_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key would have to stand in a file even where the place it runs at hands them over otherwise."""
    monkeypatch.setenv("OUR_KEY", "a-long-secret")
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE + "  keys: {admin: {env: OUR_KEY}}\n")
    assert asked(str(path)).admin_keys == ("a-long-secret",)


@pytest.mark.parametrize(
    ("option", "environment", "url"),
    [
        (None, {}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/"}, "http://c:4318/v1/traces"),
        (
            None,
            {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1/t", "OTEL_EXPORTER_OTLP_ENDPOINT": "x"},
            "http://c:1/t",
        ),
        ("https://c/v1/traces", {"OTEL_EXPORTER_OTLP_ENDPOINT": "x"}, "https://c/v1/traces"),
    ],
)
def test_spans_go_where_opentelemetry_says(option: str | None, environment: dict[str, str], url: str | None) -> None:
    """Traces would go to a page that a collector does not have, or nowhere though its variable is set."""
    assert traces_url(option, environment) == url


def test_a_wrong_collector_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped address would lose all traces without a word."""
    line = "--otlp-endpoint: got 'collector', allowed is a URL"
    assert line in told(capsys, "serve", "--model", "tiny", "--otlp-endpoint", "collector")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--join", "h:99999"), "--join http://h:99999, port: got '99999', allowed is a whole number from 1 to 65535"),
        (("--port", "99999"), "--port: got 99999, allowed is a whole number from 0 to 65535"),
        (("--block-tokens", "33"), "--block-tokens: got 33, allowed is a power of two, 1 to 4,096"),
        (("--block-tokens", "0"), "--block-tokens: got 0, allowed is a power of two"),
    ],
)
def test_wrong_options_of_vllm_worker_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    """A typing error would be told after a minute, behind a hundred lines of vLLM's."""
    assert told(capsys, "vllm-worker", "--model", "m", "--python", "no/such/python", *arguments).startswith(line)


@pytest.mark.parametrize("imported", ["phasesplit.errors", "typer", "numpy", "phasesplit.launcher.listening"])
def test_an_early_interrupt_is_quiet(imported: str) -> None:
    """Who changes his mind at once would be shown where in our imports that was."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "phasesplit", "serve", "--model", "tiny", "--port", "0"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, process_group=0,
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if line.rstrip().endswith(f" {imported}"):
            break
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert "Traceback" not in rest
    assert process.wait(30) in (-signal.SIGINT, 130)
    process.stderr.close()


def test_top_says_when_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong address would end in a traceback."""
    assert "nothing listens there" in told(capsys, "top", "http://127.0.0.1:1", "--once")


def test_a_taken_port_is_one_line() -> None:
    """Two clusters on one port would end in a traceback, or leave workers behind."""
    code = (
        "import socket, subprocess, sys; taken = socket.socket(); taken.bind(('127.0.0.1', 0)); taken.listen();"
        "port = str(taken.getsockname()[1]);"
        "done = subprocess.run([sys.executable, '-m', 'phasesplit', 'serve', '--model', 'tiny', '--port', port],"
        "capture_output=True, text=True); import json; print(json.dumps([done.returncode, done.stderr]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    status, said = json.loads(done.stdout)
    assert status == 2
    assert said.count("\n") == 1
    assert "Address already in use" in said
