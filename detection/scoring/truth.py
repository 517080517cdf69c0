"""Find the annotations that detections are scored against."""

from __future__ import annotations

from pathlib import Path

from detection.scoring.boxes import GroundTruth, make_ground_truth, read_ground_truth
from kscl.data.annotated.specs import Source, parse_source, read_source


def find_ground_truth(
    where: str, class_names: tuple[str, ...], with_masks: bool = False
) -> GroundTruth:
    """Read the annotations that a name stands for, without looking at any image."""
    if where.endswith(".npz"):
        return read_ground_truth(where)
    found = read_source(_source(where), class_names, with_images=False, with_masks=with_masks)
    return make_ground_truth(found.checked())


def _source(where: str) -> Source:
    """Also accept names without `voc:` or `coco:`: a folder, FOLDER:split, FILE.json."""
    if where.endswith(".json"):
        return Source(where, Path(), json_file=Path(where))
    if Path(where).is_dir():
        return Source(where, Path(where), split="test")
    folder, _, split = where.rpartition(":")
    if split and Path(folder).is_dir():
        return Source(where, Path(folder), split=split)
    return parse_source(where)
