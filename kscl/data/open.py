"""The images that a path stands for.

A path is a folder tree, class folders, a text list, tar shards, or a split of a VOC folder
(`voc:FOLDER:SPLIT`). Paths with a scheme (`name://…`) go through the project's PathManager: http(s)
is built in, and --path-handler registers handlers of others.
"""

from __future__ import annotations

import logging
import time

from kscl.data.folder import FileSource, list_folder, open_list, open_voc_split
from kscl.data.formats import IMAGE_EXTENSIONS
from kscl.data.source import ImageSource, Labels, is_remote, join, warn_of_lost
from kscl.data.tar.remote import open_remote_shards
from kscl.data.tar.shards import expand_shards, is_shard_pattern, open_shards
from kscl.errors import KsclError
from kscl.runtime.paths import path_manager

__all__ = ["ImageSource", "Labels", "open_source"]

logger = logging.getLogger(__name__)


def open_source(where: str, cache_dir: str = "", cache_gb: float = 0.0) -> ImageSource:
    """Open all images of a folder, list or shards; raise KsclError if there are none.

    Of remote shards at most `cache_gb` gigabytes are kept in the cache folder, or all with 0.
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
        return _open_shards(where, expand_shards(where), cache_dir, cache_gb)
    if where.startswith("voc:"):
        return open_voc_split(where)
    if where.lower().endswith(".txt"):
        return open_list(where)
    if not path_manager.isdir(where):
        raise KsclError(_not_a_folder(where))
    names, shards, lost = list_folder(where, cache_dir)
    if len(names):
        return FileSource(where, where, names, lost=lost)
    if shards:
        return _open_shards(where, [join(where, shard) for shard in shards], cache_dir, cache_gb)
    warn_of_lost(lost)
    raise KsclError(
        f"{where} holds no image: no file in it or below it ends in "
        f"{', '.join(IMAGE_EXTENSIONS)}, and no .tar shard lies in it. "
        "Set DATA.TRAIN to the folder of the images."
    )


def _open_shards(where: str, shards: list[str], cache_dir: str, cache_gb: float) -> ImageSource:
    source = (
        open_remote_shards(where, shards, cache_dir, cache_gb)
        if is_remote(where)
        else open_shards(where, shards, cache_dir)
    )
    if not len(source):
        raise KsclError(
            f"{where} holds no image: none of its {len(shards)} shards has a member like "
            "000017.jpg. Pack the images in the WebDataset layout."
        )
    return source


def _not_a_folder(where: str) -> str:
    if path_manager.isfile(where):
        return f"{where} is neither a folder, nor a .txt list, nor a .tar shard."
    if is_remote(where):
        return f"{where} is not there, or no iopath handler is registered for its scheme."
    return f"{where} is not there. DATA.TRAIN must be a folder, a .txt list or tar shards."
