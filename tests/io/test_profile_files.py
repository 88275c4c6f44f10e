"""Profile files: read back, used as phase times and as a machine, and refused where they are wrong."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import tiny_trace
from phasesplit.domain.cluster import Cluster, Pool, Role
from phasesplit.domain.machine import Link
from phasesplit.errors import SpecError
from phasesplit.io.catalog import build_cluster, phase_times
from phasesplit.io.profile_schema import ProfileSpec
from phasesplit.io.profiles import read_profile_file, write_machine_file, write_profile_file
from phasesplit.io.specs import load_machine, load_model
from phasesplit.scheduler.rules import Rules, Transfer
from phasesplit.simulator.run import simulate
from phasesplit.simulator.setup import capacity_blocks
from profile_contents import CONTENT, content
from refusals import assert_refused


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(CONTENT))
    return path


@pytest.fixture
def machine_path(path: Path) -> Path:
    machine_path = path.with_name("some.yaml")
    write_machine_file(read_profile_file(path), machine_path, path)
    return machine_path


def test_a_profile_is_read_back_as_it_was_written(path: Path) -> None:
    """A resumed profile would lose points."""
    profile = read_profile_file(path)
    again = path.with_name("again.json")
    write_profile_file(profile, again)
    assert read_profile_file(again) == profile
    assert {one.name for one in path.parent.iterdir()} == {"some.json", "again.json"}


def test_its_times_are_those_of_the_machine_that_names_it(path: Path, machine_path: Path) -> None:
    """A simulation would run on a roofline although the machine was measured."""
    model, machine = load_model(path), load_machine(machine_path)
    times = phase_times(model, machine)
    assert times.source.startswith("measured: smol on some-core (some.json, 2026-01-02)")
    assert times.mean_error == 0.021
    np.testing.assert_array_equal(times.prefill_knots_tokens, [1, 64, 512])
    assert times.prefill_time_s(64) == pytest.approx(0.14 + 9e-7 * 64**2 / 2)
    assert times.decode_time_s(6, 100) == pytest.approx(0.02 + 2e-4)
    assert phase_times(model, machine, source="measured").source == times.source
    assert phase_times(model, machine, source="roofline").source.startswith("roofline")


def test_it_is_found_beside_the_machine_file_wherever_one_is(
    path: Path, machine_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine file would work in its own folder alone."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert "profile: some.json\n" in machine_path.read_text()
    cluster = build_cluster(path, [("prefill", 1, machine_path), ("decode", 2, machine_path)])
    assert {pool.times.source.split(":")[0] for pool in cluster.pools} == {"measured"}


def test_a_profile_option_goes_before_the_machine_s_own(path: Path, machine_path: Path) -> None:
    """Comparing two profiles of one machine would compare one with itself."""
    other = path.with_name("other.json")
    other.write_text(json.dumps(content(times__decode_context_s=5e-6)))
    times = phase_times(load_model(path), load_machine(machine_path), profile=other)
    assert times.decode_context_s == 5e-6


def test_its_measured_link_goes_into_the_machine_file(path: Path, machine_path: Path) -> None:
    """A simulation of a measured machine would move KV with the fixed times of other machines on a paper's network."""
    measured = {"bytes_per_s": 6.912345678901e9, "latency_s": 1e-5 / 3, "per_layer_s": 0.0, "streaming_slowdown": 0.7}
    profile = ProfileSpec(**content(link=measured | {"source": "measured: shared memory"}))
    write_machine_file(profile, machine_path, path)
    machine = load_machine(machine_path)
    assert machine.link == Link(**measured)
    assert machine.link_source == "measured: shared memory"
    cluster = build_cluster(path, [("prefill", 1, machine), ("decode", 1, machine)])
    result = simulate(cluster, tiny_trace((0.0, 100, 2)), Rules(transfer=Transfer.SERIALIZED))
    assert result.columns is not None
    sent_s = 100 * cluster.model.kv_bytes_per_token / measured["bytes_per_s"]
    assert result.columns["transfer_exposed_s"] == pytest.approx([sent_s + measured["latency_s"]], abs=1e-12)


def test_a_link_that_was_not_measured_is_left_to_the_network_cards(path: Path, machine_path: Path) -> None:
    """A guess would pass for a measurement."""
    write_machine_file(ProfileSpec(**content(link=None, unknown={"link": "not told"})), machine_path, path)
    machine = load_machine(machine_path)
    assert (machine.link, machine.link_source, machine.nic_bytes_per_s) == (None, None, 12.5e9)
    assert machine.sources["nic_bytes_per_s"] == "assumed, 100 Gb/s (not told)"


