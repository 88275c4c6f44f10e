"""Machine, model and cluster files: what is read, and one plain line for what is wrong."""

import json
from pathlib import Path

import pytest
import yaml

from phasesplit.domain.cluster import Role
from phasesplit.domain.machine import Link
from phasesplit.errors import SpecError
from phasesplit.io.schema import ClusterSpec, PoolSpec
from phasesplit.io.specs import known_machines, known_models, load_cluster, load_machine, load_model, write_cluster
from refusals import assert_refused

MACHINE = {
    "name": "box",
    "accelerators": 4,
    "hbm_bytes": "320 GB",
    "hbm_bytes_per_s": "8 TB/s",
    "flops_per_s": "1.2 PFLOP/s",
    "nic_bytes_per_s": "400 Gb/s",
    "provisioned_w": "4 kW",
    "idle_w": 500,
    "prefill_w": 3000,
    "decode_w": "2e3",
    "price_usd_per_hour": "9.50 USD/h",
    "embodied_kg_co2e": "2 t",
}
MODEL = {
    "name": "small",
    "layers": 2,
    "hidden": 64,
    "query_heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "parameters": "1e6",
    "active_parameters": 1e6,
    "weights_bytes": "2 MB",
}
LLAMA_8B = {
    "model_type": "llama",
    "_name_or_path": "meta-llama/Llama-3.1-8B",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
MIXTRAL = LLAMA_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
QWEN3_32B = LLAMA_8B | {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "head_dim": 128,
    "intermediate_size": 25600,
    "vocab_size": 151936,
}


def _write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def test_shipped_names() -> None:
    """A machine or model that the documentation names would not be there."""
    assert {"dgx-a100", "dgx-h100", "dgx-h100-capped", "dgx-h200", "dgx-b200", "l40s", "mi300x"} == set(
        known_machines()
    )
    assert {"bloom-176b", "llama2-70b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-32b", "mixtral-8x7b"} == set(
        known_models()
    )


@pytest.mark.parametrize(
    ("load", "name", "near"),
    [(load_machine, "dgx-h10", "dgx-h100"), (load_machine, "H200", "h200"), (load_model, "lama2-70b", "llama2-70b")],
)
def test_unknown_name_offers_near_ones(load, name: str, near: str) -> None:  # type: ignore[no-untyped-def]
    """A typing mistake would be answered without the name that was meant."""
    with pytest.raises(SpecError) as caught:
        load(name)
    assert near in str(caught.value)
    assert "\n" not in str(caught.value)


def test_units_become_base_units(tmp_path: Path) -> None:
    """A figure with a unit would be read in another size than its unit says."""
    machine = load_machine(_write(tmp_path / "box.yaml", MACHINE))
    assert machine.hbm_bytes == 320e9
    assert machine.hbm_bytes_per_s == 8e12
    assert machine.flops_per_s == 1.2e15
    assert machine.nic_bytes_per_s == 50e9
    assert (machine.provisioned_w, machine.idle_w, machine.decode_w) == (4000, 500, 2000)
    assert machine.price_usd_per_hour == 9.5
    assert machine.embodied_kg_co2e == 2000
    assert machine.profile_name == "box"
    binary = MACHINE | {"hbm_bytes": "640 GiB", "lifetime_s": "5 years", "nic_bytes_per_s": "12 GiB/s"}
    machine = load_machine(str(_write(tmp_path / "box.yml", binary)))
    assert machine.hbm_bytes == 8 * 85_899_345_920
    assert machine.lifetime_s == 5 * 365 * 86_400
    assert machine.nic_bytes_per_s == 12 * 2**30


LINK = {"bytes_per_s": "50 Gb/s", "latency_s": "900 us", "per_layer_s": 0, "streaming_slowdown": "0.5"}


def test_a_measured_link_is_read_in_base_units(tmp_path: Path) -> None:
    """A link would be read in another size than its units say, or take part of it from a paper's network."""
    machine = load_machine(_write(tmp_path / "box.yaml", MACHINE | {"link": LINK, "sources": {"link": "iperf"}}))
    assert machine.link == Link(bytes_per_s=6.25e9, latency_s=9e-4, per_layer_s=0.0, streaming_slowdown=0.5)
    assert machine.link_source == "iperf"
    half = load_machine(f"{tmp_path / 'box.yaml'}/tp2")
    assert half.link == Link(bytes_per_s=3.125e9, latency_s=9e-4, per_layer_s=0.0, streaming_slowdown=0.5)
    assert load_machine(_write(tmp_path / "box.yaml", MACHINE)).link is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hbm_bytes": "80 GB/s"}, ["line 3", "hbm_bytes", "80 GB/s", "unit of bytes_per_s", "GB"]),
        ({"hbm_bytes": "80 gigs"}, ["line 3", "hbm_bytes", "'gigs' is not a unit"]),
        ({"hbm_bytes": "80 Gb"}, ["line 3", "hbm_bytes", "'Gb' is not a unit", "GB"]),
        ({"hbm_bytes": "1,5 GB"}, ["hbm_bytes", "1,5 GB"]),
        ({"hbm_bytes": -1}, ["line 3", "hbm_bytes", "-1", "above 0"]),
        ({"hbm_bytes": 0}, ["line 3", "hbm_bytes", "got 0", "above 0"]),
        ({"hbm_bytes": float("nan")}, ["line 3", "hbm_bytes", "nan"]),
        ({"hbm_bytes": "nan"}, ["line 3", "hbm_bytes", "nan"]),
        ({"hbm_bytes": float("inf")}, ["line 3", "hbm_bytes", "inf"]),
        ({"hbm_bytes": 10**400}, ["line 3", "hbm_bytes", "at most 1e+18"]),
        ({"hbm_bytes": "9" * 400 + " GB"}, ["line 3", "hbm_bytes", "at most 1e+18"]),
        ({"hbm_bytes": True}, ["line 3", "hbm_bytes", "True"]),
        ({"hbm_bytes": None}, ["line 3", "hbm_bytes", "None"]),
        ({"hbm_bytes": [1]}, ["line 3", "hbm_bytes"]),
        ({"hbm_bytes": ""}, ["line 3", "hbm_bytes"]),
        ({"accelerators": 2.5}, ["line 2", "accelerators", "2.5", "whole number"]),
        ({"accelerators": True}, ["line 2", "accelerators", "whole number"]),
        ({"accelerators": 0}, ["line 2", "accelerators", "from 1"]),
        ({"prefill_time_factor": "2 s"}, ["prefill_time_factor", "without a unit"]),
        ({"name": 7}, ["line 1", "name", "plain text"]),
        ({"name": ""}, ["line 1", "name"]),
        ({"idle_w": 3500}, ["prefill_w", "at least idle_w"]),
        ({"prefill_w": 5000}, ["line 9", "prefill_w", "at most provisioned_w"]),
        ({"price_per_hour": 3}, ["line 13", "price_per_hour", "did you mean price_usd_per_hour"]),
        ({"xyzzy": 3}, ["line 13", "xyzzy", "known are", "hbm_bytes"]),
        ({7: 3}, ["line 13, 7", "field names in plain text"]),
        ({"sources": 3}, ["line 13, sources", "a mapping"]),
        ({"idle_w": -1}, ["line 8, idle_w: got -1, allowed is a number from 0 to 1e+08"]),
        ({"link": 3}, ["line 13, link: got 3, allowed is a mapping"]),
        ({"link": {}}, ["line 13, link", "field bytes_per_s is missing"]),
        ({"link": LINK | {"bytes_per_s": 0}}, ["line 14, link.bytes_per_s: got 0, allowed is a number above 0"]),
        (
            {"link": LINK | {"bytes_per_s": "6 GB"}},
            ["line 14, link.bytes_per_s: got '6 GB'", "'GB' is a unit of bytes"],
        ),
        ({"link": LINK | {"latency_s": "-1 ms"}}, ["line 15, link.latency_s: got '-1 ms'", "a number from 0 to 3600"]),
        ({"link": LINK | {"per_layer_s": "2 h"}}, ["line 16, link.per_layer_s: got '2 h'", "a number from 0 to 3600"]),
        ({"link": LINK | {"streaming_slowdown": "9%"}}, ["line 17, link.streaming_slowdown", "without a unit"]),
        ({"link": LINK | {"latency": 1}}, ["line 18, link.latency: unknown field, did you mean latency_s"]),
    ],
)
def test_one_line_for_a_bad_machine_field(tmp_path: Path, change: dict[object, object], says: list[str]) -> None:
    """A bad value would get through, or be reported without file, line, field and what is allowed."""
    path = _write(tmp_path / "box.yaml", MACHINE | change)
    with pytest.raises(SpecError) as caught:
        load_machine(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    for part in [str(path), *says]:
        assert part in message


def test_missing_and_misspelt_field(tmp_path: Path) -> None:
    """A missing field would be taken as 0, or a misspelt one reported only as missing."""
    without = {name: value for name, value in MACHINE.items() if name != "decode_w"}
    with pytest.raises(SpecError) as caught:
        load_machine(_write(tmp_path / "box.yaml", without))
    assert_refused(caught.value, "decode_w", "missing")
    with pytest.raises(SpecError) as caught:
        load_machine(_write(tmp_path / "box.yaml", without | {"tokens_w": 5}))
    assert_refused(caught.value, "line 12", "tokens_w", "unknown", "decode_w")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", ["a mapping of fields"]),
        ("- a\n- b\n", ["a mapping of fields"]),
        ("hello", ["a mapping of fields"]),
        ("name: a\nlayers: 2\nname: b\n", ["line 3", "name", "twice"]),
        ("name: a\nsources:\n  layers: x\n  layers: y\n", ["line 4", "layers", "twice"]),
        ("name: [a\n", ["not YAML"]),
        ("name: a\n\tlayers: 2\n", ["line 2", "not YAML"]),
        ("a: &x [1]\nb: *x\n", ["alias"]),
        ("? [a, b]\n: 1\n", ["plain text"]),
        ("name: !!python/object:os.system x\n", ["not YAML"]),
        ("[" * 5000, ["not YAML"]),
        ("layers: " + "9" * 5000, ["not YAML"]),
        ("name: a\n---\nname: b\n", ["not YAML"]),
    ],
)
def test_one_line_for_text_that_is_not_a_spec(tmp_path: Path, text: str, named: list[str]) -> None:
    """Broken YAML would end in a traceback, or a field named twice be taken silently."""
    path = _write(tmp_path / "model.yaml", text)
    with pytest.raises(SpecError) as caught:
        load_model(path)
    assert_refused(caught.value, str(path), *named)


