"""`phasesplit trace inspect | convert | resample`, called in process."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from phasesplit.cli.trace import app
from phasesplit.domain.request import describe_trace
from phasesplit.errors import SpecError
from phasesplit.io.traces import read_trace
from phasesplit.io.workloads import load_workload

pytestmark = pytest.mark.slow

OWN = "arrival_s,prompt_tokens,output_tokens\n0.5,10,1\n1.5,20,2\n2.5,300000,3\n61.5,40,400\n"


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80", "NO_COLOR": "1"})


def done(*arguments: object) -> Result:
    result = call(*arguments)
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text(OWN)
    return path


def test_inspect_fits_80_columns_and_says_what_matters(trace: Path) -> None:
    """The page would wrap, or lack a figure that the planner needs."""
    for file in (trace, "azure-coding"):
        output = done("inspect", file).stdout
        assert max(len(line) for line in output.splitlines()) <= 80
        for word in ("requests/s", "coefficient of variation", "empty", "p99", "Spearman", "prompt tokens"):
            assert word in output
    assert "…" not in done("inspect", trace).stdout


def test_inspect_counts_right(trace: Path) -> None:
    """The table would show other numbers than the file has."""
    shown = json.loads(done("inspect", trace, "--json").stdout)
    assert shown["requests"] == 4
    assert shown["duration_s"] == 61.0
    assert shown["prompt"]["percentiles"]["100"] == 300_000
    assert shown["windows"][2]["windows"] == 1
    assert shown["prefix_seen_share"] is None
    assert "4 requests" in done("inspect", trace).stdout


def test_inspect_json_stays_json_for_one_request(tmp_path: Path) -> None:
    """A figure that is undefined would be printed as NaN, which JSON readers refuse."""
    path = tmp_path / "one.csv"
    path.write_text("".join(OWN.splitlines(keepends=True)[:2]))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    shown = json.loads(done("inspect", path, "--json").stdout, parse_constant=refuse)
    assert shown["inter_arrival_cv"] is None
    assert "1 request over 0 s" in done("inspect", path).stdout


def test_inspect_draws_a_png(trace: Path, tmp_path: Path) -> None:
    """The picture would not be written, or differ from run to run."""
    done("inspect", trace, "--png", tmp_path / "a.png")
    done("inspect", trace, "--png", tmp_path / "b.png")
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert picture == (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz", "out.parquet", "out.csv.zst"])
def test_convert_keeps_every_request(trace: Path, tmp_path: Path, name: str) -> None:
    """Converting would lose or change requests."""
    done("convert", trace, tmp_path / name)
    before, after = read_trace(trace)[0], read_trace(tmp_path / name)[0]
    assert after.arrival_s.tolist() == before.arrival_s.tolist()
    assert after.prompt_tokens.tolist() == before.prompt_tokens.tolist()
    assert after.output_tokens.tolist() == before.output_tokens.tolist()


def test_convert_says_what_it_dropped(trace: Path, tmp_path: Path) -> None:
    """Failed rows would vanish without a word."""
    trace.write_text(f"{OWN}70,5,0\n")
    result = done("convert", trace, tmp_path / "out.csv", "--skip-bad")
    assert "dropped 1 of 5 rows: 1 with zero tokens in output_tokens" in result.output
    refused = call("convert", trace, tmp_path / "none.csv")
    assert isinstance(refused.exception, SpecError)
    assert not (tmp_path / "none.csv").exists()


def test_convert_reads_own_columns_and_writes_to_a_pipe(tmp_path: Path) -> None:
    """A trace of one's own, or a pipe, could not be used."""
    path = tmp_path / "mine.csv"
    path.write_text("ms,i,o\n1000,5,6\n1500,7,8\n")
    result = done("convert", path, "-", "--columns", "arrival=ms,prompt=i,output=o", "--time-unit", "ms")
    assert result.stdout == "arrival_s,prompt_tokens,output_tokens\n0,5,6\n0.5,7,8\n"


def test_resample_gives_the_rate_and_keeps_the_pattern(trace: Path, tmp_path: Path) -> None:
    """The trace would have another rate than asked for, or lose its burstiness."""
    done("resample", "azure-coding", tmp_path / "fast.csv", "--rate", 70, "--seed", 3)
    fast = describe_trace(read_trace(tmp_path / "fast.csv")[0])
    slow = describe_trace(load_workload("azure-coding").trace())
    assert fast.rate_per_s == pytest.approx(70, rel=1e-6)
    assert fast.inter_arrival_cv == pytest.approx(slow.inter_arrival_cv, rel=1e-6)
    done("resample", "azure-coding", tmp_path / "even.csv", "--rate", 70, "--duration", 60, "--arrivals", "poisson")
    even = describe_trace(read_trace(tmp_path / "even.csv")[0])
    assert even.inter_arrival_cv == pytest.approx(1.0, abs=0.05)
    assert even.requests == pytest.approx(4_200, rel=0.06)


def test_resample_uses_the_window(trace: Path, tmp_path: Path) -> None:
    """Requests outside the window would be used."""
    done("resample", trace, tmp_path / "out.csv", "--rate", 2, "--start", 0.5, "--end", 10)
    assert read_trace(tmp_path / "out.csv")[0].prompt_tokens.tolist() == [20, 300_000]


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "none.csv"),
        ("inspect", "azure-codin"),
        ("convert", "azure-coding", "out.txt"),
        ("convert", "azure-coding", "no/such/folder/out.csv"),
        ("resample", "azure-coding", "out.csv", "--rate", "0"),
        ("resample", "azure-coding", "out.csv", "--rate", "nan"),
        ("resample", "azure-coding", "out.csv", "--rate", "1", "--seed", "-1"),
        ("resample", "azure-coding", "out.csv", "--rate", "1", "--arrivals", "burst"),
        ("resample", "azure-coding", "out.csv", "--rate", "1", "--start", "9", "--end", "8"),
    ],
    ids=" ".join,
)
def test_wrong_input_is_one_line_and_writes_nothing(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong input would end in a traceback or leave half a file."""
    monkeypatch.chdir(tmp_path)
    problem = call(*arguments).exception
    assert isinstance(problem, SpecError)
    assert "\n" not in str(problem)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *((f"--rate {number}", "--rate: got ") for number in ("nan", "-1", "inf", "0", "1e10")),
        *((f"--rate 1 --duration {number}", "--duration: got ") for number in ("nan", "-1", "inf", "0")),
        ("--rate 1 --seed -1", "--seed: got -1, allowed is a whole number from 0 to 2^63 - 1"),
        ("--rate 1 --start -1", "--start: got -1.0, allowed is a finite number of seconds of at least 0"),
        ("--rate 1 --start nan", "--start: got nan"),
        ("--rate 1 --end nan", "--end: got nan, allowed is more than --start, 0 s"),
        ("--rate 1 --start 9 --end 9", "--end: got 9.0, allowed is more than --start, 9 s"),
    ],
)
def test_a_wrong_number_is_named_by_its_option(options: str, message: str, tmp_path: Path) -> None:
    """A person would have to guess which of the options is meant by a word such as rate."""
    problem = call("resample", "azure-coding", tmp_path / "out.csv", *options.split()).exception
    assert isinstance(problem, SpecError)
    assert str(problem).startswith(message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["inspect", "convert", "resample"])
def test_help_shows_an_example(command: str) -> None:
    """A user would have to guess how a command is called."""
    assert f"phasesplit trace {command}" in done(command, "--help").stdout
