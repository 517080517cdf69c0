"""Mask heads as a user trains them: masks are checked first, and scored beside boxes at the end."""

from __future__ import annotations

import json

import numpy as np
import pytest

from detection.commands.convert import main as convert
from detection.commands.score import main as score
from detection.commands.train_net import main
from detection.scoring.boxes import read_detections
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.writing.exports import as_csv
from kscl.benchmark.leaderboard.writing.tables import markdown
from kscl.data.annotated.masks import run_lengths
from kscl.data.annotated.voc import read_voc
from kscl.records.record import read_record
from tests.detection.commands.test_train_net import as_coco
from tests.helpers.detection_runs import arguments, start_train_net

SHORT = ("SOLVER.MAX_ITER", "2", "SOLVER.STEPS", "(1,)", "KSCL.SCORER", "coco-101pt")


@pytest.fixture(scope="module")
def mask_shop(shop, tmp_path_factory):
    """The shop's images, and random weights that are converted for a mask head."""
    folder = tmp_path_factory.mktemp("masks")
    (folder / "voc").symlink_to(shop / "voc")
    words = ["random", "--arch", "resnet50", "--arch-kwargs", "{channels: [8, 16, 32, 64]}"]
    words += ["--protocol", "detection/shapes_tiny_mask.yaml"]
    assert convert([*words, "--output-dir", str(folder / "weights0")]) == 0
    return folder


def sets_with_masks(shop, folder, masks=True):
    """Return the words that name COCO files; every object has a polygon, the last is a crowd."""
    words = []
    for role, split in (("TRAIN", "train"), ("TEST", "test")):
        content = as_coco(read_voc(shop / "voc", split).checked())
        for thing in content["annotations"] if masks else ():
            x, y, w, h = thing["bbox"]
            thing["segmentation"] = [[x, y, x + w, y, x + w, y + h, x, y + h]]
        if masks:
            pixels = np.zeros((100, 96), bool)
            pixels[int(y) : int(y + h), int(x) : int(x + w)] = True
            counts = run_lengths(pixels).counts.tolist()
            thing |= {"iscrowd": 1, "segmentation": {"size": [100, 96], "counts": counts}}
        path = folder / f"{split}.json"
        path.write_text(json.dumps(content))
        words += [f"DATASETS.{role}", f"('coco:{path}:{shop / 'voc' / 'JPEGImages'}',)"]
    return words


def test_masks_are_trained_scored_recorded_and_shown(mask_shop, tmp_path, capsys):
    sets = sets_with_masks(mask_shop, tmp_path)
    output = tmp_path / "run"
    done = start_train_net(mask_shop, output, *sets, *SHORT).wait()
    assert done.returncode == 0, done.stderr
    assert "mask AP50" in done.stdout
    record = read_record(output / "record.json")
    assert {"mask/AP", "mask/AP50", "mask/AP75", "mask/AR100", "AR1"} <= set(record.metrics)
    classes = record.details["per_class_by_scorer"]["coco-101pt-segm"]
    assert set(classes) == {"cat", "dog"}
    saved = read_detections(output / "detections.npz")
    assert saved.masks is not None
    assert {tuple(mask["size"]) for mask in saved.masks} <= {(100, 96)}
    for truth in (output / "ground_truth.npz", tmp_path / "test.json"):
        words = ["--detections", str(output / "detections.npz"), "--annotations", str(truth)]
        assert score([*words, "--json"]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["coco-101pt-segm"]["AP"] == record.metrics["mask/AP"]
    board = build_board([tmp_path])
    assert "mask AP50" in markdown(board, "Board")
    assert "mask/AP50" in as_csv(board).splitlines()[0]


@pytest.mark.parametrize(
    ("masks", "more", "kind"),
    [
        (False, (), "[missing mask]"),
        (True, ("DATASETS.TEST", "('voc:{shop}/voc:test',)"), "[missing mask]"),
    ],
)
def test_missing_masks_are_an_error_before_training(mask_shop, tmp_path, capsys, masks, more, kind):
    sets = sets_with_masks(mask_shop, tmp_path, masks)
    words = [*sets, *SHORT, *(word.format(shop=mask_shop) for word in more)]
    assert main(arguments(mask_shop, tmp_path / "run", *words)) == 2
    assert kind in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
