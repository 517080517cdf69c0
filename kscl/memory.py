"""Freed memory stays with the process: a training step on a CPU needs it again at once."""

from __future__ import annotations

import ctypes
import sys

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
