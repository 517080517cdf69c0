"""All boxes of a data set, detected or annotated, with their masks if any, in one .npz file.

The file has plain arrays (no pickle), with one row per box of all images: all that is needed to
score them again.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from pycocotools import mask as coco_masks

from kscl.data.annotations import AnnotatedSet, check_class_names
from kscl.data.masks import Mask, RunLengths, unpack_counts
from kscl.errors import KsclError
from kscl.runtime.files import read_arrays, write_atomically

FORMAT = "kscl-boxes"
VERSION = 2
INDICES: dict[str, type] = {"image": np.int64, "category": np.int64}

Array = np.ndarray[Any, Any]
Packed = dict[str, Any]  # pycocotools' {"size": [height, width], "counts": bytes}


@dataclass(frozen=True, eq=False)
class BoxTable:
    """The N boxes of all images of a data set."""

    kind: ClassVar[str]  # in a file
    columns: ClassVar[dict[str, type]]  # name → dtype
    texts: ClassVar[tuple[str, ...]] = ("dataset",)

    dataset: str
    class_names: tuple[str, ...]
    image_ids: tuple[str, ...]  # every image of the set, even one without a box
    image: Array  # (N,) int64, index into image_ids
    category: Array  # (N,) int64, index into class_names
    boxes: Array  # (N, 4) x1, y1, x2, y2, 0-based
    masks: tuple[Packed, ...] | None = field(default=None, kw_only=True)  # N of them

    def __len__(self) -> int:
        return len(self.boxes)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a table; a damaged file or one of another kind is an error."""
        kind = cls.kind
        try:
            content = read_arrays(path)
        except FileNotFoundError:
            raise KsclError(f"{path}: there is no such file of {kind}. Check the path.") from None
        except (OSError, ValueError) as error:
            raise KsclError(
                f"{path} is not readable as a file of {kind} ({error}). It is damaged or was "
                "written by another program: recreate it."
            ) from error
        text = {name: str(content.get(name, "")) for name in ("format", "version", "kind")}
        if (text["format"], text["version"]) != (FORMAT, str(VERSION)):
            raise KsclError(
                f"{path} must be a file of {kind} ({FORMAT} {VERSION}), got {text['format']} "
                f"{text['version']}. Recreate it by an evaluation."
            )
        if text["kind"] != kind:
            raise KsclError(f"{path} holds {text['kind']}, not {kind}. Pass the other file.")
        lists = ("class_names", "image_ids")
        missing = [name for name in (*cls.columns, *lists) if name not in content]
        if missing:
            raise KsclError(f"{path}: {', '.join(missing)} is missing. Recreate the file.")
        count = len(content["boxes"]) if content["boxes"].ndim else -1
        for name, dtype in cls.columns.items():
            column, shape = content[name], (count, 4) if name == "boxes" else (count,)
            if column.dtype != dtype or column.shape != shape:
                raise KsclError(
                    f"{path}: {name} must be {np.dtype(dtype)} of shape {shape}, got "
                    f"{column.dtype} of shape {column.shape}. Recreate the file."
                )
        values: dict[str, Any] = {name: content[name] for name in cls.columns}
        values |= {name: str(content.get(name, "")) for name in cls.texts}
        values |= {name: tuple(str(value) for value in content[name]) for name in lists}
        table = cls(**values, masks=_read_masks(content, path))
        check_table(table, path)
        return table


@dataclass(frozen=True, eq=False)
class Detections(BoxTable):
    """What a model found; boxes and scores are float32."""

    kind = "detections"
    columns: ClassVar = INDICES | {"boxes": np.float32, "scores": np.float32}
    texts = ("dataset", "ground_truth")

    scores: Array  # (N,) float32
    ground_truth: str = ""  # fingerprint of the annotations at that time


@dataclass(frozen=True, eq=False)
class GroundTruth(BoxTable):
    """The annotated objects."""

    kind = "ground truth"
    columns: ClassVar = INDICES | {"boxes": float, "difficult": bool, "areas": float}

    difficult: Array  # (N,) bool: neither a hit nor a miss
    areas: Array  # (N,) float64: COCO's measure of small, medium and large

    @cached_property
    def fingerprint(self) -> str:
        """Hash everything that can change a score; the order of images and classes cannot."""
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


