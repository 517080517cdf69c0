"""Images with a mask each, a PNG of one class number per pixel: VOC's layout, or two folders.

    voc:FOLDER:SPLIT    JPEGImages/, SegmentationClass/ and ImageSets/Segmentation/SPLIT.txt
    FOLDER              images/ and masks/, in which a mask has the name of its image

A file classes.txt beside the masks names value 0 on its first line, 1 on the second, and so on;
without it a set in VOC's layout has VOC's classes. Every mask is read when a set is opened.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from fvcore.common.config import CfgNode
from PIL.PngImagePlugin import PngImageFile

from kscl.data.annotated.voc import CLASSES_FILE, VOC_CLASSES
from kscl.data.annotations import (
    AnnotatedSet,
    Problem,
    check_class_names,
    image_size,
    is_set_name,
    parse_source,
)
from kscl.data.formats import UnreadableImage, open_image
from kscl.data.open import FileSource, open_source, open_voc_split
from kscl.data.source import open_regular, read_lines
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.runtime.distributed import on_first_rank
from linear_eval.images import ABSENT, PRESENT, LabeledImages

VOC_LISTS = "Segmentation"  # the folder of ImageSets/ that has the splits
VOID, UNKNOWN = 255, 254  # in place of a class: not counted; not in the list of classes


@dataclass(frozen=True)
class MaskedImages(LabeledImages):
    """Images with a mask each; labels (N, C) say which classes a mask shows."""

    masks: Sequence[Path] = ()
    numbering: np.ndarray | None = None  # (256,): the class of each value of a mask

    def mask(self, index: int) -> np.ndarray:
        """Return the class of each pixel, or VOID: (H, W), uint8."""
        assert self.numbering is not None
        return np.asarray(self.numbering[read_values(self.masks[index])])


def open_masked(name: str, where: str, cfg: CfgNode) -> MaskedImages:
    """Open the set that the config names under the key `name`; report all masks that are wrong."""
    classes: tuple[str, ...] = ()
    if is_set_name(where) and parse_source(where).format == "voc":
        named = parse_source(where)
        images = open_voc_split(f"voc:{named.root}:{named.split}", VOC_LISTS)
        folder, classes = named.root / cfg.SEGMENTATION.MASKS, ("background", *VOC_CLASSES)
    elif os.path.isdir(f"{where}/images"):
        opened = open_source(f"{where}/images", cfg.DATA.CACHE_DIR)
        if not isinstance(opened, FileSource) or opened.lost:
            raise KsclError(f"{where}/images ({name}) must hold image files that can be read.")
        images, folder = opened, Path(where, "masks")
    else:
        raise KsclError(
            f"{name} must be voc:FOLDER:SPLIT, a name such as voc_2012_train, or a folder with "
            f"images/ and masks/, got '{where}'."
        )
    if not folder.is_dir():
        raise KsclError(f"{name} {where}: {folder} is not there. Put the masks into it.")
    listed = folder / CLASSES_FILE
    if listed.is_file():
        classes = check_class_names(read_lines(listed), listed)
    elif not classes:
        raise KsclError(
            f"{name} {where}: {listed} is not there. Write the name of value 0 on its first line, "
            "that of 1 on the second, and so on."
        )
    ignored = cfg.SEGMENTATION.IGNORE
    values = [value for value in range(len(classes)) if value != ignored]
    if not 2 <= len(values) < UNKNOWN:
        raise KsclError(f"{name} {where} must have 2 to {UNKNOWN - 1} classes, got {len(values)}.")
    numbering = np.full(256, UNKNOWN, np.uint8)
    numbering[values], numbering[ignored] = np.arange(len(values)), VOID
    masks = [folder / f"{os.path.splitext(each)[0]}.png" for each in images.names]
    shown, content = on_first_rank(lambda: _read_all(where, images, masks, numbering))
    names = [classes[value] for value in values]
    absent = [
        name for name, there in zip(names, shown[:, values].T, strict=True) if not there.any()
    ]
    if absent:
        raise KsclError(
            f"{name} {where}: no mask shows {', '.join(absent)}, so it has no IoU. Add images that "
            f"show it, or take it out of the masks and out of {CLASSES_FILE}."
        )

    def print_() -> dict[str, object]:
        parts = {str(p): fingerprint(p, cfg.DATA.CACHE_DIR) for p in (Path(images.root), folder)}
        digest = hashlib.sha256("\0".join([*(p.hash for p in parts.values()), content]).encode())
        known = [{"path": os.path.abspath(path), "hash": p.hash} for path, p in parts.items()]
        return parts[images.root].as_dict() | {"hash": digest.hexdigest()[:16], "parts": known}

    return MaskedImages(
        replace(images, where=where),
        names,
        np.arange(len(images)),
        np.where(shown[:, values], PRESENT, ABSENT),
        on_first_rank(print_),
        cfg.DATA.MAX_PIXELS,
        masks,
        numbering,
    )


def _read_all(
    where: str, images: FileSource, masks: Sequence[Path], numbering: np.ndarray
) -> tuple[np.ndarray, str]:
    """Return which values each mask shows (N, 256), and a hash of all names and pixels."""

    def read(index: int) -> tuple[np.ndarray, bytes] | Problem:
        try:
            return _shown_in(Path(images.name(index)), masks[index], numbering)
        except UnreadableImage as error:
            return Problem("mask", str(masks[index]), str(error), error.fix)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        found = list(pool.map(read, range(len(masks))))
    AnnotatedSet(where, (), problems=[it for it in found if isinstance(it, Problem)]).checked()
    good = [it for it in found if not isinstance(it, Problem)]
    digest = hashlib.sha256("\0".join(images.names).encode("utf-8", "surrogateescape"))
    for _, content in good:
        digest.update(content)
    return np.stack([shown for shown, _ in good]), digest.hexdigest()


def _shown_in(image: Path, mask: Path, numbering: np.ndarray) -> tuple[np.ndarray, bytes]:
    """Return which values a mask shows (256,), and a hash of it; raise what is wrong with it."""
    if not mask.exists():
        raise UnreadableImage(f"is missing: {image} has no mask", "Add it, or remove the image")
    values, (width, height) = read_values(mask), image_size(image)
    if values.shape != (height, width):
        what = f"is {values.shape[1]} x {values.shape[0]}, but {image} is {width} x {height}"
        raise UnreadableImage(what, "Save it in the size of its image")
    shown = np.bincount(values.ravel(), minlength=256) > 0
    unknown = np.flatnonzero(shown & (numbering == UNKNOWN)).tolist()
    if unknown:
        what = f"has values that are no class, such as {', '.join(map(str, unknown[:8]))}"
        fix = f"Name them in {mask.parent / CLASSES_FILE}, or set the value to ignore "
        raise UnreadableImage(what, f"{fix}(SEGMENTATION.IGNORE)")
    return shown, hashlib.sha256(values.tobytes()).digest()


def read_values(path: Path) -> np.ndarray:
    """Return the values of a mask (H, W), uint8: with a palette its indices, not its colors."""
    try:
        with open_regular(path) as file, open_image(file) as image:
            # Pillow spreads fewer than 8 bits of gray over 0 … 255, which gives other numbers.
            stored = image.tile[0].args if isinstance(image, PngImageFile) else image.format
            if image.mode not in ("P", "L") or (image.mode == "L" and stored != "L"):
                raise UnreadableImage(
                    f"has pixels of kind {image.mode} ({stored}), not class numbers",
                    "Save masks as PNGs with a palette or 8 bits of gray, one class number a pixel",
                )
            return np.asarray(image)
    except OSError as error:
        raise UnreadableImage(error.strerror or str(error), "Make it readable") from error
