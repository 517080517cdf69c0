"""What the tools share on the command line."""

from __future__ import annotations

import pytest

from kscl.cli import is_later


@pytest.mark.parametrize(
    ("name", "later", "found"),
    [
        ("datasets/shapes", "datasets/shapes", True),
        ("datasets/shapes/unlabeled", "datasets/shapes", True),
        ("voc:datasets/shapes/VOC2007:trainval", "datasets/shapes", True),
        ("coco:datasets/shapes/coco/a.json:elsewhere", "datasets/shapes", True),
        ("BACKBONE.WEIGHTS", "BACKBONE.WEIGHTS", True),
        ("datasets/shapes2", "datasets/shapes", False),
        ("voc:datasets/shapes_screen/VOC2007:trainval", "datasets/shapes", False),
        ("MODEL.WEIGHTS", "BACKBONE.WEIGHTS", False),
        ("", "datasets/shapes", False),
    ],
)
def test_only_what_lies_in_a_folder_that_will_be_made_is_left_for_later(name, later, found):
    assert is_later(name, [later]) is found