def make_detections(
    dataset: str,
    class_names: tuple[str, ...],
    per_image: dict[str, tuple[Array, Array, Array]],
    ground_truth: str = "",
    masks: dict[str, list[Packed]] | None = None,
) -> Detections:
    """Make a table from (boxes, scores, class indices) of every image, in the set's order."""
    image_ids = tuple(per_image)

    def joined(column: int, dtype: type) -> Array:
        parts = [np.ravel(columns[column]) for columns in per_image.values()]
        return np.concatenate([np.zeros(0), *parts]).astype(dtype)

    counts = [len(boxes) for boxes, _, _ in per_image.values()]
    table = Detections(
        dataset=dataset,
        class_names=class_names,
        image_ids=image_ids,
        image=np.repeat(np.arange(len(image_ids), dtype=np.int64), counts),
        category=joined(2, np.int64),
        boxes=joined(0, np.float32).reshape(-1, 4),
        scores=joined(1, np.float32),
        ground_truth=ground_truth,
        masks=None if masks is None else tuple(mask for key in image_ids for mask in masks[key]),
    )
    check_table(table, dataset)
    return table


def make_ground_truth(annotated: AnnotatedSet) -> GroundTruth:
    """Make a table of a set's objects; it has masks if every object has one."""
    index = {name: number for number, name in enumerate(annotated.class_names)}
    objects = [(i, o) for i, image in enumerate(annotated.images) for o in image.objects]
    boxes = np.array([o.box for _, o in objects], np.float64).reshape(-1, 4)
    of_box = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    areas = [of_box[row] if o.area is None else o.area for row, (_, o) in enumerate(objects)]
    masks = [
        packed(o.mask, image.height, image.width)
        for image in annotated.images
        for o in image.objects
        if o.mask is not None
    ]
    table = GroundTruth(
        dataset=annotated.name,
        class_names=annotated.class_names,
        image_ids=tuple(image.id for image in annotated.images),
        image=np.array([i for i, _ in objects], np.int64),
        category=np.array([index[o.name] for _, o in objects], np.int64),
        boxes=boxes,
        difficult=np.array([o.difficult for _, o in objects], np.bool_),
        areas=np.array(areas, np.float64),
        masks=tuple(masks) if masks and len(masks) == len(objects) else None,
    )
    check_table(table, annotated.name)
    return table


def write_table(table: Detections | GroundTruth, path: str | Path) -> Path:
    """Write the file atomically; the same boxes give the same bytes."""
    texts = {"format": FORMAT, "kind": table.kind}
    texts |= {name: getattr(table, name) for name in table.texts}
    arrays = {name: getattr(table, name) for name in table.columns}
    arrays |= {name: np.array(text, np.str_) for name, text in texts.items()}
    arrays["class_names"] = np.array(table.class_names, np.str_)
    arrays["image_ids"] = np.array(table.image_ids, np.str_)
    arrays["version"] = np.array(VERSION, np.int64)
    if table.masks is not None:
        arrays |= _mask_columns(table.masks)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(Path(path), content.getvalue())
    return Path(path)


def check_table(table: BoxTable, where: object) -> None:
    """Raise an error unless images and classes are known, and boxes valid."""
    check_class_names(table.class_names, str(where))
    if len(set(table.image_ids)) != len(table.image_ids):
        raise KsclError(f"{where}: an image id is listed twice. Ids must be unique.")
    ranges = {"image": len(table.image_ids), "category": len(table.class_names)}
    for name, count in ranges.items():
        column = getattr(table, name)
        wrong = column[(column < 0) | (column >= count)]
        if len(wrong):
            raise KsclError(
                f"{where}: a box has the {name} index {wrong[0]}, but there are {count}. Use the "
                "model's class list; otherwise the file is damaged."
            )
    for name in ("boxes", "scores", "areas"):
        column = getattr(table, name, np.zeros(0))
        if not np.isfinite(column).all():
            raise KsclError(
                f"{where}: {name} has a value that is not a finite number. Recreate the file."
            )
    if table.masks is not None and len(table.masks) != len(table):
        raise KsclError(
            f"{where}: {len(table.masks)} masks for {len(table)} boxes. Recreate the file."
        )
    if (table.boxes[:, 2:] < table.boxes[:, :2]).any():
        raise KsclError(f"{where}: a box ends before it begins. Boxes are x1, y1, x2, y2.")


