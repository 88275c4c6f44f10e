"""Phase times by name: the published look-up to the digit, which source applies, measurements of one's own."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phasesplit.domain.machine import variant
from phasesplit.domain.roofline import MODERN_OVERHEAD_PER_LAYER_S, roofline_times
from phasesplit.errors import SpecError
from phasesplit.io.catalog import build_cluster, phase_times, slice_errors
from phasesplit.io.specs import load_machine, load_model
from refusals import assert_refused

HEADER = "model,hardware,prompt_size,batch_size,token_size,prompt_time,token_time,tensor_parallel\n"
OWN_PROFILE = HEADER + "".join(
    f"llama-3.1-8b,box,{prompt},{batch},128,{10 + prompt * batch / 100},{5 + batch},8\n"
    for prompt, batch in [(128, 1), (512, 1), (2048, 1), (512, 2), (512, 8), (512, 32)]
)

# decode phase at x = 1, 64, 512 and prefill phase at 100, 1,045, 5,942, 14,050 tokens, ms, of the published simulator
PUBLISHED = {
    ("bloom-176b", "dgx-a100"): (
        [47.518242, 47.564802, 49.312984],
        [75.403784, 292.565344, 2350.658430, 5157.892767],
    ),
    ("bloom-176b", "dgx-h100"): (
        [35.327248, 35.531623, 36.166175],
        [47.651148, 134.672746, 993.008496, 2205.561497],
    ),
    ("llama2-70b", "dgx-a100"): (
        [42.582613, 42.805169, 45.033140],
        [65.038962, 163.358898, 1191.763557, 3027.775916],
    ),
    ("llama2-70b", "dgx-h100"): (
        [31.466219, 30.675713, 30.561747],
        [59.613176, 78.847469, 581.398330, 1346.520896],
    ),
}


@pytest.mark.parametrize("pair", PUBLISHED)
def test_published_look_up(pair: tuple[str, str]) -> None:
    """The published rules would take other times than the published simulator: no result of it could come out."""
    decode_ms, prefill_ms = PUBLISHED[pair]
    times = phase_times(load_model(pair[0]), load_machine(pair[1]), published=True)
    assert times.decode_time_s([1, 64, 512], 0) == pytest.approx(np.array(decode_ms) / 1e3, abs=0.51e-9)
    assert times.prefill_time_s([100, 1045, 5942, 14_050]) == pytest.approx(np.array(prefill_ms) / 1e3, abs=0.51e-9)
    assert times.prefill_pair_s == times.decode_context_s == 0


@pytest.mark.parametrize("published", [True, False])
def test_capped_machine_is_slower_in_the_prompt_phase_only(published: bool) -> None:
    """The power cap would not cost 1.3 x the prompt time, or cost token time."""
    model = load_model("bloom-176b")
    free = phase_times(model, load_machine("dgx-h100"), published=published)
    capped = phase_times(model, load_machine("dgx-h100-capped"), published=published)
    tokens = np.array([100, 1045, 14_050])
    assert capped.prefill_time_s(tokens) == pytest.approx(1.3 * free.prefill_time_s(tokens))
    assert (capped.decode_time_s(tokens, tokens) == free.decode_time_s(tokens, tokens)).all()


def test_published_without_measurements_is_refused() -> None:
    """The published rules would run on times that the paper never measured."""
    with pytest.raises(SpecError) as caught:
        phase_times(load_model("bloom-176b"), load_machine("h200"), published=True)
    assert_refused(caught.value, "measured", "bloom-176b on dgx-a100")


def test_measured_where_measured_else_roofline() -> None:
    """A measured pair would be guessed, or a guess pass for a measurement."""
    llama, h200 = load_model("llama-3.1-70b"), load_machine("h200")
    assert phase_times(load_model("llama2-70b"), load_machine("dgx-h100")).source.startswith("measured: ")
    assert phase_times(llama, h200).source.startswith("roofline: ")
    modern = roofline_times(llama, h200, overhead_per_layer_s=MODERN_OVERHEAD_PER_LAYER_S)
    assert (phase_times(llama, h200).decode_knots_s == modern.decode_knots_s).all()


def test_a_measured_model_keeps_its_engine_on_other_machines() -> None:
    """A new machine would win over a measured one by the engine alone, not by its hardware."""
    model = load_model("llama2-70b")
    h100, h200 = phase_times(model, load_machine("dgx-h100")), phase_times(model, load_machine("h200"))
    assert float(h200.decode_time_s(1, 600)) == pytest.approx(float(h100.decode_time_s(1, 600)), rel=0.15)
    modern = phase_times(model, load_machine("dgx-h100"), overhead_per_layer_s=40e-6)
    assert modern.source.startswith("roofline: ")
    assert float(modern.decode_time_s(1, 600)) < 0.5 * float(h100.decode_time_s(1, 600))
    none = phase_times(model, load_machine("dgx-h100"), overhead_per_layer_s=0.0)
    assert float(none.decode_time_s(1, 600)) < float(modern.decode_time_s(1, 600))


def test_factors_apply_to_the_roofline_too() -> None:
    """A capped machine without measurements would run as fast as an uncapped one."""
    model, machine = load_model("qwen3-32b"), load_machine("dgx-h100-capped")
    free = phase_times(model, load_machine("dgx-h100"))
    assert float(phase_times(model, machine).prefill_time_s(1000)) == pytest.approx(
        1.3 * float(free.prefill_time_s(1000))
    )


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        ("dgx-h100/tp2", ["157.2 GB", "171.8 GB", "dgx-h100", "tensor parallelism 8"]),
        ("mi300x/tp1", ["mi300x", "tensor parallelism 2"]),
        ("l40s/tp4@50%", ["bloom-176b", "l40s/tp4@50%", "329.0 GB", "135.7 GB"]),
    ],
)
def test_model_that_does_not_fit(machine: str, named: list[str]) -> None:
    """A model larger than the memory would be served from nowhere, or its reader not learn what has enough."""
    with pytest.raises(SpecError) as caught:
        phase_times(load_model("bloom-176b"), load_machine(machine))
    assert_refused(caught.value, *named)


def test_model_that_fits_nowhere() -> None:
    """The error would offer a machine that is too small as well, or end in another error."""
    giant = replace(load_model("bloom-176b"), weights_bytes=1e13)
    with pytest.raises(SpecError) as caught:
        phase_times(giant, load_machine("dgx-h100"))
    assert_refused(caught.value, "none", "machines")


def test_a_slice_is_timed_by_what_was_measured_on_as_many_accelerators() -> None:
    """A slice would run as fast as the whole server, or be guessed although it was measured."""
    llama, bloom = load_model("llama2-70b"), load_model("bloom-176b")
    sliced, whole = (phase_times(llama, load_machine(name)) for name in ("dgx-h100/tp4", "dgx-h100"))
    assert sliced.source.startswith("measured: llama2-70b on dgx-h100 (Splitwise, ISCA 2024, tensor parallelism over 4")
    assert float(sliced.prefill_time_s(1024)) == pytest.approx(0.1056, abs=1e-3)
    assert float(whole.prefill_time_s(1024)) == pytest.approx(0.0779, abs=1e-3)
    guessed = phase_times(replace(bloom, name="llama2-70b", weights_bytes=1e11), load_machine("dgx-h100/tp4"))
    assert guessed.source.startswith("roofline")
    slow = replace(load_machine("dgx-h100"), hbm_bytes_per_s=1e12)
    assert phase_times(llama, variant(slow, "/tp4")).source.startswith("roofline")
    assert phase_times(llama, load_machine("h200/tp4")).source.startswith("roofline")
    with pytest.raises(SpecError) as caught:
        phase_times(llama, load_machine("dgx-h100/tp4"), published=True)
    assert_refused(caught.value, "not measured")


def test_a_cap_on_a_slice_scales_its_measured_times() -> None:
    """A cap and a slice together would lose one of the two."""
    llama = load_model("llama2-70b")
    both, sliced = (phase_times(llama, load_machine(name)) for name in ("dgx-h100/tp4@50%", "dgx-h100/tp4"))
    assert float(both.prefill_time_s(1024)) == pytest.approx(1.3 * float(sliced.prefill_time_s(1024)))
    assert float(both.decode_time_s(8, 4096)) == float(sliced.decode_time_s(8, 4096))


def test_own_profile_of_a_slice(tmp_path: Path) -> None:
    """One's own measurements on four accelerators would be passed over, or those on eight taken for them."""
    path = tmp_path / "own.csv"
    path.write_text(OWN_PROFILE + OWN_PROFILE.removeprefix(HEADER).replace(",8\n", ",4\n"))
    machine = variant(replace(load_machine("dgx-h100"), name="box"), "/tp4")
    times = phase_times(load_model("llama-3.1-8b"), machine, profile=path)
    assert float(times.prefill_time_s(1280)) == pytest.approx(0.0228)
    path.write_text(OWN_PROFILE)
    with pytest.raises(SpecError, match="tensor_parallel 4"):
        phase_times(load_model("llama-3.1-8b"), machine, profile=path)


