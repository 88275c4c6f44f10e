"""`phasesplit simulate`, called in process through `run`, and a few times as a process."""

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from phasesplit import __version__, cli
from phasesplit.errors import InfeasibleError, SimulationError
from phasesplit.simulator import run as simulation
from refusals import assert_refused

pytestmark = pytest.mark.slow

TRACE = "arrival_s,prompt_tokens,output_tokens\n0.5,1000,20\n0.75,20,3\n2.5,3000,30\n9.5,40,100\n"
SMALL = ("--model", "bloom-176b", "--pool", "prefill:2:dgx-h100", "--pool", "decode:1:dgx-h100")
TEN_S = (*SMALL, "--workload", "azure-conversation", "--rate", "4", "--duration", "10")
CLUSTER = """
name: two pools
model: bloom-176b
pools:
  - {role: prefill, count: 1, machine: dgx-h100}
  - {role: decode, count: 1, machine: dgx-a100}
rules: {transfer: serialized, batch-requests: 64, seed: 5}
"""
ROWS = [
    "request_id", "arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "itl_mean_s", "itl_max_s", "e2e_s",
    "queue_s", "transfer_exposed_s", "prefill_machine", "decode_machine", "status",
]  # fmt: skip


@dataclass
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


def settled(err: str) -> str:
    """Return what was written to standard error, without the one line that depends on what ran here before."""
    return re.sub(r"compiling the simulation kernel.*\n", "", err)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs `phasesplit` in an empty folder with a trace in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "trace.csv").write_text(TRACE)

    def run(*arguments: object) -> Outcome:
        code = cli.run([str(argument) for argument in arguments])
        written = capsys.readouterr()
        return Outcome(code, written.out, settled(written.err))

    return run


@pytest.fixture
def shown(call: Call) -> Callable[..., dict[str, Any]]:
    """Return a function that simulates and returns the JSON."""

    def run(*arguments: object) -> dict[str, Any]:
        outcome = call("simulate", *arguments, "--json")
        assert (outcome.code, outcome.err) == (0, "")
        found: dict[str, Any] = json.loads(outcome.out)
        return found

    return run


Shown = Callable[..., dict[str, Any]]


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"trace.csv"}


def test_limits_of_one_s_own_judge_the_run(call: Call, shown: Shown) -> None:
    """Limits in seconds or a goodput would be accepted and not judged, or break the report's table."""
    text = "ttft_p100<2s, tpot_p90<50ms, goodput(ttft<2s,itl<1s)>=95%"
    slo = shown(*TEN_S, "--slo", text)["slo"]
    assert [finding["metric"] for finding in slo["findings"]] == ["ttft_s", "itl_mean_s", "goodput_ratio"]
    assert slo["holds"] is all(finding["holds"] for finding in slo["findings"])
    outcome = call("simulate", *TEN_S, "--slo", text, "--html", "out.html")
    assert outcome.code == 0
    assert "…" not in outcome.out
    for word in ("p95", "TPOT", "goodput ratio", "50 ms"):
        assert word in outcome.out


def test_slices_and_caps_are_machines_like_others(shown: Shown) -> None:
    """A slice or a capped machine could not be simulated, or would cost as much as the whole server."""
    pools = ("--pool", "prefill:2:dgx-h100/tp4", "--pool", "decode:2:dgx-h100/tp4@50%")
    found = shown("--model", "llama2-70b", *pools, "--workload", "trace.csv")
    assert [pool["machine"] for pool in found["cluster"]["pools"]] == ["dgx-h100/tp4", "dgx-h100/tp4@50%"]
    assert found["bill"]["usd_per_hour"] == pytest.approx(2 * 38.08)
    assert found["bill"]["provisioned_w"] == pytest.approx(10_200 + 7_140)


