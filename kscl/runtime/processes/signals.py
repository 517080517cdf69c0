"""Signals to stop, received as a request that the work reads between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

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
    if (
        threading.current_thread() is not threading.main_thread()
    ):  # Python allows handlers only there
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
