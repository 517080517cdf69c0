"""The interface of image sources, and what they share: names, files, folders, a cached index."""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from kscl.data.formats import (
    IMAGE_EXTENSIONS,
    MAX_PIXELS,
    Decoded,
    Reduction,
    UnreadableImage,
    decode,
    is_image,
)
from kscl.errors import KsclError
from kscl.runtime.files import read_arrays, sha256_of, write_atomically

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

THREADS = 8
SHOWN_LOST = 20  # on screen; all are counted
MAX_FILE_BYTES = 2**30  # no image of an allowed number of pixels has a larger file


@dataclass(eq=False)
class Names(Sequence[str]):
    """A read-only list of strings kept in two arrays.

    Touching the reference counts of a Python list of strings copies it into every forked worker;
    arrays stay shared, and are saved and loaded in one piece. After reading a million names, a
    worker holds 23 MiB of its own instead of 84.
    """

    text: np.ndarray  # uint8, the encoded strings without a separator
    ends: np.ndarray  # int64, where each string ends

    @classmethod
    def pack(cls, names: Iterable[str]) -> Names:
        """Pack any strings, also file names that are not UTF-8."""
        encoded = [os.fsencode(name) for name in names]
        ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        index = range(len(self))[index]
        start = self.ends[index - 1] if index else 0
        return os.fsdecode(self.text[start : self.ends[index]].tobytes())

    def __iter__(self) -> Iterator[str]:
        text, start = self.text.tobytes(), 0
        for end in self.ends.tolist():
            yield os.fsdecode(text[start:end])
            start = end


class Labels(NamedTuple):
    """The class of every image: `classes[numbers[i]]` for image i."""

    classes: list[str]
    numbers: np.ndarray  # int64


def number_classes(names: list[str]) -> Labels | None:
    """Give classes numbers by the order of their names, 10 after 2; None if an image has none."""
    if "" in names:
        return None
    classes = sorted(set(names), key=lambda name: (int(name) if name.isdecimal() else -1, name))
    number = {name: index for index, name in enumerate(classes)}
    return Labels(classes, np.array([number[name] for name in names], np.int64))


class Lost(NamedTuple):
    """Images that a source should have but could not list."""

    name: str
    reason: str
    num_images: int = 1  # an estimate where a shard is damaged


def warn_of_lost(lost: Sequence[Lost]) -> None:
    """Log each lost image by name."""
    for name, reason, num_images in lost[:SHOWN_LOST]:
        images = f" (about {num_images} images)" if num_images > 1 else ""
        logger.warning("%s is skipped%s: %s.", name, images, reason)
    if len(lost) > SHOWN_LOST:
        logger.warning("… and %d more like these are skipped.", len(lost) - SHOWN_LOST)


class ImageSource(Protocol):
    """A numbered list of encoded images, read one by one in any order."""

    where: str  # as the user named it

    @property
    def lost(self) -> Sequence[Lost]: ...
    def __len__(self) -> int: ...
    def name(self, index: int) -> str: ...
    def read(self, index: int) -> bytes: ...
    @property
    def labels(self) -> Labels | None: ...


def read_picture(source: ImageSource, index: int, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Read and decode one image of a source; every way to fail is an UnreadableImage."""
    return read_decoded(source, index, max_pixels).picture


def read_decoded(
    source: ImageSource,
    index: int,
    max_pixels: int = MAX_PIXELS,
    reduction: Reduction | None = None,
) -> Decoded:
    """Do the same, at reduced size where the format allows."""
    try:
        data = source.read(index)
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error)) from error
    return decode(data, max_pixels, reduction)


def is_remote(path: str) -> bool:
    """Return whether a path has a scheme and so belongs to one of iopath's handlers."""
    return "://" in path


def join(folder: str, name: str) -> str:
    """Join a local or remote folder and a name in it."""
    return f"{folder.rstrip('/')}/{name}"


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a local file for reading; raise OSError for a pipe or device, which could block."""
    try:  # O_NONBLOCK: opening a pipe would wait for a writer
        file = open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK))  # noqa: SIM115
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error)) from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file")
    return file


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Read a local file; raise OSError if it is not a regular one or larger than allowed."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it is larger than {max_bytes / 2**20:g} MiB")
        return file.read()


def in_threads(work: Callable[..., Result], *arguments: Iterable[Any]) -> list[Result]:
    """Return the results of `map`; decoding waits for the disk and releases Python's lock."""
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(work, *arguments))


