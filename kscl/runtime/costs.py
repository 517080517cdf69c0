"""What a run costs beside time: its peak memory."""

from __future__ import annotations

import resource
import sys


def costs() -> dict[str, float]:
    """Return the peak memory of the main process, without its workers, and of its GPU."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB, on macOS bytes
    scale = 1 if sys.platform == "darwin" else 1024
    found = {"peak_memory_gib": round(peak * scale / 2**30, 3)}
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return found
    if used := torch.cuda.max_memory_allocated():
        found["peak_gpu_memory_gib"] = round(used / 2**30, 3)
    return found
