"""Reading and writing traces, and the shipped workloads."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from phasesplit.domain.arrivals import Poisson
from phasesplit.domain.request import Trace, describe_trace
from phasesplit.errors import SpecError
from phasesplit.io.trace_writers import write_trace
from phasesplit.io.traces import SkipCount, read_trace, read_trace_or_workload
from phasesplit.io.workloads import load_workload, workload_names
from refusals import assert_refused

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
shared = pytest.mark.shared

OWN = b"arrival_s,prompt_tokens,output_tokens\n0.5,10,1\n1.5,20,2\n1.5,30,3\n"
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,4808,10\r\n"
    b"2023-11-16 18:17:04.0319600,3180,8\r\n2023-11-16 18:18:04.0319600,110,27"
)
AZURE_2024 = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    b"2024-05-10 00:00:01+00:00,2399,6\n"
)
MOONCAKE = (
    b'{"timestamp": 0, "input_length": 600, "output_length": 52, "hash_ids": [0, 1]}\n'
    b'{"timestamp": 27482, "input_length": 700, "output_length": 26, "hash_ids": [0, 2]}\n'
)
BURSTGPT = (
    b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,230,1317,Conversation log\n118,GPT-4,417,0,417,API log\n"
)
BURSTGPT_SESSIONS = (
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"19440110.0,,1.5,GPT-4,100,20,120,API log\n19440112.5,a-b,2.0,GPT-4,7,8,15,Conversation log\n"
)
SPLITWISE = (
    b"request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    b"0,2,0,1.25,1,2048,8\n1,2,0,3.0,1,2048,16\n"
)
EVERY = [OWN, AZURE, AZURE_2024, MOONCAKE, BURSTGPT, BURSTGPT_SESSIONS, SPLITWISE]

Put = Callable[[bytes], Path]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    def write(content: bytes, name: str = "trace.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    return list(zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True))


def refusal(path: Path | str, **options: object) -> str:
    with pytest.raises(SpecError) as caught:
        read_trace(path, **options)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (OWN, [(0.5, 10, 1), (1.5, 20, 2), (1.5, 30, 3)]),
        (AZURE, [(0.0, 4808, 10), (0.052, 3180, 8), (60.052, 110, 27)]),
        (AZURE_2024, [(0.0, 2162, 5), (0.99007, 2399, 6)]),
        (MOONCAKE, [(0.0, 600, 52), (27.482, 700, 26)]),
        (BURSTGPT.replace(b",0,417", b",1,418"), [(0.0, 472, 18), (40.0, 1087, 230), (113.0, 417, 1)]),
        (BURSTGPT_SESSIONS, [(0.0, 100, 20), (2.5, 7, 8)]),
        (SPLITWISE, [(1.25, 2048, 8), (3.0, 2048, 16)]),
        (
            b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374,44\n4.3,396,109\n",
            [(0.0, 374, 44), (4.3, 396, 109)],
        ),
        (b"\xef\xbb\xbf" + OWN.replace(b"\n", b"\r\n"), [(0.5, 10, 1), (1.5, 20, 2), (1.5, 30, 3)]),
        (b"\n" + OWN.replace(b"0.5,10,1", b'"0.5", 10 ,1.0\n'), [(0.5, 10, 1), (1.5, 20, 2), (1.5, 30, 3)]),
    ],
)
def test_a_layout_is_told_from_its_columns(put: Put, content: bytes, expected: list[tuple[float, int, int]]) -> None:
    """A published trace would be refused, or read with the wrong clock."""
    trace, count = read_trace(put(content))
    assert rows(trace) == expected
    assert count == SkipCount(len(expected), {})


def test_prefix_blocks_come_with_their_requests(put: Put) -> None:
    """A request would own the prefix blocks of another one once rows are dropped or sorted."""
    lines = MOONCAKE.splitlines()
    bad = b'{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": [7]}'
    trace, count = read_trace(put(b"\n".join([lines[1], bad, lines[0]])), skip_bad=True, sort=True)
    assert rows(trace) == [(0.0, 600, 52), (27.482, 700, 26)]
    assert trace.prefix_offsets is not None
    assert trace.prefix_offsets.tolist() == [0, 2, 4]
    assert trace.prefix_ids is not None
    assert trace.prefix_ids.tolist() == [0, 1, 0, 2]
    assert count.dropped == {"zero tokens in input_length": 1}


@pytest.mark.parametrize("unit", [("s", 1), ("ms", 1_000), ("us", 1_000_000), ("ns", 1_000_000_000)])
def test_columns_of_any_name_and_unit(put: Put, unit: tuple[str, int]) -> None:
    """A trace of one's own would have to be rewritten first, or its time be off by a power of ten."""
    name, size = unit
    start = 1_700_000_000 * size
    text = f"id,in,ts,out\na,5,{start},6\nb,7,{start + size + size // 2 if size > 1 else start + 2},8\n"
    trace, _ = read_trace(put(text.encode()), columns="arrival=ts,prompt=in,output=out", time_unit=name)
    assert rows(trace) == [(0.0, 5, 6), (1.5 if size > 1 else 2.0, 7, 8)]


