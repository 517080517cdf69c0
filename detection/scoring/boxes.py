"""Save an inference pass: every box of a data set, detected or annotated, in one kind of file.

The file is a .npz of plain arrays (no pickle): the boxes of all images one after the other, with
the index of their image and class beside them, and their masks where there are any. What is needed
to score them again is inside.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from detection.data.masks import Packed, columns_of_masks, masks_of_columns, packed
from detection.errors import DetectionError
from kscl.data.annotations import AnnotatedSet, check_class_names
from kscl.runtime.files import read_arrays, write_atomically

FORMAT = "kscl-boxes"
VERSION = 2  # 1 had no masks, and still has none

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class BoxTable:
    """The boxes of all images of a data set; N boxes, `image` and `category` index the lists."""

    dataset: str
    class_names: tuple[str, ...]
    image_ids: tuple[str, ...]  # every image of the set, also one without a box
    image: Array  # (N,) int64
    category: Array  # (N,) int64
    boxes: Array  # (N, 4) x1, y1, x2, y2, 0-based
    masks: tuple[Packed, ...] | None = field(default=None, kw_only=True)  # N, or none at all

    def __len__(self) -> int:
        return len(self.boxes)


@dataclass(frozen=True, eq=False)
class Detections(BoxTable):
    """What a model found. Boxes and scores are float32, as models give them."""

    scores: Array  # (N,) float32
    ground_truth: str = ""  # fingerprint of the annotations that were there at the time


@dataclass(frozen=True, eq=False)
class GroundTruth(BoxTable):
    """What there is to be found."""

    difficult: Array  # (N,) bool: neither a hit nor a miss
    areas: Array  # (N,) float64: by which COCO calls an object small, medium or large

    @cached_property
    def fingerprint(self) -> str:
        """A hash of whatever can change a score; the order of images and classes does not."""
        digest = hashlib.sha256()
        order = np.argsort(np.asarray(self.image_ids)[self.image], kind="stable")
        for image_id in sorted(self.image_ids):
            digest.update(f"{image_id}\0".encode())
        for row in order:
            name, image_id = self.class_names[self.category[row]], self.image_ids[self.image[row]]
            digest.update(f"{image_id}\0{name}\0{int(self.difficult[row])}\0".encode())
            digest.update(self.boxes[row].tobytes() + self.areas[row].tobytes())
            if self.masks is not None:
                digest.update(self.masks[row]["counts"])
        return digest.hexdigest()[:16]


# name in the file: (dtype, dimensions) of the columns each kind has
_COLUMNS = {"image": (np.int64, 1), "category": (np.int64, 1)}
_KINDS: dict[str, tuple[type[BoxTable], dict[str, tuple[type, int]]]] = {
    "detections": (Detections, {"boxes": (np.float32, 2), "scores": (np.float32, 1)}),
    "ground truth": (
        GroundTruth,
        {"boxes": (np.float64, 2), "difficult": (np.bool_, 1), "areas": (np.float64, 1)},
    ),
}


def make_detections(
    dataset: str,
    class_names: tuple[str, ...],
    per_image: dict[str, tuple[Array, Array, Array]],
    ground_truth: str = "",
    masks: dict[str, list[Packed]] | None = None,
) -> Detections:
    """Make a table from (boxes, scores, class indices) of every image, in the set's order."""
    image_ids = tuple(per_image)
    columns = list(zip(*per_image.values(), strict=True)) or [(), (), ()]
    counts = [len(boxes) for boxes in columns[0]]
    table = Detections(
        dataset=dataset,
        class_names=class_names,
        image_ids=image_ids,
        image=np.repeat(np.arange(len(image_ids), dtype=np.int64), counts),
        category=_joined(columns[2], np.int64),
        boxes=_joined(columns[0], np.float32).reshape(-1, 4),
        scores=_joined(columns[1], np.float32),
        ground_truth=ground_truth,
        masks=None if masks is None else tuple(mask for key in image_ids for mask in masks[key]),
    )
    check_table(table, dataset)
    return table


