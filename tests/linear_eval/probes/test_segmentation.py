"""The segmentation probe: its math, its numbers end to end, its resume, and wrong masks."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import accuracy_score, jaccard_score

import linear_eval.probes.segmentation as module
from kscl.backbone_file import load_backbone
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.tables import markdown
from kscl.datasets.shapes import ShapesSettings, make_shapes
from kscl.records.record import read_record
from kscl.rng import Stream, permutation
from linear_eval.commands.linear_eval import main
from linear_eval.linear import Rows, new_head, solutions_of, standardized, start_grid
from tests.helpers.commands import ROOT
from tests.helpers.data.digits import config, overrides

pytestmark = pytest.mark.portable

SIZE, CLASSES = 64, 4


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Thirty-two drawn scenes of three classes and a background, each with its mask."""
    few = dict.fromkeys(("unlabeled", "train", "val"), 3)
    settings = ShapesSettings(
        num_classes=CLASSES - 1, detection_train=24, detection_test=8, detection_size=SIZE, **few
    )
    make_shapes(tmp_path_factory.mktemp("scenes") / "shapes", settings)
    return tmp_path_factory.getbasetemp() / "scenes0/shapes/segmentation"


def settings(scenes, *more: object) -> tuple[object, ...]:
    small = {"INPUT.SIZE": SIZE, "INPUT.RESIZE": SIZE, "SOLVER.BATCH_SIZE": 5}
    small |= {
        "PROBE": "segmentation",
        "DATA.TRAIN": scenes / "trainval",
        "DATA.VAL": scenes / "test",
    }
    small |= {"SEGMENTATION.LEVELS": "[-3, -1]", "SEGMENTATION.LABEL_SIZE": 24}
    small |= {"SEGMENTATION.LRS": "[0.003, 0.01, 0.03]", "CHECKPOINT.SECONDS": 0}
    small |= {"BACKBONE.BATCH_NORM": "keep", "SOLVER.EPOCHS": 12, "SOLVER.SCHEDULE": "cosine"}
    small |= dict(zip(more[::2], more[1::2], strict=True))
    return tuple(word for pair in small.items() for word in pair)


def words(scenes, output, *more: object) -> list[str]:
    return overrides(scenes, output, *settings(scenes, *more))


