"""Failures of the machine, as errors that name the thing, the reason and the fix."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

from kscl.errors import KsclError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR)
LOADER = "torch.utils.data.dataloader"
PATIENCE = 1.0  # seconds for the news that a worker has ended
SHARED_MEMORY = Path("/dev/shm")
NO_SHARED_MEMORY = ("unable to allocate shared memory", "unable to mmap", "signal: Bus error")
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")
# The last error of a chain: the one before it is what it was raised from.
FROM_A_WORKER = re.compile(
    r"Caught \w+ in DataLoader worker process .*^[\w.]+Error: (.*)", re.M | re.S
)
DEAD_WORKER = re.compile(r"DataLoader worker \(pid\S* ([\d, ]+)\)(?: is killed by signal: (\w+))?")


@contextlib.contextmanager
def explained(workers_key: str = "DATA.NUM_WORKERS") -> Iterator[None]:
    """Raise a KsclError, without a traceback for the user, where the machine fails.

    A full disk, a folder without permission, too little memory, a loader worker that has died.
    Anything else passes unchanged. `workers_key` is the setting for the number of loader workers.
    """
    hook, threading.excepthook = threading.excepthook, _quiet_on_full_disk
    try:
        yield
    except (KsclError, OSError, EOFError, RuntimeError, MemoryError) as error:
        text = explain(error, workers_key)
        if text is None:
            raise
        raise KsclError(text) from error
    finally:
        threading.excepthook = hook


def explain(error: Exception, workers_key: str = "DATA.NUM_WORKERS") -> str | None:
    """Return a sentence for the user, or None if the error is not the machine's."""
    text = str(error)
    if isinstance(error, KsclError):
        raised_in_worker = FROM_A_WORKER.search(text)
        return raised_in_worker[1].strip() if raised_in_worker else None
    if any(words in text for words in NO_SHARED_MEMORY):
        return _shared_memory(workers_key)
    dead = DEAD_WORKER.search(text)
    from_worker = "in DataLoader worker process" in text
    met_in_loader = dead or (_loader_frames(error) and not from_worker)
    if met_in_loader and -signal.SIGBUS in _exit_codes(error):  # which PyTorch may not have seen
        return _shared_memory(workers_key)
    if dead:
        cause = f"was killed by signal {dead[2]}" if dead[2] else "died"
        return _dead_worker(f" {dead[1]}", cause, workers_key)
    if met_in_loader and isinstance(error, ConnectionError | EOFError | FileNotFoundError):
        return _dead_worker("", f"died ({type(error).__name__})", workers_key)
    if isinstance(error, OSError):
        return _explain_file_error(error)
    torch = sys.modules.get("torch")  # an error of its own can only come after its import
    out_of_memory = torch is not None and isinstance(error, torch.OutOfMemoryError)
    if out_of_memory or ("CUDA" in text and NO_MEMORY[-1] in text):
        return (
            f"The GPU's memory is full ({text.splitlines()[0] if text else 'OutOfMemoryError'}). "
            "Use more GPUs, a smaller batch (SOLVER.BATCH_SIZE), smaller images (INPUT.SIZE), "
            "SOLVER.AMP, or in pretraining more SOLVER.GRAD_ACCUM_STEPS."
        )
    if isinstance(error, MemoryError) or any(words in text for words in NO_MEMORY):
        return (
            f"Memory has run out ({text.splitlines()[0] if text else 'MemoryError'}). Use a "
            f"smaller batch, smaller images or fewer workers ({workers_key})."
        )
    return None


def _loader_frames(error: Exception) -> list[FrameType]:
    """Return the frames in which the main process waited for a worker's batch."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame for frame in frames if frame.f_globals.get("__name__") == LOADER]


def _exit_codes(error: Exception) -> set[int]:
    """Return how those workers ended that have, of the loaders in the traceback."""
    loaders = [frame.f_locals.get("self") for frame in _loader_frames(error)]
    workers = {each.sentinel: each for it in loaders for each in getattr(it, "_workers", ())}
    wait(list(workers), PATIENCE)  # news of a death may come late
    return {worker.exitcode for worker in workers.values() if worker.exitcode is not None}


def _dead_worker(number: str, cause: str, workers_key: str) -> str:
    return (
        f"Loader worker{number} {cause}. If you did not kill it, it probably ran out of memory: "
        f"use fewer workers ({workers_key}). --resume continues from the last checkpoint."
    )


def _explain_file_error(error: OSError) -> str | None:
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in DISK_FULL:
        return (
            f"{where}The disk is full ({error.strerror}). Make room; --resume continues from the "
            "last checkpoint."
        )
    if error.errno in NOT_ALLOWED and error.filename:
        return (
            f"{where}It cannot be used: {error.strerror}. Choose another folder (OUTPUT_DIR, "
            "DATA.CACHE_DIR), or change its permissions."
        )
    return None


def _shared_memory(workers_key: str) -> str:
    size = ""
    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        size = f" ({usage.free / 2**20:,.1f} of {usage.total / 2**20:,.1f} MiB are free)"
    return (
        f"Shared memory {SHARED_MEMORY}{size} is too small for the batches of the loader workers. "
        "Give the container more (docker run --shm-size 8g), or use fewer workers "
        f"({workers_key}, 0 needs none)."
    )


def _quiet_on_full_disk(args: threading.ExceptHookArgs) -> None:
    """Leave it to the main thread, which meets the same error, to say that the disk is full."""
    if not (isinstance(args.exc_value, OSError) and args.exc_value.errno in DISK_FULL):
        threading.__excepthook__(args)
