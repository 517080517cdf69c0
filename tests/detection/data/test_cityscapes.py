"""Cityscapes as it is unpacked: read, checked, trained on and scored by its instance pixels."""

from __future__ import annotations

import json

import numpy as np
import pytest
from detectron2.data import DatasetMapper
from PIL import Image

from detection.commands.convert import main as convert
from detection.commands.preflight import main as preflight
from detection.commands.train_net import main as train_net
from detection.config import load_detection_config
from detection.data.sets import read_run_sets
from detection.scoring import MASK_SCORER, score
from detection.scoring.boxes import make_detections, make_ground_truth, packed
from kscl.commands.prepare_data import main as prepare_data
from kscl.data.annotated.cityscapes import CITYSCAPES_CLASSES
from kscl.data.annotated.voc import read_voc
from kscl.data.annotations import parse_source, read_source

TRAIN, VAL = "cityscapes_fine_instance_seg_train", "cityscapes_fine_instance_seg_val"
SIDES = (64, 128)  # height, width
ROAD, CAR, PERSON, TRAILER = 7, 26, 24, 30


def instance_ids() -> np.ndarray:
    """Road, a car with a person in front of it, a group of persons, and a trailer."""
    ids = np.full(SIDES, ROAD, np.uint16)
    ids[30:60, 10:60] = CAR * 1000  # the first car has number 0
    ids[20:50, 30:40] = PERSON * 1000 + 3  # cuts the car in two
    ids[5:20, 70:127] = PERSON  # a group
    ids[40:60, 100:128] = TRAILER * 1000  # not evaluated
    ids[63, 127] = CAR * 1000 + 1  # the last pixel of the image
    return ids


@pytest.fixture
def cityscapes(tmp_path, monkeypatch):
    """The layout of the two archives, with every file that they have per image."""
    root = tmp_path / "datasets" / "cityscapes"
    rng = np.random.default_rng(0)
    for split, cities in (("train", ("aachen", "bochum")), ("val", ("frankfurt",))):
        for city in cities:
            images, truth = root / "leftImg8bit" / split / city, root / "gtFine" / split / city
            images.mkdir(parents=True)
            truth.mkdir(parents=True)
            for number in range(2):
                name = f"{city}_{number:06d}_000019"
                pixels = rng.integers(0, 255, (*SIDES, 3), np.uint8)
                Image.fromarray(pixels).save(images / f"{name}_leftImg8bit.png")
                ids = instance_ids()
                Image.fromarray(ids).save(truth / f"{name}_gtFine_instanceIds.png")
                labels = np.where(ids >= 1000, ids // 1000, ids).astype(np.uint8)
                Image.fromarray(labels).save(truth / f"{name}_gtFine_labelIds.png")
                about = {"imgHeight": SIDES[0], "imgWidth": SIDES[1], "objects": []}
                (truth / f"{name}_gtFine_polygons.json").write_text(json.dumps(about))
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "datasets"))
    return root


def test_objects_are_the_pixels_of_their_numbers_and_groups_are_crowds(cityscapes):
    found = read_source(parse_source(VAL), with_masks=True).checked()
    assert found.class_names == CITYSCAPES_CLASSES
    assert [image.id for image in found.images] == [
        "frankfurt_000000_000019",
        "frankfurt_000001_000019",
    ]
    image = found.images[0]
    assert (image.width, image.height) == (128, 64)
    assert image.path == cityscapes / "leftImg8bit/val/frankfurt" / f"{image.id}_leftImg8bit.png"
    ids = instance_ids()
    expected = {PERSON: True, PERSON * 1000 + 3: False, CAR * 1000: False, CAR * 1000 + 1: False}
    assert len(image.objects) == len(expected)
    for thing, (number, crowd) in zip(image.objects, expected.items(), strict=True):
        assert thing.difficult is crowd
        assert thing.name == ("car" if number >= CAR * 1000 else "person")
        rows, columns = np.nonzero(ids == number)
        box = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert thing.box == box
        assert thing.area == len(rows)
        pixels = np.zeros(SIDES, bool).T.ravel()
        ends = np.cumsum(thing.mask.counts)
        for start, end in zip(ends[0::2], ends[1::2], strict=False):
            pixels[start:end] = True
        assert np.array_equal(pixels.reshape(SIDES[::-1]).T, ids == number)


