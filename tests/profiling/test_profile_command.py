"""`phasesplit profile`, called in process, on the tiny model."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from endpoints import running_server
from phasesplit import cli
from phasesplit.engine.fetch import write_tiny_model
from phasesplit.profiling import engine_machine
from phasesplit.profiling.engine_machine import EngineMachine
from phasesplit.profiling.fitting import Shape

pytestmark = pytest.mark.slow


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs `phasesplit profile` in a folder with a tiny model, its cache in there as well."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHASESPLIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    # Three processes of their own, which have a test of their own.
    monkeypatch.setattr(engine_machine, "start_up_s", lambda _: 0.7)
    write_tiny_model(tmp_path / "small.gguf")

    def run(*arguments: object) -> Outcome:
        code = cli.run(["profile", *map(str, arguments)])
        written = capsys.readouterr()
        return Outcome(code, written.out, written.err)

    return run


QUICK = ("engine", "--model", "small.gguf", "--kv-memory", "1MB", "--budget", "2s", "--error", "50%")


def test_the_whole_way_from_a_machine_to_a_simulation(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    """What was measured could not be simulated with."""
    outcome = call(*QUICK, "--machine", "here.yaml", "--name", "here", "--price", "0.2")
    assert (outcome.code, outcome.err) == (0, "")
    assert "wrote profile-small.json and here.yaml" in outcome.out
    assert "held-out error" in outcome.out
    assert "start-up: 0.70 s" in outcome.out
    simulated = (
        "simulate", "--model", "profile-small.json", "--pool", "prefill:1:here.yaml", "--pool", "decode:1:here.yaml",
        "--workload", "azure-conversation", "--rate", "1", "--count", "20", "--json",
    )  # fmt: skip
    assert cli.run(simulated) == 0
    measured = "measured: shared memory of one host, both ends on one core"
    pools = json.loads(capsys.readouterr().out)["cluster"]["pools"]
    assert [pool["link_source"] for pool in pools] == [measured, measured]
    assert cli.run(simulated[:-1]) == 0
    assert f"link (prefill pool, decode pool): {measured}" in capsys.readouterr().out
    by_option = (*simulated[:-1], "--profile", "profile-small.json", "--quiet")
    assert cli.run(by_option) == 0


def test_json_is_the_profile_and_nothing_else(call: Call, tmp_path: Path) -> None:
    """Programs would have to pick the figures out of tables."""
    outcome = call(*QUICK, "--json", "-o", "p.json")
    assert json.loads(outcome.out) == json.loads((tmp_path / "p.json").read_text())
    found = json.loads(outcome.out)
    assert found["machine"]["cores"] >= 1
    assert found["kv"]["blocks"] * 32 > 100
    assert found["iterations"]
    assert set(found["unknown"]) <= {"power"}
    assert found["settings"]["kv_bytes"] == 1_000_000


def test_ctrl_c_keeps_what_there_is_and_resume_goes_on(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of measuring would be lost, or measured again."""
    run, asked = EngineMachine.run, []

    def interrupted(machine: EngineMachine, shape: Shape) -> object:
        asked.append(shape)
        if len(asked) == 900:
            raise KeyboardInterrupt
        return run(machine, shape)

    monkeypatch.setattr(EngineMachine, "run", interrupted)
    outcome = call(*QUICK, "--error", "0.1%", "--budget", "20s")
    assert outcome.code == 130
    assert "what there is was kept; go on with --resume profile-small.json" in outcome.err
    before = json.loads((tmp_path / "profile-small.json").read_text())
    assert before["ending"] == "interrupted"
    outcome = call(*QUICK, "--resume", "profile-small.json")
    assert outcome.code == 0
    after = json.loads((tmp_path / "profile-small.json").read_text())
    runs = {tuple(one["runs_s"][:2]) for one in after["iterations"]}
    assert runs >= {tuple(one["runs_s"][:2]) for one in before["iterations"]}
    assert after["elapsed_s"] > before["elapsed_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "TARGET: got 'nothing', allowed is engine, or an address such as http://127.0.0.1:8080"),
        (("http://127.0.0.1:9",), "http://127.0.0.1:9: nothing listens there (connection refused)"),
        (
            ("http://127.0.0.1:99999",),
            "TARGET http://127.0.0.1:99999, port: got '99999', allowed is a whole number from 1",
        ),
        (("engine", "--error", "0"), "--error: got '0', allowed is 0.1% to 100%, such as 3%"),
        (("engine", "--budget", "-1s"), "--budget: got '-1s', allowed is a number above 0"),
        (("engine", "--budget", "soon"), "--budget: got 'soon'"),
        (("engine", "--power", "1,2"), "--power: got '1,2', allowed is three powers IDLE,PREFILL,DECODE"),
        (("engine", "--power", "9,2,9"), "--power: got '9,2,9', allowed is powers of the phases of at least the idle"),
        (("engine", "-o", "out.csv"), "--output: got 'out.csv', allowed is a file name ending in .json"),
        (("engine", "--machine", "no/m.yaml"), "--machine: got 'no/m.yaml', allowed is a file in a folder that exists"),
        (("engine", "--resume", "absent.json"), "absent.json: cannot be read"),
        (("engine", "--resume", "small.gguf"), "small.gguf: cannot be read"),
        (("engine", "--model", "absent.gguf"), "model: got 'absent.gguf'"),
        (("engine", "--model", "small.gguf", "--kv-memory", "1kB"), "--kv-memory: got 1000, allowed is"),
        (("http://127.0.0.1:9", "--concurrency", "1"), "--concurrency: got 1, allowed is 2 to 1,024 requests"),
        (("http://127.0.0.1:9", "--machine", "m.yaml"), "--machine: an endpoint does not report the model's sizes"),
        (("http://127.0.0.1:9", "--token-ids", "5"), "--token-ids: got '5'"),
        (("http://127.0.0.1:9", "--token-ids", "9:3"), "--token-ids: got '9:3', allowed is two whole numbers FROM:TO"),
        (("http://127.0.0.1:9", "--sizes", "llama2"), "--sizes: unknown name 'llama2', did you mean llama2-70b"),
        (("engine", "--seed", "-1"), "--seed: got -1, allowed is a whole number from 0 to 2^63 - 1"),
    ],
)
def test_bad_input_is_one_line(call: Call, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """A person would see a traceback, or find the mistake after a minute of measuring."""
    outcome = call(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} <= {"small.gguf", "cache"}


def test_a_machine_file_that_cannot_be_written_is_refused_before_measuring(call: Call, tmp_path: Path) -> None:
    """A person would wait for a whole profile to be told that no machine file can be made of it."""
    with running_server() as server:
        options = ("--machine", "m.yaml", "--sizes", "llama2-70b", "--budget", "5s")
        outcome = call(server.url, *options)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1)
        assert f"--machine: {server.url} does not report its KV capacity" in outcome.err
        assert not server.prompts
    assert {path.name for path in tmp_path.iterdir()} <= {"small.gguf", "cache"}


