"""How a process ends: at once after an error, and with the process that it works for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

EXIT_BUG = 1
POLL_SECONDS = 0.2


def leave(code: int) -> NoReturn:
    """End this process at once, after it has reported an error.

    With NCCL, destroying the process group waits for the other ranks, and so can what Python does
    at exit; they in turn wait for this rank, and nobody would learn why.
    """
    for child in multiprocessing.active_children():  # loader workers
        child.kill()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def end_with_parent() -> None:
    """End this process of multiprocessing's once the process that asked for it is gone.

    torch's loader workers watch their parent. Of one that a fork server started, that is the
    server, which in turn lives as long as its workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_and_end() -> None:
        parent.join()
        os._exit(EXIT_BUG)

    _watch(wait_and_end)


def end_with_torchrun() -> None:
    """End this rank, and so its loader workers, once torchrun is gone and another is the parent."""
    torchrun = os.getppid()

    def wait_and_end() -> None:
        while os.getppid() == torchrun:
            time.sleep(POLL_SECONDS)
        os._exit(EXIT_BUG)

    _watch(wait_and_end)


def _watch(end: Callable[[], None]) -> None:
    threading.Thread(target=end, daemon=True).start()
