"""Images that are files of their own: a folder tree, class folders, or a text list of paths."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cached_property

from iopath.common.file_io import g_pathmgr

from kscl.data.index_cache import cache_folder, load_index, save_index, stamps
from kscl.data.packed_names import Names
from kscl.data.source import Labels, is_image, is_remote, join, number_classes
from kscl.errors import KsclError


class FileSource:
    """One file an image."""

    def __init__(self, where: str, root: str, names: Names, listed: Labels | None = None) -> None:
        self.where = where
        self.root = root
        self.names = names  # relative to the root, or absolute
        self._listed = listed

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        name = self.names[index]
        return name if is_remote(name) else os.path.join(self.root, name)

    def read(self, index: int) -> bytes:
        path = self.name(index)
        # iopath costs more than reading a small local file does.
        with g_pathmgr.open(path, "rb") if is_remote(path) else open(path, "rb") as file:
            return file.read()

    @cached_property
    def labels(self) -> Labels | None:
        """From the list, else from class folders: none if an image lies beside the folders."""
        if self._listed is not None:
            return self._listed
        folders = [name.split("/", 1)[0] if "/" in name else "" for name in self.names]
        return None if "" in folders else number_classes(folders)


def open_list(where: str) -> FileSource:
    """A text file with one path a line, relative to the list; a class number may follow a blank."""
    try:
        with g_pathmgr.open(where, "rb") as file:
            lines = [line.strip() for line in file.read().decode("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise KsclError(f"the list {where} cannot be read: {error}") from error
    entries = [_parse_line(line) for line in lines if line and not line.startswith("#")]
    if not entries:
        raise KsclError(f"the list {where} names no image: write one path a line")
    names = Names.pack(name for name, _ in entries)
    classes = [label for _, label in entries if label]
    listed = number_classes(classes) if len(classes) == len(entries) else None
    return FileSource(where, os.path.dirname(where), names, listed)


def open_voc_split(where: str) -> FileSource:
    """`voc:FOLDER:SPLIT`: the images of one split of a VOC-layout folder, without their boxes."""
    folder, _, split = where.removeprefix("voc:").rpartition(":")
    ids = os.path.join(folder, "ImageSets", "Main", f"{split}.txt")
    try:
        with open(ids, encoding="utf-8") as file:
            wanted = [line.split()[0] for line in file if line.strip()]
        there = {os.path.splitext(name)[0]: name for name in os.listdir(f"{folder}/JPEGImages")}
    except OSError as error:
        raise KsclError(f"{where} is not there: {error.filename}: {error.strerror}") from error
    missing = [name for name in wanted if name not in there]
    if missing or not wanted:
        what = f"{missing[0]} (and {len(missing) - 1} others)" if missing else "anything"
        raise KsclError(f"{where}: {folder}/JPEGImages has no image of {what}, which {ids} lists")
    return FileSource(where, f"{folder}/JPEGImages", Names.pack(there[name] for name in wanted))


def _parse_line(line: str) -> tuple[str, str]:
    *words, last = line.rsplit(maxsplit=1)
    # Names may hold blanks, so the last word is a class only behind something like an image.
    return (words[0], last) if words and last.isdigit() and is_image(words[0]) else (line, "")


def list_folder(where: str, cache_dir: str = "") -> tuple[Names, list[str]]:
    """Sorted paths, relative to a folder: all images below it, and the tar files right in it."""
    if is_remote(where):  # has no time stamps to check a cached index by
        found = sorted(_walk_remote(where))
        return Names.pack(filter(is_image, found)), _direct_tars(found)
    cache, key = cache_folder(cache_dir), os.path.abspath(where)
    index = load_index(cache, key)
    if index is None:
        started = time.time_ns()
        try:
            files, folders, times = _walk_local(where)
        except OSError as error:
            raise KsclError(f"{error.filename} cannot be listed: {error.strerror}") from error
        images, tars = Names.pack(filter(is_image, files)), Names.pack(_direct_tars(files))
        index = {
            "text": images.text,
            "ends": images.ends,
            "tar_text": tars.text,
            "tar_ends": tars.ends,
            **stamps(folders, times, started),
        }
        save_index(cache, key, index)
    tars = Names(index["tar_text"], index["tar_ends"])
    return Names(index["text"], index["ends"]), list(tars)


def _walk_local(root: str) -> tuple[list[str], list[str], list[int]]:
    """Sorted files below a folder, and every folder looked into with its time stamp."""
    files: list[str] = []
    folders: list[str] = []
    times: list[int] = []
    waiting, visited = [""], set()
    while waiting:
        prefix = waiting.pop()
        folder = os.path.join(os.path.abspath(root), prefix)
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:
            continue  # a link back up the tree
        visited.add((status.st_dev, status.st_ino))
        folders.append(folder)
        times.append(status.st_mtime_ns)
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue  # hidden, and the shadow files that macOS leaves
                if entry.is_dir():
                    waiting.append(f"{prefix}{entry.name}/")
                else:
                    files.append(prefix + entry.name)
    return sorted(files), folders, times


def _walk_remote(root: str, prefix: str = "") -> Iterator[str]:
    for entry in g_pathmgr.ls(join(root, prefix) if prefix else root):
        path = prefix + entry.rstrip("/").rpartition("/")[2]
        if is_image(path) or _is_tar(path):
            yield path
        elif g_pathmgr.isdir(join(root, path)):
            yield from _walk_remote(root, f"{path}/")


def _direct_tars(files: list[str]) -> list[str]:
    return [name for name in files if _is_tar(name) and "/" not in name]


def _is_tar(name: str) -> bool:
    return name.lower().endswith(".tar")