@pytest.fixture
def weights(cityscapes, tmp_path):
    words = ["random", "--arch", "resnet50", "--arch-kwargs", "{channels: [8, 16, 32, 64]}"]
    words += ["--protocol", "detection/cityscapes_fpn_24k.yaml"]
    assert convert([*words, "--output-dir", str(tmp_path / "weights")]) == 0
    return tmp_path / "weights"


def test_the_shipped_protocol_starts_from_cityscapes_on_disk(weights, tmp_path, capsys):
    config = str(weights / "config.yaml")
    capsys.readouterr()
    words = ["--config-file", config, "--check", "OUTPUT_DIR", str(tmp_path / "run")]
    assert train_net(words) == 0, capsys.readouterr()
    assert preflight(["--train", TRAIN, "--test", VAL]) == 0
    assert "frankfurt" not in capsys.readouterr().err
    cfg = load_detection_config(config)
    sets, _ = read_run_sets(cfg)
    assert sets.class_names == CITYSCAPES_CLASSES
    dicts = sets.train_dicts(cfg)
    assert len(dicts) == 4
    mapped = DatasetMapper(cfg, is_train=True)(dicts[0])
    assert len(mapped["instances"]) == 3  # without the crowd
    areas = mapped["instances"].gt_masks.tensor.flatten(1).sum(1)
    scale = np.prod(mapped["image"].shape[1:]) / np.prod(SIDES)
    assert areas[1].item() == pytest.approx(scale * 1300, rel=0.1)  # the car, 30 x 50 less 20 x 10
    parts = [part["path"] for part in sets.fingerprints["test"]["parts"]]
    assert [path.rsplit("cityscapes/")[1] for path in parts] == ["leftImg8bit/val", "gtFine/val"]


def test_instances_are_scored_and_a_missed_group_costs_nothing(cityscapes):
    annotated = read_source(parse_source(VAL), with_masks=True)
    truth = make_ground_truth(annotated)
    index = {name: number for number, name in enumerate(truth.class_names)}
    per_image, masks = {}, {}
    for image in annotated.images:
        things = [thing for thing in image.objects if not thing.difficult]
        boxes = np.array([thing.box for thing in things], np.float32)
        classes = np.array([index[thing.name] for thing in things])
        per_image[image.id] = (boxes, np.ones(len(things), np.float32), classes)
        masks[image.id] = [packed(thing.mask, image.height, image.width) for thing in things]
    found = make_detections(VAL, truth.class_names, per_image, truth.fingerprint, masks)
    result = score(found, truth, ("coco-101pt", MASK_SCORER))
    for scorer in result.values():
        assert scorer["AP"] == pytest.approx(100.0)
        assert set(scorer["per_class"]) == {"person", "car"}
    assert len(result[MASK_SCORER]["absent_classes"]) == 6


def test_the_folders_can_be_named_and_prepared_like_any_other_format(cityscapes, tmp_path, capsys):
    truth, images = cityscapes / "gtFine/train", cityscapes / "leftImg8bit/train"
    named = parse_source(f"cityscapes:{truth}:{images}")
    assert read_source(named).images == read_source(parse_source(TRAIN)).images
    words = ["own", "--images", str(images), "--annotations", str(truth), "--split", "50/50"]
    assert prepare_data([*words, "--output-dir", str(tmp_path / "mine")]) == 0
    assert "4 images, 4 annotation files in the format cityscapes." in capsys.readouterr().out
    (image, _) = read_voc(tmp_path / "mine", "trainval").checked().images
    boxes = [thing.box for thing in read_source(named).images[0].objects]
    assert [thing.box for thing in image.objects] == boxes


def test_missing_and_damaged_files_are_named(cityscapes, capsys):
    truth = cityscapes / "gtFine/val/frankfurt"
    (truth / "frankfurt_000000_000019_gtFine_instanceIds.png").unlink()
    (truth / "frankfurt_000001_000019_gtFine_instanceIds.png").write_bytes(b"no")
    assert preflight(["--train", TRAIN, "--test", VAL]) != 0
    captured = capsys.readouterr()
    told = captured.out + captured.err
    assert "frankfurt_000000_000019_leftImg8bit.png" in told
    assert "frankfurt_000001_000019_gtFine_instanceIds.png" in told
    for path in (cityscapes / "gtFine").rglob("*.png"):
        path.unlink()
    assert preflight(["--train", TRAIN, "--test", VAL]) != 0
    captured = capsys.readouterr()
    assert "gtFine_trainvaltest.zip" in captured.out + captured.err
