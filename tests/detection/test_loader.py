"""Images of a run: unreadable ones are named, counted and replaced; ranks stop together."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest

from detection.config import load_detection_config
from detection.data.sets import read_run_sets
from detection.train import detect
from detection.train.loader import build_train_loader
from kscl.errors import KsclError
from tests.helpers.data.sets import write_voc


def batches(root, most: float, bad_images: dict[str, str], number: int = 8) -> list[list[str]]:
    words = ["DATASETS.TRAIN", f"('voc:{root}:train',)", "DATASETS.TEST", f"('voc:{root}:test',)"]
    words += ["MODEL.ROI_HEADS.NUM_CLASSES", "1", "SOLVER.IMS_PER_BATCH", "2"]
    words += ["KSCL.MAX_BAD_FRACTION", str(most)]
    cfg = load_detection_config("detection/shapes_tiny_c4.yaml", words)
    sets, _ = read_run_sets(cfg)
    for image in sets.train[0][1].images[:1]:  # broken after the preflight has seen it
        assert image.path is not None
        content = image.path.read_bytes()
        image.path.write_bytes(content[: len(content) // 2])
    loader = build_train_loader(cfg, sets.train_dicts(cfg), 0, workers=0, bad_images=bad_images)
    return [[i["image_id"] for i in batch] for batch in itertools.islice(loader, number)]


@pytest.fixture
def root(tmp_path):
    ids = [f"{number:03d}" for number in range(12)]
    objects = {image_id: [("cat", (1, 1, 9, 9), 0)] for image_id in ids}
    return write_voc(tmp_path, {"train": ids[:10], "test": ids[10:]}, objects)


def test_an_image_that_cannot_be_read_is_named_counted_and_replaced(root, caplog):
    bad_images: dict[str, str] = {}
    with caplog.at_level(logging.WARNING):
        seen = batches(root, 0.1, bad_images)
    path = str(root / "JPEGImages/000.jpg")
    assert list(bad_images) == [path]
    assert caplog.text.count(path) == 1
    assert all(len(batch) == 2 and "000" not in batch for batch in seen)


def test_more_bad_images_than_allowed_stop_the_run(root):
    with pytest.raises(KsclError, match="MAX_BAD_FRACTION"):
        batches(root, 0.0, {})


@pytest.mark.parametrize("share", [2, 3])  # of 5 test images on two ranks
def test_ranks_vote_equally_often_whether_to_stop_an_inference(share):
    votes = []
    run = SimpleNamespace(leave_if_stopped=lambda: votes.append(1))
    images = detect._UntilStopped(SimpleNamespace(run=run), [{}] * share, fewest=2)
    assert len(list(images)) == len(images) == share
    assert len(votes) == 2
