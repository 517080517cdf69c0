"""What the choices depend on: the images and boxes of a prepared set, and the machine."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.cluster.vq import kmeans2

from kscl.data.annotated.voc import read_voc
from kscl.data.open import open_source
from kscl.errors import KsclError

PRETRAIN_SPLIT, TRAIN_SPLIT, TEST_SPLIT = "pretrain", "trainval", "test"
TILES = "tiles"  # folder of crops to pretrain on, made by prepare_data.py where objects are small
FEWEST_IMAGES = 8  # to pretrain on


@dataclass(frozen=True)
class Boxes:
    """The annotated images to train a detector on."""

    class_names: tuple[str, ...]
    sides: np.ndarray  # root of each box's area, in pixels
    shorts: np.ndarray  # short side of the image of each box
    num_train: int
    num_test: int

    @property
    def relative_area(self) -> float:
        """The median area of a box as a fraction of a square of its image's short side."""
        return float(np.median((self.sides / self.shorts) ** 2))

    def anchors(self, short_side: int) -> list[int]:
        """Return sizes at this input size: centers of k-means over the logarithm of the sides."""
        logs = np.log(np.maximum(self.sides / self.shorts * short_side, 4.0))
        starts = np.quantile(logs, [0.1, 0.5, 0.9])[:, None]
        with warnings.catch_warnings():  # boxes of one size leave clusters empty, at their starts
            warnings.filterwarnings("ignore", "One of the clusters is empty")
            centers, _ = kmeans2(logs[:, None], starts, minit="matrix", missing="warn")
        return sorted({round(float(np.exp(center))) for center in centers[:, 0]})


@dataclass(frozen=True)
class Facts:
    """What is known about a prepared set."""

    root: Path
    photos: str  # the images that are not to test on, as DATA.TRAIN takes them
    num_photos: int
    pretrain: str  # the same, or their tiles if there are any
    num_pretrain: int
    boxes: Boxes | None
    classes: Path | None  # the folder with train/ and val/ for a probe
    first_image: str

    @property
    def name(self) -> str:
        """Return the name of the folder, also if it was given as a dot."""
        return self.root.resolve().name

    @property
    def has_tiles(self) -> bool:
        """Return whether photos are pretrained on in tiles."""
        return self.pretrain != self.photos


def refuse_few(images: int) -> None:
    """Raise KsclError if there are too few images for a batch and a queue."""
    if images < FEWEST_IMAGES:
        what = f"{images} image{' is' if images == 1 else 's are'}"
        raise KsclError(f"{what} too few to pretrain on. Bring at least {FEWEST_IMAGES}.")


def look_at(root: Path) -> Facts:
    """Return the facts about a folder of tools/prepare_data.py own."""
    classes = root / "classes"
    has_boxes = (root / "ImageSets/Main" / f"{TRAIN_SPLIT}.txt").is_file()
    has_classes = (classes / "train").is_dir() and (classes / "val").is_dir()
    if not has_boxes and not has_classes:
        raise KsclError(
            f"{root} is not a prepared data set. Make one: python tools/prepare_data.py own "
            "--images DIR --annotations DIR --output-dir data/mine."
        )
    photos = f"voc:{root}:{PRETRAIN_SPLIT}" if has_boxes else str(classes / "train")
    tiles = root / TILES if has_boxes else None
    pretrain = str(tiles) if tiles is not None and tiles.is_dir() else photos
    logging.getLogger("kscl").setLevel(logging.WARNING)
    source = open_source(pretrain)
    return Facts(
        root,
        photos,
        len(open_source(photos)),
        pretrain,
        len(source),
        _boxes(root) if has_boxes else None,
        classes if has_classes else None,
        source.name(0),
    )


def _boxes(root: Path) -> Boxes:
    train = read_voc(root, TRAIN_SPLIT).checked()
    test = read_voc(root, TEST_SPLIT).checked()
    found = [
        (box, min(image.width, image.height))
        for image in train.images
        for box in (thing.box for thing in image.objects)
    ]
    corners = np.array([box for box, _ in found])
    areas = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    shorts = np.array([short for _, short in found], float)
    return Boxes(train.class_names, np.sqrt(areas), shorts, len(train.images), len(test.images))
