"""Loader workers: how they start, and what ends them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading

from kscl.runtime.processes.lifetime import end_with_parent
from kscl.runtime.processes.signals import STOP_SIGNALS


def start_method(num_workers: int) -> str | None:
    """Return how a loader starts its workers; None for its own choice.

    A forked worker shares the index of the images with the process that it loads for. The fork
    server that Python 3.14 takes for Linux would hand a copy of it to every worker.
    """
    return "fork" if num_workers and sys.platform == "linux" else None


def obey_parent_alone() -> None:
    """Let no signal to stop end this worker unless the process that it loads for sends it.

    A scheduler sends SIGTERM to all processes of a job. The process that trains then ends its step
    and saves, for which it needs its workers.
    """
    os.setpgid(0, 0)  # a terminal, or a launcher, signals a group
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait_and_end() -> None:
        while signal.sigwaitinfo(STOP_SIGNALS).si_pid != parent.pid:
            pass
        os._exit(0)

    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        threading.Thread(target=wait_and_end, daemon=True).start()
    end_with_parent()