def test_one_line_for_files_that_cannot_be_read(tmp_path: Path) -> None:
    """A missing, binary, huge or special file would end in a traceback."""
    binary, huge, folder = tmp_path / "b.yaml", tmp_path / "h.yaml", tmp_path / "d.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    huge.write_bytes(b"a" * (2 << 20))
    folder.mkdir()
    for path, says in [
        (tmp_path / "none.yaml", "No such file"),
        (binary, "UTF-8"),
        (huge, "at most"),
        (folder, "not a file"),
        (Path("a\0b.yaml"), "cannot be read"),
    ]:
        with pytest.raises(SpecError, match=says):
            load_machine(path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kv_heads": 3}, ["divisor of query_heads"]),
        ({"active_parameters": 2e6}, ["at most parameters"]),
        ({"experts": 2, "experts_per_token": 3}, ["at most experts"]),
        ({"weights_bytes": "2 MW"}, ["unit of w"]),
        ({"layer": 2}, ["did you mean", "layers"]),
    ],
)
def test_one_line_for_a_bad_model_field(tmp_path: Path, change: dict[str, object], named: list[str]) -> None:
    """A model that cannot exist would be planned for."""
    with pytest.raises(SpecError) as caught:
        load_model(_write(tmp_path / "small.yaml", MODEL | change))
    assert_refused(caught.value, *named)