def fitted(detections: Detections, truth: GroundTruth) -> Detections:
    """Return the detections in the image and class order of the ground truth."""
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
        raise KsclError(
            f"The detections of {a} do not match the annotations of {b}: {what} names differ, "
            f"{' and '.join(reasons)}. Score them with the set and split they were made on."
        )


def _moved(names: tuple[str, ...], target: tuple[str, ...]) -> Array:
    index = {name: number for number, name in enumerate(target)}
    return np.array([index[name] for name in names], np.int64)


def segmentation(mask: Mask) -> list[Any] | Packed | None:
    """Return a mask for Detectron2: polygons as they are, or packed run lengths.

    Like its loader, leave out polygons of fewer than three points, which only public benchmarks may
    have; None if nothing is left.
    """
    if not isinstance(mask, RunLengths):
        return [points.ravel() for points in mask.parts if len(points) >= 3] or None
    return _packed_counts(mask.counts.tolist(), mask.height, mask.width)


def packed(mask: Mask, height: int, width: int) -> Packed:
    """Return a mask as run lengths; pycocotools fills polygons."""
    found = segmentation(mask)
    if isinstance(found, dict):
        return found
    if found is None:
        return _packed_counts([height * width], height, width)
    return dict(coco_masks.merge(coco_masks.frPyObjects(found, height, width)))


def packed_pixels(pixels: Array) -> Packed:
    """Return the run lengths of a mask (height, width)."""
    return dict(coco_masks.encode(np.asfortranarray(pixels, np.uint8)))


def _packed_counts(counts: list[int], height: int, width: int) -> Packed:
    runs = {"size": [height, width], "counts": counts}
    return dict(coco_masks.frPyObjects(runs, height, width))


def _mask_columns(masks: Sequence[Packed]) -> dict[str, Array]:
    """Return the arrays of a file: sizes (N, 2), ends (N,) of the masks in the bytes, bytes."""
    return {
        "mask_sizes": np.array([mask["size"] for mask in masks], np.int64).reshape(-1, 2),
        "mask_ends": np.cumsum([len(mask["counts"]) for mask in masks], dtype=np.int64),
        "mask_bytes": np.frombuffer(b"".join(mask["counts"] for mask in masks), np.uint8),
    }


def _read_masks(content: Mapping[str, Array], path: object) -> tuple[Packed, ...] | None:
    """Return the masks of a file, if any; pycocotools does not notice damaged ones."""
    if "mask_bytes" not in content:
        return None
    masks = []
    try:
        for name, dtype in (("mask_sizes", "i8"), ("mask_ends", "i8"), ("mask_bytes", "u1")):
            if content[name].dtype != dtype:
                raise ValueError(f"{name} is {content[name].dtype}")
        ends, text = content["mask_ends"].tolist(), content["mask_bytes"].tobytes()
        bounds = zip([0, *ends[:-1]], ends, strict=True)
        for (height, width), (start, end) in zip(
            content["mask_sizes"].tolist(), bounds, strict=True
        ):
            counts = text[start:end]
            if int(unpack_counts(counts.decode("ascii")).sum()) != height * width:
                raise ValueError("a mask does not fill its image")
            masks.append({"size": [height, width], "counts": counts})
        if (ends[-1] if ends else 0) != len(text):
            raise ValueError("bytes are left after the masks")
    except (KeyError, TypeError, ValueError) as error:
        raise KsclError(f"{path}: the masks are damaged ({error}). Recreate it.") from error
    return tuple(masks)
