"""Masks of COCO files: polygons, run lengths in both forms, and what is wrong with them."""

from __future__ import annotations

import numpy as np
import pytest
from pycocotools import mask as coco_masks

from kscl.data.annotated.coco import read_coco
from kscl.data.annotations import Source, read_source
from kscl.data.masks import (
    Polygons,
    RunLengths,
    extent,
    read_mask,
    run_lengths,
    unpack_counts,
)
from tests.helpers.data.mask_pixels import pixels_of_counts
from tests.helpers.data.sets import SIZE, small_coco

OBJECT = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 9, 5], "area": 45}
SQUARE = [1, 2, 10, 2, 10, 7, 1, 7]


def random_masks():
    rng = np.random.default_rng(0)
    for _ in range(300):
        height, width = (int(side) for side in rng.integers(1, 40, 2))
        yield rng.random((height, width)) < rng.random()


def test_run_lengths_are_those_of_pycocotools_in_both_forms():
    for mask in random_masks():
        height, width = mask.shape
        theirs = coco_masks.encode(np.asfortranarray(mask.astype(np.uint8)))["counts"].decode()
        ours = run_lengths(mask)
        assert unpack_counts(theirs).tolist() == ours.counts.tolist()
        for counts in (theirs, ours.counts.tolist()):
            again = read_mask({"size": [height, width], "counts": counts})
            assert isinstance(again, RunLengths)
            assert (pixels_of_counts(again.counts.tolist(), height, width) == mask).all()


def test_the_extent_of_run_lengths_is_that_of_their_pixels():
    for mask in random_masks():
        rows, columns = np.nonzero(mask)
        expected = (
            (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) if len(rows) else None
        )
        assert extent(run_lengths(mask)) == expected


def test_masks_are_kept_only_when_they_are_asked_for(tmp_path):
    crowd = run_lengths(np.pad(np.ones((5, 9), bool), ((2, 41), (1, 54))))
    packed = coco_masks.frPyObjects(
        {"size": [SIZE[1], SIZE[0]], "counts": crowd.counts.tolist()}, SIZE[1], SIZE[0]
    )["counts"].decode()
    annotations = [
        OBJECT | {"segmentation": [SQUARE, [3, 3, 5, 3, 5, 5]]},
        OBJECT | {"id": 2, "segmentation": {"size": [48, 64], "counts": packed}, "iscrowd": 1},
        OBJECT | {"id": 3, "segmentation": []},
    ]
    json_file, images = small_coco(tmp_path, annotations=annotations)
    first, second, third = read_coco(json_file, images, with_masks=True).checked().images[0].objects
    assert isinstance(first.mask, Polygons)
    assert first.mask.parts[0].tolist() == [[1, 2], [10, 2], [10, 7], [1, 7]]
    assert len(first.mask.parts) == 2
    assert second.difficult
    assert second.mask.counts.tolist() == crowd.counts.tolist()
    assert third.mask is None
    assert {o.mask for o in read_coco(json_file, images).images[0].objects} == {None}


BAD = {
    "a text": ("polygon", "bad mask"),
    "one number": ([[5.0]], "bad mask"),
    "an odd number": ([[1, 2, 10, 2, 10, 7, 1]], "bad mask"),
    "not a number": ([[1, 2, float("nan"), 2, 10, 7]], "bad mask"),
    "texts": ([["1", "2", "10", "2", "10", "7"]], "bad mask"),
    "no list of lists": (SQUARE, "bad mask"),
    "two points": ([[1, 2, 10, 7]], "degenerate mask"),
    "a line": ([[1, 2, 10, 2, 5, 2]], "degenerate mask"),
    "empty runs": ({"size": [48, 64], "counts": [48 * 64]}, "degenerate mask"),
    "outside": ([[60, 2, 80, 2, 80, 7]], "mask outside"),
    "elsewhere": ([[30, 30, 40, 30, 40, 40]], "mask beside its box"),
    "another size": ({"size": [10, 10], "counts": [20, 80]}, "mask size"),
    "x and y swapped": ({"size": [64, 48], "counts": [20, 48 * 64 - 20]}, "mask size"),
    "too few pixels": ({"size": [48, 64], "counts": [5, 5]}, "bad mask"),
    "negative runs": ({"size": [48, 64], "counts": [-5, 48 * 64 + 5]}, "bad mask"),
    "no size": ({"counts": [5, 5]}, "bad mask"),
    "cut off": ({"size": [48, 64], "counts": "`"}, "bad mask"),
    "not packed": ({"size": [48, 64], "counts": "\x01é"}, "bad mask"),
    "a number without end": ({"size": [48, 64], "counts": "o" * 50}, "bad mask"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_mask_is_named_and_boxes_are_usable_if_the_file_is_not_damaged(tmp_path, case):
    value, kind = BAD[case]
    json_file, images = small_coco(tmp_path, annotations=[OBJECT | {"segmentation": value}])
    found = read_coco(json_file, images, with_masks=True)
    assert [(problem.kind, problem.fatal) for problem in found.problems] == [(kind, True)]
    assert "annotation 1" in found.problems[0].what
    without = read_coco(json_file, images)
    if kind == "bad mask":
        assert [problem.kind for problem in without.problems] == [kind]
    else:
        assert [thing.box for thing in without.checked().images[0].objects] == [(1, 2, 10, 7)]


def test_a_benchmarks_own_odd_masks_are_noted(tmp_path):
    annotations = [OBJECT | {"segmentation": [[1, 2, 10, 7]]}]
    json_file, images = small_coco(tmp_path, annotations=annotations)
    source = Source("coco_2017_val", "coco", images, annotations=json_file, official=True)
    found = read_source(source, with_masks=True)
    assert [(problem.kind, problem.fatal) for problem in found.problems] == [
        ("degenerate mask", False)
    ]