def test_own_model(tmp_path: Path) -> None:
    """A model file would lose or change a field."""
    model = load_model(_write(tmp_path / "small.yaml", MODEL))
    assert (model.name, model.layers, model.parameters, model.weights_bytes) == ("small", 2, 1e6, 2e6)
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 2 * 16


@pytest.mark.parametrize(
    ("config", "shipped"),
    [(LLAMA_8B, "llama-3.1-8b"), (MIXTRAL, "mixtral-8x7b"), (QWEN3_32B, "qwen3-32b")],
)
def test_config_json_gives_the_shipped_model(tmp_path: Path, config: dict[str, object], shipped: str) -> None:
    """A config.json would give other sizes than the shipped model of the same name has."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    read, known = load_model(tmp_path / "config.json"), load_model(shipped)
    assert load_model(tmp_path) == read
    for field in ("layers", "hidden", "query_heads", "kv_heads", "head_dim", "experts", "experts_per_token"):
        assert getattr(read, field) == getattr(known, field)
    assert read.parameters == pytest.approx(known.parameters, rel=0.01)
    assert read.active_parameters == pytest.approx(known.active_parameters, rel=0.01)
    assert read.weights_bytes == pytest.approx(known.weights_bytes, rel=0.01)
    assert read.kv_bytes_per_token == known.kv_bytes_per_token


def test_config_json_names_its_model(tmp_path: Path) -> None:
    """A report would call the model by no name."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    assert load_model(path).name == "meta-llama/Llama-3.1-8B"
    path.write_text(json.dumps({key: value for key, value in LLAMA_8B.items() if key != "_name_or_path"}))
    assert load_model(path).name == tmp_path.name


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    ],
)
def test_quantized_weights_take_fewer_bytes(tmp_path: Path, quantization: dict[str, object], bits: float) -> None:
    """A quantized model would be counted at 16 bits, or its embeddings at 4."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B | {"quantization_config": quantization}))
    embeddings = 2 * 4096 * 128_256
    model = load_model(path)
    assert model.weights_bytes == pytest.approx((model.parameters - embeddings) * bits / 8 + embeddings * 2)
    assert model.value_bytes == 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "bloom"}, ["model_type", "'bloom'"]),
        ({"model_type": None}, ["model_type"]),
        ({"hidden_size": None}, ["hidden_size", "missing"]),
        ({"hidden_size": -1}, ["hidden_size", "got -1"]),
        ({"hidden_size": True}, ["hidden_size", "True"]),
        ({"hidden_size": 4096.5}, ["hidden_size"]),
        ({"num_key_value_heads": 5}, ["divisor of 32"]),
        ({"torch_dtype": "int3"}, ["torch_dtype", "'int3'"]),
        ({"torch_dtype": ["float16"]}, ["torch_dtype"]),
        ({"tie_word_embeddings": "no"}, ["tie_word_embeddings"]),
        ({"quantization_config": "fp8"}, ["quantization_config"]),
        ({"quantization_config": {"quant_method": "mystery"}}, ["'mystery'"]),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, ["at most 2"]),
    ],
)
def test_one_line_for_a_bad_config_json(tmp_path: Path, change: dict[str, object], named: list[str]) -> None:
    """A config.json that is not understood would give a wrong model or a traceback."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B | change))
    with pytest.raises(SpecError) as caught:
        load_model(path)
    assert_refused(caught.value, *named)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"a": 1, "a": 2}', "[" * 5000, "9" * 5000])
