"""Sources of phase times side by side: who covers what, and by how much they differ."""

from dataclasses import replace
from typing import Any

import pytest

from phasesplit.errors import SpecError
from phasesplit.io.catalog import compare_sources, phase_times, time_sources
from phasesplit.io.specs import load_machine, load_model
from refusals import assert_refused


def test_measured_and_roofline_without_the_package(no_tables: None) -> None:
    """The comparison would need an optional package, or compare a 2023 engine with the roofline of another one."""
    model, machine = load_model("llama2-70b"), load_machine("dgx-h100")
    rows = compare_sources(model, machine)
    assert [(row.phase, row.size) for row in rows if row.size in (128, 64)] == [("prefill", 128), ("decode", 64)]
    first = rows[0]
    assert list(first.seconds) == ["measured", "roofline"]
    assert first.seconds["measured"] == phase_times(model, machine).prefill_time_s(128)
    assert first.ratios["measured"] == first.seconds["measured"] / first.seconds["roofline"]
    assert first.ratios["roofline"] == 1
    assert 0.5 < first.ratios["measured"] < 2
    assert "pip install" in time_sources(model, machine).absent["aiconfigurator"]


def test_nothing_to_compare_where_only_the_roofline_covers(no_tables: None) -> None:
    """A report would print the roofline as if something had confirmed it."""
    model, machine = load_model("llama-3.1-70b"), load_machine("dgx-h100")
    assert compare_sources(model, machine) == []
    assert set(time_sources(model, machine).absent) == {"measured", "aiconfigurator"}


def test_three_sources_where_all_cover(fake_tables: Any) -> None:
    """A source that covers an iteration would be missing, or decode times be compared at different contexts."""
    rows = compare_sources(load_model("llama2-70b"), load_machine("dgx-h100"))
    assert all(list(row.seconds) == ["measured", "aiconfigurator", "roofline"] for row in rows)
    decode = next(row for row in rows if (row.phase, row.size) == ("decode", 8))
    assert decode.seconds["aiconfigurator"] == pytest.approx((9 + 0.02 * 8 + 1.3e-5 * 8 * 512) / 1e3)


def test_source_is_left_out_beyond_its_data(fake_tables: Any) -> None:
    """An extrapolation would be shown as if a source covered it."""
    model = load_model("llama-3.1-70b")
    whole = load_machine("dgx-h100")
    small = replace(whole, hbm_bytes=model.weights_bytes + 3000 * model.kv_bytes_per_token)
    sizes = [row.size for row in compare_sources(model, small) if row.phase == "prefill"]
    assert sizes == [128, 256, 512, 1024, 2048]


def test_power_cap_slows_every_source(fake_tables: Any) -> None:
    """A capped machine would look faster in one source because its factor was forgotten there."""
    model = load_model("llama-3.1-70b")
    free = compare_sources(model, load_machine("dgx-h100"))
    capped = compare_sources(model, load_machine("dgx-h100-capped"))
    for slow, fast in zip(capped, free, strict=True):
        factor = 1.3 if slow.phase == "prefill" else 1.0
        assert slow.seconds == pytest.approx({name: factor * time_s for name, time_s in fast.seconds.items()})


def test_model_that_does_not_fit_is_refused(no_tables: None) -> None:
    """Times would be compared of a model that cannot run there."""
    with pytest.raises(SpecError) as caught:
        compare_sources(load_model("llama-3.1-70b"), replace(load_machine("dgx-h100"), hbm_bytes=100e9))
    assert_refused(caught.value, "141.1 GB")