@pytest.mark.parametrize("columns", [80, 120])
def test_the_report_fits_and_says_what_matters(call: Call, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report would wrap its tables, or lack a figure that the planner needs."""
    monkeypatch.setenv("COLUMNS", str(columns))
    outcome = call("simulate", *TEN_S)
    assert outcome.code == 0
    assert max(len(line) for line in outcome.out.splitlines()) <= columns
    assert "…" not in outcome.out
    for word in (
        "requests/s", "TTFT", "ITL, all gaps", "TPOT", "E2E", "exposed KV transfer", "p99", "SLO splitwise",
        "KV used", "pool moves", "KV transfers", "kW provisioned", "USD", "kWh", "CO2e", "measured:", "no oracle",
    ):  # fmt: skip
        assert word in outcome.out


def test_overload_is_said_first(call: Call) -> None:
    """A cluster that falls behind would be reported by averages alone."""
    outcome = call("simulate", *SMALL, "--workload", "azure-conversation", "--rate", 60, "--duration", 30)
    assert outcome.code == 0
    assert outcome.out.splitlines()[2].startswith("Overloaded: the backlog grew")
    assert "broken" in outcome.out


def test_json_is_all_of_standard_output(shown: Shown) -> None:
    """A script could not parse the output, or would read another run's figures."""
    found = shown(*TEN_S, "--seed", 1)
    assert found["version"] == __version__
    assert found["elapsed_s"] > 0
    assert found["trace"] == "azure-conversation"
    assert found["requests"] == sum(found["statuses"].values())
    assert found["rules"]["seed"] == 1
    assert found["slo"]["name"] == "splitwise"
    assert shown(*TEN_S, "--seed", 2)["metrics"] != found["metrics"]


def test_rows_have_the_columns_that_others_read(call: Call, tmp_path: Path) -> None:
    """A checker of somebody else's could not read the rows."""
    assert call("simulate", *SMALL, "--workload", "trace.csv", "--requests", "out.csv", "--quiet").out == ""
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert [name for name in lines[0].split(",") if name in ROWS] == ROWS
    assert [line.split(",")[:4] for line in lines[1:]] == [
        [str(row), *line.split(",")] for row, line in enumerate(TRACE.splitlines()[1:])
    ]


def test_the_same_seed_gives_the_same_bytes(call: Call, tmp_path: Path) -> None:
    """A result could not be reproduced."""
    for name, seed in (("a.csv", 1), ("b.csv", 1), ("c.csv", 2)):
        assert call("simulate", *TEN_S, "--seed", seed, "--requests", name).code == 0
    first, second, other = ((tmp_path / name).read_bytes() for name in ("a.csv", "b.csv", "c.csv"))
    assert first == second
    assert first != other


def test_all_outputs_of_one_run(call: Call, tmp_path: Path) -> None:
    """An output that was asked for would be missing, or not be what its name says."""
    names = {"--requests": "r.csv.gz", "--parquet": "r.parquet", "--figure": "f.png", "--html": "report.html"}
    outcome = call("simulate", *TEN_S, *(part for pair in names.items() for part in pair))
    assert outcome.code == 0
    assert all(f"wrote {name}" in outcome.out for name in names.values())
    assert files_in(tmp_path) == set(names.values())
    assert pq.read_table(tmp_path / "r.parquet").num_rows > 10
    begins = {"r.csv.gz": b"\x1f\x8b", "f.png": b"\x89PNG", "report.html": b"<!"}
    assert all((tmp_path / name).read_bytes().startswith(begin) for name, begin in begins.items())


def test_all_outputs_or_none(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails while it writes would leave some of its files, or parts of them."""

    def fail(result: object, path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("phasesplit.report.write_html", fail)
    outcome = call("simulate", *TEN_S, "--requests", "out.csv", "--html", "report.html")
    assert (outcome.code, outcome.err) == (
        2,
        "phasesplit: report.html: cannot be written (No space left on device)\n",
    )
    assert files_in(tmp_path) == set()


def test_standard_input_is_a_trace(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace could not be piped in, or would be another one than from the file."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TRACE.encode())))
    piped = shown(*SMALL, "--workload", "-")
    assert piped["metrics"] == shown(*SMALL, "--workload", "trace.csv")["metrics"]


def test_how_many_requests_arrive_when(shown: Shown) -> None:
    """--rate, --duration and --count would not mean what the help says."""
    file = (*SMALL, "--workload", "trace.csv")
    assert shown(*file)["rate_per_s"] == pytest.approx(3 / 9)
    assert shown(*file, "--duration", "2.5")["requests"] == 3
    assert shown(*file, "--count", "2")["requests"] == 2
    assert shown(*file, "--rate", "2")["rate_per_s"] == pytest.approx(2)
    assert shown(*file, "--rate", "2", "--count", "3")["requests"] == 3
    more = shown(*file, "--rate", "2", "--count", "11")
    assert more["requests"] == 11
    assert shown(*file, "--rate", "2", "--duration", "60")["requests"] == pytest.approx(120, abs=4)
    assert shown(*file, "--arrivals", "poisson", "--rate", "2", "--duration", "60")["requests"] != 120
    assert shown(*SMALL, "--workload", "azure-coding", "--count", "50")["requests"] == 50
    observed = shown(*SMALL, "--workload", "azure-conversation", "--duration", "60")["requests"]
    assert observed == pytest.approx(60 * 5.5, rel=0.2)


def test_an_own_layout_is_read_and_what_is_dropped_is_said(call: Call, tmp_path: Path) -> None:
    """A trace with other columns could not be used, or would lose rows in silence."""
    (tmp_path / "own.csv").write_text("ms,i,o\n3000,50,6\n1000,100,20\n3500,7,0\n")
    mapped = ("--columns", "arrival=ms,prompt=i,output=o", "--time-unit", "ms")
    outcome = call("simulate", *SMALL, "--workload", "own.csv", *mapped, "--skip-bad", "--sort", "--json")
    assert json.loads(outcome.out)["requests"] == 2
    assert outcome.err == "own.csv: dropped 1 of 3 rows: 1 with zero tokens in o\n"


def test_summary_only_sees_the_same_requests(shown: Shown) -> None:
    """Streaming would draw other requests, lose some at the seams, or lie about how exact it is."""
    kept, summed = shown(*TEN_S), shown(*TEN_S, "--summary-only")
    assert summed["counts"] == kept["counts"]
    assert summed["statuses"] == kept["statuses"]
    assert (summed["metrics"]["e2e_s"]["exact"], kept["metrics"]["e2e_s"]["exact"]) == (False, True)
    assert summed["metrics"]["e2e_s"]["p90"] == pytest.approx(kept["metrics"]["e2e_s"]["p90"], rel=0.02)
    counted = (*SMALL, "--workload", "azure-conversation", "--count", "70")
    assert shown(*counted, "--summary-only")["counts"] == shown(*counted)["counts"]
    assert shown(*SMALL, "--workload", "trace.csv", "--summary-only")["requests"] == 4


def test_rules_come_from_the_file_then_from_the_options(shown: Shown, tmp_path: Path) -> None:
    """A setting would be lost, or the weaker one would win."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    base = ("--cluster", "cluster.yaml", "--workload", "trace.csv")
    found = shown(*base)
    assert found["cluster"]["name"] == "two pools"
    assert [pool["machine"] for pool in found["cluster"]["pools"]] == ["dgx-h100", "dgx-a100"]
    assert {key: found["rules"][key] for key in ("transfer", "batch_requests", "seed")} == {
        "transfer": "serialized",
        "batch_requests": 64,
        "seed": 5,
    }
    changed = shown(*base, "--set", "transfer=layerwise", "--seed", 7)["rules"]
    assert (changed["transfer"], changed["batch_requests"], changed["seed"]) == ("layerwise", 64, 7)
    published = shown(*SMALL, "--workload", "trace.csv", "--rules", "published", "--set", "batch-requests=16")
    assert (published["rules"]["published"], published["rules"]["batch_requests"]) == (True, 16)
    assert published["oracle"] is True


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("bloom-176b", "bloom-176", ["cluster.yaml", "line 3", "model", "'bloom-176'", "bloom-176b"]),
        (
            "dgx-a100",
            "dgx-a10",
            ["cluster.yaml", "line 6", "pools[1].machine", "'dgx-a10'", "dgx-a100"],
        ),
        ("{transfer: serialized, ", "\n  {transfer: fast, ", ["cluster.yaml", "line 8", "rules.transfer", "'fast'"]),
        ("seed: 5", "seed: -5", ["cluster.yaml", "line 7", "rules.seed", "got -5"]),
    ],
)
def test_a_wrong_field_of_a_cluster_file_is_named_with_its_line(
    call: Call, tmp_path: Path, old: str, new: str, named: list[str]
) -> None:
    """A person would have to search a file for the pool or the rule that is meant."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER.replace(old, new, 1))
    outcome = call("simulate", "--cluster", "cluster.yaml", "--workload", "trace.csv")
    assert_refused(outcome, *named)


def test_oracle_slo_grid_and_reference_reach_the_result(shown: Shown) -> None:
    """An option would be accepted and do nothing."""
    base = (*SMALL, "--workload", "trace.csv")
    found = shown(*base)
    assert shown(*base, "--oracle")["oracle"] is not found["oracle"]
    assert shown(*base, "--slo", "none")["slo"] is None
    assert shown(*base, "--grid-intensity", "0")["bill"]["operational_kg_co2e"] == 0
    fast = shown(*base, "--reference", "dgx-h100")
    assert fast["metrics"]["ttft_slowdown"]["p50"] > found["metrics"]["ttft_slowdown"]["p50"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("", ["Missing", "'--workload'"]),
        ("--workload trace.csv", ["--model and --pool: missing"]),
        ("{m} --workload trace.csv --cluster a.yaml", ["--cluster", "model and pools"]),
        ("{m} --workload trace.csv --rat 1", ["No such option"]),
        ("{m} --workload azure-conversatoin", ["did you mean", "azure-conversation"]),
        ("{m} --workload none.csv", ["none.csv", "no such file"]),
        ("{m} --workload azure-coding --sort", ["--sort", "only for a trace file"]),
        ("{m} --workload azure-coding --rate 0", ["--rate", "0.0", "positive"]),
        ("{m} --workload azure-coding --rate 1e-308", ["--rate", "1e-308", "positive"]),
        ("{m} --workload azure-coding --seed 9223372036854775808", ["seed", "9223372036854775808"]),
        ("{m} --workload azure-coding --rate=-3", ["--rate", "got -3.0"]),
        ("{m} --workload azure-coding --rate nan", ["--rate", "nan"]),
        ("{m} --workload azure-coding --rate fast", ["'--rate'", "valid number"]),
        ("{m} --workload azure-coding --duration inf", ["--duration", "inf"]),
        ("{m} --workload azure-coding --duration 9 --count 9", ["give one of the two"]),
        ("{m} --workload azure-coding --count 0", ["--count", "got 0"]),
        ("{m} --workload azure-coding --seed=-1", ["--seed", "got -1"]),
        ("{m} --workload azure-coding --arrivals bursts", ["--arrivals", "'bursts'"]),
        ("{m} --workload trace.csv --count 5", ["--count", "5", "4 requests"]),
        ("{m} --workload trace.csv --rate 1 --arrivals poisson --count 5", ["--count and --arrivals"]),
        ("{m} --workload trace.csv --set transfer", ["--set", "'transfer'", "FIELD=VALUE"]),
        ("{m} --workload trace.csv --set transfr=auto", ["did you mean", "transfer"]),
        ("{m} --workload trace.csv --set transfer=fast", ["auto, serialized, layerwise"]),
        ("{m} --workload trace.csv --rules publishd", ["--rules", "'publishd'", "published"]),
        ("{m} --workload trace.csv --slo strict", ["--slo", "'strict'", "splitwise or none"]),
        ("{m} --workload trace.csv --grid-intensity nan", ["--grid-intensity", "nan"]),
        ("{m} --workload trace.csv --profile none.csv", ["none.csv", "cannot be read"]),
        (
            "{m} --workload trace.csv --reference dgx-h1000",
            ["--reference", "'dgx-h1000'", "dgx-h100"],
        ),
        ("{m} --workload trace.csv --requests out.txt", ["--requests", "'out.txt'", "ending"]),
        ("{m} --workload trace.csv --figure out.html", ["--figure", "'out.html'", "ending"]),
        ("{m} --workload trace.csv --html none/out.html", ["--html", "'none/out.html'", "folder"]),
        ("{m} --workload trace.csv --requests trace.csv", ["no other option"]),
        ("{m} --workload trace.csv --requests a.parquet --parquet a.parquet", ["no other option"]),
        ("{m} --workload trace.csv --requests out.csv --summary-only", ["--summary-only", "keeps no rows"]),
        ("--cluster none.yaml --workload trace.csv", ["none.yaml"]),
        ("--model bloom --pool unsplit:1:h100 --workload trace.csv", ["model", "'bloom'"]),
        ("--model bloom-176b --pool unsplit:1:dgx-h99 --workload trace.csv", ["machine", "'dgx-h99'"]),
        ("--model bloom-176b --pool unsplit:1:dgx-h100/tp3 --workload trace.csv", ["1, 2, 4 or 8"]),
        ("--model bloom-176b --pool unsplit:1:h100/tp2 --workload trace.csv", ["more than its memory"]),
        ("--model bloom-176b --pool unsplit:1 --workload trace.csv", ["--pool", "'unsplit:1'", "ROLE:COUNT"]),
        (
            "--model bloom-176b --pool prefil:1:h100 --workload trace.csv",
            ["role", "'prefil'", "prefill"],
        ),
        ("--model bloom-176b --pool unsplit:0:h100 --workload trace.csv", ["count", "'0'", "whole number"]),
        ("--model bloom-176b --pool prefill:1:h100 --workload trace.csv", ["decode, mixed or unsplit"]),
    ],
)
def test_wrong_input_is_one_line(call: Call, tmp_path: Path, arguments: str, named: list[str]) -> None:
    """Wrong input would end in a traceback, in a message that does not say what to do, or leave a file."""
    outcome = call("simulate", *shlex.split(arguments.format(m=shlex.join(SMALL))))
    assert_refused(outcome, *named)
    assert outcome.err.endswith("\n")
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize(
    ("problem", "code", "line"),
    [
        (InfeasibleError("no design\nmeets it"), 1, "phasesplit: no design meets it\n"),
        (KeyboardInterrupt(), 130, "phasesplit: interrupted\n"),
    ],
)
def test_exit_codes(call: Call, monkeypatch: pytest.MonkeyPatch, problem: BaseException, code: int, line: str) -> None:
    """A script could not tell an honest no from wrong input or from Ctrl-C."""

    def fail(*arguments: object, **options: object) -> None:
        raise problem

    monkeypatch.setattr(simulation, "simulate", fail)
    outcome = call("simulate", *SMALL, "--workload", "trace.csv")
    assert (outcome.code, outcome.err) == (code, line)


def test_a_bug_asks_to_be_reported(monkeypatch: pytest.MonkeyPatch, call: Call, capsys: Any) -> None:
    """A bug would look like the user's mistake, or hide where it happened."""

    def fail(*arguments: object, **options: object) -> None:
        raise SimulationError("time went back")

    monkeypatch.setattr(simulation, "simulate", fail)
    with pytest.raises(SystemExit, match="1"):
        call("simulate", *SMALL, "--workload", "trace.csv")
    written = capsys.readouterr().err
    assert "SimulationError: time went back" in written
    assert written.splitlines()[-1].startswith("phasesplit: this is a bug of phasesplit")