def test_one_line_for_text_that_is_not_json(tmp_path: Path, text: str) -> None:
    """Broken JSON would end in a traceback."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"config\.json"):
        load_model(path)


def _cluster() -> ClusterSpec:
    return ClusterSpec(
        name="ours",
        model="bloom-176b",
        pools=(
            PoolSpec(role=Role.PREFILL, count=25, machine="dgx-h100"),
            PoolSpec(role=Role.DECODE, count=15, machine="dgx-h100-capped"),
        ),
        rules={"batch_tokens": 2048, "transfer": "layer-wise"},
    )


def test_cluster_round_trip(tmp_path: Path) -> None:
    """A cluster written and read back would be another cluster."""
    write_cluster(_cluster(), tmp_path / "cluster.yaml")
    assert load_cluster(tmp_path / "cluster.yaml") == _cluster()
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"]


def test_a_served_cluster_can_be_simulated(tmp_path: Path) -> None:
    """One file could not say both what is served and what is simulated, or a plan would repeat what it did not read."""
    plain = _cluster()
    content = plain.model_dump(mode="json") | {"engine": "embedded", "serve": {"port": 8080, "kv_memory": "1GB"}}
    spec = load_cluster(_write(tmp_path / "cluster.yaml", content))
    assert spec.model_dump() == plain.model_dump()
    write_cluster(spec, tmp_path / "written.yaml")
    assert "serve" not in (tmp_path / "written.yaml").read_text()


def test_cluster_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A failed write would leave a temporary file, or raise something else than one line."""
    with pytest.raises(SpecError, match="cannot be written"):
        write_cluster(_cluster(), tmp_path / "missing" / "cluster.yaml")
    (tmp_path / "taken").mkdir()
    with pytest.raises(SpecError, match="cannot be written"):
        write_cluster(_cluster(), tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_cluster_paths_are_beside_its_file(tmp_path: Path) -> None:
    """A cluster file with machines and models of its own would only work from its own directory."""
    _write(tmp_path / "box.yaml", MACHINE)
    _write(tmp_path / "small.yaml", MODEL)
    pools = [{"role": "unsplit", "count": 2, "machine": "box.yaml"}]
    spec = load_cluster(_write(tmp_path / "cluster.yaml", {"model": "small.yaml", "pools": pools}))
    assert load_model(spec.model).name == "small"
    assert load_machine(spec.pools[0].machine).name == "box"
    assert spec.rules == {}
    (tmp_path / "elsewhere").mkdir()
    write_cluster(spec, tmp_path / "elsewhere" / "cluster.yaml")
    assert load_cluster(tmp_path / "elsewhere" / "cluster.yaml") == spec


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"pools": []}, ["line 2", "pools", "[]", "list of pools"]),
        ({"pools": "many"}, ["list of pools"]),
        ({"pools": [{"role": "promt", "count": 1, "machine": "x"}]}, ["line 3", "pools[0].role", "'promt'"]),
        ({"pools": [{"role": "prefill", "count": 0, "machine": "x"}]}, ["line 4", "pools[0].count", "got 0"]),
        ({"pools": [{"role": "prefill", "machine": "x"}]}, ["line 3", "pools[0]", "count", "missing"]),
        ({"pools": [{"role": "prefill", "count": 1, "machin": "x"}]}, ["did you mean", "machine"]),
        ({"pool": []}, ["did you mean", "pools"]),
        ({"rules": 3}, ["line 6", "rules", "3", "mapping"]),
        ({"pools": [3]}, ["pools[0]", "3", "mapping"]),
    ],
)
def test_one_line_for_a_bad_cluster(tmp_path: Path, change: dict[str, object], named: list[str]) -> None:
    """A bad cluster file would be planned with, or end in a traceback."""
    good = {"model": "bloom-176b", "pools": [{"role": "unsplit", "count": 1, "machine": "dgx-h100"}]}
    with pytest.raises(SpecError) as caught:
        load_cluster(_write(tmp_path / "cluster.yaml", good | change))
    assert_refused(caught.value, *named)


