"""Costs of a cluster: price, power, energy, greenhouse gases."""

import math

import numpy as np
import pytest

from phasesplit.domain.money import (
    WORLD_GRID_KG_PER_KWH,
    bill,
    embodied_kg_co2e,
    energy_j,
    operational_kg_co2e,
    provisioned_w,
    usd_per_hour,
)
from phasesplit.errors import SpecError
from phasesplit.io.catalog import build_cluster
from phasesplit.io.specs import load_machine
from refusals import assert_refused


def test_price_and_power_are_sums_over_machines() -> None:
    """A cluster would cost or be provisioned other than its machines are."""
    cluster = build_cluster("bloom-176b", [("prefill", 25, "dgx-h100"), ("decode", 26, "dgx-a100")])
    assert usd_per_hour(cluster) == pytest.approx(25 * 38.08 + 26 * 17.68)
    assert provisioned_w(cluster) == pytest.approx(25 * 10_200 + 26 * 6500)


def test_equal_budgets_of_the_paper() -> None:
    """The paper's iso-cost count would not come out: 40 DGX-H100 cost as much as 86 DGX-A100."""
    h100 = build_cluster("bloom-176b", [("unsplit", 40, "dgx-h100")])
    a100 = build_cluster("bloom-176b", [("unsplit", 1, "dgx-a100")])
    assert usd_per_hour(h100) // usd_per_hour(a100) == 86
    assert provisioned_w(h100) // provisioned_w(a100) == 62


def test_energy_by_phase() -> None:
    """A phase would draw another phase's power, or idle time none."""
    machine = load_machine("dgx-h100")
    drawn = energy_j(machine, duration_s=100.0, prefill_s=[10.0, 0.0], mixed_s=[5.0, 0.0], decode_s=[40.0, 0.0])
    assert drawn[0] == pytest.approx(15 * machine.prefill_w + 40 * machine.decode_w + 45 * machine.idle_w)
    assert drawn[1] == pytest.approx(100 * machine.idle_w)


def test_busier_than_the_run_is_refused() -> None:
    """Busy times of another run would give negative idle energy instead of an error."""
    with pytest.raises(SpecError, match="duration_s"):
        energy_j(load_machine("dgx-h100"), duration_s=10.0, prefill_s=[11.0], mixed_s=[0.0], decode_s=[0.0])


def test_carbon() -> None:
    """Greenhouse gases would not be energy x intensity plus the share of the machines' making."""
    assert operational_kg_co2e(3.6e6, 0.1) == pytest.approx(0.1)
    assert operational_kg_co2e(3.6e6) == pytest.approx(WORLD_GRID_KG_PER_KWH)
    cluster = build_cluster("bloom-176b", [("unsplit", 2, "dgx-h100")])
    machine = cluster.pools[0].machine
    assert embodied_kg_co2e(cluster, machine.lifetime_s) == pytest.approx(2 * machine.embodied_kg_co2e)
    assert embodied_kg_co2e(cluster, 0.0) == 0.0


def test_bill() -> None:
    """A bill would split machines among pools wrongly or divide by the wrong count."""
    cluster = build_cluster("bloom-176b", [("prefill", 1, "dgx-h100"), ("decode", 2, "dgx-a100")])
    h100, a100 = cluster.pools[0].machine, cluster.pools[1].machine
    run = bill(
        cluster,
        duration_s=3600.0,
        prefill_s=np.array([1000.0, 0.0, 0.0]),
        mixed_s=np.zeros(3),
        decode_s=np.array([0.0, 3600.0, 1800.0]),
        requests=100,
        output_tokens=20_000,
        grid_kg_per_kwh=0.5,
    )
    expected_j = 1000 * h100.prefill_w + 2600 * h100.idle_w + 5400 * a100.decode_w + 1800 * a100.idle_w
    assert run.energy_j == pytest.approx(expected_j)
    assert run.mean_w == pytest.approx(expected_j / 3600)
    assert run.usd == pytest.approx(38.08 + 2 * 17.68)
    assert run.usd_per_request == pytest.approx(run.usd / 100)
    assert run.usd_per_million_tokens == pytest.approx(run.usd * 50)
    assert run.energy_j_per_request == pytest.approx(expected_j / 100)
    assert run.energy_j_per_million_tokens == pytest.approx(expected_j * 50)
    assert run.operational_kg_co2e == pytest.approx(expected_j / 3.6e6 * 0.5)
    assert run.kg_co2e == pytest.approx(run.operational_kg_co2e + embodied_kg_co2e(cluster, 3600.0))
    assert run.kg_co2e_per_request == pytest.approx(run.kg_co2e / 100)
    assert run.kg_co2e_per_million_tokens == pytest.approx(run.kg_co2e * 50)


def test_machines_that_are_off_cost_nothing() -> None:
    """Money, idle power or embodied carbon would be charged for machines that are off, or those of another pool."""
    cluster = build_cluster("bloom-176b", [("prefill", 2, "dgx-h100"), ("decode", 1, "dgx-a100")])
    h100, a100 = cluster.pools[0].machine, cluster.pools[1].machine
    run = bill(
        cluster,
        duration_s=7200.0,
        prefill_s=np.array([1000.0, 0.0, 0.0]),
        mixed_s=np.zeros(3),
        decode_s=np.zeros(3),
        requests=1,
        output_tokens=1,
        on_s=np.array([3600.0, 0.0, 1800.0]),
    )
    assert run.usd == pytest.approx(h100.price_usd_per_hour + a100.price_usd_per_hour / 2)
    assert run.energy_j == pytest.approx(1000 * h100.prefill_w + 2600 * h100.idle_w + 1800 * a100.idle_w)
    lives = h100.embodied_kg_co2e * 3600 / h100.lifetime_s + a100.embodied_kg_co2e * 1800 / a100.lifetime_s
    assert run.embodied_kg_co2e == pytest.approx(lives)
    assert run.provisioned_w == 2 * h100.provisioned_w + a100.provisioned_w
    with pytest.raises(SpecError) as caught:
        bill(
            cluster, duration_s=7200.0, prefill_s=np.array([0.0, 1.0, 0.0]), mixed_s=np.zeros(3), decode_s=np.zeros(3),
            requests=1, output_tokens=1, on_s=np.array([3600.0, 0.0, 1800.0]),
        )  # fmt: skip
    assert_refused(caught.value, "at least", "busy")


def test_nothing_served() -> None:
    """A run that served nothing would divide by zero instead of having no price per request."""
    cluster = build_cluster("bloom-176b", [("unsplit", 1, "dgx-h100")])
    idle = np.zeros(1)
    run = bill(cluster, duration_s=0.0, prefill_s=idle, mixed_s=idle, decode_s=idle, requests=0, output_tokens=0)
    assert math.isnan(run.usd_per_request)
    assert math.isnan(run.kg_co2e_per_million_tokens)
    assert math.isnan(run.mean_w)
