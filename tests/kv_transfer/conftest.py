"""What tests of endpoints have in common."""

from collections.abc import Iterator

import pytest

from kv_transfer.pairs import WAYS, OpenPair, Pair
from kv_transfer.wires import none_left_open, open_files


@pytest.fixture(params=WAYS)
def open_pair(request: pytest.FixtureRequest) -> Iterator[OpenPair]:
    """Open pairs over a transport; after the test no handle may be open."""
    before = open_files()
    opened: list[Pair] = []

    def opening(**settings: object) -> Pair:
        opened.append(Pair(request.param, **settings))
        return opened[-1]

    yield opening
    while opened:
        opened.pop().close()
    assert none_left_open(before)
