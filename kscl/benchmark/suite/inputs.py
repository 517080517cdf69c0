"""What a stage reads: its files and data, each by a hash of what it holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from kscl.benchmark.suite.spec import Overrides
from kscl.config import file_values, leaves
from kscl.data.annotations import is_set_name, parse_source
from kscl.data.source import is_remote
from kscl.data.tar import expand_shards, is_shard_pattern
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint, fingerprint_of_list
from kscl.runtime.files import sha256_of

PATH_KEYS = (
    *("DATA.TRAIN", "DATA.VAL", "EVAL.KNN_TRAIN", "EVAL.KNN_VAL"),
    *("DATA.SUBSET", "DATASETS.TRAIN", "DATASETS.TEST"),
)
SETS, PARTS = "SETS.", (".train", ".val", ".test")  # of the linear suite
PHOTOS = "JPEGImages"  # of a set of prepare_data.py, which cuts them into a folder of tiles


def data_of(files: Sequence[str], overrides: Overrides) -> list[str]:
    """Return the data that a stage reads, by its overrides or else by its config files."""
    values = _values(files, overrides)
    sets = [key for key in values if key.startswith(SETS) and key.endswith(PARTS)]
    found: list[str] = []
    for key in (*PATH_KEYS, *sets):
        value = values.get(key)
        found += [str(name) for name in (value if isinstance(value, list | tuple) else [value])]
    return [name for name in found if name and name != "None"]


def weights_of(files: Sequence[str], overrides: Overrides) -> list[str]:
    """Return the file of weights that a pretraining starts from, if there is one."""
    name = _values(files, overrides).get("BACKBONE.WEIGHTS")
    return [str(name)] if name else []


def _values(files: Sequence[str], overrides: Overrides) -> dict[str, object]:
    values: dict[str, object] = {}
    for file in files:
        if Path(file).suffix in (".yaml", ".yml"):
            values |= dict(leaves(file_values(file)))
    return values | dict(leaves(overrides))


def content_of(name: str, made: Sequence[str]) -> str:
    """Return a hash of what a file or folder holds; of a config, of the values that it sets.

    What lies in a folder that an earlier stage has `made` is known by its name, and so is what is
    not there, or not on this machine.
    """
    if is_set_name(name):
        source = parse_source(name)
        return "/".join([source.split, *(content_of(str(part), made) for part in source.parts)])
    path = Path(name)
    if any(path.is_relative_to(folder) for folder in made):
        return name
    if path.suffix in (".yaml", ".yml"):
        values = json.dumps(file_values(name), sort_keys=True, default=str)
        return hashlib.sha256(values.encode()).hexdigest()
    if path.is_dir():
        return "/".join([fingerprint(path).hash, *_cut_from(path)])
    if not path.is_file():
        return "/".join(_shards(name)) or name
    images = fingerprint_of_list(name) if path.suffix.lower() == ".txt" else None
    return f"{sha256_of(path)}/{images.hash}" if images else sha256_of(path)


def _cut_from(folder: Path) -> list[str]:
    """Return the hash of the photos beside a folder: its tiles are copies of their parts."""
    photos = folder.parent / PHOTOS
    if folder == photos or not photos.is_dir():
        return []
    try:
        return [fingerprint(photos).hash]
    except KsclError:  # links to photos that are gone; the tiles are still there
        return []


def _shards(pattern: str) -> list[str]:
    """Return the hashes of tar shards, or none if any of them is not there."""
    if is_remote(pattern) or not is_shard_pattern(pattern):
        return []
    try:
        return [fingerprint(shard).hash for shard in expand_shards(pattern)]
    except KsclError:  # told by the check of the stage
        return []
