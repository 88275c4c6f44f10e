"""Pictures of results: valid files of the kind that was asked for, also of runs with next to nothing in them."""

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest

from phasesplit.domain.latency import Binned
from phasesplit.errors import SpecError
from phasesplit.report import write_figure
from phasesplit.report.panels import batch_bins, mean_split, nines, slowest_split, tail_curve
from report.runs import CASES, SPLIT, one_request, simulated

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_every_result_can_be_drawn(case: str, tmp_path: Path) -> None:
    """A run with few requests, or without rows or a reference, would end without its picture."""
    target = tmp_path / "result.png"
    write_figure(CASES[case](), target)
    assert target.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["result.png"]


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF-"), ("PNG", b"\x89PNG")])
def test_the_ending_says_the_kind(ending: str, start: bytes, tmp_path: Path) -> None:
    """A file would hold something else than its name says."""
    target = tmp_path / f"result.{ending}"
    write_figure(simulated(SPLIT), target)
    assert target.read_bytes().startswith(start)
    if ending == "svg":
        assert ElementTree.parse(target).getroot().tag.endswith("svg")  # noqa: S314 - written just now


@pytest.mark.parametrize("name", ["result.jpg", "result", "png"])
def test_another_ending_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    """A person would see a traceback of matplotlib, or a file half-written."""
    with pytest.raises(SpecError, match=r"\.png, \.pdf, \.svg") as caught:
        write_figure(one_request(), tmp_path / name)
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_same_result_gives_the_same_bytes(tmp_path: Path) -> None:
    """Figures under version control would change without a change of the result."""
    result = simulated(SPLIT)
    for kind in ("png", "svg", "pdf"):
        first, second = tmp_path / f"first.{kind}", tmp_path / f"second.{kind}"
        write_figure(result, first)
        write_figure(result, second)
        assert first.read_bytes() == second.read_bytes(), kind


def test_settings_of_the_caller_neither_matter_nor_change(tmp_path: Path) -> None:
    """Drawing in a notebook would change its other figures, or look different there."""
    result = one_request()
    write_figure(result, tmp_path / "plain.png")
    with matplotlib.rc_context({"axes.titlesize": 30, "font.size": 20, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        write_figure(result, tmp_path / "styled.png")
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "plain.png").read_bytes() == (tmp_path / "styled.png").read_bytes()


def test_stages_add_up_to_the_whole_request() -> None:
    """A bar would leave out, or count twice, a part of the time from arrival to last token."""
    result = simulated(SPLIT)
    mean = mean_split(result)
    slowest = slowest_split(result, stages=5)
    assert mean is not None
    assert slowest is not None
    assert result.columns is not None
    assert mean.stage_s.sum() == pytest.approx(result.metrics["e2e_s"].mean, rel=1e-9)
    assert mean.stage_s[:2].sum() == pytest.approx(result.metrics["ttft_s"].mean, rel=1e-9)
    worst = np.sort(result.columns["e2e_s"])[-max(1, round(result.requests / 100)) :]
    assert slowest.stage_s.sum() == pytest.approx(float(worst.mean()), rel=1e-9)


def test_stages_do_not_depend_on_kept_rows() -> None:
    """The mean request would be another one where only sums were kept."""
    kept, summed = mean_split(simulated(SPLIT)), mean_split(simulated(SPLIT, keep=False))
    assert kept is not None
    assert summed is not None
    np.testing.assert_allclose(kept.stage_s, summed.stage_s, rtol=1e-9, atol=1e-12)


def test_batch_ranges_hold_all_busy_time() -> None:
    """A batch size would fall between two ranges."""
    share = np.zeros((4, 100))
    share[0, 1], share[0, 2], share[1, 3], share[1, 64], share[1, 65] = 0.25, 0.75, 0.125, 0.5, 0.375
    sizes, shares = batch_bins(share)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 128]
    assert shares[0].tolist() == [0.25, 0.75, 0, 0, 0, 0, 0, 0]
    assert shares[1].tolist() == [0, 0, 0.125, 0, 0, 0, 0.5, 0.375]


def test_tail_curve_follows_the_quantiles() -> None:
    """A curve would show another distribution than the table beside it."""
    values = Binned()
    values.add(np.linspace(0.1, 10.0, 5_000))
    found, places = tail_curve(values, 99.9)
    assert nines(90.0) == pytest.approx(1.0)
    assert places[-1] == pytest.approx(3.0)
    assert np.interp(nines(99.0), places, found) == pytest.approx(values.quantile(0.99), rel=1e-3)
