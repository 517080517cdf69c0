"""Refuse a probe that is evaluated on the images it was trained on."""

from __future__ import annotations

import functools
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from fvcore.common.config import CfgNode

from kscl.data.annotated.specs import parse_source, read_source
from kscl.data.equal_files import equal_files
from kscl.data.folder import open_voc_split
from kscl.data.open import open_source
from kscl.errors import KsclError
from kscl.runtime.logs import LOGGER
from linear_eval.data.sets import PARTS, is_annotated
from linear_eval.errors import LinearEvalError

MOST_COMPARED = 200_000  # images of both sets; of larger ones only folders and paths are compared
ALLOWED = 0.01  # fraction of the second set: public sets have a few duplicates of their own

log = logging.getLogger(LOGGER)

Named = tuple[str, str]  # a key of the config, and the images that it names


def refuse_overlap(cfg: CfgNode) -> None:
    """Raise LinearEvalError if two sets that must differ share images, by file or by content."""
    paths_of = functools.cache(lambda where: _paths(where, cfg.DATA.CACHE_DIR))
    for (train_key, train), (val_key, val) in _pairs(cfg):
        if os.path.isdir(train) and os.path.isdir(val):
            first, second = Path(train).resolve(), Path(val).resolve()
            if first == second or first in second.parents or second in first.parents:
                raise _refused(f"{val_key} {val} and {train_key} {train} overlap")
        _compare(train_key, paths_of(train), val_key, paths_of(val))


def _pairs(cfg: CfgNode) -> Iterator[tuple[Named, Named]]:
    """Yield each pair of sets that must not share images."""
    groups = [[("DATA.TRAIN", cfg.DATA.TRAIN), ("DATA.VAL", cfg.DATA.VAL)]]
    if cfg.PROBE == "linear_suite":
        groups = [
            [(f"SETS.{name}.{part}", given.get(part, "")) for part in PARTS]
            for name, given in cfg.SETS.items()
        ]
    for group in groups:
        yield from itertools.combinations([named for named in group if named[1]], 2)


def _paths(where: str, cache_dir: str) -> list[str]:
    """Return the files of a set; none if it cannot be opened, which is told where it is."""
    if os.path.isdir(where):
        source = open_source(where, cache_dir)
        if len(source) > MOST_COMPARED:
            return []  # of so many images only the folders are compared
    elif is_annotated(where):
        try:
            named = parse_source(where)
            if not named.is_voc:
                return [str(image.path) for image in read_source(named).images if image.path]
            source = open_voc_split(f"voc:{named.root}:{named.split}")
        except KsclError:
            return []
    else:
        return []
    return [source.name(index) for index in range(len(source))]


def _compare(train_key: str, train: list[str], val_key: str, val: list[str]) -> None:
    if not train or not val:
        return
    if len(train) + len(val) > MOST_COMPARED:
        known = set(train)
        shared = [(path, path) for path in val if path in known]
    else:
        files = [[Path(path) for path in paths if os.path.isfile(path)] for paths in (train, val)]
        shared = [(str(same), str(path)) for same, path in equal_files(*files)]
    if not shared:
        return
    same, path = shared[0]
    what = (
        f"{len(shared)} of the {len(val)} images of {val_key} are in {train_key} too, {path} "
        f"({same}) for one"
    )
    if len(shared) > ALLOWED * len(val):
        raise _refused(what)
    log.warning("%s.", what)


def _refused(what: str) -> LinearEvalError:
    return LinearEvalError(
        f"{what}: a score on training images says nothing. Separate them, or insist with "
        "--allow-overlap, an option of tools/linear_eval.py: a suite must name other images."
    )