def test_a_profile_of_another_machine_is_not_gone_on_with(call: Call, tmp_path: Path) -> None:
    """Points of two machines would become one curve."""
    call(*QUICK, "-o", "p.json")
    for change, message in (
        ({"machine": {"processor": "Another"}}, "machine, processor: measured was 'Another'"),
        ({"settings": {"kv_bytes": 5}}, "settings, kv_bytes: measured was 5"),
        ({"target": "http://host"}, "target: measured was 'http://host'"),
        ({"model": {"digest": "0123456789abcdef" * 4}}, "weights: measured was 0123456789ab, here it is "),
    ):
        found = json.loads((tmp_path / "p.json").read_text())
        for name, fields in change.items():
            found[name] = {**found[name], **fields} if isinstance(fields, dict) else fields
        (tmp_path / "other.json").write_text(json.dumps(found))
        outcome = call(*QUICK, "--resume", "other.json")
        assert outcome.code == 2
        assert message in outcome.err


def test_what_cannot_be_measured_is_named(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thing that is missing on a host would cost the whole profile."""

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine_machine, "host_link", broken)
    outcome = call(*QUICK, "-o", "p.json", "--machine", "m.yaml")
    assert outcome.code == 0
    assert "link: unknown, [Errno 28] No space left on device" in outcome.out
    assert "assumed, 100 Gb/s" in (tmp_path / "m.yaml").read_text()


def test_a_plan_does_not_compare_by_a_price_that_nobody_gave(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    """Machines without a price would win every plan, or break it."""
    call(*QUICK, "-o", "p.json", "--machine", "m.yaml")
    plan = ("plan", "--model", "p.json", "--machines", "m.yaml", "--rate", "1", "--slo", "ttft_p99<9s")
    lengths = ("--prompt-percentiles", "p50=20,p90=50", "--output-percentiles", "p50=4,p90=10")
    assert cli.run((*plan, *lengths)) == 2
    assert "price_usd_per_hour: is 0, which stands for unknown" in capsys.readouterr().err
    assert cli.run((*plan, *lengths, "--minimize", "power")) == 2
    assert "provisioned_w: is 0, which stands for unknown" in capsys.readouterr().err
