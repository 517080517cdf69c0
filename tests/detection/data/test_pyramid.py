"""Images that are too small for the coarsest level of a pyramid are told before training."""

from __future__ import annotations

import json

import pytest

from detection.commands.train_net import main
from tests.helpers.data.sets import small_voc


def problems_of(root, capsys, *words: str) -> list[tuple[str, str]]:
    """Run the check of train_net on a small set; return where and what its problems are."""
    sets = [f"DATASETS.{role.upper()}" for role in ("train", "test")]
    data = [sets[0], f"('voc:{root}:train',)", sets[1], f"('voc:{root}:test',)"]
    config = ["--config-file", "detection/shapes_tiny_fpn.yaml", "--check-later", "MODEL.WEIGHTS"]
    main(["--check", *config, *data, "MODEL.ROI_HEADS.NUM_CLASSES", "2", *words])
    told = json.loads(capsys.readouterr().out)["problems"]
    return [(it["where"], it["what"]) for it in told if it["fatal"]]


@pytest.mark.parametrize(
    ("words", "images"),
    [
        (["INPUT.MIN_SIZE_TRAIN", "(0,)"], "ab"),
        (["INPUT.MIN_SIZE_TEST", "0"], "cd"),
        (["INPUT.MIN_SIZE_TRAIN", "(0,)", "INPUT.MIN_SIZE_TEST", "0"], "abcd"),
    ],
)
def test_images_that_keep_their_own_size_are_told_one_by_one(tmp_path, capsys, words, images):
    root = small_voc(tmp_path, size=(64, 48))
    found = problems_of(root, capsys, *words)
    assert [where for where, _ in found] == [f"{root}/JPEGImages/{name}.jpg" for name in images]
    for _, what in found:
        assert "is 64 x 48 pixels, and INPUT.MIN_SIZE_" in what
        assert "stride of 64 pixels" in what


def test_images_of_the_stride_are_large_enough_in_their_own_size(tmp_path, capsys):
    root = small_voc(tmp_path, size=(64, 64))
    words = ["INPUT.MIN_SIZE_TRAIN", "(0,)", "INPUT.MIN_SIZE_TEST", "0"]
    assert problems_of(root, capsys, *words) == []
