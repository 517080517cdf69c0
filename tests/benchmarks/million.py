"""Figures at the size of ImageNet: 1.28 million files, and as many images in 1,281 shards.

The files are empty, and the shards are links to one of empty images: listing, indexing, ordering
and memory do not depend on what the images hold.
"""

from __future__ import annotations

import atexit
import io
import os
import shutil
import tarfile
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import numpy as np

from kscl.data.loader import epoch_order
from kscl.data.open import open_source
from kscl.data.source import ImageSource
from kscl.engine.pretrain import data_fingerprint
from tests.benchmarks.harness import figure, in_own_process, seconds

IMAGES = 1_281_000
PER_FOLDER = PER_SHARD = 1000
MIB = 2**20
SETS = {"files": "1,281,000 files", "shards": "1,281 shards of 1,000 images"}
OF_SECOND_START: dict[str, tuple[str, float, str]] = {
    "second": ("second start on", 5, " s"),
    "memory": ("memory of a rank for the index of", 1000, " MiB"),
    "worker": ("further memory of a loader worker with the index of", 50, " MiB"),
}


@cache
def data() -> Path:
    """Return the folder of both sets; made once, removed at the end."""
    root = Path(tempfile.mkdtemp(prefix="kscl-million-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    empty_files(root / "files", IMAGES)
    shards = root / "shards"
    shards.mkdir()
    first = shards / "train-000000.tar"
    with tarfile.open(first, "w") as tar:
        for number in range(PER_SHARD):
            tar.addfile(tarfile.TarInfo(f"n01440764_{number:05d}.jpg"), io.BytesIO())
    for number in range(1, IMAGES // PER_SHARD):
        os.link(first, shards / f"train-{number:06d}.tar")
    time.sleep(2.5)  # an index is trusted if it is younger than what it was made from
    return root


def empty_files(root: Path, images: int) -> None:
    for folder in range(images // PER_FOLDER):
        where = root / f"n{folder:08d}"
        where.mkdir(parents=True)
        for number in range(PER_FOLDER):
            os.mknod(f"{where}/n{folder:08d}_{number:05d}.JPEG")


def start(root: Path, kind: str, images: int = IMAGES) -> ImageSource:
    """Do what a run does with its images before it trains."""
    where, cache_dir = str(root / kind), str(root / "cache")
    source = open_source(where, cache_dir)
    data_fingerprint(where, source, cache_dir)
    assert len(source) == images
    return source


@cache
def first_start(kind: str) -> float:
    """Return the seconds of a start that finds nothing cached."""
    root = data()
    return seconds(lambda: start(root, kind))


def of_second(kind: str, what: str) -> float:
    """Measure a start from the cache in a process of its own."""
    first_start(kind)
    return in_own_process(__name__, "_measure", what, kind, str(data()))


for _kind, _set in SETS.items():
    figure(f"million_{_kind}_first", f"first start on {_set}", unit=" s")(
        partial(first_start, _kind)
    )
    for _name, (_what, _bound, _unit) in OF_SECOND_START.items():
        figure(f"million_{_kind}_{_name}", f"{_what} {_set}", at_most=_bound, unit=_unit)(
            partial(of_second, _kind, _name)
        )


@figure("million_order", "order of an epoch of 1,281,000 images", at_most=2, unit=" s")
def million_order() -> float:
    return of_second("files", "order")


def _measure(what: str, kind: str, root: str) -> float:
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the imports
    before = _status_bytes("VmRSS")
    begun = time.perf_counter()
    source = start(Path(root), kind)
    if what == "second":
        return time.perf_counter() - begun
    if what == "memory":
        return (_status_bytes("VmHWM") - before) / MIB
    if what == "order":
        return seconds(lambda: epoch_order(0, 0, len(source), source))
    return _worker_memory(source)


def _worker_memory(source: ImageSource) -> float:
    """Return what a forked worker holds for itself once it has gone through the whole index."""
    reading, writing = os.pipe()
    if not os.fork():
        before = _private_bytes()
        for index in np.random.default_rng(0).permutation(len(source)).tolist():
            source.name(index)
        os.write(writing, str(_private_bytes() - before).encode())
        os._exit(0)
    os.wait()
    return float(os.read(reading, 100)) / MIB


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = [line.split() for line in lines if line.startswith("Private_")]
    return sum(int(words[1]) for words in private) * 1024