def test_the_roofline_s_error_on_slices_is_what_the_page_says() -> None:
    """docs/model.md would state another error of the roofline on slices than there is."""
    errors = {
        f"{machine}/tp{degree}": (error.prefill_mean, error.decode_mean)
        for (_, machine, degree), error in slice_errors().items()
    }
    assert errors == {
        "dgx-a100/tp2": pytest.approx((0.48, 0.19), abs=0.005),
        "dgx-a100/tp4": pytest.approx((0.20, 0.08), abs=0.005),
        "dgx-h100/tp2": pytest.approx((0.25, 0.37), abs=0.005),
        "dgx-h100/tp4": pytest.approx((0.13, 0.30), abs=0.005),
    }


def test_unknown_profile_is_refused() -> None:
    """A misspelt profile would silently fall back to the roofline."""
    typo = replace(load_machine("dgx-h100"), name="box", profile="dgx-h10")
    with pytest.raises(SpecError) as caught:
        phase_times(load_model("bloom-176b"), typo)
    assert_refused(caught.value, "did you mean", "dgx-h100")


def test_own_profile(tmp_path: Path) -> None:
    """Measurements of one's own would be read in the wrong unit or for the wrong machine."""
    path = tmp_path / "own.csv"
    path.write_text(OWN_PROFILE + "llama-3.1-8b,box,512,1,128,999,999,4\nother,box,512,1,128,999,999,8\n")
    machine = replace(load_machine("dgx-h100"), name="box")
    times = phase_times(load_model("llama-3.1-8b"), machine, profile=path)
    assert float(times.prefill_time_s(1280)) == pytest.approx(0.0228)
    assert float(times.decode_time_s(16, 0)) == pytest.approx(0.021)
    assert "own.csv" in times.source


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["a column model"]),
        ("model,hardware\n", ["a column prompt_size"]),
        (HEADER, ["llama-3.1-8b", "box", "tensor_parallel 8"]),
        (OWN_PROFILE.replace("128,1,128,11.28", "128,1,128,fast"), ["row 1", "prompt_time", "'fast'"]),
        (OWN_PROFILE.replace("128,1,128,11.28", "128,1,128,-1"), ["row 1", "prompt_time", "'-1'"]),
        (OWN_PROFILE.replace("128,1,128,11.28", "128,1,128,nan"), ["row 1", "prompt_time", "'nan'"]),
        (HEADER + "llama-3.1-8b,box,128,1\n", ["row 1", "token_size", "None"]),
        ("\0", ["column model"]),
    ],
)
def test_one_line_for_a_bad_profile(tmp_path: Path, text: str, named: list[str]) -> None:
    """A bad profile file would give times that nobody measured, or a traceback."""
    path = tmp_path / "own.csv"
    path.write_text(text)
    machine = replace(load_machine("dgx-h100"), name="box")
    with pytest.raises(SpecError) as caught:
        phase_times(load_model("llama-3.1-8b"), machine, profile=path)
    assert_refused(caught.value, *named)


