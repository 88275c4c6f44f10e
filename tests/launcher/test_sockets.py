"""The directory of a host's sockets."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from phasesplit.launcher.sockets import socket_directory


def test_what_killed_processes_left_behind_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kill would leave a directory in the system's temporary one for ever, or a live cluster lose its sockets."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    orphan, other = tmp_path / f"phasesplit-{ended.pid}-abc", tmp_path / "phasesplit-notes"
    alive = tmp_path / f"phasesplit-{os.getppid()}-abc"
    for path in (orphan, other, alive):
        path.mkdir()
    with socket_directory() as directory:
        assert Path(directory).parent == tmp_path
        assert not orphan.exists()
        assert other.exists()
        assert alive.exists()
    assert not Path(directory).exists()