@pytest.mark.parametrize(
    ("text", "name", "accelerators", "provisioned_w"),
    [
        ("dgx-h100/tp4", "dgx-h100/tp4", 4, 5_100),
        ("h100@50%", "dgx-h100@50%", 8, 7_140),
        ("dgx-h100/tp2@50%", "dgx-h100/tp2@50%", 2, 1_785),
        ("dgx-h100/tp8@100%", "dgx-h100", 8, 10_200),
    ],
)
def test_variants_by_name(text: str, name: str, accelerators: int, provisioned_w: float) -> None:
    """A slice or a cap in a machine's name would be dropped, or taken for a path."""
    machine = load_machine(text)
    assert (machine.name, machine.accelerators) == (name, accelerators)
    assert machine.provisioned_w == pytest.approx(provisioned_w)


def test_variants_of_a_file(tmp_path: Path) -> None:
    """A slice of a machine of one's own could not be asked for, or a folder be taken for a slice."""
    path = _write(tmp_path / "box.yaml", MACHINE | {"accelerators": 4, "accelerators_limit_w": "1 kW"})
    assert load_machine(f"{path}/tp2@50%").name == "box/tp2@50%"
    inside = tmp_path / "dgx-h100"
    inside.mkdir()
    _write(inside / "tp4", MACHINE)
    assert load_machine(str(inside / "tp4")).name == "box"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dgx-h100/tp3", ["tensor parallelism", "3", "1, 2, 4 or 8"]),
        ("dgx-h100/tp0", ["tensor parallelism", "got 0"]),
        ("dgx-h100@19%", ["power cap", "'19%'", "20% to 100%"]),
        ("dgx-h100@101%", ["power cap", "'101%'"]),
        ("dgx-h100/4", ["NAME", "NAME/tp4", "NAME@50% or NAME/tp4@50%"]),
        ("dgx-h100@50", ["NAME", "NAME/tp4"]),
        ("dgx-h100@50%/tp4", ["NAME", "NAME/tp4"]),
        ("h100/tp", ["NAME", "NAME/tp4"]),
        ("dgx-h10/tp4", ["'dgx-h10'", "dgx-h100"]),
        ("none.yaml/tp4", ["none.yaml", "cannot be read"]),
    ],
)
def test_wrong_variants_are_one_line(text: str, named: list[str]) -> None:
    """A slice or a cap that there is not would be rounded to one that there is, or end in a traceback."""
    with pytest.raises(SpecError) as caught:
        load_machine(text)
    assert_refused(caught.value, *named)


def test_variants_stay_in_a_written_cluster(tmp_path: Path) -> None:
    """A cluster file would lose the slices of its machines, or take their names for paths."""
    _write(tmp_path / "box.yaml", MACHINE)
    pools = [{"role": "unsplit", "count": 1, "machine": name} for name in ("dgx-h100/tp4@50%", "box.yaml/tp4")]
    spec = load_cluster(_write(tmp_path / "cluster.yaml", {"model": "llama2-70b", "pools": pools}))
    assert spec.pools[0].machine == "dgx-h100/tp4@50%"
    assert spec.pools[1].machine == f"{tmp_path / 'box.yaml'}/tp4"
