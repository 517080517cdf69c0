"""COCO files, boxes and masks: what is read, and what is wrong with one."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pycocotools import mask as coco_masks

from detection.scoring.boxes import make_ground_truth
from kscl.data.annotated.coco import read_coco
from kscl.data.annotations import Source, read_source
from kscl.data.masks import Polygons, RunLengths, extent, read_mask, run_lengths, unpack_counts
from tests.helpers.data.mask_pixels import pixels_of_counts
from tests.helpers.data.sets import SIZE, only_problem, small_coco


def test_a_coco_file_is_read_with_classes_in_the_order_of_ids(tmp_path):
    json_file, images = small_coco(tmp_path)
    json_file.write_bytes(b"\xef\xbb\xbf" + json_file.read_bytes())  # a byte order mark
    found = read_coco(json_file, images).checked()
    assert found.class_names == ("cat", "dog")
    assert [image.id for image in found.images] == ["7", "8"]
    dog, cat = found.images[0].objects
    assert (dog.name, dog.box, dog.area) == ("dog", (0, 0, 20, 20), 90)
    assert (cat.name, cat.box) == ("cat", (30, 9.5, 60, 39.5))
    assert found.images[1].objects[0].difficult  # a crowd
    truth = make_ground_truth(found)
    assert list(truth.areas) == [90, 900, 81]


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"categories": None}, "unreadable annotation", "categories"),
        ({"categories": [{"id": 3}]}, "unreadable annotation", "a category lacks"),
        ({"categories": [{"id": 3, "name": "a"}] * 2}, "unreadable annotation", "the same id"),
        ({"images": [], "annotations": []}, "empty split", "no usable image"),
    ],
)
def test_what_is_wrong_in_a_coco_file_is_told(tmp_path, changes, kind, says):
    json_file, images = small_coco(tmp_path, **changes)
    problem = only_problem(read_coco(json_file, images))
    assert problem.kind == kind
    assert says in problem.what


@pytest.mark.parametrize(
    ("classes", "kind", "says"),
    [
        (["Cat", "dog"], "case of a class", "'cat' differs from 'Cat'"),
        (["horse", "dog"], "unknown class", "'cat' is not in the list"),
    ],
)
def test_a_class_that_is_not_in_the_list_is_one_problem(tmp_path, classes, kind, says):
    json_file, images = small_coco(tmp_path)  # with two cats
    problem = only_problem(read_coco(json_file, images, classes))
    assert problem.kind == kind
    assert says in problem.what
    assert "2 objects" in problem.what


def test_missing_and_doubled_images_of_a_coco_file_are_told(tmp_path):
    json_file, images = small_coco(tmp_path)
    content = json.loads(json_file.read_text())
    content["images"] += [content["images"][0], {"id": 1, "file_name": "no.jpg", "width": 0}]
    json_file.write_text(json.dumps(content))
    (images / "two.png").unlink()
    kinds = [problem.kind for problem in read_coco(json_file, images).problems]
    assert sorted(kinds) == ["duplicate id", "missing image", "size"]
    json_file.write_text("{")
    assert "not JSON" in only_problem(read_coco(json_file, images)).what
    assert "cannot be read" in only_problem(read_coco(tmp_path / "no.json", images)).what
    small_coco(tmp_path)
    assert "no such folder" in only_problem(read_coco(json_file, tmp_path / "nowhere")).what


GOOD_ANNOTATION = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 9, 5], "area": 45}


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        ({"area": float("nan")}, "bad annotation", "nan"),
        ({"area": -1}, "bad annotation", "-1"),
        ({"area": 10**400}, "bad annotation", "area"),
        ({"iscrowd": "no"}, "bad annotation", "'no'"),
        ({"bbox": None}, "bad box", "None"),
        ({"bbox": [1, 2]}, "bad box", "[1, 2]"),
        ({"bbox": [1, 2, 10**400, 5]}, "bad box", "bbox"),
        ({"bbox": [True, 2, 9, 5]}, "bad box", "bbox"),
        ({"bbox": [1, 2, 0, 5]}, "degenerate box", "[1, 2, 0, 5]"),
        ({"bbox": [50, 2, 30, 5]}, "box outside", "16 pixels outside"),
        ({"segmentation": {"counts": [1, "x"], "size": [48, 64]}}, "bad mask", "segmentation"),
        ({"image_id": 99}, "lost annotation", "99"),
        ({"image_id": True}, "lost annotation", "True"),
        ({"category_id": 4}, "unknown class", "4"),
        ({"category_id": True}, "unknown class", "True"),
    ],
)
def test_an_annotation_that_detectron2_would_misread_is_refused(tmp_path, changes, kind, says):
    json_file, images = small_coco(tmp_path, annotations=[GOOD_ANNOTATION])
    read_coco(json_file, images).checked()
    small_coco(tmp_path, annotations=[GOOD_ANNOTATION | changes])
    problem = only_problem(read_coco(json_file, images))
    assert problem.kind == kind
    assert says in problem.what


@pytest.mark.parametrize("ids", [[5, 5, 6], ["a", "a", "b"], [None, 1, 2], [[1], 2, 3]])
def test_annotation_ids_that_are_missing_or_repeated_are_told(tmp_path, ids):
    annotations = [GOOD_ANNOTATION | {"id": value} for value in ids]
    json_file, images = small_coco(tmp_path, annotations=annotations)
    assert only_problem(read_coco(json_file, images)).kind == "annotation id"


@pytest.mark.parametrize("name", ["/etc/hostname", "../images/one.jpg", "a/../../b.jpg", "a\0.jpg"])
def test_an_image_outside_the_image_folder_is_refused(tmp_path, name):
    json_file, images = small_coco(tmp_path, annotations=[])
    content = json.loads(json_file.read_text())
    content["images"][0]["file_name"] = name
    json_file.write_text(json.dumps(content))
    problem = only_problem(read_coco(json_file, images))
    assert problem.kind == "bad image entry"
    assert repr(name) in problem.what


def test_a_problem_is_one_short_line_whatever_the_file_has(tmp_path):
    json_file, images = small_coco(tmp_path, annotations=[GOOD_ANNOTATION | {"area": "x\n" * 9999}])
    line = str(only_problem(read_coco(json_file, images)))
    assert "\n" not in line
    assert len(line) < 2000
    for name in ("evil\nname", "\ud800", "\x1b[31m", " "):
        categories = [{"id": 3, "name": name}, {"id": 18, "name": "dog"}]
        small_coco(tmp_path, categories=categories)
        str(only_problem(read_coco(json_file, images))).encode()


SQUARE = [1, 2, 10, 2, 10, 7, 1, 7]


def random_masks():
    rng = np.random.default_rng(0)
    for _ in range(100):
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
        rows, columns = np.nonzero(mask)
        box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) if len(rows) else None
        assert extent(ours) == box


def test_masks_are_kept_only_when_they_are_asked_for(tmp_path):
    crowd = run_lengths(np.pad(np.ones((5, 9), bool), ((2, 41), (1, 54))))
    packed = coco_masks.frPyObjects(
        {"size": [SIZE[1], SIZE[0]], "counts": crowd.counts.tolist()}, SIZE[1], SIZE[0]
    )["counts"].decode()
    annotations = [
        GOOD_ANNOTATION | {"segmentation": [SQUARE, [3, 3, 5, 3, 5, 5]]},
        GOOD_ANNOTATION
        | {"id": 2, "segmentation": {"size": [48, 64], "counts": packed}, "iscrowd": 1},
        GOOD_ANNOTATION | {"id": 3, "segmentation": []},
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
    "one number": ([[5.0]], "bad mask"),
    "an odd number": ([[1, 2, 10, 2, 10, 7, 1]], "bad mask"),
    "not a number": ([[1, 2, float("nan"), 2, 10, 7]], "bad mask"),
    "no list of lists": (SQUARE, "bad mask"),
    "two points": ([[1, 2, 10, 7]], "degenerate mask"),
    "a line": ([[1, 2, 10, 2, 5, 2]], "degenerate mask"),
    "empty runs": ({"size": [48, 64], "counts": [48 * 64]}, "degenerate mask"),
    "outside": ([[60, 2, 80, 2, 80, 7]], "mask outside"),
    "elsewhere": ([[30, 30, 40, 30, 40, 40]], "mask beside its box"),
    "another size": ({"size": [10, 10], "counts": [20, 80]}, "mask size"),
    "too few pixels": ({"size": [48, 64], "counts": [5, 5]}, "bad mask"),
    "negative runs": ({"size": [48, 64], "counts": [-5, 48 * 64 + 5]}, "bad mask"),
    "cut off": ({"size": [48, 64], "counts": "`"}, "bad mask"),
    "not packed": ({"size": [48, 64], "counts": "\x01é"}, "bad mask"),
    "a number without end": ({"size": [48, 64], "counts": "o" * 50}, "bad mask"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_mask_is_named_and_boxes_are_usable_if_the_file_is_not_damaged(tmp_path, case):
    value, kind = BAD[case]
    json_file, images = small_coco(
        tmp_path, annotations=[GOOD_ANNOTATION | {"segmentation": value}]
    )
    found = read_coco(json_file, images, with_masks=True)
    assert [(problem.kind, problem.fatal) for problem in found.problems] == [(kind, True)]
    assert "annotation 1" in found.problems[0].what
    without = read_coco(json_file, images)
    if kind == "bad mask":
        assert [problem.kind for problem in without.problems] == [kind]
    else:
        assert [thing.box for thing in without.checked().images[0].objects] == [(1, 2, 10, 7)]
    source = Source("coco_2017_val", "coco", images, annotations=json_file, official=True)
    quirk = kind in ("degenerate mask", "mask outside", "mask beside its box")
    noted = read_source(source, with_masks=True).problems
    assert [problem.fatal for problem in noted] == [not quirk]