def make_ground_truth(annotated: AnnotatedSet) -> GroundTruth:
    """Make a table of the objects of a set that has been read, in its order.

    It has masks if every object of the set has one (see `read_source`, `with_masks`).
    """
    index = {name: number for number, name in enumerate(annotated.class_names)}
    objects = [(i, o) for i, image in enumerate(annotated.images) for o in image.objects]
    boxes = np.array([o.box for _, o in objects], np.float64).reshape(-1, 4)
    of_box = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    areas = [of_box[row] if o.area is None else o.area for row, (_, o) in enumerate(objects)]
    table = GroundTruth(
        dataset=annotated.name,
        class_names=annotated.class_names,
        image_ids=tuple(image.id for image in annotated.images),
        image=np.array([i for i, _ in objects], np.int64),
        category=np.array([index[o.name] for _, o in objects], np.int64),
        boxes=boxes,
        difficult=np.array([o.difficult for _, o in objects], np.bool_),
        areas=np.array(areas, np.float64),
        masks=_packed_masks(annotated),
    )
    check_table(table, annotated.name)
    return table


def _packed_masks(annotated: AnnotatedSet) -> tuple[Packed, ...] | None:
    found = [(image, o.mask) for image in annotated.images for o in image.objects]
    if not found or any(mask is None for _, mask in found):
        return None
    return tuple(packed(mask, image.height, image.width) for image, mask in found if mask)


def write_table(table: Detections | GroundTruth, path: str | Path) -> Path:
    """Write the file atomically; the same boxes give the same bytes."""
    kind = next(name for name, (type_, _) in _KINDS.items() if type(table) is type_)
    arrays = {name: getattr(table, name) for name in (*_COLUMNS, *_KINDS[kind][1])}
    texts = {"format": FORMAT, "kind": kind, "dataset": table.dataset}
    if isinstance(table, Detections):
        texts["ground_truth"] = table.ground_truth
    arrays |= {name: np.array(text, np.str_) for name, text in texts.items()}
    arrays["class_names"] = np.array(table.class_names, np.str_)
    arrays["image_ids"] = np.array(table.image_ids, np.str_)
    arrays["version"] = np.array(1 if table.masks is None else VERSION, np.int64)
    if table.masks is not None:
        arrays |= columns_of_masks(table.masks)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(Path(path), content.getvalue())
    return Path(path)


def read_detections(path: str | Path) -> Detections:
    """Read what a model found; a file that is damaged or of another kind is an error."""
    table = _read(path, "detections")
    assert isinstance(table, Detections)
    return table


def read_ground_truth(path: str | Path) -> GroundTruth:
    """Read what there is to be found; a file that is damaged or of another kind is an error."""
    table = _read(path, "ground truth")
    assert isinstance(table, GroundTruth)
    return table


def check_table(table: BoxTable, where: object) -> None:
    """Raise unless every box belongs to a known image and class and every number is finite."""
    check_class_names(table.class_names, str(where))
    if len(set(table.image_ids)) != len(table.image_ids):
        raise DetectionError(f"{where}: an image id is listed twice. Ids must be unique in a set.")
    ranges = {"image": len(table.image_ids), "category": len(table.class_names)}
    for name, count in ranges.items():
        column = getattr(table, name)
        if len(column) and not (column.min() >= 0 and column.max() < count):
            wrong = column.min() if column.min() < 0 else column.max()
            raise DetectionError(
                f"{where}: a box has the {name} index {wrong}, but there are {count}. Use the "
                "class list that the model was built with; otherwise the file is damaged."
            )
    for name in ("boxes", "scores", "areas"):
        column = getattr(table, name, np.zeros(0))
        if not np.isfinite(column).all():
            raise DetectionError(
                f"{where}: {name} has a value that is not a finite number. Make the file again."
            )
    if table.masks is not None and len(table.masks) != len(table):
        raise DetectionError(
            f"{where}: there are {len(table.masks)} masks for {len(table)} boxes. Make it again."
        )
    if (table.boxes[:, 2:] < table.boxes[:, :2]).any():
        raise DetectionError(f"{where}: a box ends before it begins. Boxes are x1, y1, x2, y2.")


