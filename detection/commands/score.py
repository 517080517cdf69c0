"""Score saved detections again, boxes and masks, by all scorers or some; no model is needed."""

from __future__ import annotations

import json
from collections.abc import Sequence

from detection.scoring import SCORERS, as_table, score
from detection.scoring.boxes import read_detections
from detection.scoring.truth import find_ground_truth
from kscl import cli

EXAMPLES = """  python tools/score.py --detections run/detections.npz --annotations VOC2007:test
  python tools/score.py --detections run/detections.npz --annotations run/ground_truth.npz
  python tools/score.py --detections det.npz --annotations annotations/instances_val.json
  python tools/score.py --detections det.npz --annotations voc_2007_test --scorer voc07-11pt --json
  python tools/score.py --detections det.npz --annotations val.json --scorer coco-101pt-segm
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
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
    about = "score although the annotations have changed since the detections were made"
    cli.add_flag(parser, "--changed-annotations", about)
    cli.add_flag(parser, "--json", "print everything, curves too, as JSON")
    arguments = parser.parse_args(argv)
    detections = read_detections(arguments.detections)
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
