"""`shapes.json`: what a folder holds, written last; and whether a folder may be filled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kscl.datasets.shapes.settings import ShapesSettings
from kscl.errors import KsclError
from kscl.runtime.files import write_atomically

MANIFEST = "shapes.json"
# Stands in the folder while it is being filled: what is there belongs to an unfinished run.
UNFINISHED = "shapes.unfinished.json"
# Raise it with every change that moves a pixel or a box.
GENERATOR_VERSION = 1
# The folders that each of the manifest's hashes is over: the first is older than the COCO files.
DIGESTS = {"sha256": ("unlabeled", "classes", "VOCdevkit"), "coco_sha256": ("coco",)}


def describe(settings: ShapesSettings) -> dict[str, Any]:
    """Return what identifies the data set."""
    return {
        "format": "kscl-shapes",
        "generator_version": GENERATOR_VERSION,
        **asdict(settings),
        "classes": list(settings.class_names),
    }


def digest(hashes: Mapping[str, str]) -> str:
    """Return one SHA-256 over all files: that of `sha256sum`'s lines in the order of the paths."""
    lines = "".join(f"{hashes[path]}  {path}\n" for path in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def is_finished(folder: Path, settings: ShapesSettings) -> bool:
    """Return whether the folder holds this very data set; raise if it holds anything else."""
    if not folder.exists():
        return False
    if folder.is_dir() and all(path.name.startswith(".") for path in folder.iterdir()):
        return False  # hidden are the lock and files of a killed process
    for name in (MANIFEST, UNFINISHED):
        if (folder / name).is_file():
            _refuse_other(folder, _read(folder / name), describe(settings))
            return name == MANIFEST
    raise KsclError(
        f"{folder} already holds something that is not this data set ({MANIFEST} is missing). "
        "Choose another output folder."
    )


def _refuse_other(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if "unlabelled" in found:
        raise KsclError(
            f"{folder} was drawn by an earlier version, which called its pictures to pretrain on "
            "`unlabelled`. Delete it: it is drawn again with the same pixels."
        )
    changes = [
        f"{key} is {found.get(key)!r}, but {value!r} is asked for"
        for key, value in wanted.items()
        if found.get(key) != value and key != "classes"
    ]
    if changes:
        raise KsclError(
            f"{folder} holds another data set of this kind: {'; '.join(changes)}. "
            "Choose another output folder, or delete this one."
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KsclError(f"{path} is not valid JSON ({error}). Delete its folder.") from error
    if not isinstance(content, dict):
        raise KsclError(f"{path} is not a manifest of this data set. Choose another output folder.")
    return content


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what a finished folder holds."""
    path = folder / MANIFEST
    if not path.is_file():
        raise KsclError(
            f"{folder} holds no finished data set: {MANIFEST} is missing. Run tools/make_shapes.py."
        )
    return _read(path)


def begin(folder: Path, settings: ShapesSettings) -> None:
    """Mark the folder as being filled."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / UNFINISHED, describe(settings))
    (folder / MANIFEST).unlink(missing_ok=True)


def finish(folder: Path, settings: ShapesSettings, hashes: Mapping[str, str]) -> dict[str, Any]:
    """Mark the folder as finished and return its manifest."""
    content = {**describe(settings), "files": len(hashes)}
    for key, parts in DIGESTS.items():
        content[key] = digest({p: h for p, h in hashes.items() if p.split("/")[0] in parts})
    _write(folder / MANIFEST, content)
    (folder / UNFINISHED).unlink()
    return content


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
