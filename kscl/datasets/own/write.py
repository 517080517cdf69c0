"""Write a prepared set, all or nothing: VOC layout with links to the images."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from kscl.data.annotated.annotations import AnnotatedImage
from kscl.data.annotated.voc import CLASSES_FILE
from kscl.errors import KsclError

MANIFEST = "own.json"
REPORT = "report.txt"


def refuse_inside(output_dir: Path, *given: Path) -> None:
    """Raise KsclError if the set would lie among the user's files, and be read as some of them."""
    for folder in given:
        if output_dir.resolve().is_relative_to(folder.resolve()):
            raise KsclError(
                f"--output-dir {output_dir} lies in {folder}, whose files are read: the next start "
                "would take its links for more of your images. Choose a folder beside it."
            )


def is_written(folder: Path, about: Mapping[str, Any]) -> bool:
    """Return whether the folder holds this very set; raise KsclError if it holds anything else."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return False
    try:
        before = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise ValueError
    except (OSError, ValueError):
        raise KsclError(
            f"{folder} holds something that is not a set of this tool. Choose another --output-dir."
        ) from None
    changed = [key for key, value in about.items() if before.get(key) != value]
    if changed:
        raise KsclError(
            f"{folder} was made from other data or settings ({', '.join(changed)} differ). Delete "
            "it, or choose another --output-dir."
        )
    return True


def write_voc(
    folder: Path,
    images: Mapping[str, AnnotatedImage],
    unlabeled: Mapping[str, Path],
    splits: Mapping[str, Sequence[str]],
    class_names: Sequence[str],
) -> None:
    """Write annotations, links and lists; images are by id."""
    for name in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    (folder / CLASSES_FILE).write_text("".join(f"{name}\n" for name in class_names), "utf-8")
    for image_id, image in images.items():
        assert image.path is not None
        (folder / "Annotations" / f"{image_id}.xml").write_bytes(annotation(image_id, image))
        link(image.path, folder / "JPEGImages" / f"{image_id}{image.path.suffix}")
    for image_id, path in unlabeled.items():
        link(path, folder / "JPEGImages" / f"{image_id}{path.suffix}")
    for split, ids in splits.items():
        text = "".join(f"{image_id}\n" for image_id in ids)
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text(text, "utf-8")


def link(path: Path, place: Path) -> None:
    """Link to a user's file, which is never copied nor changed."""
    os.symlink(path.resolve(), place)


def annotation(image_id: str, image: AnnotatedImage) -> bytes:
    """Return the XML of one image, as LabelImg writes it; boxes count from 1."""
    assert image.path is not None
    top = Element("annotation")
    SubElement(top, "filename").text = f"{image_id}{image.path.suffix}"
    size = SubElement(top, "size")
    for tag, value in (("width", image.width), ("height", image.height), ("depth", 3)):
        SubElement(size, tag).text = str(value)
    for thing in image.objects:
        item = SubElement(top, "object")
        for tag, text in (
            ("name", thing.name),
            ("pose", thing.pose),
            ("truncated", str(int(thing.truncated))),
            ("difficult", str(int(thing.difficult))),
        ):
            SubElement(item, tag).text = text
        box = SubElement(item, "bndbox")
        x1, y1, x2, y2 = thing.box
        for tag, number in (("xmin", x1 + 1), ("ymin", y1 + 1), ("xmax", x2), ("ymax", y2)):
            SubElement(box, tag).text = f"{round(number, 2):.12g}"
    indent(top, "\t")
    return tostring(top, encoding="utf-8") + b"\n"


def write_about(folder: Path, about: Mapping[str, Any], report: str) -> None:
    """Write what the set was made from, and the report."""
    (folder / MANIFEST).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
    (folder / REPORT).write_text(f"{report}\n", "utf-8")
