"""Phase times from aiconfigurator: fitted to its figures, asked for rightly, refused in one line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasesplit.domain.profile import extended_interp
from phasesplit.domain.roofline import roofline_times
from phasesplit.errors import SpecError
from phasesplit.io.catalog import operator_times
from phasesplit.io.operator_engine import BACKENDS, SYSTEMS, engine_named, operator_engine
from phasesplit.io.specs import load_machine, load_model
from refusals import assert_refused

MODEL = load_model("llama-3.1-70b")
MACHINE = load_machine("dgx-h100")


@pytest.fixture
def package() -> None:
    """Skip where the optional package is not installed."""
    pytest.importorskip("aiconfigurator_core", reason="needs pip install 'phasesplit[aiconfigurator]'")


def test_fit_returns_the_times_it_was_fitted_to(fake_tables: Any) -> None:
    """Milliseconds would be taken for seconds, or the pair and context terms mixed up with the batch."""
    times = operator_times(MODEL, MACHINE)
    tokens, requests = np.array([16, 700, 9000]), np.array([1, 50, 400])
    assert times.prefill_time_s(tokens) == pytest.approx((5 + 0.04 * tokens + 5e-7 * tokens**2 / 2) / 1e3)
    assert times.decode_time_s(requests, 700 * requests) == pytest.approx(
        (9 + 0.02 * requests + 0.0091 * requests) / 1e3
    )
    assert times.prefill_pair_s == pytest.approx(5e-10)
    assert times.decode_context_s == pytest.approx(1.3e-8)
    assert times.mean_error == pytest.approx(0, abs=1e-9)
    assert (times.measured_prompt_tokens, times.measured_requests) == (32_768, 512)


def test_source_names_what_a_reader_needs_to_find_the_figures(fake_tables: Any) -> None:
    """A report could not say which tables of which release its times come from."""
    source = operator_times(MODEL, MACHINE).source
    for part in (
        "meta-llama/Meta-Llama-3.1-70B",
        "h100_sxm",
        "vllm 0.24.0",
        "over 8",
        "aiconfigurator-core 0.12.0",
        "90%",
    ):
        assert part in source


def test_slice_is_asked_for_with_its_own_accelerators(fake_tables: Any) -> None:
    """A slice of a server would be as fast as the whole, or another engine's or version's tables be taken."""
    operator_times(MODEL, load_machine("dgx-h100/tp4"), backend="sglang", version="next")
    (asked,) = fake_tables.asked
    assert asked["tp_size"] == 4
    assert (asked["system"], asked["backend"], asked["backend_version"]) == ("h100_sxm", "sglang", "0.27.0")
    assert (asked["kvcache_quant_mode"], asked["moe_tp_size"]) == ("bfloat16", None)


def test_levels_never_fall_with_more_work(fake_tables: Any) -> None:
    """Noise in the tables would make two requests faster than one, and a scheduler pile up work to gain time."""
    fake_tables.engine.dip_ms = 0.7
    times = operator_times(MODEL, MACHINE)
    assert (np.diff(times.decode_knots_s) >= 0).all()
    assert 0 < times.mean_error < 0.05


def test_grid_stays_within_memory(fake_tables: Any) -> None:
    """Times would be claimed for batches that the machine cannot hold."""
    small = replace(MACHINE, hbm_bytes=MODEL.weights_bytes + 5000 * MODEL.kv_bytes_per_token)
    times = operator_times(MODEL, small)
    assert (times.measured_prompt_tokens, times.measured_requests) == (4096, 32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"machine": replace(MACHINE, name="mi300x")}, ["mi300x", "dgx-h100"]),
        ({"backend": "vlm"}, ["vlm", "did you mean vllm"]),
        ({"version": "0.9.0"}, ["0.9.0", "0.24.0"]),
        ({"model": load_model("bloom-176b")}, ["bloom-176b", "packaged are meta-llama/Meta-Llama-3.1-70B"]),
        ({"model": replace(MODEL, weights_bytes=MODEL.weights_bytes / 2)}, ["no packaged model"]),
        ({"model": replace(MODEL, value_bytes=4)}, ["value_bytes", "2 or 1"]),
        ({"machine": replace(MACHINE, hbm_bytes=140e9)}, ["141.1 GB", "less than"]),
    ],
)
def test_what_the_tables_lack_is_refused_in_one_line(
    fake_tables: Any, change: dict[str, Any], words: list[str]
) -> None:
    """A wrong name, another precision or a model that does not fit would get another's times, or a traceback."""
    with pytest.raises(SpecError) as refused:
        operator_times(**({"model": MODEL, "machine": MACHINE} | change))
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


def test_error_of_the_package_becomes_one_line(fake_tables: Any) -> None:
    """What the package raises deep inside would reach the reader as a traceback of another project."""
    fake_tables.engine.failure = RuntimeError("no data\n  to anchor query")
    with pytest.raises(SpecError) as caught:
        operator_times(MODEL, MACHINE)
    assert_refused(caught.value, "h100_sxm", "vllm 0.24.0", "no data to anchor query")


def test_own_config_must_describe_the_model(fake_tables: Any, tmp_path: Path) -> None:
    """A model that is not packaged could not be used, or the wrong file would give another model's times."""
    packaged = tmp_path / "aiconfigurator_core" / "model_configs" / "meta-llama--Meta-Llama-3.1-70B_config.json"
    own = tmp_path / "config.json"
    own.write_text(packaged.read_text())
    packaged.unlink()
    assert "llama-3.1-70b on h100_sxm" in operator_times(MODEL, MACHINE, config=tmp_path).source
    with pytest.raises(SpecError) as caught:
        operator_times(load_model("llama-3.1-8b"), MACHINE, config=own)
    assert_refused(caught.value, "layers", "llama-3.1-8b")


