"""Check training and test sets before a run; report every problem at once, with its fix."""

from __future__ import annotations

import json
from collections.abc import Sequence

from detection.data.preflight import DECODED_SAMPLE, preflight
from kscl import cli
from kscl.data.annotations import forms

EXAMPLES = """  kscl preflight --train voc:data/BCCD:trainval --test voc:data/BCCD:test
  kscl preflight --train voc_2007_trainval voc_2012_trainval --test voc_2007_test
  kscl preflight --train coco:train.json:images --test coco:val.json:images --full
  kscl preflight --train coco:train.json:images --masks polygon
  kscl preflight --test voc:data/BCCD:test --classes RBC WBC Platelets --json

The exit code is 1 if a problem was found; notes alone are not a problem.
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("--train", nargs="+", default=[], metavar="SET", help=forms())
    parser.add_argument("--test", nargs="+", default=[], metavar="SET", help=forms())
    parser.add_argument("--classes", nargs="+", metavar="NAME", help="default: found in the data")
    parser.add_argument("--num-classes", type=int, metavar="N", help="the model's, to compare with")
    cli.add_flag(parser, "--full", "decode every image, not a sample")
    parser.add_argument(
        "--sample", type=int, default=DECODED_SAMPLE, help="images per set to decode (%(default)s)"
    )
    parser.add_argument(
        "--masks",
        choices=("polygon", "bitmask"),
        default="",
        help="check that every object has a mask; the format is INPUT.MASK_FORMAT",
    )
    cli.add_flag(parser, "--json", "print everything as JSON")
    cli.add_import(parser)
    arguments = parser.parse_args(argv)
    if not arguments.train and not arguments.test:
        parser.error("name at least one set with --train or --test")
    report = preflight(
        arguments.train,
        arguments.test,
        arguments.classes,
        arguments.num_classes,
        arguments.full,
        arguments.sample,
        arguments.masks,
    )
    print(json.dumps(report.as_dict(), indent=2) if arguments.json else report)
    return 1 if report.fatal else 0
