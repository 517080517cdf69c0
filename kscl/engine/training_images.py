"""The images of a pretraining, known by a fingerprint: a run never ends on others than it began."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.data.open import ImageSource, open_source
from kscl.data.source import is_remote
from kscl.data.tar.remote import RemoteShards
from kscl.engine.start import refuse_other_weights
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint, fingerprint_of_list
from kscl.records.record import RECORD_FILE, read_record
from kscl.runtime.processes.ranks import first_rank_first, on_first_rank

SAMPLED_IMAGES = 64


def open_images(cfg: CfgNode) -> tuple[ImageSource, dict[str, Any]]:
    """Return the images of DATA.TRAIN and their fingerprint, on every rank."""
    where = (cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR, cfg.DATA.CACHE_GB)
    source = first_rank_first(lambda: open_source(*where))
    return source, on_first_rank(lambda: data_fingerprint(where[0], source, where[1]))


def refuse_other_ending(cfg: CfgNode, folder: Path) -> None:
    """Raise if the run that has ended here was trained on other images or weights than are named.

    What has the name that it had then may be gone, or be far away. Rank 0 alone calls this.
    """
    record = read_record(folder / RECORD_FILE)
    refuse_other_weights(cfg, record.inputs.get("weights"))
    is_same_name = record.config.values["DATA"]["TRAIN"] == cfg.DATA.TRAIN
    if is_same_name and is_remote(cfg.DATA.TRAIN):
        return
    try:
        source = open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR, cfg.DATA.CACHE_GB)
        data = data_fingerprint(cfg.DATA.TRAIN, source, cfg.DATA.CACHE_DIR)
    except KsclError:
        if is_same_name:
            return
        raise
    refuse_other_data(record.data["train"], data, cfg.DATA.TRAIN)


def data_fingerprint(where: str, source: ImageSource, cache_dir: str = "") -> dict[str, Any]:
    """Hash names, sizes and sampled contents; of remote shards the hashes of all contents.

    Equal copies have equal hashes, wherever they are.
    """
    if Path(where).exists():
        found = fingerprint(where, cache_dir).as_dict()
        if where.lower().endswith(".txt") and (images := fingerprint_of_list(where)) is not None:
            both = f"{found['hash']}/{images.hash}"
            found["hash"] = hashlib.sha256(both.encode()).hexdigest()[:16]
        return {**found, "images": len(source)}
    digest = hashlib.sha256()
    if isinstance(source, RemoteShards):
        digest.update("\n".join(source.sha256).encode())
        return {"hash": digest.hexdigest()[:16], "images": len(source)}
    names = [source.name(index) for index in range(len(source))]
    folder = os.path.commonpath([os.path.dirname(name) for name in (min(names), max(names))])
    for name in names:
        digest.update(f"{name.removeprefix(folder)}\0".encode("utf-8", "surrogateescape"))
    for index in range(0, len(source), max(1, len(source) // SAMPLED_IMAGES)):
        digest.update(source.read(index))
    return {"hash": digest.hexdigest()[:16], "images": len(source)}


def refuse_other_data(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    """Raise if the images are not those that the checkpoint was trained on."""
    if before["hash"] != now["hash"]:
        raise KsclError(
            f"DATA.TRAIN {where} does not hold the images that this run was trained on "
            f"(fingerprint {before['hash']} with {before['images']:,} images then, {now['hash']} "
            f"with {now['images']:,} now). Restore them, or start a new run in another OUTPUT_DIR."
        )