@pytest.mark.parametrize("block_tokens", [16, 32])
def test_a_simulated_machine_has_the_measured_kv_capacity(path: Path, machine_path: Path, block_tokens: int) -> None:
    """Predicted and measured would differ by preemptions that only one of them has."""
    model, machine = load_model(path), load_machine(machine_path)
    pool = Pool(role=Role.UNSPLIT, count=1, machine=machine, times=phase_times(model, machine))
    cluster = Cluster(name="c", model=model, pools=(pool,))
    blocks = capacity_blocks(cluster, pool, Rules(block_tokens=block_tokens))
    assert blocks * block_tokens == pytest.approx(347 * 32, abs=block_tokens)
    if block_tokens == 32:
        assert blocks == 347


def test_what_is_unknown_is_zero_and_says_so(path: Path, machine_path: Path) -> None:
    """A price that nobody gave would look like one."""
    machine = load_machine(machine_path)
    assert (machine.price_usd_per_hour, machine.prefill_w, machine.embodied_kg_co2e) == (0.0, 0.0, 0.0)
    for name in ("price_usd_per_hour", "prefill_w", "embodied_kg_co2e"):
        assert machine.sources[name].startswith("unknown")
    write_machine_file(read_profile_file(path), machine_path, path, price_usd_per_hour=0.1, power_w=(10.0, 40.0, 30.0))
    machine = load_machine(machine_path)
    assert (machine.price_usd_per_hour, machine.idle_w, machine.decode_w) == (0.1, 10.0, 30.0)
    assert machine.provisioned_w == 40.0
    assert machine.nic_bytes_per_s == 8e9


def test_measurements_of_something_else_are_refused(path: Path, machine_path: Path) -> None:
    """Times of one model or machine would pass for those of another."""
    model, machine = load_model(path), load_machine(machine_path)
    with pytest.raises(SpecError) as caught:
        phase_times(load_model("llama-3.1-8b"), load_machine("dgx-h100"), profile=path)
    assert_refused(caught.value, "model smol", "'llama-3.1-8b with layers 32'", "--model", "some.json")
    with pytest.raises(SpecError) as caught:
        phase_times(model, load_machine("dgx-h100"), profile=path)
    assert_refused(caught.value, "machine some-core", "'dgx-h100'", "that machine")
    path.write_text(json.dumps(content(model={"name": "other"})))
    with pytest.raises(SpecError) as caught:
        phase_times(model, machine)
    assert_refused(caught.value, "model other", "'smol'", "measured")
    with pytest.raises(SpecError) as caught:
        load_model(path)
    assert_refused(caught.value, "sizes are not known")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (content(version=2), ["version", "2", "1"]),
        (content(format="something"), ["format", "'something'", "'phasesplit profile'"]),
        (
            content(times__prefill_knots_s=[0.1, 0.2]),
            ["prefill_knots_tokens", "increase", "as many prefill_knots_s"],
        ),
        (content(times__decode_knots_requests=[1, 7, 6, 32]), ["decode_knots_requests", "increase"]),
        (content(times__decode_context_s=-1.0), ["times.decode_context_s", "got -1.0"]),
        (content(elapsed_s=math.nan), ["elapsed_s"]),
        (content(iteratons=[]), ["iteratons", "unknown", "iterations"]),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(path: Path, changed: dict[str, Any], named: list[str]) -> None:
    """A wrong figure would be simulated with, or end in a traceback."""
    path.write_text(json.dumps(changed))
    with pytest.raises(SpecError) as caught:
        read_profile_file(path)
    assert_refused(caught.value, str(path), *named)


def test_an_unfinished_profile_is_kept_but_not_simulated_with(path: Path, machine_path: Path) -> None:
    """Points of two iterations would be taken for phase times."""
    path.write_text(json.dumps(content(times=None)))
    with pytest.raises(SpecError) as caught:
        phase_times(load_model(path), load_machine(machine_path))
    assert_refused(caught.value, "too few iterations", "phasesplit profile --resume")
    with pytest.raises(SpecError, match="needs phase times"):
        write_machine_file(ProfileSpec(**content(times=None)), machine_path, path)


def test_no_roofline_and_no_cap_is_lost(path: Path, machine_path: Path) -> None:
    """A power-capped machine would be as fast as the measured one."""
    text = machine_path.read_text().replace("provisioned_w: 0.0", "decode_time_factor: 2.0\nprovisioned_w: 0.0")
    machine_path.write_text(text)
    times = phase_times(load_model(path), load_machine(machine_path))
    assert times.decode_time_s(1, 0) == pytest.approx(0.015)
