"""The drawn data set has the same bytes everywhere."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from kscl.datasets.shapes import (
    make_shapes,
)
from kscl.datasets.shapes.plan import plan
from kscl.datasets.shapes.writing.writer import draw
from tests.helpers.data.shapes import SMALL, bytes_of

# Drift in these two is a new GENERATOR_VERSION, or a mistake. The first is over bare pixels; the
# second also depends on the JPEG encoder of the pinned Pillow.
SMALL_PIXELS = "6b93809add5f8feb1d545af4ab4223af08b28e5f29c606eb9d8309cbd2826b14"

SMALL_FILES = "2606abff0ff0f504d191fb6074b53c10d518e8262b0b67e2a1f0369bdbafb284"

SMALL_COCO = "bb2803e43933e5d6c4c1cf06cdc7d1838d965821fd9389dc3c03d8e50c365d06"


def test_the_bytes_do_not_depend_on_the_folder_or_the_number_of_workers(
    small: Path, tmp_path: Path
) -> None:
    make_shapes(tmp_path / "elsewhere" / "again", SMALL, workers=3)
    assert bytes_of(tmp_path / "elsewhere" / "again") == bytes_of(small)


def test_another_seed_gives_other_pictures(small: Path, tmp_path: Path) -> None:
    make_shapes(tmp_path, replace(SMALL, seed=8))
    ours, theirs = bytes_of(small), bytes_of(tmp_path)
    pictures = [path for path in ours if path.endswith(".jpg")]
    assert ours.keys() == theirs.keys()
    assert all(ours[path] != theirs[path] for path in pictures)


def test_the_pixels_are_those_of_this_generator_version() -> None:
    everything = hashlib.sha256()
    for drawing in plan(SMALL):
        picture, objects = draw(drawing, SMALL)
        everything.update(picture.tobytes() + repr(objects).encode())
    assert everything.hexdigest() == SMALL_PIXELS


def test_the_files_are_those_of_the_pinned_pillow(small: Path) -> None:
    manifest = json.loads((small / "shapes.json").read_text())
    assert manifest["sha256"] == SMALL_FILES
    parts = {"sha256": ("unlabeled/", "classes/", "VOCdevkit/"), "coco_sha256": ("coco/",)}
    for key, folders in parts.items():
        lines = "".join(
            f"{h}  {p}\n" for p, h in sorted(bytes_of(small).items()) if p.startswith(folders)
        )
        assert hashlib.sha256(lines.encode()).hexdigest() == manifest[key]


def test_the_coco_files_are_those_of_this_generator_version(small: Path) -> None:
    assert json.loads((small / "shapes.json").read_text())["coco_sha256"] == SMALL_COCO


def test_a_processor_without_vector_units_draws_the_same_bytes(small: Path, tmp_path: Path) -> None:
    from numpy._core._multiarray_umath import (  # type: ignore[attr-defined]
        __cpu_dispatch__,
        __cpu_features__,
    )

    extras = [feature for feature in __cpu_dispatch__ if __cpu_features__.get(feature)]
    plain = {"NPY_DISABLE_CPU_FEATURES": " ".join(extras), "JSIMD_FORCENONE": "1"}
    code = f"from kscl.datasets.shapes import *; make_shapes({str(tmp_path)!r}, {SMALL!r})"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **plain}, check=True)
    assert bytes_of(tmp_path) == bytes_of(small)


def test_a_longer_set_begins_with_the_shorter_one(small: Path, tmp_path: Path) -> None:
    make_shapes(tmp_path, replace(SMALL, unlabeled=25, detection_test=9))
    ours, theirs = bytes_of(small), bytes_of(tmp_path)
    pictures = [path for path in ours if path.endswith((".jpg", ".xml"))]
    assert all(ours[path] == theirs[path] for path in pictures)
