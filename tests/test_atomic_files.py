"""Files that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from phasesplit.atomic_files import atomic_path


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    """A reader would find half a file, or the one from before would be gone while the new one is written."""
    target = tmp_path / "plan.yaml"
    target.write_text("before", encoding="ascii")
    with atomic_path(target) as part:
        part.write_text("half", encoding="ascii")
        assert target.read_text(encoding="ascii") == "before"
        part.write_text("whole", encoding="ascii")
    assert target.read_text(encoding="ascii") == "whole"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("problem", [ValueError, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("is_alone", [False, True])
def test_an_error_leaves_all_as_it_was(problem: type[BaseException], is_alone: bool, tmp_path: Path) -> None:
    """An interrupted writer would leave half a file under the name, or litter beside it."""
    target = tmp_path / "plan.yaml"
    target.write_text("before", encoding="ascii")

    def fail() -> None:
        with atomic_path(target, is_alone=is_alone) as part:
            part.write_text("half", encoding="ascii")
            raise problem

    with pytest.raises(problem):
        fail()
    assert target.read_text(encoding="ascii") == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_the_ending_stays_at_the_end(tmp_path: Path) -> None:
    """Writers that tell the format from the ending would write another format, or refuse."""
    with atomic_path(tmp_path / "rows.csv.gz") as part:
        assert part.name.endswith("rows.csv.gz")
        assert part.parent == tmp_path
        part.touch()


def test_two_processes_do_not_write_the_same_file_beside(tmp_path: Path) -> None:
    """Two processes that write one file would mix their bytes."""
    with atomic_path(tmp_path / "plan.yaml") as part:
        assert str(os.getpid()) in part.name
        part.touch()


def test_what_a_killed_process_left_is_overwritten(tmp_path: Path) -> None:
    """Gigabytes would stay beside a model for each process that was killed while it wrote them."""
    with atomic_path(tmp_path / "weights", is_alone=True) as part:
        assert str(os.getpid()) not in part.name
        part.touch()


def test_a_link_is_followed(tmp_path: Path) -> None:
    """A link that a person made would be replaced by a file, and what it names would stay old."""
    link = tmp_path / "link"
    link.symlink_to("file")
    with atomic_path(link) as part:
        part.write_text("new", encoding="ascii")
    assert link.is_symlink()
    assert (tmp_path / "file").read_text(encoding="ascii") == "new"


@pytest.mark.parametrize("is_synced", [False, True])
def test_content_is_on_the_disk_before_it_has_its_name(
    is_synced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a file could have its name and no content, or each small file would wait for the disk."""
    target, seen = tmp_path / "weights", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append((os.fstat(descriptor).st_size, target.exists())))
    with atomic_path(target, is_synced=is_synced) as part:
        part.write_bytes(b"1234")
    assert seen == ([(4, False)] if is_synced else [])
