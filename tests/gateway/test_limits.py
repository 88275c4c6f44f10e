"""What a deployment may set."""

import pytest

from phasesplit.errors import SpecError
from phasesplit.gateway.limits import Limits


@pytest.mark.parametrize(
    "wrong", [{"body_bytes": 0}, {"attempts": -1}, {"lease_s": float("inf")}, {"request_s": float("nan")}]
)
def test_bounds_are_positive(wrong: dict[str, float]) -> None:
    """A gateway would start with a bound that refuses everything, or nothing."""
    with pytest.raises(SpecError, match=next(iter(wrong))):
        Limits(**wrong)


def test_shipped_bounds_hold_a_benchmark() -> None:
    """The limits that ship would refuse the 500 concurrent streams that the gateway is to hold."""
    assert Limits().live_requests >= 500
