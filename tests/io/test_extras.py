"""What needs a package that does not come with phasesplit."""

import sys
from pathlib import Path

import pytest

from phasesplit.errors import SpecError
from phasesplit.io.compression import extra_module
from phasesplit.io.results import REQUEST_ENDINGS, check_output
from phasesplit.io.trace_writers import write_trace
from phasesplit.io.traces import read_trace

MODULES = {"t.parquet": ("pyarrow", "parquet"), "t.csv.zst": ("zstandard", "zstd")}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0.5,10,1\n")
    return path


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_trace_that_needs_an_extra_names_it(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Somebody with the plain package would meet a traceback, or half a file."""
    module, extra = MODULES[name]
    trace, _ = read_trace(own)
    write_trace(tmp_path / name, trace)
    monkeypatch.setitem(sys.modules, module, None)
    told = rf"^[^\n]*pip install 'phasesplit\[{extra}\]'$"
    with pytest.raises(SpecError, match=told):
        read_trace(tmp_path / name)
    (tmp_path / name).unlink()
    with pytest.raises(SpecError, match=told):
        write_trace(tmp_path / name, trace)
    assert [path.name for path in tmp_path.iterdir()] == ["own.csv"]


def test_rows_in_parquet_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long simulation would end without the file it was made for."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SpecError, match=r"^--requests .*rows\.parquet: .*'phasesplit\[parquet\]'"):
        check_output(tmp_path / "rows.parquet", REQUEST_ENDINGS, "--requests")
    check_output(tmp_path / "rows.csv", REQUEST_ENDINGS, "--requests")


def test_an_installed_module_is_given() -> None:
    """What is there would be called missing."""
    assert extra_module("pyarrow.parquet", "parquet", "here") is sys.modules["pyarrow.parquet"]
