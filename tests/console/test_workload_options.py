"""The requests that options ask for, from shipped workloads and trace files."""

from pathlib import Path

import numpy as np
import pytest

from phasesplit.console.options import LoadOptions, TraceFileOptions
from phasesplit.console.workload_options import Demand, check_numbers
from phasesplit.errors import SpecError

TRACE = "arrival_timestamp,prompt_size,token_size\n0.0,10,5\n1.0,20,6\n2.5,30,7\n4.0,40,8\n"


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "trace.csv"
    file.write_text(TRACE)
    return str(file)


def test_a_trace_file_is_served_as_recorded(path: str) -> None:
    """Requests would come at other times than those of the file."""
    trace, dropped = Demand(source=path).trace()
    assert (trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), dropped) == (
        [0.0, 1.0, 2.5, 4.0],
        [10, 20, 30, 40],
        "",
    )
    assert len(Demand(source=path, load=LoadOptions(count=2)).trace()[0]) == 2
    assert len(Demand(source=path, load=LoadOptions(duration=2.0)).trace()[0]) == 2


def test_a_rate_draws_from_the_trace_file(path: str) -> None:
    """`--rate` would be ignored, or lengths be invented."""
    trace, _ = Demand(source=path, load=LoadOptions(rate=10.0, count=50), seed=3).trace()
    assert len(trace) == 50
    assert set(zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), strict=True)) <= {
        (10, 5), (20, 6), (30, 7), (40, 8),
    }  # fmt: skip


def test_stretches_are_the_trace_in_pieces() -> None:
    """`--summary-only` would simulate other requests than the same command without it."""
    demand = Demand(source="azure-conversation", load=LoadOptions(rate=20.0, duration=30.0), seed=1)
    whole, pieces = demand.trace()[0], list(demand.stretches())
    assert np.concatenate([piece.arrival_s for piece in pieces]).tolist() == whole.arrival_s.tolist()
    assert np.concatenate([piece.prompt_tokens for piece in pieces]).tolist() == whole.prompt_tokens.tolist()


@pytest.mark.parametrize(
    ("load", "file", "start"),
    [
        (LoadOptions(count=5, duration=1.0), TraceFileOptions(), "--count and --duration"),
        (LoadOptions(count=0), TraceFileOptions(), "--count"),
        (LoadOptions(rate=-1.0), TraceFileOptions(), "--rate"),
        (LoadOptions(duration=float("nan")), TraceFileOptions(), "--duration"),
        (LoadOptions(), TraceFileOptions(layout="azure"), "--format: only for a trace file"),
        (LoadOptions(), TraceFileOptions(skip_bad=True), "--skip-bad: only for a trace file"),
    ],
)
def test_contradictions_name_their_options(load: LoadOptions, file: TraceFileOptions, start: str) -> None:
    """A person would not learn which option is wrong."""
    with pytest.raises(SpecError) as caught:
        Demand(source="azure-conversation", load=load, file=file)
    assert str(caught.value).startswith(start)


def test_an_unknown_source_names_the_place() -> None:
    """A person would look at --workload where an argument was wrong."""
    with pytest.raises(SpecError, match=r"^TRACE \(no such file\)"):
        Demand(source="azure-conversion", place="TRACE")


@pytest.mark.parametrize("seed", [-1, 1 << 63])
def test_seeds_out_of_range_are_refused(seed: int) -> None:
    """A seed would fail inside the random generator, far from the option."""
    with pytest.raises(SpecError, match=r"^--seed"):
        check_numbers(rate_per_s=None, duration_s=None, seed=seed)