def read_image(path: Path) -> np.ndarray:
    """Read and decode a local file; raise KsclError if it cannot be read."""
    try:
        return decode(read_file(path)).picture
    except UnreadableImage as error:
        raise KsclError(f"{path} cannot be read: {error}. {error.fix}.") from error
    except OSError as error:
        raise KsclError(f"{path} cannot be read: {error}. Make it readable.") from error


def read_text(path: str | Path, read: Callable[[str | Path], bytes] = read_file) -> str:
    """Read a UTF-8 file; the message of the KsclError for a bad one is the reason alone."""
    try:
        return read(path).decode("utf-8-sig")
    except OSError as error:
        raise KsclError(f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KsclError(f"is not UTF-8 text: {error}") from error


def read_lines(path: str | Path, read: Callable[[str | Path], bytes] = read_file) -> list[str]:
    """Read the lines of a UTF-8 file that are not blank, without blanks around them."""
    return [line.strip() for line in read_text(path, read).splitlines() if line.strip()]


@dataclass
class Walk:
    """The folders of a walk, and the images that it lost."""

    folders: list[str] = field(default_factory=list)  # absolute
    times: list[int] = field(default_factory=list)  # of each folder's last change, in ns
    lost: list[Lost] = field(default_factory=list)


def walk_files(root: str, met: Walk) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield (path relative to the root with /, entry) of every regular file below a folder.

    Hidden files do not count. Links are followed; a folder that is reachable in several ways is
    entered once, by its own name if it is below the root. A dead link and a pipe named like an
    image are noted as lost. A folder that cannot be listed is an error.
    """
    base = os.path.abspath(root)
    waiting, links, visited = [""], list[str](), set()
    while waiting or links:
        if not waiting:
            links.sort(reverse=True)  # the order of a copy may differ
        prefix = waiting.pop() if waiting else links.pop()
        folder = os.path.join(base, prefix)
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in visited:
                continue  # a link back up the tree
            visited.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as listed:
                entries = list(listed)
        except OSError as error:
            raise KsclError(
                f"{folder} cannot be listed: {error.strerror}. Check the path and its permissions."
            ) from error
        met.folders.append(folder)
        met.times.append(status.st_mtime_ns)
        for entry in entries:
            if entry.name.startswith("."):
                continue  # hidden, and the shadow files that macOS leaves
            name = prefix + entry.name
            try:
                if entry.is_dir():
                    (links if entry.is_symlink() else waiting).append(f"{name}/")
                elif entry.is_file():
                    yield name, entry
                elif entry.is_symlink() and not os.path.exists(entry.path):
                    met.lost.append(Lost(entry.path, "the link leads nowhere"))
                elif is_image(entry.name):
                    met.lost.append(Lost(entry.path, "it is not a regular file"))
            except OSError as error:  # a link to itself, or into a folder that is closed to us
                met.lost.append(Lost(entry.path, error.strerror or str(error)))


# An index of a data set on disk, valid until one of the folders or files it was made from changes.
# Adding, removing or renaming a file changes its folder's modification time, so only folders need
# checking: with 100,000 files in 100 folders 0.007 CPU seconds instead of 0.29.
Index = dict[str, Any]  # Names and arrays

INDEX_FORMAT = 3
# A change in the same clock tick as the reading would go unnoticed.
CLOCK_TICK_NS = 2_000_000_000
ANY_SIZE = -1  # of a folder, whose size means nothing
_TEXT, _ENDS = ".text", ".ends"  # the two arrays of Names in a file


def cache_folder(folder: str = "") -> Path:
    """Return the folder named, else $KSCL_CACHE, else the user's cache folder."""
    named = folder or os.environ.get("KSCL_CACHE")
    path = named or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "kscl")
    expanded = os.path.expanduser(path)  # unlike Path's, it does not fail without a home
    # Without a home nothing can be written, which every writer reports.
    return Path(os.devnull, "kscl") if expanded.startswith("~") else Path(expanded)


