"""Power as the machine itself counts it: RAPL of the processor, NVML of the accelerators."""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from phasesplit.errors import PhasesplitError

_MICRO = 1e-6
_MILLI = 1e-3
_PACKAGE_DEPTH = 1
"""`intel-rapl:0` is a package; `intel-rapl:0:0` is a part of it, counted in it."""


class NotReadableError(PhasesplitError):
    """There is no counter of energy that this process may read; the message says why."""


class PowerMeter:
    """Mean power over a stretch of time, of all processor packages or of all NVIDIA accelerators.

    Args:
        root: What stands in for the root of the file system, in tests.
        clock: Returns the time, in seconds.

    Attributes:
        source: What is read.

    Raises:
        NotReadableError: Nothing can be read.
    """

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        try:
            self._energy_j = _rapl(root / "sys/class/powercap")
            self.source = "RAPL, processor packages alone: memory, disks and fans are not in it"
        except NotReadableError as no_rapl:
            try:
                self._energy_j = _nvml()
                self.source = "NVML, accelerators alone: the rest of the server is not in it"
            except NotReadableError as no_nvml:
                raise NotReadableError(f"{no_rapl}; {no_nvml}") from None

    def mean_w(self, work: Callable[[], object], least_s: float = 1.0) -> float:
        """Return the mean power while some work is done again and again, in watts.

        Args:
            work: What is done.
            least_s: For how long.
        """
        began_s, began_j = self._clock(), self._energy_j()
        while self._clock() - began_s < least_s:
            work()
        return max(self._energy_j() - began_j, 0.0) / (self._clock() - began_s)


def _rapl(folder: Path) -> Callable[[], float]:
    if not folder.is_dir():
        raise NotReadableError(f"{folder} is not there")
    packages = [path for path in sorted(folder.glob("*rapl:*")) if path.name.count(":") == _PACKAGE_DEPTH]
    if not packages:
        raise NotReadableError(f"{folder} has no package")
    counters = [(path / "energy_uj", _range_uj(path / "max_energy_range_uj")) for path in packages]
    try:
        before = [int(path.read_text()) for path, _ in counters]
    except (OSError, ValueError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it holds no number"
        raise NotReadableError(f"{counters[0][0]} cannot be read ({reason}; since Linux 5.10 only root may)") from None
    turns = [0] * len(counters)

    def energy_j() -> float:
        total_uj = 0
        for index, (path, range_uj) in enumerate(counters):
            now = int(path.read_text())
            turns[index] += now < before[index]  # the counter has gone round
            before[index] = now
            total_uj += now + turns[index] * range_uj
        return total_uj * _MICRO

    return energy_j


def _range_uj(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0


def _nvml() -> Callable[[], float]:
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise NotReadableError("pynvml (NVIDIA) is not installed") from None
    try:
        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if not devices:
            raise NotReadableError("NVML finds no accelerator")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(devices[0])
    except pynvml.NVMLError as problem:
        raise NotReadableError(f"NVML: {problem}") from None
    return lambda: sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(device) for device in devices) * _MILLI
