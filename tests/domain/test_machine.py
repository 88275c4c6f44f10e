"""The shipped machines against the figures they are held to."""

from dataclasses import fields

import pytest

from phasesplit.domain.machine import Machine
from phasesplit.io.specs import MACHINE_ALIASES, known_machines, load_machine


@pytest.mark.parametrize(
    ("name", "bandwidth", "flops", "provisioned_w", "usd", "nic"),
    [
        ("dgx-a100", 8 * 2.039e12, 8 * 312e12, 6500, 17.68, 200e9),
        ("dgx-h100", 8 * 3.352e12, 8 * 989e12, 10_200, 38.08, 400e9),
        ("dgx-h100-capped", 8 * 3.352e12, 8 * 989e12, 7140, 38.08, 400e9),
    ],
)
def test_machines_of_the_paper(
    name: str, bandwidth: float, flops: float, provisioned_w: float, usd: float, nic: float
) -> None:
    """A machine of the paper would have another memory, speed, power or price than the paper's."""
    machine = load_machine(name)
    assert machine.accelerators == 8
    assert machine.hbm_bytes == 8 * 85_899_345_920
    assert machine.hbm_bytes_per_s == pytest.approx(bandwidth)
    assert machine.flops_per_s == pytest.approx(flops)
    assert machine.provisioned_w == provisioned_w
    assert machine.price_usd_per_hour == usd
    assert machine.nic_bytes_per_s == nic


def test_capped_machine_uses_the_profile_of_the_uncapped() -> None:
    """The capped machine would lose its measurements, or the cap its effect on the prefill phase alone."""
    capped = load_machine("dgx-h100-capped")
    assert capped.profile_name == "dgx-h100"
    assert (capped.prefill_time_factor, capped.decode_time_factor) == (1.30, 1.00)


def test_a_machine_is_its_own_profile() -> None:
    """A machine without a profile of another would look for measurements under no name."""
    assert load_machine("dgx-a100").profile_name == "dgx-a100"


@pytest.mark.parametrize("name", known_machines())
def test_every_figure_names_its_source(name: str) -> None:
    """A shipped figure could not be checked by its reader, or a power would contradict another."""
    machine = load_machine(name)
    factors = {"prefill_time_factor", "decode_time_factor"}
    figures = (
        {field.name for field in fields(Machine)}
        - {"name", "profile", "sources", "server", "instances_per_server", "has_fast_links"}
        - ({"link"} if machine.link is None else set())
        - factors
    )
    if machine.profile:
        figures |= factors
    assert figures <= set(machine.sources)
    assert 0 < machine.accelerators_limit_w < machine.prefill_w
    assert 0 < machine.idle_w < machine.decode_w < machine.prefill_w <= machine.provisioned_w


@pytest.mark.parametrize("alias", MACHINE_ALIASES)
def test_short_names(alias: str) -> None:
    """A short name would lead nowhere."""
    assert load_machine(alias).name == MACHINE_ALIASES[alias]