def stamps(
    paths: Iterable[str], times: Iterable[int], started: int, sizes: Sequence[int] | None = None
) -> Index:
    """Describe what an index was made from, so that a change is noticed.

    Each path goes with its modification time before it was read (and its size, for files);
    `started` is when the reading started. All times are in nanoseconds.
    """
    names = Names.pack(paths)
    return {
        "stamps": names,
        "stamp_times": np.array(list(times), np.int64),
        "stamp_sizes": np.array([ANY_SIZE] * len(names) if sizes is None else sizes, np.int64),
        "started": np.array([started], np.int64),
    }


def load_index(folder: Path, key: str) -> Index | None:
    """Return the index saved under `key`, or None if anything it was made from has changed."""
    try:
        index: Index = dict(read_arrays(_index_file(folder, key)))
        for text in [name for name in index if name.endswith(_TEXT)]:
            name = text.removesuffix(_TEXT)
            index[name] = Names(index.pop(text), index.pop(name + _ENDS))
        times, sizes = index["stamp_times"], index["stamp_sizes"].tolist()
        if (times >= int(index["started"][0]) - CLOCK_TICK_NS).any():
            return None
        for path, time, size in zip(index["stamps"], times.tolist(), sizes, strict=True):
            status = os.stat(path)
            if status.st_mtime_ns != time or size not in (ANY_SIZE, status.st_size):
                return None
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return index


def save_index(folder: Path, key: str, index: Index) -> None:
    """Save an index if possible; without it the next start only takes longer."""
    arrays: dict[str, np.ndarray] = {}
    for name, value in index.items():
        if isinstance(value, Names):
            arrays |= {name + _TEXT: value.text, name + _ENDS: value.ends}
        else:
            arrays[name] = value
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    try:
        write_atomically(_index_file(folder, key), content.getvalue())
    except KsclError as error:
        logger.warning(
            "The index of %s is not cached, so it is made again at the next start: %s "
            "DATA.CACHE_DIR or $KSCL_CACHE names the folder.",
            *(key.partition("\n")[0], error),
        )


def _index_file(folder: Path, key: str) -> Path:
    # With another image format registered, an index may list other files.
    known = f"{INDEX_FORMAT} {' '.join(IMAGE_EXTENSIONS)}\n{key}"
    digest = hashlib.sha256(known.encode(errors="surrogateescape")).hexdigest()
    return folder / "index" / f"{digest[:32]}.npz"


TAIL_BYTES = 4096


def equal_files(left: Iterable[Path], right: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Return (left, right) for each file on the right with the content of one on the left.

    Sizes are compared first, then the last bytes, then hashes: few files are read completely.
    """
    lefts, rights, keys = list(left), list(right), dict[Path, object]()
    for key in (os.path.getsize, _tail, sha256_of):
        keys = {path: key(path) for path in {*lefts, *rights}}
        shared = {keys[path] for path in lefts} & {keys[path] for path in rights}
        lefts = [path for path in lefts if keys[path] in shared]
        rights = [path for path in rights if keys[path] in shared]
    first = {keys[path]: path for path in reversed(lefts)}
    return [(first[keys[path]], path) for path in rights]


def _tail(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(max(0, os.path.getsize(path) - TAIL_BYTES))
        return hashlib.md5(file.read()).digest()