def test_profile_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing or binary profile would end in a traceback."""
    machine, model = load_machine("dgx-h100"), load_model("llama-3.1-8b")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    for name in ("none.csv", "binary.csv"):
        with pytest.raises(SpecError, match="cannot be read"):
            phase_times(model, machine, profile=tmp_path / name)


def test_build_cluster() -> None:
    """A cluster would be built with other machines, counts or times than its pools say."""
    cluster = build_cluster("bloom-176b", [("prefill", 3, "h100"), ("decode", 2, load_machine("dgx-a100"))])
    assert cluster.machines == 5
    assert [pool.role for pool in cluster.pools] == ["prefill", "decode"]
    assert cluster.name == "3 prefill dgx-h100 + 2 decode dgx-a100"
    assert cluster.pools[1].times.source.startswith("measured: bloom-176b on dgx-a100")
    published = build_cluster(cluster.model, [("unsplit", 1, "h100")], published=True, name="theirs")
    assert published.name == "theirs"
    assert published.pools[0].times.source.startswith("published look-up")


def test_build_cluster_refuses() -> None:
    """A cluster that cannot serve, or a role that is not one, would get through."""
    with pytest.raises(SpecError, match="did you mean"):
        build_cluster("bloom-176b", [("prefil", 1, "h100")])
    with pytest.raises(SpecError, match="decode"):
        build_cluster("bloom-176b", [("prefill", 1, "h100")])
    with pytest.raises(SpecError, match="at least 1"):
        build_cluster("bloom-176b", [("unsplit", 0, "h100")])


def test_own_machine_or_model_does_not_inherit_measurements_by_name() -> None:
    """A copy of a shipped file with other figures would get the shipped machine's or model's measured times."""
    machine, model = load_machine("dgx-h100"), load_model("llama2-70b")
    assert phase_times(model, machine).source.startswith("measured")
    assert phase_times(model, replace(machine, hbm_bytes_per_s=1e12)).source.startswith("roofline")
    assert phase_times(replace(model, layers=8), machine).source.startswith("roofline")
    assert phase_times(model, replace(machine, hbm_bytes_per_s=1e12, profile="dgx-h100")).source.startswith("measured")
