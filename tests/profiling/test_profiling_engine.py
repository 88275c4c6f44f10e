"""What a profile asks of the embedded engine, on the tiny model."""

from pathlib import Path

import numpy as np
import pytest

from phasesplit.engine.fetch import write_tiny_model
from phasesplit.engine.iteration import check_batch
from phasesplit.errors import SpecError
from phasesplit.profiling.adaptive import coarse_grid, held_out, prompts_alone
from phasesplit.profiling.engine_machine import (
    EngineMachine,
    attempted,
    batch_of,
    kv_facts,
    link_facts,
    model_facts,
    opened,
    start_up_s,
)
from phasesplit.profiling.fitting import Shape
from phasesplit.profiling.power import NotReadableError, PowerMeter

pytestmark = pytest.mark.alone

KV_BYTES = 1 << 20


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def machine(path: Path) -> EngineMachine:
    return EngineMachine(opened(path), KV_BYTES)


def test_batches_are_what_their_shape_says() -> None:
    """Other iterations would be timed than the ones that the times are written down for."""
    batch = batch_of(
        Shape(prompts=2, prompt_tokens=40, behind_tokens=70, requests=3, context_tokens=33), blocks=99, vocabulary=50
    )
    assert batch.tokens.shape == (83,)
    assert batch.tables.shape == (5, 4)
    assert len(np.unique(batch.tables)) == 20  # every sequence has blocks of its own
    assert batch.positions[0] == batch.positions[40] == 70
    assert batch.positions[39] == batch.positions[79] == 109
    assert batch.positions[80:].tolist() == [32, 32, 32]  # which attends to 33 tokens, itself among them
    assert batch.wanted.tolist() == [39, 79, 80, 81, 82]


def test_the_engine_takes_every_shape_that_is_asked_for(machine: EngineMachine) -> None:
    """A profile would end in an error of the engine."""
    bounds = machine.bounds
    assert bounds.kv_tokens == machine.blocks * 32
    for shape in (*prompts_alone(bounds), *coarse_grid(bounds), *held_out(bounds, 100, seed=1)):
        batch = batch_of(shape, machine.blocks, machine.model.config.vocab)
        check_batch(batch, machine.model.config, machine.blocks)
    (taken_s,) = machine.run(Shape(prompts=1, prompt_tokens=30, requests=2, context_tokens=100))
    assert 0 < taken_s < 10
    assert machine.interrupted_share is not None


def test_too_little_memory_is_refused(machine: EngineMachine) -> None:
    """An engine that holds no two blocks would be profiled."""
    with pytest.raises(SpecError, match=r"--kv-memory: got 1000, allowed is \d+ bytes or more"):
        EngineMachine(machine.model, 1_000)


def test_the_model_is_described_as_it_is_served(machine: EngineMachine) -> None:
    """The simulator would give machines another KV capacity than the engine has."""
    facts, kv = model_facts("tiny", machine.model), kv_facts(machine)
    assert facts.sizes is not None
    config = machine.model.config
    assert facts.sizes["value_bytes"] == 4.0
    assert kv.bytes_per_token == 2 * 4 * config.layers * config.kv_heads * config.head_dim
    assert kv.blocks * kv.block_tokens * kv.bytes_per_token <= KV_BYTES
    # Every matrix is kept in float32 once: those of the layers and the embedding, which is the output too.
    assert facts.sizes["weights_bytes"] == pytest.approx(4 * facts.sizes["parameters"], rel=0.01)


def test_the_link_is_measured(machine: EngineMachine) -> None:
    """The machine file would have a bandwidth that nobody measured."""
    link = link_facts(machine.model)
    assert 1e6 < link.bytes_per_s < 1e13
    assert 0 <= link.latency_s < 0.1


def test_start_up_is_that_of_a_process_of_its_own(path: Path) -> None:
    """Start-up would be told of a process that has everything loaded."""
    assert 0.1 < start_up_s(path) < 60
    with pytest.raises(SpecError, match="the engine does not start"):
        start_up_s(path.with_name("absent.gguf"))


def powercap(root: Path, *counters_uj: int) -> list[Path]:
    paths = []
    for index, counter_uj in enumerate(counters_uj):
        folder = root / f"sys/class/powercap/intel-rapl:{index}"
        (folder / "..").resolve().mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        (folder / "max_energy_range_uj").write_text("1000000000\n")
        paths.append(folder / "energy_uj")
        paths[-1].write_text(f"{counter_uj}\n")
    inner = root / "sys/class/powercap/intel-rapl:0:0"
    inner.mkdir()
    (inner / "energy_uj").write_text("5\n")
    return paths


def test_power_is_energy_over_time_even_when_a_counter_goes_round(tmp_path: Path) -> None:
    """A counter that starts again at 0 would give negative power, and parts of a package would count twice."""
    first, second = powercap(tmp_path, 999_000_000, 0)
    now_s = [0.0]
    meter = PowerMeter(tmp_path, clock=lambda: now_s[0])

    def work() -> None:
        now_s[0] += 2.0
        first.write_text("19000000\n")
        second.write_text("40000000\n")

    assert meter.mean_w(work, least_s=1.0) == pytest.approx((20 + 40) / 2)
    assert "RAPL" in meter.source


def test_the_reason_is_told_where_power_cannot_be_read(tmp_path: Path) -> None:
    """A profile would say 0 W, or break."""
    with pytest.raises(NotReadableError, match=r"powercap is not there.*pynvml"):
        PowerMeter(tmp_path)
    powercap(tmp_path, 1)[0].unlink()
    unknown: dict[str, str] = {}
    assert attempted("power", unknown, lambda: PowerMeter(tmp_path)) is None
    assert unknown["power"].startswith("not readable here, because ")
    assert "energy_uj cannot be read" in unknown["power"]
