"""An index of a data set on disk, kept until one of the folders or files it was made from changes.

Adding, removing or renaming a file changes its folder's modification time, so a tree of a million
files is checked by looking at its folders alone. With 100,000 files in 100 folders a second start
takes 0.007 CPU seconds instead of 0.29, 40 times less.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from kscl.data.packed_names import Names
from kscl.runtime.files import read_arrays

logger = logging.getLogger(__name__)

FORMAT = 2

# A change in the same clock tick as the reading would go unseen: a fresh time stamp proves nothing.
CLOCK_TICK_NS = 2_000_000_000

ANY_SIZE = -1  # of a folder, whose size means nothing

# Of a user without a home: nothing can be written there, which every writer reports.
NO_FOLDER = Path(os.devnull, "kscl")

Arrays = dict[str, np.ndarray]


def cache_folder(folder: str = "") -> Path:
    """Return the folder named, else $KSCL_CACHE, else the user's cache folder."""
    named = folder or os.environ.get("KSCL_CACHE")
    path = named or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kscl")
    expanded = os.path.expanduser(path)  # unlike Path's, it does not fail without a home
    return NO_FOLDER if expanded.startswith("~") else Path(expanded)


def stamps(
    paths: Iterable[str], times: Iterable[int], started: int, sizes: Sequence[int] | None = None
) -> Arrays:
    """Describe what an index was made from, so that a change is noticed.

    Each path goes with its modification time before it was read (and its size, for files);
    `started` is when the reading started. All times are in nanoseconds.
    """
    names = Names.pack(paths)
    return {
        "stamp_text": names.text,
        "stamp_ends": names.ends,
        "stamp_times": np.array(list(times), np.int64),
        "stamp_sizes": np.array([ANY_SIZE] * len(names) if sizes is None else sizes, np.int64),
        "started": np.array([started], np.int64),
    }


def modified_ns(path: str) -> int:
    """Return when a file or folder last changed, in nanoseconds."""
    return os.stat(path).st_mtime_ns


def load_index(folder: Path, key: str) -> Arrays | None:
    """Return the arrays saved under `key`, or None if anything they were made from has changed."""
    try:
        arrays = read_arrays(_cache_file(folder, key))
        return arrays if _still_holds(arrays) else None
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _still_holds(arrays: Arrays) -> bool:
    safe = int(arrays["started"][0]) - CLOCK_TICK_NS
    if (arrays["stamp_times"] >= safe).any():
        return False
    paths = Names(arrays["stamp_text"], arrays["stamp_ends"])
    times, sizes = arrays["stamp_times"].tolist(), arrays["stamp_sizes"].tolist()
    for path, time, size in zip(paths, times, sizes, strict=True):
        status = os.stat(path)
        if status.st_mtime_ns != time or size not in (ANY_SIZE, status.st_size):
            return False
    return True


def save_index(folder: Path, key: str, arrays: Arrays) -> None:
    """Keep an index if possible: without it the next start takes longer, nothing else."""
    target = _cache_file(folder, key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written beside its target in a folder of its own, so that a failure leaves nothing behind.
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            complete = Path(scratch) / target.name
            np.savez(complete, allow_pickle=False, **arrays)
            os.replace(complete, target)
    except (OSError, ValueError) as error:
        logger.warning(
            "The index of %s could not be cached in %s: %s. It is made again at the next start; "
            "set DATA.CACHE_DIR or $KSCL_CACHE to a folder that can be written.",
            *(key.partition("\n")[0], folder, error),
        )


def _cache_file(folder: Path, key: str) -> Path:
    digest = hashlib.sha256(f"{FORMAT}\n{key}".encode(errors="surrogateescape")).hexdigest()
    return folder / "index" / f"{digest[:32]}.npz"
