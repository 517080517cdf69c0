"""What the drawn data set shows: exact VOC and COCO files, neither trivial nor hopeless."""

from __future__ import annotations

import json
import warnings
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pycocotools import mask as coco_masks
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from kscl.data.annotated.coco import read_coco
from kscl.data.annotated.masks import RunLengths
from kscl.data.annotated.voc import read_voc
from kscl.datasets.shapes import (
    CLASS_NAMES,
    ShapesSettings,
    make_shapes,
)
from kscl.datasets.shapes.classes import CLASSES
from kscl.datasets.shapes.polygons import polygons_of
from tests.helpers.data.mask_pixels import pixels_of_counts, pixels_of_polygons
from tests.helpers.data.shapes import SMALL

LEARNING = ShapesSettings(
    unlabeled=20, train=2000, val=600, detection_train=60, detection_test=40, image_size=64
)

# Measured: 0.14 with 2,000 pictures to learn from; chance is 0.05.
RAW_PIXEL_BOUND = 0.40


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learning") / "shapes"
    make_shapes(folder, LEARNING, workers=2)
    return folder


def test_neither_form_nor_texture_alone_decides_the_class() -> None:
    assert len(set(CLASSES)) == 20
    assert set(Counter(each.form for each in CLASSES).values()) == {4}
    assert set(Counter(each.texture for each in CLASSES).values()) == {4}
    assert len({each.form for each in CLASSES[:5]}) == 5
    assert len({each.texture for each in CLASSES[:5]}) == 5


def test_fewer_classes_are_the_first_ones(tmp_path: Path) -> None:
    make_shapes(tmp_path, replace(SMALL, num_classes=3))
    assert {path.name for path in (tmp_path / "classes/train").iterdir()} == set(CLASS_NAMES[:3])
    assert objects_of(tmp_path, "test").keys() == set(CLASS_NAMES[:3])


def objects_of(folder: Path, split: str) -> dict[str, list[ElementTree.Element]]:
    """All annotated objects of a VOC split, by class."""
    home = folder / "VOCdevkit/VOC2007"
    found: dict[str, list[ElementTree.Element]] = {}
    for name in (home / f"ImageSets/Main/{split}.txt").read_text().split():
        for each in ElementTree.parse(home / f"Annotations/{name}.xml").iter("object"):
            found.setdefault(each.findtext("name", ""), []).append(each)
    return found


