"""How processes end: by a signal, after an error, and with the process that they work for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
ECHO_SECONDS = 5.0  # within which a second SIGTERM is the first one, by another way


class StopRequest:
    """True once SIGTERM or SIGINT has arrived; a second one interrupts at once.

    A scheduler sends SIGTERM to all processes of a job, and a launcher that it reaches passes it on
    to its ranks, which have it already.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.since = 0.0

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """Return what shells expect of a process that a signal has ended."""
        return 128 + (self.signal or signal.SIGTERM)

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        now = time.monotonic()
        if self.signal is None:
            self.signal, self.since = number, now
        elif number != signal.SIGTERM or now - self.since > ECHO_SECONDS:
            raise KeyboardInterrupt


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn signals to stop into a request within this block; ignored signals stay ignored."""
    request = StopRequest()
    # Python allows signal handlers in the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {
        number: signal.signal(number, request.receive)
        for number in STOP_SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """End this multiprocessing child once the process that started it is gone.

    torch's loader workers watch their parent, which can be a fork server that outlives that
    process as long as it has workers.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    _end_after(parent.join)


def end_with_torchrun() -> None:
    """End this rank, and so its loader workers, once torchrun is gone (the parent changes)."""
    torchrun = os.getppid()

    def wait() -> None:
        while os.getppid() == torchrun:
            time.sleep(POLL_SECONDS)

    _end_after(wait)


def _end_after(wait: Callable[[], None], code: int = EXIT_BUG) -> None:
    """End this process once `wait`, in a thread of its own, returns."""

    def wait_and_end() -> None:
        wait()
        os._exit(code)

    threading.Thread(target=wait_and_end, daemon=True).start()


def start_method(num_workers: int) -> str | None:
    """Return how a loader starts its workers; None for the default.

    A forked worker shares the image index with its parent. Python 3.14's default on Linux, a fork
    server, would copy the index to every worker.
    """
    return "fork" if num_workers and sys.platform == "linux" else None


def obey_parent_alone() -> None:
    """Let stop signals end this worker only if its parent sends them.

    A scheduler sends SIGTERM to all processes of a job. The training process then finishes its step
    and saves, and needs its workers for that.
    """
    os.setpgid(0, 0)  # a terminal, or a launcher, signals a group
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        while signal.sigwaitinfo(STOP_SIGNALS).si_pid != parent.pid:
            pass

    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        _end_after(wait, code=0)
    end_with_parent()