def test_the_grid_trains_as_a_plain_loop_over_conv_and_interpolate_does(tmp_path, monkeypatch):
    images, side, dim, size = 6, 6, 5, 13
    monkeypatch.setattr(module, "AT_ONCE", 2 * 2 * CLASSES * size * size)  # several parts
    random = torch.Generator().manual_seed(0)
    table = torch.randn(images * side * side, dim, generator=random) * 3 + 1
    targets = torch.randint(0, CLASSES, (images, size, size), generator=random).to(torch.uint8)
    targets[:, :4, 2:] = module.VOID
    targets[3] = module.VOID
    rows = standardized(Rows(table, np.arange(len(table))[None], torch.empty(0)))
    points = [{"lr": lr, "weight_decay": 0.01} for lr in (0.05, 0.5)]
    solver = config(tmp_path, tmp_path, "SOLVER.BATCH_SIZE", 4).SOLVER
    state = start_grid(len(points), CLASSES, dim, 0.1, 0, torch.device("cpu"))
    assert list(module.train_maps(rows, targets, points, state, solver, seed=0)) == [1, 2, 3, 4]

    maps = table.view(images, side, side, dim).permute(0, 3, 1, 2)
    maps = (maps - maps.mean((0, 2, 3), keepdim=True)) / maps.std(
        (0, 2, 3), correction=0, keepdim=True
    )
    for point, (weight, bias) in zip(points, solutions_of(state, len(points)), strict=True):
        conv = torch.nn.Conv2d(dim, CLASSES, 1)
        start = new_head(CLASSES, dim, 0.1, 0)
        conv.load_state_dict({"weight": start[0][:, :, None, None], "bias": start[1]})
        sgd = torch.optim.SGD(
            conv.parameters(), point["lr"], momentum=0.9, weight_decay=point["weight_decay"]
        )
        for epoch in range(4):
            sgd.param_groups[0]["lr"] = point["lr"] * 0.1 ** max(0, epoch - 1)
            order = torch.from_numpy(permutation(0, epoch, Stream.ORDER, images))
            for batch in order.split(4):
                fine = F.interpolate(conv(maps[batch]), (size, size), mode="bilinear")
                loss = F.cross_entropy(fine, targets[batch].long(), ignore_index=module.VOID)
                sgd.zero_grad()
                loss.backward()
                sgd.step()
        torch.testing.assert_close(weight, conv.weight.detach().flatten(1), rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(bias, conv.bias.detach(), rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def finished(scenes, tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main(words(scenes, folder)) == 0
    return folder


def predicted_by_hand(backbone, record, classifier, picture, height, width):
    """Return the classes (height, width) of a picture, by PyTorch's own functions alone."""
    pixels = np.asarray(picture.resize((SIZE, SIZE), Image.Resampling.BILINEAR)) / 255
    mean, std = (record.details["backbone"][name] for name in ("mean", "std"))
    x = torch.from_numpy((pixels - mean) / std).float().permute(2, 0, 1)[None]
    x = backbone.maxpool(backbone.act1(backbone.bn1(backbone.conv1(x))))
    finest = coarsest = backbone.layer2(backbone.layer1(x))
    coarsest = backbone.layer4(backbone.layer3(coarsest))
    enlarged = F.interpolate(coarsest, finest.shape[2:], mode="bilinear")
    outputs = F.conv2d(
        torch.cat([finest, enlarged], 1), classifier["weight"][:, :, None, None], classifier["bias"]
    )
    return F.interpolate(outputs, (height, width), mode="bilinear")[0].argmax(0).numpy()


@torch.no_grad()
def test_the_record_has_scikit_learns_iou_of_the_saved_classifier(scenes, finished):
    record = read_record(finished / "record.json")
    classifier = safetensors.torch.load_file(finished / "classifier.safetensors")
    kwargs = config(scenes, finished).BACKBONE.KWARGS
    backbone = load_backbone("random", "resnet18", dict(kwargs), seed=0).backbone.eval()
    truths, predictions = [], []
    for file in sorted((scenes / "test/masks").glob("*.png")):
        truth = np.asarray(Image.open(file))
        picture = Image.open(scenes / "test/images" / f"{file.stem}.jpg")
        found = predicted_by_hand(backbone, record, classifier, picture, *truth.shape)
        truths.append(truth[truth != 255])
        predictions.append(found[truth != 255])
    truth, predicted = np.concatenate(truths), np.concatenate(predictions)
    theirs = 100 * jaccard_score(truth, predicted, average=None)
    assert theirs.min() > 0
    # Rounding may move a pixel that lies between two classes.
    assert list(record.details["per_class"].values()) == pytest.approx(theirs, abs=0.1)
    accuracy = 100 * accuracy_score(truth, predicted)
    expected = {"mIoU": theirs.mean(), "pixel_accuracy": accuracy}
    assert record.metrics == pytest.approx(expected, abs=0.1)
    assert "rankme" not in record.details  # whole maps are no features to compare
    low, high = record.details["confidence_interval"]["mIoU"]
    assert low < record.metrics["mIoU"] < high
    assert "seg. mIoU" in markdown(build_board([finished]), "title")
    assert Image.open(finished / "predictions.png").width > 6 * 64


KILLED = """
import os, signal, sys
import linear_eval.probes.segmentation as module
from linear_eval.commands.linear_eval import main

original, left = module.pixel_gradient, int(sys.argv[1])

def pixel_gradient(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*args)

module.pixel_gradient = pixel_gradient
main(sys.argv[2:])
"""


@pytest.mark.parametrize("epochs", [2, 12, 20], ids=["in the grid", "after it", "in the last fit"])
def test_a_killed_run_resumes_to_the_same_bits(scenes, finished, tmp_path, epochs):
    batches = epochs * 5  # those of an epoch, also of the grid's 21 images
    given = words(scenes, tmp_path / "run")
    killed = subprocess.run([sys.executable, "-c", KILLED, str(batches), *given], cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    assert main(["--resume", *given]) == 0
    runs = tmp_path / "run", finished
    parts, whole = (safetensors.torch.load_file(run / "classifier.safetensors") for run in runs)
    assert all(torch.equal(parts[name], whole[name]) for name in ("weight", "bias"))
    parts, whole = (read_record(run / "record.json") for run in runs)
    assert parts.metrics == whole.metrics
    for name in ("sweep", "per_class", "confidence_interval", "curves"):
        assert parts.details[name] == whole.details[name]


def test_vocs_layout_gives_the_numbers_of_the_same_folder(scenes, finished, tmp_path):
    for part in ("trainval", "test"):
        shutil.copytree(scenes / part / "images", tmp_path / "JPEGImages", dirs_exist_ok=True)
        shutil.copytree(scenes / part / "masks", tmp_path / "SegmentationClass", dirs_exist_ok=True)
        listed = tmp_path / "ImageSets/Segmentation" / f"{part}.txt"
        listed.parent.mkdir(parents=True, exist_ok=True)
        names = sorted(path.stem for path in (scenes / part / "images").iterdir())
        listed.write_text("\n".join(names) + "\n")
    sets = ("DATA.TRAIN", f"voc:{tmp_path}:trainval", "DATA.VAL", f"voc:{tmp_path}:test")
    assert main(words(scenes, tmp_path / "run", *sets)) == 0
    voc, folders = (read_record(run / "record.json") for run in (tmp_path / "run", finished))
    assert voc.metrics == folders.metrics
    assert voc.details["sweep"] == folders.details["sweep"]


def with_a_pixel_of_77(values):
    return np.where(np.arange(values.size).reshape(values.shape) == 300, 77, values)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda mask, values: mask.unlink(), "trainval/images/"),
        (lambda mask, values: mask.write_bytes(mask.read_bytes()[:200]), ""),
        (lambda mask, values: Image.fromarray(values[:-1]).save(mask), "x"),
        (lambda mask, values: Image.fromarray(with_a_pixel_of_77(values)).save(mask), "77"),
        (lambda mask, values: Image.open(mask).convert("RGB").save(mask), "RGB"),
        (lambda mask, values: Image.fromarray(values > 0).save(mask), "kind 1"),
    ],
    ids=["missing", "damaged", "another size", "unknown value", "colors", "one bit"],
)
def test_a_mask_that_is_wrong_is_named_before_any_work(scenes, tmp_path, capsys, change, named):
    shutil.copytree(scenes / "trainval", tmp_path / "trainval")
    mask = sorted((tmp_path / "trainval/masks").glob("*.png"))[4]
    change(mask, np.array(Image.open(mask)))
    given = words(scenes, tmp_path / "run", "DATA.TRAIN", tmp_path / "trainval")
    assert main(given) == 2
    said = capsys.readouterr().err
    assert str(mask) in said
    assert named in said
    assert not (tmp_path / "run/record.json").exists()
    assert main(["--check", *given]) == 1
    assert str(mask) in json.dumps(json.loads(capsys.readouterr().out))


def test_a_size_of_which_patches_would_show_more_than_the_image_is_refused(
    scenes, tmp_path, capsys
):
    small = {"embed_dim": 12, "depth": 1, "num_heads": 2}
    more = ("BACKBONE.NAME", "vit_small_patch14_dinov2", "BACKBONE.KWARGS", small)
    assert main(words(scenes, tmp_path / "run", *more, "SEGMENTATION.LEVELS", "[-1]")) == 2
    said = capsys.readouterr().err
    assert "INPUT.SIZE" in said
    assert "70" in said
