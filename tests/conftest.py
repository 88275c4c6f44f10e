"""What all tests share: where the reference files lie, and what happens where they are absent."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED_DATA = ROOT.parent / "shared" / "data"
ABSENT = f"needs the reference files at ../{SHARED_DATA.relative_to(ROOT.parent)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules with slow tests first; skip tests marked `shared` where there are no reference files, and count them.

    Where processes share the work, one would otherwise begin the longest module when the others have ended.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    if SHARED_DATA.is_dir():
        return
    for item in items:
        if item.get_closest_marker("shared"):
            item.add_marker(pytest.mark.skip(reason=ABSENT))


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Undo what a command sets for its own process, which in tests is that of all."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of reference files, which no test writes to; the test is skipped where it is absent."""
    if not SHARED_DATA.is_dir():
        pytest.skip(ABSENT)
    return SHARED_DATA
