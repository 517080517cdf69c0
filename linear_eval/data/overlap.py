"""Refuse a probe that is evaluated on the images it was trained on."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from fvcore.common.config import CfgNode

from kscl.data.equal_files import equal_files
from kscl.data.open import open_source
from kscl.runtime.logs import LOGGER
from linear_eval.errors import LinearEvalError

MOST_COMPARED = 200_000  # images of both sets; of larger ones only the folders are compared
ALLOWED = 0.01  # fraction of DATA.VAL: public sets have a few duplicates of their own

log = logging.getLogger(LOGGER)


def refuse_overlap(cfg: CfgNode) -> None:
    """Raise LinearEvalError if DATA.TRAIN and DATA.VAL share images, by file or by content."""
    folders = [Path(where) for where in (cfg.DATA.TRAIN, cfg.DATA.VAL) if where]
    if len(folders) < 2 or not all(folder.is_dir() for folder in folders):
        return  # reported where they are opened
    train, val = (folder.resolve() for folder in folders)
    if train == val or train in val.parents or val in train.parents:
        raise _refused(f"DATA.VAL {cfg.DATA.VAL} and DATA.TRAIN {cfg.DATA.TRAIN} overlap")
    sources = [open_source(str(folder), cfg.DATA.CACHE_DIR) for folder in folders]
    if sum(map(len, sources)) > MOST_COMPARED:
        return
    paths = [
        [path for i in range(len(source)) if os.path.isfile(path := Path(source.name(i)))]
        for source in sources
    ]
    shared = equal_files(*paths)
    if not shared:
        return
    same, path = shared[0]
    what = (
        f"{len(shared)} of the {len(paths[1])} images of DATA.VAL are in DATA.TRAIN too, {path} "
        f"({same}) for one"
    )
    if len(shared) > ALLOWED * len(paths[1]):
        raise _refused(what)
    log.warning("%s.", what)


def _refused(what: str) -> LinearEvalError:
    return LinearEvalError(
        f"{what}: a score on training images says nothing. Separate them, or insist with "
        "--allow-overlap."
    )
