"""An index of a data set on disk, kept until one of the folders or files it was made from changes.

Adding, removing or renaming a file changes its folder's modification time, so a tree of a million
files is checked by looking at its folders alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from kscl.data.packed_names import Names

logger = logging.getLogger(__name__)

FORMAT = 1

# A change in the same clock tick as the reading would go unseen: a fresh time stamp proves nothing.
CLOCK_TICK_NS = 2_000_000_000

Arrays = dict[str, np.ndarray]


def cache_folder(folder: str = "") -> Path:
    """The folder named, else $KSCL_CACHE, else the user's cache folder."""
    if folder or os.environ.get("KSCL_CACHE"):
        return Path(folder or os.environ["KSCL_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kscl"


def stamps(paths: Iterable[str], times: Iterable[int], started: int) -> Arrays:
    """What an index was made from: each path, its modification time before it was read, and when
    the reading started (all in nanoseconds)."""
    names = Names.pack(paths)
    return {
        "stamp_text": names.text,
        "stamp_ends": names.ends,
        "stamp_times": np.array(list(times), np.int64),
        "started": np.array([started], np.int64),
    }


def modified_ns(path: str) -> int:
    return os.stat(path).st_mtime_ns


def load_index(folder: Path, key: str) -> Arrays | None:
    """The arrays saved under `key`, if nothing they were made from has changed."""
    try:
        with np.load(_cache_file(folder, key), allow_pickle=False) as saved:
            arrays = dict(saved)
        return arrays if _still_holds(arrays) else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _still_holds(arrays: Arrays) -> bool:
    paths = Names(arrays["stamp_text"], arrays["stamp_ends"])
    safe = int(arrays["started"][0]) - CLOCK_TICK_NS
    return all(
        modified_ns(path) == then and then < safe
        for path, then in zip(paths, arrays["stamp_times"].tolist(), strict=True)
    )


def save_index(folder: Path, key: str, arrays: Arrays) -> None:
    """Best effort: an index that cannot be kept costs time at the next start, nothing else."""
    target = _cache_file(folder, key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written beside its place in a folder of its own, so that a failure leaves nothing behind.
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            complete = Path(scratch) / target.name
            np.savez(complete, allow_pickle=False, **arrays)
            os.replace(complete, target)
    except OSError as error:
        logger.warning("the index of %s could not be cached in %s: %s", key, folder, error)


def _cache_file(folder: Path, key: str) -> Path:
    digest = hashlib.sha256(f"{FORMAT}\n{key}".encode(errors="surrogateescape")).hexdigest()
    return folder / "index" / f"{digest[:32]}.npz"