def fitted(detections: Detections, truth: GroundTruth) -> Detections:
    """Return the detections with the indices and the order of images of the ground truth."""
    _same("image", detections.image_ids, truth.image_ids, detections.dataset, truth.dataset)
    _same("class", detections.class_names, truth.class_names, detections.dataset, truth.dataset)
    image = _moved(detections.image_ids, truth.image_ids)[detections.image]
    order = np.argsort(image, kind="stable")
    return replace(
        detections,
        class_names=truth.class_names,
        image_ids=truth.image_ids,
        image=image[order],
        category=_moved(detections.class_names, truth.class_names)[detections.category[order]],
        boxes=detections.boxes[order],
        scores=detections.scores[order],
        masks=None if detections.masks is None else tuple(detections.masks[i] for i in order),
    )


def _same(what: str, found: tuple[str, ...], wanted: tuple[str, ...], a: str, b: str) -> None:
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        reasons = [f"{len(missing)} only annotated (first: {missing[0]})"] if missing else []
        reasons += [f"{len(extra)} only in the detections (first: {extra[0]})"] if extra else []
        raise DetectionError(
            f"The detections of {a} do not belong to the annotations of {b}: of the {what} names "
            f"{' and '.join(reasons)}. Score them with the set and split that they were made on."
        )


def _moved(names: tuple[str, ...], target: tuple[str, ...]) -> Array:
    index = {name: number for number, name in enumerate(target)}
    return np.array([index[name] for name in names], np.int64)


def _joined(parts: Any, dtype: type) -> Array:
    return np.concatenate([np.asarray(part, dtype) for part in parts] or [np.zeros(0, dtype)])


def _read(path: str | Path, kind: str) -> BoxTable:
    try:
        content = read_arrays(path)
    except FileNotFoundError:
        raise DetectionError(f"{path}: there is no such file of {kind}. Check the path.") from None
    except (OSError, ValueError) as error:
        raise DetectionError(
            f"{path} is not readable as a file of {kind} ({error}). Make it again: it is damaged, "
            "or was written by something else."
        ) from error
    text = {name: str(content.get(name, "")) for name in ("format", "kind", "dataset")}
    if text["format"] != FORMAT or "version" not in content:
        raise DetectionError(f"{path} is not a file of {kind}. Pass one that an evaluation wrote.")
    version = int(content["version"])
    if version > VERSION:
        raise DetectionError(
            f"{path} was written by a newer release (version {version}, this one reads up to "
            f"{VERSION}). Upgrade to read it."
        )
    if text["kind"] != kind:
        raise DetectionError(f"{path} holds {text['kind']}, not {kind}. Pass the other file.")
    type_, own_columns = _KINDS[kind]
    columns = _checked_columns(content, {**_COLUMNS, **own_columns}, path)
    if kind == "detections":
        columns["ground_truth"] = str(content.get("ground_truth", ""))
    columns["masks"] = masks_of_columns(content, path) if version > 1 else None
    table = type_(
        dataset=text["dataset"],
        class_names=tuple(str(name) for name in content["class_names"]),
        image_ids=tuple(str(name) for name in content["image_ids"]),
        **columns,
    )
    check_table(table, path)
    return table


def _checked_columns(
    content: dict[str, Array], wanted: dict[str, tuple[type, int]], path: str | Path
) -> dict[str, Any]:
    missing = [name for name in (*wanted, "class_names", "image_ids") if name not in content]
    if missing:
        raise DetectionError(f"{path}: {', '.join(missing)} is missing. Make the file again.")
    count = len(content["boxes"]) if content["boxes"].ndim else -1
    for name, (dtype, dimensions) in wanted.items():
        column = content[name]
        shape = (count, 4) if dimensions == 2 else (count,)
        if column.dtype != dtype or column.shape != shape:
            raise DetectionError(
                f"{path}: {name} is {column.dtype} of shape {column.shape}, not "
                f"{np.dtype(dtype)} of shape {shape}. Make the file again."
            )
    return {name: content[name] for name in wanted}
