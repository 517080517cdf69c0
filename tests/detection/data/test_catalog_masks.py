"""Masks of annotated sets, as Detectron2's mapper gets them."""

from __future__ import annotations

import pytest
from detectron2.data.dataset_mapper import DatasetMapper
from detectron2.data.datasets.coco import load_coco_json

from detection.data.catalog import (
    detectron2_dicts,
)
from kscl.data.annotated.coco import read_coco
from tests.helpers.data.sets import small_coco

POLYGON = [1.0, 2.0, 10.0, 2.0, 10.0, 7.0, 1.0, 7.0]


RUNS = {"size": [48, 64], "counts": [50, 5, 48 * 64 - 55]}  # five pixels of the second column


def coco_with_masks(root):
    """Read a polygon, run lengths and a crowd, all over the left of the first image."""
    thing = {"image_id": 7, "category_id": 3, "bbox": [1, 2, 9, 5], "area": 45}
    annotations = [
        thing | {"id": 1, "segmentation": [POLYGON]},
        thing | {"id": 2, "segmentation": RUNS},
        thing | {"id": 3, "segmentation": RUNS, "iscrowd": 1},
    ]
    json_file, images = small_coco(root, annotations=annotations)
    return read_coco(json_file, images, with_masks=True).checked()


@pytest.mark.parametrize("mask_format", ["bitmask", "polygon"])
def test_masks_reach_detectron2s_mapper_and_crowds_are_left_out(tmp_path, mask_format):
    first, _ = detectron2_dicts(coco_with_masks(tmp_path), crowds=True)
    if mask_format == "polygon":
        del first["annotations"][1]
    mapper = DatasetMapper(
        is_train=True,
        augmentations=[],
        image_format="RGB",
        use_instance_mask=True,
        instance_mask_format=mask_format,
    )
    mapped = mapper(first)["instances"]
    assert mapped.gt_classes.tolist() == [0] * len(mapped)
    if mask_format == "bitmask":
        areas = mapped.gt_masks.tensor.sum(dim=(1, 2)).tolist()
        assert areas == [45, 5]
    else:
        assert mapped.gt_masks.polygons[0][0].tolist() == POLYGON


def test_masks_are_filled_as_detectron2s_own_loader_hands_them_over(tmp_path):
    annotated = coco_with_masks(tmp_path)
    theirs = load_coco_json(str(tmp_path / "annotations.json"), str(tmp_path / "images"))[0]
    mine = detectron2_dicts(annotated, crowds=True)[0]
    for ours, other in zip(mine["annotations"], theirs["annotations"], strict=True):
        shape, wanted = ours["segmentation"], other["segmentation"]
        if isinstance(wanted, dict):
            assert (list(shape["size"]), shape["counts"]) == (
                list(wanted["size"]),
                wanted["counts"],
            )
        else:
            assert [part.tolist() for part in shape] == wanted
        assert ours["iscrowd"] == other.get("iscrowd", 0)


def test_a_benchmarks_object_without_a_usable_polygon_is_not_trained_on(tmp_path):
    thing = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 9, 5], "area": 45}
    annotations = [thing | {"segmentation": [[1, 2, 10, 7]]}]
    json_file, images = small_coco(tmp_path, annotations=annotations)
    first, _ = detectron2_dicts(read_coco(json_file, images, with_masks=True), crowds=True)
    assert first["annotations"] == []
