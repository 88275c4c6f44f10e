"""Loaded by every Python process that has this folder on its path: which functions run while a test asks for it.

While the file `go` is in the folder that PHASESPLIT_TRACED names, the first call of each function of phasesplit is kept
with its instant; `PID.on` says so. Once `go` is gone, they are written to `PID.json`.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_FOLDER = os.environ.get("PHASESPLIT_TRACED", "")
_PART = f"{os.sep}phasesplit{os.sep}"
_POLL_S = 0.01


def _watch() -> None:
    go, seen = Path(_FOLDER, "go"), dict[CodeType, float]()
    is_on = False

    def called(frame: FrameType, event: str, _: Any) -> None:
        if is_on and event == "call" and frame.f_code not in seen:
            seen[frame.f_code] = time.monotonic()

    sys.setprofile(called)
    threading.setprofile(called)

    def poll() -> None:
        nonlocal is_on
        while True:
            time.sleep(_POLL_S)
            if is_on != go.exists():
                is_on = not is_on
                Path(_FOLDER, f"{os.getpid()}.on").touch()
                if not is_on:
                    _write(seen)

    threading.Thread(target=poll, daemon=True).start()


def _write(seen: dict[CodeType, float]) -> None:
    first: dict[str, float] = {}
    for code, called_s in list(seen.items()):
        if _PART in code.co_filename:
            name = f"{code.co_filename.rpartition(_PART)[2]}:{code.co_qualname}"
            first[name] = min(called_s, first.get(name, called_s))
    path = Path(_FOLDER, f"{os.getpid()}.json")
    path.with_suffix(".part").write_text(json.dumps({"argv": sys.argv, "first_s": first}))
    path.with_suffix(".part").rename(path)


if _FOLDER:
    _watch()