def box_of(element: ElementTree.Element) -> tuple[int, int, int, int]:
    edges = (element.findtext(f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax"))
    xmin, ymin, xmax, ymax = (int(edge or "") for edge in edges)
    return xmin, ymin, xmax, ymax


def test_every_class_is_equally_frequent_in_every_split(learning: Path) -> None:
    for part, count in (("train", LEARNING.train), ("val", LEARNING.val)):
        for name in CLASS_NAMES:
            assert len(list((learning / "classes" / part / name).glob("*.jpg"))) == count // 20
    assert len(list((learning / "unlabeled").glob("*.jpg"))) == LEARNING.unlabeled
    for split in ("trainval", "test"):
        counts = [len(found) for found in objects_of(learning, split).values()]
        assert len(counts) == 20
        assert max(counts) - min(counts) <= 1
    assert objects_of(learning, "train").keys() == objects_of(learning, "val").keys()


def test_the_splits_are_disjoint_and_all_their_files_exist(learning: Path) -> None:
    home = learning / "VOCdevkit/VOC2007"
    split = {
        name: (home / f"ImageSets/Main/{name}.txt").read_text().split()
        for name in ("train", "val", "trainval", "test")
    }
    assert sorted(split["train"] + split["val"]) == split["trainval"]
    assert not set(split["train"]) & set(split["val"])
    assert not set(split["trainval"]) & set(split["test"])
    assert (len(split["trainval"]), len(split["test"])) == (60, 40)
    everyone = set(split["trainval"] + split["test"])
    assert {path.stem for path in (home / "JPEGImages").iterdir()} == everyone
    assert {path.stem for path in (home / "Annotations").iterdir()} == everyone


def test_annotations_are_as_voc_has_them(learning: Path) -> None:
    home = learning / "VOCdevkit/VOC2007"
    flags: Counter[str] = Counter()
    at_border = 0
    for path in (home / "Annotations").iterdir():
        root = ElementTree.parse(path).getroot()
        assert [child.tag for child in root][:5] == [
            "folder",
            "filename",
            "source",
            "size",
            "segmented",
        ]
        with Image.open(home / "JPEGImages" / root.findtext("filename", "")) as picture:
            width, height = picture.size
        size = [root.findtext(f"size/{side}") for side in ("width", "height", "depth")]
        assert size == [str(width), str(height), "3"]
        objects = root.findall("object")
        assert 5 <= len(objects) <= 9
        for each in objects:
            tags = ["name", "pose", "truncated", "difficult", "bndbox"]
            assert [child.tag for child in each] == tags
            assert each.findtext("name") in CLASS_NAMES
            xmin, ymin, xmax, ymax = box_of(each)
            assert 1 <= xmin < xmax <= width
            assert 1 <= ymin < ymax <= height
            truncated = each.findtext("truncated") == "1"
            flags["truncated"] += truncated
            flags["difficult"] += each.findtext("difficult") == "1"
            flags["all"] += 1
            at_border += truncated and (xmin == 1 or ymin == 1 or xmax == width or ymax == height)
    assert 0.1 < flags["truncated"] / flags["all"] < 0.4
    assert 0.02 < flags["difficult"] / flags["all"] < 0.2
    # The few others are hidden by something else where the border cuts them.
    assert at_border > 0.9 * flags["truncated"]


def test_class_wise_image_sets_tell_who_is_in_a_picture(learning: Path) -> None:
    main_folder = learning / "VOCdevkit/VOC2007/ImageSets/Main"
    names = (main_folder / "test.txt").read_text().split()
    for class_name in CLASS_NAMES:
        lines = (main_folder / f"{class_name}_test.txt").read_text().splitlines()
        assert [line.split()[0] for line in lines] == names
        for line in lines:
            name, presence = line.split()
            path = learning / f"VOCdevkit/VOC2007/Annotations/{name}.xml"
            found = [
                each.findtext("difficult") == "1"
                for each in ElementTree.parse(path).iter("object")
                if each.findtext("name") == class_name
            ]
            assert presence == ("-1" if not found else "0" if all(found) else "1")


def test_the_coco_files_have_the_boxes_of_the_voc_folder_and_a_mask_for_each(
    learning: Path,
) -> None:
    home = learning / "VOCdevkit/VOC2007"
    for split in ("train", "val", "trainval", "test"):
        voc = read_voc(home, split, CLASS_NAMES).checked()
        json_file = learning / f"coco/instances_{split}.json"
        coco = read_coco(json_file, home / "JPEGImages", with_masks=True).checked()
        assert not coco.problems
        assert coco.class_names == CLASS_NAMES
        assert [image.path for image in coco.images] == [image.path for image in voc.images]
        for mine, theirs in zip(coco.images, voc.images, strict=True):
            assert [(o.name, o.box, o.difficult) for o in mine.objects] == [
                (o.name, o.box, o.difficult) for o in theirs.objects
            ]
            assert all(isinstance(o.mask, RunLengths) == o.difficult for o in mine.objects)


def test_the_masks_are_what_shows_of_each_object(learning: Path) -> None:
    content = json.loads((learning / "coco/instances_test.json").read_text())
    sizes = {image["id"]: (image["height"], image["width"]) for image in content["images"]}
    taken = {key: np.zeros(size, bool) for key, size in sizes.items()}
    for each in content["annotations"]:
        size, shape = sizes[each["image_id"]], each["segmentation"]
        if each["iscrowd"]:
            mask = pixels_of_counts(shape["counts"], *size)
        else:
            mask = pixels_of_polygons(shape, *size)
        filled = coco_masks.decode(
            coco_masks.merge(coco_masks.frPyObjects(shape, *size))
            if not each["iscrowd"]
            else coco_masks.frPyObjects(shape, *size)
        )
        assert (filled == mask).all()  # the edges of pixels leave nothing to rounding
        assert np.count_nonzero(mask) == each["area"]
        rows, columns = np.nonzero(mask)
        left, top, width, height = each["bbox"]
        assert (columns.min(), rows.min()) == (left, top)
        assert (columns.max() + 1, rows.max() + 1) == (left + width, top + height)
        assert not (taken[each["image_id"]] & mask).any()
        taken[each["image_id"]] |= mask


def test_polygons_cover_any_mask_exactly_also_with_holes_and_touching_corners() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        mask = rng.random(tuple(rng.integers(1, 20, 2))) < rng.random()
        if mask.any():
            full = np.pad(mask, ((3, 1), (2, 1)))
            assert (pixels_of_polygons(polygons_of(mask, 2, 3), *full.shape) == full).all()


Labeled = tuple[np.ndarray, np.ndarray]  # pictures (N, 32, 32, 3) in [0, 1], labels (N,)


@pytest.fixture(scope="module")
def labeled(learning: Path) -> tuple[Labeled, Labeled]:
    return pictures_of(learning / "classes/train"), pictures_of(learning / "classes/val")


def pictures_of(folder: Path) -> Labeled:
    pictures, labels = [], []
    for label, name in enumerate(CLASS_NAMES):
        for path in sorted((folder / name).glob("*.jpg")):
            with Image.open(path) as picture:
                small = picture.resize((32, 32), Image.Resampling.BOX)
            pictures.append(np.asarray(small, dtype=np.float32) / 255)
            labels.append(label)
    return np.stack(pictures), np.array(labels)


def probe(train: Labeled, val: Labeled, regularization: float) -> float:
    """Accuracy on `val` of a logistic regression on whatever features are given."""
    scale = StandardScaler().fit(train[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = LogisticRegression(C=1 / regularization, max_iter=40)
        model.fit(scale.transform(train[0]), train[1])
    return float(model.score(scale.transform(val[0]), val[1]))


def test_a_linear_probe_on_raw_pixels_stays_low(labeled: tuple[Labeled, Labeled]) -> None:
    train, val = ((pictures.reshape(len(labels), -1), labels) for pictures, labels in labeled)
    assert probe(train, val, regularization=1000) < RAW_PIXEL_BOUND


def test_color_does_not_carry_the_class(labeled: tuple[Labeled, Labeled]) -> None:
    def histogram(pictures: np.ndarray) -> np.ndarray:
        bins = (pictures * 7.99).astype(int)
        return np.concatenate([(bins == each).mean(axis=(1, 2)) for each in range(8)], axis=1)

    means = [(pictures.mean(axis=(1, 2)), labels) for pictures, labels in labeled]
    histograms = [(histogram(pictures), labels) for pictures, labels in labeled]
    # Chance is 0.05; one standard error on 600 pictures is 0.009.
    assert probe(means[0], means[1], regularization=1) < 0.09
    assert probe(histograms[0], histograms[1], regularization=1) < 0.12
