"""Masks, checked before a detector with a mask head trains on them."""

from __future__ import annotations

import pytest

from detection.commands.preflight import main
from detection.data.preflight import preflight
from tests.helpers.data.sets import small_coco, small_voc, write_image


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, set()),
        ({"segmentation": []}, {"missing mask"}),
        ({"segmentation": [[1, 2, 10, 7]]}, {"degenerate mask"}),
        ({"segmentation": {"size": [48, 64], "counts": [50, 5, 3017]}}, {"mask format"}),
        ({"segmentation": [], "iscrowd": 1}, {"missing mask"}),
    ],
)
def test_masks_that_are_missing_or_cannot_be_trained_on_are_told_before_the_run(
    tmp_path, change, kinds
):
    thing = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 9, 5], "area": 45}
    thing |= {"segmentation": [[1, 2, 10, 2, 10, 7, 1, 7]]}
    good = [thing, thing | {"id": 2, "category_id": 18}]
    train, images = small_coco(tmp_path / "train", annotations=[good[0] | change, good[1]])
    test, others = small_coco(tmp_path / "test", annotations=[good[0] | change, good[1]])
    for picture in others.iterdir():  # the test has pictures of its own
        write_image(picture, 99 + len(picture.name))
    names = [f"coco:{train}:{images}"], [f"coco:{test}:{others}"]
    assert preflight(*names).checked()
    report = preflight(*names, mask_format="polygon")
    assert {problem.kind for problem in report.fatal} == kinds
    if "counts" in str(change):
        assert preflight(*names, mask_format="bitmask").checked()


def test_a_voc_folder_has_no_masks_and_is_refused_for_a_mask_head(tmp_path, capsys):
    root = small_voc(tmp_path)
    sets = ["--train", f"voc:{root}:train", "--test", f"voc:{root}:test"]
    assert main(sets) == 0
    assert main([*sets, "--masks", "polygon"]) == 1
    assert capsys.readouterr().out.count("[missing mask]") == 2
