"""Slices of a server and power caps: what is in proportion, what a cap costs, and where it binds."""

from dataclasses import replace

import pytest

from phasesplit.domain.machine import Link, capped, fitting_degree, networked, sliced, split_name
from phasesplit.errors import SpecError
from phasesplit.io.specs import known_machines, load_machine, load_model

H100 = load_machine("dgx-h100")


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_slices_of_a_server_make_the_server(degree: int) -> None:
    """Slices would cost, draw or hold more or less together than the server that they are rented as."""
    part = sliced(H100, degree)
    assert part.accelerators * part.instances_per_server == 8
    assert part.server == part.profile_name == "dgx-h100"
    for figure in (
        "hbm_bytes", "hbm_bytes_per_s", "flops_per_s", "nic_bytes_per_s", "provisioned_w", "idle_w", "prefill_w",
        "decode_w", "accelerators_limit_w", "price_usd_per_hour", "embodied_kg_co2e",
    ):  # fmt: skip
        assert getattr(part, figure) * part.instances_per_server == pytest.approx(getattr(H100, figure))
    assert (part.lifetime_s, part.prefill_time_factor) == (H100.lifetime_s, 1.0)


LINK = Link(bytes_per_s=6e9, latency_s=0.002, per_layer_s=1e-4, streaming_slowdown=0.5)


def test_slices_share_the_measured_bandwidth_of_a_server() -> None:
    """Each of eight instances on one server would send as if the server's network were its own."""
    server = replace(H100, link=LINK)
    assert sliced(server, 2).link == replace(LINK, bytes_per_s=6e9 / 4)
    assert capped(server, 0.5).link == LINK
    assert sliced(H100, 2).link is None


def test_other_network_cards_change_the_measured_bandwidth_too() -> None:
    """A plan bent to slower links would go on with the measured one, or with other fixed times than were measured."""
    half = networked(replace(H100, link=LINK), 0.5)
    assert (half.nic_bytes_per_s, half.link) == (H100.nic_bytes_per_s / 2, replace(LINK, bytes_per_s=3e9))
    assert networked(H100, 0.5).link is None


def test_the_whole_server_is_no_slice() -> None:
    """A server would appear twice in a plan, under two names."""
    assert sliced(H100, 8) is H100
    assert capped(H100, 1.0) is H100


def test_a_slice_of_a_slice_counts_from_the_server() -> None:
    """A slice of a slice would be taken for half a server's price."""
    part = sliced(sliced(H100, 4), 2)
    assert (part.accelerators, part.instances_per_server, part.server) == (2, 4, "dgx-h100")


def test_half_the_limit_is_the_shipped_capped_machine() -> None:
    """The cap's law would miss the one figure that it rests on."""
    ours, shipped = capped(H100, 0.5), load_machine("dgx-h100-capped")
    for figure in (
        "provisioned_w", "idle_w", "prefill_w", "decode_w", "accelerators_limit_w", "prefill_time_factor",
        "decode_time_factor", "price_usd_per_hour", "flops_per_s",
    ):  # fmt: skip
        assert getattr(ours, figure) == pytest.approx(getattr(shipped, figure))
    assert ours.profile_name == shipped.profile_name


def test_a_cap_costs_tokens_time_only_where_it_binds() -> None:
    """A cap above what the decode phase draws would cost time or save energy, or one below it neither."""
    free, above, below = H100, capped(H100, 0.43), capped(H100, 0.3)
    assert (above.decode_w, above.decode_time_factor) == (free.decode_w, 1.0)
    assert below.decode_w == pytest.approx(free.decode_w - 8 * 300 + 8 * 210)
    assert below.decode_time_factor == pytest.approx((300 / 210) ** 0.3785, rel=1e-4)
    assert below.decode_time_factor < below.prefill_time_factor


def test_two_caps_are_one() -> None:
    """The law would depend on the steps in which a limit is lowered."""
    twice, once = capped(capped(H100, 0.5), 0.5), capped(H100, 0.25)
    assert twice.prefill_time_factor == pytest.approx(once.prefill_time_factor)
    assert twice.decode_time_factor == pytest.approx(once.decode_time_factor)
    assert twice.provisioned_w == pytest.approx(once.provisioned_w)


@pytest.mark.parametrize("name", known_machines())
@pytest.mark.parametrize("share", [0.2, 0.5, 0.99])
def test_capped_figures_agree(name: str, share: float) -> None:
    """A capped machine would draw more than is provisioned for it, less than idle, or be faster than uncapped."""
    machine = load_machine(name)
    cut = capped(machine, share)
    assert cut.idle_w < cut.decode_w <= cut.prefill_w <= cut.provisioned_w < machine.provisioned_w
    assert cut.prefill_time_factor > machine.prefill_time_factor
    assert sliced(cut, 4).provisioned_w == pytest.approx(capped(sliced(machine, 4), share).provisioned_w)


def test_a_cap_needs_the_limit() -> None:
    """A machine whose accelerators' limit nobody stated would be capped to nothing."""
    with pytest.raises(SpecError, match="accelerators_limit_w: missing"):
        capped(replace(H100, accelerators_limit_w=0.0), 0.5)


def test_fewest_accelerators_that_hold_a_model() -> None:
    """The advice beside a model that does not fit would not fit either, or ask for too much."""
    bloom, llama = load_model("bloom-176b"), load_model("llama2-70b")
    assert (fitting_degree(bloom, H100), fitting_degree(llama, H100)) == (8, 2)
    assert fitting_degree(bloom, sliced(H100, 2)) == 8
    assert fitting_degree(replace(bloom, weights_bytes=1e12), H100) is None


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("dgx-h100", ("dgx-h100", "")),
        ("dgx-h100/tp4", ("dgx-h100", "/tp4")),
        ("a/b.yaml/tp4@62.5%", ("a/b.yaml", "/tp4@62.5%")),
        ("dgx-h100@50", ("dgx-h100@50", "")),
    ],
)
def test_names_of_variants(name: str, parts: tuple[str, str]) -> None:
    """A machine's own name and the ending that asks for a variant would be cut at the wrong place."""
    assert split_name(name) == parts
