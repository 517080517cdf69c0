"""What a run costs beside time: peak memory, and energy where the machine counts it."""

from __future__ import annotations

import bisect
import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
PERIOD = 5.0  # seconds between two readings; counters wrap after minutes at the earliest
SLACK = 0.05  # fraction of a run that may be missing from the readings

Counter = Callable[[], float]  # joules since any moment, never falling

_meter: Meter | None = None


def start_metering() -> None:
    """Start to count energy in this process, if the machine tells it; once."""
    global _meter
    if _meter is None:
        counters = [*rapl_counters(), *nvml_counters()]
        _meter = Meter(counters) if counters else None


def costs(seconds: float) -> dict[str, float]:
    """Return what the last `seconds` of this process cost; what is not known is left out.

    Memory is the peak of the main process, without its workers. Energy is that of the whole
    machine: processors where RAPL can be read, and NVIDIA GPUs through NVML. It is left out if
    the run was resumed or has processes on other machines, which nobody here has counted.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on macOS bytes
    scale = 1 if sys.platform == "darwin" else 1024
    found = {"peak_memory_gib": round(peak * scale / 2**30, 3)}
    gpu = _gpu_bytes()
    if gpu:
        found["peak_gpu_memory_gib"] = round(gpu / 2**30, 3)
    world = os.environ.get("WORLD_SIZE", "1")
    alone = os.environ.get("LOCAL_WORLD_SIZE", world) == world
    joules = _meter.joules(seconds) if _meter and alone else None
    if joules is not None:
        found["energy_wh"] = round(joules / 3600, 4)
    return found


class Meter:
    """Read counters from time to time, and tell how much was used lately."""

    def __init__(self, counters: Sequence[Counter], period: float = PERIOD) -> None:
        self.counters, self.period = counters, period
        self.times: list[float] = []
        self.joules_at: list[float] = []
        self.read()
        threading.Thread(target=self._run, daemon=True).start()

    def read(self, now: float | None = None) -> None:
        """Take one reading."""
        with contextlib.suppress(OSError, ValueError):
            used = sum(counter() for counter in self.counters)
            self.joules_at.append(used)
            self.times.append(time.monotonic() if now is None else now)

    def joules(self, seconds: float, now: float | None = None) -> float | None:
        """Return the energy of the last seconds; None if the readings do not cover them."""
        self.read(now)
        if not self.times:
            return None
        start = self.times[-1] - seconds
        if self.times[0] > start + SLACK * seconds:
            return None
        i = max(0, bisect.bisect_right(self.times, start) - 1)
        return self.joules_at[-1] - self.joules_at[i]

    def _run(self) -> None:
        while True:
            time.sleep(self.period)
            self.read()


def rapl_counters(root: Path = POWERCAP) -> list[Counter]:
    """Return a counter for each processor package whose energy this user may read."""
    found: list[Counter] = []
    for folder in sorted(root.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:  # a part of a package, which is counted with it
            continue
        with contextlib.suppress(OSError, ValueError):
            counter = Rapl(folder)
            counter()
            found.append(counter)
    return found


class Rapl:
    """One package's counter in microjoules, without the jumps back where it wraps."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "energy_uj"
        self.range = int((folder / "max_energy_range_uj").read_text())
        self.last, self.wrapped = 0, 0

    def __call__(self) -> float:
        """Return joules."""
        value = int(self.file.read_text())
        if value < self.last:
            self.wrapped += self.range
        self.last = value
        return (self.wrapped + value) / 1e6


def nvml_counters() -> list[Counter]:
    """Return a counter for each NVIDIA GPU that counts its energy, if NVML is installed."""
    try:
        import pynvml  # type: ignore[import-not-found]

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        for handle in handles:
            pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # no library, no driver, or a GPU that does not count
        return []
    total = pynvml.nvmlDeviceGetTotalEnergyConsumption
    return [lambda handle=handle: total(handle) / 1e3 for handle in handles]  # type: ignore[misc]


def _gpu_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.max_memory_allocated())
