"""Take turns: of two processes that want the same features, one makes them and the other waits."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLL_SECONDS = 0.2


@contextlib.contextmanager
def my_turn(path: Path, while_waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; the system releases it however the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError:  # whoever writes there next says what is wrong
        yield
        return
    with lock:
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                while_waiting()
                time.sleep(POLL_SECONDS)
            except OSError:  # a file system without locks: both make them, which is only slower
                break
        yield
