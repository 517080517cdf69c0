"""Open the images that a path stands for.

A path is a folder tree, class folders, a text list, tar shards, or a split of a VOC folder
(`voc:FOLDER:SPLIT`). Paths with a scheme (`name://…`) go through the project's PathManager: http(s)
is built in, and --path-handler registers handlers of others.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kscl.data.annotated.voc import choose_image, image_files, read_split
from kscl.data.annotations import AnnotatedSet
from kscl.data.formats import IMAGE_EXTENSIONS, is_image
from kscl.data.source import (
    ImageSource,
    Labels,
    Lost,
    Names,
    Walk,
    cache_folder,
    is_remote,
    join,
    load_index,
    number_classes,
    read_file,
    read_lines,
    save_index,
    stamps,
    walk_files,
    warn_of_lost,
)
from kscl.data.tar import expand_shards, is_shard_pattern, open_shards
from kscl.errors import KsclError
from kscl.runtime.paths import path_manager

logger = logging.getLogger(__name__)


def open_source(where: str, cache_dir: str = "", cache_gb: float = 0.0) -> ImageSource:
    """Open all images of a folder, list or shards; raise KsclError if there are none.

    At most `cache_gb` gigabytes of remote shards are kept in the cache folder; 0 keeps all.
    """
    if not where:
        raise KsclError("No images are named. Set DATA.TRAIN to a folder, a .txt list or shards.")
    started = time.perf_counter()
    source = _open(where, cache_dir, cache_gb)
    warn_of_lost(source.lost)
    logger.info("%d images in %s (%.1f s).", len(source), where, time.perf_counter() - started)
    return source


def _open(where: str, cache_dir: str, cache_gb: float) -> ImageSource:
    if is_shard_pattern(where):
        return open_shards(where, expand_shards(where), cache_dir, cache_gb)
    if where.startswith("voc:"):
        return open_voc_split(where)
    if where.lower().endswith(".txt"):
        return open_list(where)
    if not path_manager.isdir(where):
        if path_manager.isfile(where):
            reason = "is neither a folder, nor a .txt list, nor a .tar shard"
        elif is_remote(where):
            reason = "is not there, or no iopath handler is registered for its scheme"
        else:
            reason = "is not there. DATA.TRAIN must be a folder, a .txt list or tar shards"
        raise KsclError(f"{where} {reason}.")
    names, shards, lost = _list_folder(where, cache_dir)
    if len(names):
        return FileSource(where, where, names, lost=lost)
    if len(shards):
        return open_shards(where, [join(where, shard) for shard in shards], cache_dir, cache_gb)
    warn_of_lost(lost)
    raise KsclError(
        f"{where} holds no image: no file in it or below it ends in "
        f"{', '.join(IMAGE_EXTENSIONS)}, and it has no .tar shard. "
        "Set DATA.TRAIN to the folder of the images."
    )


@dataclass(eq=False)
class FileSource:
    """One file per image."""

    where: str
    root: str
    names: Names  # relative to the root, or absolute
    listed: Labels | None = None
    lost: Sequence[Lost] = ()

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the full path of an image."""
        name = self.names[index]
        return name if is_remote(name) else os.path.join(self.root, name)

    def read(self, index: int) -> bytes:
        """Return the encoded image."""
        return _read(self.name(index))

    @cached_property
    def labels(self) -> Labels | None:
        """Those of the list, else of class folders; None if an image is in no class folder."""
        if self.listed is not None:
            return self.listed
        return number_classes([name.split("/", 1)[0] if "/" in name else "" for name in self.names])


def _read(path: str | Path) -> bytes:
    if not is_remote(str(path)):  # iopath costs more than reading a small local file does
        return read_file(path)
    with path_manager.open(str(path), "rb") as file:
        return file.read()


def open_list(where: str) -> FileSource:
    """Open a text file with one path per line, relative to it; a class number may follow."""
    try:
        lines = read_lines(where, _read)
    except KsclError as error:
        raise KsclError(f"The list {where} {error}. Check the path and the file.") from error
    names, classes = [], []
    for line in lines:
        if not line.startswith("#"):
            *words, last = line.rsplit(maxsplit=1)
            # Names may hold blanks, so the last word is a class only after an image's name.
            has_class = words and last.isdigit() and is_image(words[0])
            names.append(words[0] if has_class else line)
            classes.append(last if has_class else "")
    if not names:
        raise KsclError(f"The list {where} names no image. Write one path per line.")
    return FileSource(where, os.path.dirname(where), Names.pack(names), number_classes(classes))


def open_voc_split(where: str, lists: str = "Main") -> FileSource:
    """Open `voc:FOLDER:SPLIT`: the images of one split of a VOC-layout folder, without boxes.

    `lists` is the folder of ImageSets/ that has the split.
    """
    folder, _, split = where.removeprefix("voc:").rpartition(":")
    root, found = Path(folder), AnnotatedSet(where, ())
    images, ids = root / "JPEGImages", read_split(root, split, found, lists)
    found.checked()
    files = image_files(images)
    paths = [choose_image(root, image_id, files, found) for image_id in ids]
    found.checked()
    names = (os.path.relpath(path, images) for path in paths if path is not None)
    return FileSource(where, str(images), Names.pack(names))


def _list_folder(where: str, cache_dir: str) -> tuple[Names, Names, list[Lost]]:
    """List the images below a folder, the tar files right in it, and what could not be listed.

    Names are sorted and relative to the folder.
    """
    met, started = Walk(), time.time_ns()
    if is_remote(where):  # has no time stamps to check a cached index by
        return *_images_and_tars(_walk_remote(where)), met.lost
    cache, key = cache_folder(cache_dir), os.path.abspath(where)
    index = load_index(cache, key)
    if index is not None:
        return index["names"], index["tars"], met.lost
    names, tars = _images_and_tars(name for name, _ in walk_files(where, met))
    # Not cached with a dead link: its target may come back without a trace in the folder.
    if not met.lost:
        made_from = stamps(met.folders, met.times, started)
        save_index(cache, key, {"names": names, "tars": tars, **made_from})
    return names, tars, met.lost


def _images_and_tars(files: Iterator[str]) -> tuple[Names, Names]:
    found = sorted(files)
    tars = (name for name in found if _is_tar(name) and "/" not in name)
    return Names.pack(filter(is_image, found)), Names.pack(tars)


def _walk_remote(root: str, prefix: str = "") -> Iterator[str]:
    for entry in path_manager.ls(join(root, prefix) if prefix else root):
        path = prefix + entry.rstrip("/").rpartition("/")[2]
        if is_image(path) or _is_tar(path):
            yield path
        elif path_manager.isdir(join(root, path)):
            yield from _walk_remote(root, f"{path}/")


def _is_tar(name: str) -> bool:
    return name.lower().endswith(".tar")
