"""What CPUs need: memory that stays with the process, and bf16 without broken matrix tiles.

Many virtual machines announce matrix tiles (AMX) and cannot run them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

log = logging.getLogger(__name__)

LIMIT = "ONEDNN_MAX_CPU_ISA"  # read by torch's CPU kernels when the first of them runs
WITHOUT_TILES = "AVX512_CORE_BF16"
PROBE = "import torch; x = torch.ones(16, 96, dtype=torch.bfloat16); x @ x.T"


def avoid_broken_amx() -> None:
    """Disable AMX if this CPU announces it but cannot run it; call it before any computation.

    An instruction that is announced and missing would end the process.
    """
    if LIMIT not in os.environ and announces_amx() and not amx_works():
        os.environ[LIMIT] = WITHOUT_TILES
        log.info("This CPU announces AMX but cannot run it: bf16 runs without (%s).", LIMIT)


def announces_amx() -> bool:
    """Return whether the CPU announces AMX for bf16."""
    try:
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def amx_works() -> bool:
    """Return whether AMX runs, tried in another process, as this one would not survive a no."""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode == 0


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Tell glibc's allocator to keep up to 1 GiB; whether there is one to tell.

    Otherwise the activations of every forward pass go back to the system and come again as some
    thousand page faults: 15 % of a forward pass of a small network.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, LARGEST)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST))