def as_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", "from phasesplit.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def examples() -> list[str]:
    """Return every command line that stands in the help of a command; an example ends at an empty line or the next."""
    found = []
    for command in (
        "phasesplit simulate",
        "phasesplit trace inspect",
        "phasesplit trace convert",
        "phasesplit trace resample",
    ):
        shown = as_process(*command.split()[1:], "--help").stdout.replace("\\\n", " ")
        paragraphs = [" ".join(paragraph.split()) for paragraph in shown.split("\n\n")]
        own = [f"{command}{rest}" for text in paragraphs for rest in text.split(command)[1:] if "[OPTIONS]" not in rest]
        assert own, f"the help of {command} has no example"
        found += own
    return found


def test_every_example_in_the_help_works(call: Call, tmp_path: Path) -> None:
    """Somebody's first try, copied from the help, would fail."""
    (tmp_path / "BurstGPT_1.csv").write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n"
    )
    lines = examples()
    assert len(lines) >= 5
    for line in lines:
        outcome = call(*shlex.split(line)[1:])
        assert outcome.code == 0, f"{line}\n{outcome.err}"
    assert files_in(tmp_path) >= {"out.csv", "coding.png", "burst.csv.gz"}


def test_the_process_exits_as_it_should(tmp_path: Path) -> None:
    """The installed command would not pass on exit codes, or print a warning beside its one line."""
    shown = as_process("--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, f"phasesplit {__version__}\n", "")
    wrong = as_process("simulate", *SMALL, "--workload", "none.csv", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout, wrong.stderr) == (2, "", "phasesplit: none.csv: no such file\n")
    piped = as_process("simulate", *SMALL, "--workload", "-", "--json", input=TRACE)
    assert json.loads(piped.stdout)["requests"] == 4


def test_help_needs_no_heavy_module() -> None:
    """`phasesplit --help` would take as long as a simulation."""
    heavy = ("numpy", "numba", "pyarrow", "pydantic", "matplotlib", "rich.console")
    code = (
        f"import sys; from phasesplit.cli import run; run(['--help']); print([m for m in {heavy} if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("options", ["", "--json"])
@pytest.mark.parametrize(
    ("into", "code", "line"),
    [("| true", 141, ""), ("> /dev/full", 2, "phasesplit: the output cannot be written (No space left on device)\n")],
)
def test_an_output_that_takes_no_more(tmp_path: Path, options: str, into: str, code: int, line: str) -> None:
    """`phasesplit ... | head`, or a full disk, would end in a traceback."""
    (tmp_path / "trace.csv").write_text(TRACE)
    command = shlex.join([sys.executable, "-c", "from phasesplit.cli import main; main()", "simulate", *SMALL])
    shown = subprocess.run(
        ["bash", "-c", f"{command} --workload trace.csv {options} {into}; exit ${{PIPESTATUS[0]}}"],  # noqa: S607
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert (shown.returncode, shown.stdout, settled(shown.stderr)) == (code, "", line)
