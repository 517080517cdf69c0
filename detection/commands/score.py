"""Score saved detections again, boxes and masks, by all scorers or some, without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from detection.scoring import SCORERS, as_table, score
from detection.scoring.boxes import Detections, GroundTruth, make_ground_truth
from kscl import cli
from kscl.data.annotations import Source, parse_source, read_source

EXAMPLES = """  kscl score --detections run/detections.npz --annotations VOC2007:test
  kscl score --detections run/detections.npz --annotations run/ground_truth.npz
  kscl score --detections det.npz --annotations annotations/instances_val.json
  kscl score --detections det.npz --annotations voc_2007_test --scorer voc07-11pt --json
  kscl score --detections det.npz --annotations val.json --scorer coco-101pt-segm
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    about = "detections.npz of an evaluation"
    parser.add_argument("--detections", required=True, metavar="FILE", help=about)
    parser.add_argument(
        "--annotations",
        required=True,
        metavar="WHERE",
        help="VOC_FOLDER[:split] (test if none is named), a COCO .json, the ground_truth.npz that "
        "the evaluation wrote, or a name of Detectron2's",
    )
    parser.add_argument(
        "--scorer", action="append", choices=tuple(SCORERS), help="default: all that apply"
    )
    about = "score even if the annotations have changed since the detections were made"
    cli.add_flag(parser, "--changed-annotations", about)
    cli.add_flag(parser, "--json", "print everything, curves too, as JSON")
    cli.add_import(parser)
    arguments = parser.parse_args(argv)
    detections = Detections.read(arguments.detections)
    truth = find_ground_truth(
        arguments.annotations, detections.class_names, with_masks=detections.masks is not None
    )
    scores = score(
        detections,
        truth,
        arguments.scorer or (),
        same_annotations=not arguments.changed_annotations,
    )
    print(json.dumps(scores, indent=2) if arguments.json else as_table(scores))
    return 0


def find_ground_truth(
    where: str, class_names: tuple[str, ...], with_masks: bool = False
) -> GroundTruth:
    """Read the annotations that a name stands for, without images."""
    if where.endswith(".npz"):
        return GroundTruth.read(where)
    found = read_source(_source(where), class_names, with_images=False, with_masks=with_masks)
    return make_ground_truth(found.checked())


def _source(where: str) -> Source:
    """Also accept names without `voc:` or `coco:`: a folder, FOLDER:split, FILE.json."""
    if where.endswith(".json"):
        return Source(where, "coco", Path(), annotations=Path(where))
    if Path(where).is_dir():
        return Source(where, "voc", Path(where), split="test")
    folder, _, split = where.rpartition(":")
    if split and Path(folder).is_dir():
        return Source(where, "voc", Path(folder), split=split)
    return parse_source(where)
