"""What data a run saw, in one short hash: every name and size, and a sample of the contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kscl.errors import KsclError

SAMPLED_FILES = 256
SAMPLED_BYTES = 64 * 1024  # from the start and from the end of each sampled file


@dataclass(frozen=True)
class Fingerprint:
    hash: str
    files: int
    bytes: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def fingerprint(path: str | Path) -> Fingerprint:
    """The same for equal copies anywhere, whatever their dates; a million files take seconds."""
    root = Path(path)
    if not root.exists():
        raise KsclError(f"{path}: there is nothing to take a fingerprint of")
    files = sorted(_files(root)) if root.is_dir() else [("", root.stat().st_size)]
    if not files:
        raise KsclError(f"{path}: the folder holds no file")
    digest = hashlib.sha256()
    for name, size in files:
        digest.update(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
    # Which files are sampled follows from their names, so it is the same everywhere.
    by_hash = sorted(files, key=lambda file: hashlib.md5(os.fsencode(file[0])).digest())
    for name, _ in sorted(by_hash[:SAMPLED_FILES]):
        digest.update(_sample(root / name if name else root))
    return Fingerprint(digest.hexdigest()[:16], len(files), sum(size for _, size in files))


def _files(root: Path) -> Iterator[tuple[str, int]]:
    """(relative path with /, size) of every file below the folder; hidden ones do not count."""
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.is_dir():
                    folders.append(name)
                elif entry.is_file():
                    yield name, entry.stat().st_size


def _sample(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(SAMPLED_BYTES)
        size = os.fstat(file.fileno()).st_size
        if size <= 2 * SAMPLED_BYTES:
            return start + file.read()
        file.seek(size - SAMPLED_BYTES)
        return start + file.read()
