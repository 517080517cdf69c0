"""Images that are files of their own: a folder tree, class folders, or a text list of paths."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from kscl.data.annotated.voc_files import image_files, read_split
from kscl.data.formats import is_image
from kscl.data.index_cache import cache_folder, load_index, save_index, stamps
from kscl.data.packed_names import Names
from kscl.data.source import Labels, Lost, is_remote, join, number_classes, read_file
from kscl.data.walk import Walk, walk_files
from kscl.errors import KsclError
from kscl.runtime.paths import path_manager


class FileSource:
    """One file per image."""

    def __init__(
        self,
        where: str,
        root: str,
        names: Names,
        listed: Labels | None = None,
        lost: Sequence[Lost] = (),
    ) -> None:
        self.where = where
        self.root = root
        self.names = names  # relative to the root, or absolute
        self.lost = lost
        self._listed = listed

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the full path of an image."""
        name = self.names[index]
        return name if is_remote(name) else os.path.join(self.root, name)

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        path = self.name(index)
        if not is_remote(path):  # iopath costs more than reading a small local file does
            return read_file(path)
        with path_manager.open(path, "rb") as file:
            return file.read()

    @cached_property
    def labels(self) -> Labels | None:
        """The list's, else those of class folders; None if an image lies beside the folders."""
        if self._listed is not None:
            return self._listed
        folders = [name.split("/", 1)[0] if "/" in name else "" for name in self.names]
        return None if "" in folders else number_classes(folders)


def open_list(where: str) -> FileSource:
    """Open a text file with one path per line, relative to it; a class number may follow."""
    try:
        if is_remote(where):
            with path_manager.open(where, "rb") as file:
                content = file.read()
        else:
            content = read_file(where)
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except OSError as error:
        reason = error.strerror or error
        raise KsclError(f"The list {where} cannot be read: {reason}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise KsclError(f"The list {where} is not text: {error}. Save it as UTF-8.") from error
    entries = [_parse_line(line) for line in lines if line and not line.startswith("#")]
    if not entries:
        raise KsclError(f"The list {where} names no image. Write one path per line.")
    names = Names.pack(name for name, _ in entries)
    classes = [label for _, label in entries if label]
    listed = number_classes(classes) if len(classes) == len(entries) else None
    return FileSource(where, os.path.dirname(where), names, listed)


def open_voc_split(where: str) -> FileSource:
    """Open `voc:FOLDER:SPLIT`: the images of one split of a VOC-layout folder, without boxes."""
    folder, _, split = where.removeprefix("voc:").rpartition(":")
    ids, problems = read_split(Path(folder), split)
    fatal = [str(problem) for problem in problems if problem.fatal]
    if fatal:
        raise KsclError(f"{where} cannot be used. {' '.join(fatal)}")
    images = Path(folder, "JPEGImages")
    if not images.is_dir():
        raise KsclError(f"{where} cannot be used: {images} is not a folder. Check the path.")
    found = image_files(images)
    missing = [image_id for image_id in ids if image_id not in found]
    if missing:
        more = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise KsclError(
            f"{where} cannot be used: {images} has no image of {missing[0]}{more}, which the list "
            f"{split}.txt names. Add the image, or take it off the list."
        )
    names = (found[image_id][0].relative_to(images).as_posix() for image_id in ids)
    return FileSource(where, str(images), Names.pack(names))


def _parse_line(line: str) -> tuple[str, str]:
    *words, last = line.rsplit(maxsplit=1)
    # Names may hold blanks, so the last word is a class only behind something like an image.
    return (words[0], last) if words and last.isdigit() and is_image(words[0]) else (line, "")


def list_folder(where: str, cache_dir: str = "") -> tuple[Names, list[str], list[Lost]]:
    """List the images below a folder, the tar files right in it, and what could not be listed.

    Names are sorted and relative to the folder.
    """
    if is_remote(where):  # has no time stamps to check a cached index by
        found = sorted(_walk_remote(where))
        return Names.pack(filter(is_image, found)), _direct_tars(found), []
    cache, key = cache_folder(cache_dir), os.path.abspath(where)
    index = load_index(cache, key)
    if index is not None:
        tars = Names(index["tar_text"], index["tar_ends"])
        return Names(index["text"], index["ends"]), list(tars), []
    started = time.time_ns()
    files, met = _walk_local(where)
    images, tars = Names.pack(filter(is_image, files)), Names.pack(_direct_tars(files))
    # What a dead link leads to may come back without a trace in the folder, so it is not cached.
    if not met.lost:
        index = {
            "text": images.text,
            "ends": images.ends,
            "tar_text": tars.text,
            "tar_ends": tars.ends,
            **stamps(met.folders, met.times, started),
        }
        save_index(cache, key, index)
    return images, list(tars), met.lost


def _walk_local(root: str) -> tuple[list[str], Walk]:
    met = Walk()
    return sorted(name for name, _ in walk_files(root, met)), met


def _walk_remote(root: str, prefix: str = "") -> Iterator[str]:
    for entry in path_manager.ls(join(root, prefix) if prefix else root):
        path = prefix + entry.rstrip("/").rpartition("/")[2]
        if is_image(path) or _is_tar(path):
            yield path
        elif path_manager.isdir(join(root, path)):
            yield from _walk_remote(root, f"{path}/")


def _direct_tars(files: list[str]) -> list[str]:
    return [name for name in files if _is_tar(name) and "/" not in name]


def _is_tar(name: str) -> bool:
    return name.lower().endswith(".tar")
