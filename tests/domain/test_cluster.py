"""Roles of machines, in our words and the paper's."""

import pytest

from phasesplit.domain.cluster import Role
from phasesplit.errors import SpecError
from phasesplit.protocol.roles import ROLES
from phasesplit.scheduler.pools import POOL_NAMES
from refusals import assert_refused


@pytest.mark.parametrize(
    ("text", "role"),
    [("prompt", Role.PREFILL), ("prefill", Role.PREFILL), ("token", Role.DECODE), ("decode", Role.DECODE)],
)
def test_roles_have_two_names_on_input_and_one_on_output(text: str, role: Role) -> None:
    """A cluster in the words of the paper would be refused, or print what it was given."""
    assert Role.parse(text, "role") is role
    assert str(role) in ("prefill", "decode")


def test_an_unknown_role_is_refused_with_all_roles() -> None:
    """A mistyped role would pass, or the message not say what there is."""
    with pytest.raises(SpecError) as caught:
        Role.parse("tokens", "--home")
    assert_refused(caught.value, "decode, mixed, prefill, unsplit")


def test_pools_and_roles_have_the_same_names() -> None:
    """The ledger's pools, the wire and cluster files would call one role by different names."""
    assert tuple(Role) == ROLES == POOL_NAMES
