"""One process at a time in a folder.

Pretraining, probes, detection, the drawn data set and suites on SLURM all claim their folders here.
"""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

from kscl.errors import KsclError

LOCK_FILE = ".lock"
LOCK_PATIENCE = 10.0  # seconds; ranks of a killed launcher end within a moment


@contextlib.contextmanager
def only_run_in(folder: Path, setting: str = "OUTPUT_DIR") -> Iterator[None]:
    """Hold the folder for this process; the system releases it however the process ends.

    `setting` is what names the folder to the user.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK_FILE).open("w")
    except OSError as error:
        raise KsclError(
            f"{setting} {folder} cannot be written to: {error.strerror}. Choose another."
        ) from error
    with lock:
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                # Not flock: forked workers would inherit it and hold it after this process is gone.
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise KsclError(
                        f"Another run is writing to {folder} right now. Stop it, or choose another "
                        f"{setting}."
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                break
        yield


def is_locked(folder: Path) -> bool:
    """Return whether another process holds the folder; nothing is written.

    Not for a folder that this process holds: closing the file would release it.
    """
    try:
        with (folder / LOCK_FILE).open() as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no such file, or a file system without locks
        return False
    return False
