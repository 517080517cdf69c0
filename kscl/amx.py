"""bf16 on CPUs that announce matrix tiles (AMX) but, in many virtual machines, cannot run them."""

from __future__ import annotations

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
    """Before any computation: an instruction that is announced and missing ends the process."""
    if LIMIT not in os.environ and announces_amx() and not amx_works():
        os.environ[LIMIT] = WITHOUT_TILES
        log.info("this CPU announces AMX but cannot run it: bf16 goes without (%s)", LIMIT)


def announces_amx() -> bool:
    try:
        return " amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@functools.cache
def amx_works() -> bool:
    """Asked of another process, as this one would not survive the answer no."""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode == 0
