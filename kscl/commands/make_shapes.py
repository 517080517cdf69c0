"""The command that draws the data set."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from kscl import cli
from kscl.datasets.shapes import (
    CLASS_NAMES,
    ShapesSettings,
    draw_contact_sheet,
    find_shapes,
    make_shapes,
    verify_shapes,
)
from kscl.runtime.machine import usable_cores

_DESCRIPTION = """\
Draw a data set of textured shapes: unlabeled pictures to pretrain on (unlabeled/), class folders
for the linear probe (classes/train, classes/val) and crowded scenes for detection, in the layout of
PASCAL VOC (VOCdevkit/VOC2007), as COCO files with masks (coco/) and, for the segmentation probe,
each with a mask of class numbers (segmentation/trainval, segmentation/test). The same settings give
the same bytes on every machine, whatever the number of workers. A folder that already holds the set
is left as it is; any other is refused.
"""

_EXAMPLES = """\
  the default set, in about half a minute:
    kscl shapes --output-dir datasets/shapes
  five classes that differ in both form and texture, small enough for a smoke test:
    kscl shapes --output-dir datasets/tiny --num-classes 5 --unlabeled 100 \\
        --train 50 --val 50 --detection-train 16 --detection-test 8
  larger pictures, another seed, and one picture of it all:
    kscl shapes --output-dir datasets/large --seed 1 --image-size 224 \\
        --detection-size 320 --contact-sheet large.png

classes, in the order --num-classes takes them:
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Draw the set unless the folder holds it."""
    arguments = _parser().parse_args(argv)
    names = [each.name for each in fields(ShapesSettings)]
    settings = ShapesSettings(**{name: getattr(arguments, name) for name in names})
    output = arguments.output_dir
    found = find_shapes(output, settings)
    if found:
        print(f"{output} already holds this data set: nothing to do.")
    else:
        start = time.monotonic()
        found = make_shapes(output, settings, arguments.workers)
        print(f"Drew {found['files']} files into {output} in {time.monotonic() - start:.1f} s.")
    print(f"SHA-256 of all files: {found['sha256']}")
    if arguments.verify:
        verify_shapes(output)
        print("Every file is as the manifest says.")
    if arguments.contact_sheet:
        draw_contact_sheet(output, arguments.contact_sheet)
        print(f"Contact sheet: {arguments.contact_sheet}")
    return 0


def _parser() -> argparse.ArgumentParser:
    rounds = [CLASS_NAMES[start : start + 5] for start in range(0, len(CLASS_NAMES), 5)]
    table = ("  " + "".join(f"{name:20}" for name in names).rstrip() for names in rounds)
    parser = cli.parser(_DESCRIPTION, _EXAMPLES + "\n".join(table))
    add = parser.add_argument
    default, about = Path("datasets/shapes"), "folder to write (%(default)s)"
    add("--output-dir", type=Path, default=default, metavar="DIR", help=about)
    for each in fields(ShapesSettings):
        option, about = each.name.replace("_", "-"), f"{each.metadata['about']} (%(default)s)"
        add(f"--{option}", type=int, default=each.default, metavar="N", help=about)
    add("--workers", type=int, default=usable_cores(), metavar="N", help="processes (all cores)")
    about = "also draw one picture of the whole set"
    add("--contact-sheet", type=Path, metavar="PNG", help=about)
    cli.add_flag(parser, "--verify", "read every file again and compare with the manifest")
    return parser