def test_mistral_is_handed_over_as_llama(fake_tables: Any, tmp_path: Path) -> None:
    """A model whose layers the package knows would be refused for its name."""
    packaged = next((tmp_path / "aiconfigurator_core" / "model_configs").iterdir())
    config = json.loads(packaged.read_text()) | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    operator_times(MODEL, MACHINE, config=tmp_path)
    assert json.loads(fake_tables.asked[-1]["config"])["architectures"] == ["LlamaForCausalLM"]


def test_fp8_blocks_are_refused_where_their_tables_hold_launches(fake_tables: Any, tmp_path: Path) -> None:
    """FP8 would be planned ten times as slow as BF16, because a table holds the time to launch a product."""
    packaged = next((tmp_path / "aiconfigurator_core" / "model_configs").iterdir())
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    packaged.write_text(json.dumps(json.loads(packaged.read_text()) | {"quantization_config": blocks}))
    model = replace(MODEL, weights_bytes=MODEL.parameters)
    with pytest.raises(SpecError) as caught:
        operator_times(model, MACHINE)
    assert_refused(caught.value, "FP8 blocks", "'vllm'", "sglang or trtllm")
    operator_times(model, MACHINE, backend="sglang")
    assert fake_tables.asked[-1]["fmha_quant_mode"] == "bfloat16"


def test_without_the_package_the_error_says_how_to_get_it(no_tables: None) -> None:
    """An optional package that is missing would be a traceback instead of an instruction."""
    with pytest.raises(SpecError, match=r"pip install 'phasesplit\[aiconfigurator\]'"):
        operator_times(MODEL, MACHINE)


def test_engine_and_version_are_read_from_the_source() -> None:
    """The engine that a person asked for would be ignored, or half a name be accepted."""
    assert engine_named("aiconfigurator") == ("vllm", None)
    assert engine_named("aiconfigurator:trtllm") == ("trtllm", None)
    assert engine_named("aiconfigurator:sglang:next") == ("sglang", "next")
    for wrong in ("roofline", "aiconfigurator:", "aiconfigurator:vllm:0.24.0:8"):
        with pytest.raises(SpecError, match=r"allowed is aiconfigurator\[:engine\[:version\]\]"):
            engine_named(wrong)


@pytest.mark.parametrize("machine", SYSTEMS)
def test_tables_of_the_package_cover_every_machine_and_engine(package: None, machine: str) -> None:
    """The installed release would lack tables that this package offers, or the fit would not follow them."""
    for backend in BACKENDS:
        times = operator_times(load_model("llama-3.1-8b"), load_machine(machine), backend=backend)
        assert times.mean_error < 0.05, times.source


@pytest.mark.parametrize(
    ("model", "name"),
    [("llama2-70b", "meta-llama/Meta-Llama-3.1-70B"), ("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1")],
)
def test_packaged_model_of_the_same_layers_answers(package: None, model: str, name: str) -> None:
    """Llama 2 70B would not be found by its layers, or Mixtral be looked up over the network."""
    assert f" {name} on " in operator_times(load_model(model), MACHINE).source


def test_times_of_the_package_are_of_the_size_that_the_hardware_allows(package: None) -> None:
    """The package's unit, its step or what it calls parallel would have changed: times off by far more than noise."""
    times, roofline = operator_times(MODEL, MACHINE), roofline_times(MODEL, MACHINE)
    tokens, requests = np.array([256, 2048, 8192]), np.array([1, 8, 64])
    prompts = times.prefill_time_s(tokens) / roofline.prefill_time_s(tokens)
    token = times.decode_time_s(requests, 512 * requests) / roofline.decode_time_s(requests, 512 * requests)
    assert (np.abs(np.log(np.concatenate([prompts, token]))) < np.log(1.5)).all()


def test_part_of_a_server_is_slower_than_all_of_it(package: None) -> None:
    """The package would not follow the degree of tensor parallelism: a quarter of the machine at no cost in time."""
    whole, part = (operator_times(MODEL, load_machine(name)) for name in ("dgx-h100", "dgx-h100/tp4"))
    assert 1.4 < part.decode_time_s(16, 8192) / whole.decode_time_s(16, 8192) < 2.2
    assert 1.4 < part.prefill_time_s(2048) / whole.prefill_time_s(2048) < 2.2


def test_formula_of_mixed_and_chunked_iterations_follows_the_package(package: None) -> None:
    """Chunked prefill would be planned with times that the operators of such an iteration do not add up to."""
    times = operator_times(MODEL, MACHINE)
    handle = operator_engine(MODEL, MACHINE, backend="vllm", version=None, config=None).handle

    def batch_s(tokens: int) -> float:
        return float(extended_interp(tokens, times.prefill_knots_tokens, times.prefill_knots_s))

    for chunk, requests in ((512, 16), (512, 128), (2048, 64)):
        mixed_s = (
            batch_s(chunk + requests) + times.prefill_pair_s * chunk**2 / 2 + times.decode_context_s * requests * chunk
        )
        assert mixed_s == pytest.approx(handle.mixed_step_latency(chunk, requests, chunk, 2) / 1e3, rel=0.1)
    for chunk, behind in ((512, 2048), (512, 8192), (2048, 6144)):
        chunk_s = batch_s(chunk) + times.prefill_pair_s * (chunk**2 / 2 + chunk * behind)
        assert chunk_s == pytest.approx(handle.predict_prefill_latency(1, chunk + behind, behind) / 1e3, rel=0.1)
