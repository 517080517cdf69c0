"""The machine: its cores, memory and devices, what its CPU needs, and what a run used of it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import logging
import os
import platform
import re
import resource
import subprocess
import sys
from pathlib import Path

import kscl

ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)[a-z]?")  # compute_: code for any later GPU
# PyTorch's wheels of CUDA 12.6 have code from sm_50 to sm_90, those of CUDA 12.8 and later from
# sm_75 on (https://github.com/pytorch/pytorch/issues/172352).
OLDER_GPUS = "https://download.pytorch.org/whl/cu126"
OLDEST = (5, 0)


def shipped_configs() -> Path:
    """Return the folder of configs: beside the packages in a checkout, in `kscl` if installed."""
    package = Path(kscl.__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


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
    """Return the number of cores this process may use, e.g. in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int:
    """Return the bytes of memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory() -> int:
    """Return the bytes that processes can still take; where Linux does not say, those there are."""
    with contextlib.suppress(OSError):
        found = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
        if found:
            return 1024 * int(found[1])
    return total_memory()


def without_kernels(gpu: int) -> tuple[str, str]:
    """Return what this torch lacks to compute on a GPU, and what to install; ("", "") if nothing.

    torch itself only warns, and fails at the first operation ("no kernel image is available").
    """
    import torch

    found = [ARCHITECTURE.fullmatch(name) for name in torch.cuda.get_arch_list()]
    built = [(match[1], (int(match[2]), int(match[3]))) for match in found if match]
    capability = torch.cuda.get_device_capability(gpu)
    runs = [
        code <= capability and (kind == "compute" or code[0] == capability[0])
        for kind, code in built
    ]
    if not built or any(runs):
        return "", ""  # a build for other than NVIDIA's GPUs names no such architecture
    lack = (
        f"GPU {gpu}, {torch.cuda.get_device_name(gpu)}, is sm_{capability[0]}{capability[1]}, and "
        f"torch {torch.__version__} has code for {', '.join(torch.cuda.get_arch_list())} only"
    )
    if OLDEST <= capability < min(code for _, code in built):
        versions = {name: importlib.metadata.version(name) for name in ("torch", "torchvision")}
        pins = " ".join(f"{name}=={it.partition('+')[0]}" for name, it in versions.items())
        return lack, f"Install the CUDA 12.6 wheels: pip install {pins} --index-url {OLDER_GPUS}"
    return lack, "Install a torch that is built for it: https://pytorch.org/get-started/locally"


def _cpu_info() -> str:
    """Return what Linux says about the CPU; nothing elsewhere."""
    with contextlib.suppress(OSError):
        return Path("/proc/cpuinfo").read_text()
    return ""


def _cpu_name() -> str:
    found = re.search(r"^model name.*?:(.*)", _cpu_info(), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


log = logging.getLogger(__name__)

LIMIT = "ONEDNN_MAX_CPU_ISA"  # read by torch's CPU kernels when the first of them runs
WITHOUT_TILES = "AVX512_CORE_BF16"
PROBE = "import torch; x = torch.ones(16, 96, dtype=torch.bfloat16); x @ x.T"


def avoid_broken_amx() -> None:
    """Disable AMX if this CPU announces it but cannot run it; call it before any computation.

    An instruction that is announced and missing would end the process.
    """
    if LIMIT not in os.environ and " amx_bf16" in _cpu_info() and not amx_works():
        os.environ[LIMIT] = WITHOUT_TILES
        log.info("This CPU announces AMX but cannot run it: bf16 runs without (%s).", LIMIT)


@functools.cache
def amx_works() -> bool:
    """Return whether AMX runs; tried in a subprocess, which an illegal instruction would kill."""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode == 0


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGEST = 2**30


def keep_freed_memory() -> bool:
    """Make glibc's allocator keep up to 1 GiB of freed memory; return whether it does.

    Otherwise every forward pass returns its activations to the system and pays for them with page
    faults: 15% of the time for a small network.
    """
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another system
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, LARGEST)) and bool(mallopt(M_MMAP_THRESHOLD, LARGEST))


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