def test_a_parquet_file_with_calendar_times_and_own_names(put: Put) -> None:
    """Parquet would only be read as we write it."""
    table = pa.table(
        {
            "when": pa.array([1_700_000_000_000_000, 1_700_000_002_500_000], pa.timestamp("us")),
            "p": pa.array([3, 4], pa.uint16()),
            "o": pa.array([5.0, 6.0]),
        }
    )
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    trace, _ = read_trace(put(sink.getvalue()), columns="arrival=when,prompt=p,output=o")
    assert rows(trace) == [(0.0, 3, 5), (2.5, 4, 6)]


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
def test_compression_is_told_by_content(put: Put, pack: Callable[[bytes], bytes]) -> None:
    """A compressed file without the right ending would be called garbage, and a cut one be half read."""
    packed = pack(OWN)
    assert len(read_trace(put(packed))[0]) == 3
    assert "cut off" in refusal(put(packed[:-5]))
    damaged = packed[:12] + bytes(b ^ 0x55 for b in packed[12:])
    assert "trace.csv" in refusal(put(damaged))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe could not be used."""

    class Pipe:
        buffer = io.BytesIO(OWN)

    monkeypatch.setattr("sys.stdin", Pipe())
    assert len(read_trace("-")[0]) == 3


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"20,2", b"20,0", ["line 3", "output_tokens", "'0'", "--skip-bad"]),
        (b"20,2", b"0,2", ["line 3", "prompt_tokens", "'0'", "1 to 16,777,216"]),
        (b"20,2", b"-4,2", ["line 3", "prompt_tokens", "'-4'"]),
        (b"20,2", b"20.5,2", ["line 3", "prompt_tokens", "'20.5'", "whole number"]),
        (b"20,2", b"nan,2", ["line 3", "prompt_tokens", "'nan'"]),
        (b"20,2", b",2", ["line 3", "prompt_tokens", "''"]),
        (b"20,2", b"20,many", ["line 3", "output_tokens", "'many'"]),
        (b"20,2", b"16777217,2", ["line 3", "prompt_tokens", "'16777217'"]),
        (b"20,2", b"99999999999999999999999,2", ["line 3", "prompt_tokens"]),
        (b"20,2", b"1e999,2", ["line 3", "prompt_tokens", "'1e999'"]),
        (b"20,2", b"2\xff,2", ["line 3", "prompt_tokens", "'2�'"]),
        (b"1.5,20", b"soon,20", ["line 3", "arrival_s", "'soon'"]),
        (b"1.5,20", b"nan,20", ["line 3", "arrival_s", "'nan'"]),
        (b"1.5,20", b"inf,20", ["line 3", "arrival_s", "'inf'"]),
        (b"1.5,20", b"-1.5,20", ["line 3", "arrival_s", "'-1.5'", "at least 0"]),
        (b"1.5,20", b"1700000000,20", ["line 3", "arrival_s", "ten years"]),
        (b"1.5,20", b"0.4,20", ["line 3", "arrival_s", "'0.4'", "--sort"]),
        (b"1.5,20,2", b"\n1.5,20", ["line 4", "2 fields", "3"]),
        (b"1.5,20,2", b"1.5,20,2,2", ["line 3", "4 fields"]),
    ],
)
def test_a_bad_line_is_named(put: Put, old: bytes, new: bytes, told: list[str]) -> None:
    """The user would have to search a million lines for the one that is wrong."""
    message = refusal(put(OWN.replace(old, new, 1)))
    for part in ["trace.csv", *told]:
        assert part in message


@pytest.mark.parametrize(
    "stamp",
    [
        b"2023-02-30 10:00:00",
        b"2023-11-16 25:00:00",
        b"2150-01-01 00:00:00",
        b"9999-12-31",
        b"1950-01-01",
        b"",
        b"18:17",
    ],
)
def test_a_bad_date_is_named(put: Put, stamp: bytes) -> None:
    """A date that no calendar has, or none of a trace, would be read as some time."""
    message = refusal(put(AZURE.replace(b"2023-11-16 18:17:04.0319600", stamp)))
    assert "line 3, TIMESTAMP" in message
    assert "1970 to 2099" in message


def test_lines_are_counted_past_empty_and_dropped_ones(put: Put) -> None:
    """The named line would be another than the wrong one."""
    content = OWN.replace(b"1.5,20,2\n", b"\n1.5,20\n\n").replace(b"1.5,30", b"0.1,30")
    assert "line 6, arrival_s" in refusal(put(content), skip_bad=True)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"arrival_s,prompt_tokens,output_tokens\n", "no requests"),
        (b"arrival_s,prompt_tokens,output_tokens\n\n", "no requests"),
        (b"arrival_s,prompt_token,output_tokens\n1,2,3\n", "'prompt_tokens' is missing (nearest is 'prompt_token')"),
        (b"arrival_s,prompt_tokens,output_tokens,output_tokens\n1,2,3,4\n", "one column output_tokens"),
        (b"a,b,c\n1,2,3\n", "--columns"),
        (bytes(range(256)) * 40, "not a trace"),
        (b"PAR1" + bytes(200), "Parquet"),
        (b"TIMEST\xe4MP,ContextTokens,GeneratedTokens\n1,2,3\n", "not a trace"),
        (b'{"timestamp": 0, "input_length": 6758}\n', "output_length"),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 2, "hash_ids": ["a"]}\n', "hash_ids"),
        (MOONCAKE + b'{"timestamp": 3', "line 3"),
        (MOONCAKE.replace(b"600", b"true"), "line 1, input_length"),
    ],
)
def test_a_file_that_is_no_trace_says_why(put: Put, content: bytes, told: str) -> None:
    """A wrong file would end in a traceback or in a message about something else."""
    message = refusal(put(content))
    assert told in message
    assert "trace.csv" in message


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"columns": "arrival=ts,prompt=in"}, "arrival=NAME"),
        ({"columns": "arrival=a,prompt=b,output="}, "arrival=NAME"),
        ({"columns": "arrival=arrival_s,prompt=prompt_tokens,output=x"}, "'x' is missing"),
        ({"columns": "arrival=a,prompt=b,output=c", "time_unit": "min"}, "--time-unit"),
        ({"time_unit": "ms"}, "--columns"),
        ({"format": "azur"}, "azure"),
        ({"format": "azure"}, "'TIMESTAMP' is missing"),
        ({"format": "azure", "columns": "arrival=a,prompt=b,output=c"}, "one of the two"),
    ],
)
def test_a_wrong_option_says_what_is_right(put: Put, options: dict[str, str], told: str) -> None:
    """An option would be ignored, or end in a traceback."""
    assert told in refusal(put(OWN), **options)


def test_bad_rows_are_dropped_and_counted_by_kind(put: Put) -> None:
    """Failed calls of a published trace would count as requests, or vanish without a word."""
    bad = b"x,1,1\n2,0,5\n3,5,0\n3,0,0\n4,5\n5,6,7\n"
    trace, count = read_trace(put(OWN + bad), skip_bad=True)
    assert rows(trace)[3:] == [(5.0, 6, 7)]
    assert count.kept == 4
    assert sum(count.dropped.values()) == 5
    assert count.dropped["zero tokens in prompt_tokens"] == 2
    assert count.dropped["zero tokens in output_tokens"] == 1
    assert str(count).startswith("dropped 5 of 9 rows: ")
    assert "no request" in refusal(put(b"arrival_s,prompt_tokens,output_tokens\n1,0,0\n"), skip_bad=True)


def test_failed_calls_of_burstgpt_are_explained_and_can_be_dropped(put: Put) -> None:
    """The first published file with failed calls would be refused without a way on."""
    path = put(BURSTGPT)
    message = refusal(path)
    for part in ("line 4, Response tokens", "'0'", "failed call", "--skip-bad"):
        assert part in message
    trace, count = read_trace(path, skip_bad=True)
    assert rows(trace) == [(0.0, 472, 18), (40.0, 1087, 230)]
    assert str(count) == "dropped 1 of 3 rows: 1 with zero tokens in Response tokens"


def test_time_counts_from_the_first_request_that_is_kept(put: Put) -> None:
    """A dropped first row would leave a gap before the first request."""
    trace, _ = read_trace(put(AZURE.replace(b",4808,10", b",4808,0")), skip_bad=True)
    assert trace.arrival_s.tolist() == [0.0, 60.0]


def test_sorting_moves_whole_rows(put: Put) -> None:
    """Sorted arrivals would meet the lengths of other requests."""
    trace, _ = read_trace(put(OWN.replace(b"0.5,10", b"9.5,10")), sort=True)
    assert rows(trace) == [(1.5, 20, 2), (1.5, 30, 3), (9.5, 10, 1)]


def test_missing_file_directory_and_unknown_workload_are_one_line(tmp_path: Path) -> None:
    """A typing error in a path would end in a traceback."""
    assert "no such file" in refusal(tmp_path / "none.csv")
    assert "cannot be read" in refusal(tmp_path)
    with pytest.raises(SpecError, match="azure-coding"):
        read_trace_or_workload("azure-codin")
    with pytest.raises(SpecError) as caught:
        load_workload("azure-codin")
    assert_refused(caught.value, "did you mean", "azure-coding")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    content=st.sampled_from(EVERY),
    changes=st.lists(st.tuples(st.integers(0, 500), st.binary(max_size=4), st.integers(0, 6)), min_size=1, max_size=5),
    packed=st.booleans(),
    skip_bad=st.booleans(),
    sort=st.booleans(),
)
def test_damaged_bytes_give_a_trace_or_one_line(
    put: Put, content: bytes, changes: list[tuple[int, bytes, int]], packed: bool, skip_bad: bool, sort: bool
) -> None:
    """Some damaged file would end in a traceback."""
    if packed:
        content = gzip.compress(content, mtime=0)
    for at, new, old in changes:
        content = content[: at % len(content)] + new + content[at % len(content) + old :] or b"x"
    try:
        trace, count = read_trace(put(content), skip_bad=skip_bad, sort=sort)
    except SpecError as problem:
        assert "\n" not in str(problem)  # noqa: PT017 - either outcome is right
    else:
        assert count.kept == len(trace) > 0


lengths = st.integers(1, 16_777_216)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    requests=st.lists(st.tuples(st.floats(0, 1e8), lengths, lengths), min_size=1, max_size=20),
    name=st.sampled_from(["t.csv", "t.csv.gz", "t.csv.zst", "t.parquet", "sim.csv"]),
)
def test_what_is_written_is_read_back(tmp_path: Path, requests: list[tuple[float, int, int]], name: str) -> None:
    """A converted trace would differ from the original in a last digit."""
    requests = sorted(requests)
    arrival, prompt, output = (np.array(column) for column in zip(*requests, strict=True))
    trace = Trace.from_columns("t", arrival, prompt, output)
    write_trace(tmp_path / name, trace, format="splitwise-sim" if name == "sim.csv" else None)
    again, _ = read_trace(tmp_path / name)
    assert rows(again) == rows(trace)
    assert [path.name for path in tmp_path.iterdir() if ".part" in path.name] == []


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.jsonl.gz"])
def test_prefix_blocks_are_read_back(put: Put, tmp_path: Path, name: str) -> None:
    """Prefix blocks would be lost on the way through a format that can hold them."""
    trace, _ = read_trace(put(MOONCAKE))
    write_trace(tmp_path / name, trace)
    again, _ = read_trace(tmp_path / name)
    assert rows(again) == rows(trace)
    assert again.prefix_ids is not None
    assert trace.prefix_ids is not None
    assert again.prefix_ids.tolist() == trace.prefix_ids.tolist()


def test_mooncake_lines_without_blocks_share_none(put: Put, tmp_path: Path) -> None:
    """A converted trace would promise cache hits that its requests do not have."""
    write_trace(tmp_path / "t.jsonl", read_trace(put(OWN.replace(b"20,2", b"513,2")))[0])
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [line["hash_ids"] for line in lines] == [[0], [1, 2], [3]]
    assert [line["timestamp"] for line in lines] == [500, 1500, 1500]


def test_writing_is_refused_in_one_line_and_leaves_nothing(put: Put, tmp_path: Path) -> None:
    """A failed conversion would leave half a file, or end in a traceback."""
    trace, _ = read_trace(put(OWN))
    for path in (tmp_path / "none" / "t.csv", tmp_path / "t.txt", tmp_path / "t"):
        with pytest.raises(SpecError, match="t"):
            write_trace(path, trace)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.csv"]


FIGURES = {
    "azure-coding": ([17, 147, 578, 1469, 2744, 5188, 7303, 7436, 7437], [6, 7, 9, 13, 24, 55, 90, 251, 1899]),
    "azure-conversation": (
        [29, 207, 396, 1020, 1189, 2734, 4083, 4142, 14050],
        [16, 54, 85, 129, 395, 424, 451, 601, 1000],
    ),
}
MEANS = {"azure-coding": (2047.8, 27.9, 0.00), "azure-conversation": (1154.7, 211.1, -0.11)}


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_a_shipped_workload_has_the_published_lengths(name: str) -> None:
    """Plans for a shipped workload would be made for other lengths than the published ones."""
    assert name in workload_names()
    workload = load_workload(name)
    assert "CC BY 4.0" in workload.source
    trace = workload.trace(100.0, 4_000.0, 1, arrivals=Poisson())
    shape = describe_trace(trace)
    prompt, output, correlation = MEANS[name]
    lengths = workload.lengths
    assert np.average(lengths.prompt_tokens, weights=lengths.requests) == pytest.approx(prompt, abs=0.05)
    assert lengths.mean_output_tokens == pytest.approx(output, abs=0.05)
    assert shape.pearson == pytest.approx(correlation, abs=0.015)
    for found, published in zip((shape.prompt, shape.output), FIGURES[name], strict=True):
        np.testing.assert_allclose(list(found.percentiles.values()), published, rtol=0.04, atol=1)


def test_coding_arrives_in_bursts_like_the_published_trace() -> None:
    """The coding workload would be as smooth as Poisson, and its plan far too small."""
    workload = load_workload("azure-coding")
    shapes = [describe_trace(workload.trace(seed=seed)) for seed in range(15)]
    assert np.median([shape.inter_arrival_cv for shape in shapes]) == pytest.approx(13.2, rel=0.1)
    assert np.median([shape.windows[0].empty_share for shape in shapes]) == pytest.approx(0.73, abs=0.04)
    assert np.median([shape.windows[1].dispersion for shape in shapes]) == pytest.approx(71, rel=0.2)
    assert workload.rate_per_s == pytest.approx(2.57, abs=0.01)


def test_conversation_arrives_nearly_like_poisson() -> None:
    """The conversation workload would be burstier or smoother than the published trace."""
    shape = describe_trace(load_workload("azure-conversation").trace(duration_s=20_000.0))
    assert shape.inter_arrival_cv == pytest.approx(1.09, abs=0.02)
    assert shape.rate_per_s == pytest.approx(5.53, rel=0.02)


@shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no reference files at ../shared/data")
@pytest.mark.parametrize(
    ("name", "kind", "count", "cv", "empty"),
    [("azure-coding", "code", 8_819, 13.15, 0.734), ("azure-conversation", "conv", 19_366, 1.094, 0.011)],
)
def test_a_shipped_workload_depends_as_the_trace_does(
    name: str, kind: str, count: int, cv: float, empty: float
) -> None:
    """Outputs would no longer depend on prompts as they do in the published trace."""
    trace, _ = read_trace(SHARED / "azure" / f"AzureLLMInferenceTrace_{kind}.csv")
    shape = describe_trace(trace)
    assert len(trace) == count
    assert shape.inter_arrival_cv == pytest.approx(cv, abs=0.005)
    assert shape.windows[0].empty_share == pytest.approx(empty, abs=0.001)
    assert (list(shape.prompt.percentiles.values()), list(shape.output.percentiles.values())) == FIGURES[name]
    drawn = load_workload(name).trace(100.0, 3_000.0, 3, arrivals=Poisson())
    edges = np.unique(np.quantile(trace.prompt_tokens, np.linspace(0, 1, 11)))[1:-1]

    def output_by_decile(of: Trace) -> list[float]:
        decile = np.searchsorted(edges, of.prompt_tokens, side="right")
        return [float(of.output_tokens[decile == at].mean()) for at in range(edges.size + 1)]

    np.testing.assert_allclose(output_by_decile(drawn), output_by_decile(trace), rtol=0.05)


@shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no reference files at ../shared/data")
@pytest.mark.parametrize(
    ("file", "requests", "duration_s", "prompt", "output", "seen"),
    [
        ("mooncake/conversation_trace.jsonl.gz", 12_031, 3_537, 12_035, 342.6, 0.366),
        ("mooncake/synthetic_trace.jsonl.gz", 3_993, 1_022, 15_325.5, 149.1, 0.640),
        ("splitwise-sim/rr_conv_70_2min.csv.gz", 8_502, 120.0, 1_142.3, 211.6, None),
        ("splitwise-sim/rr_code_70.csv.gz", 42_218, 600.0, 2_043.4, 27.7, None),
    ],
)
def test_published_files_have_their_published_figures(
    file: str, requests: int, duration_s: float, prompt: float, output: float, seen: float | None
) -> None:
    """A published file would be read with wrong units, lost rows or lost prefix blocks."""
    shape = describe_trace(read_trace(SHARED / file)[0])
    assert shape.requests == requests
    assert shape.duration_s == pytest.approx(duration_s, abs=0.5)
    assert shape.prompt.mean == pytest.approx(prompt, abs=0.6)
    assert shape.output.mean == pytest.approx(output, abs=0.06)
    assert shape.prefix_seen_share == (None if seen is None else pytest.approx(seen, abs=0.0006))
