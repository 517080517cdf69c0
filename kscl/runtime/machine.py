"""The machine: its cores, memory and devices."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def hardware() -> dict[str, object]:
    """Return what a record says about the machine."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": _cpu_name(),
        "cores": usable_cores(),
        "memory_gib": round(total_memory() / 2**30, 1),
        "gpus": gpus,
    }


def usable_cores() -> int:
    """Return the number of cores this process may use: in a container, fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int:
    """Return the bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
