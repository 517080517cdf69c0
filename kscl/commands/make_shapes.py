"""The command that draws the data set."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from tqdm import tqdm

from kscl import cli
from kscl.datasets.shapes.classes import CLASS_NAMES
from kscl.datasets.shapes.settings import ShapesSettings
from kscl.datasets.shapes.writing.contact_sheet import draw_contact_sheet
from kscl.datasets.shapes.writing.writer import Written, find_shapes, make_shapes, verify_shapes
from kscl.runtime.machine import usable_cores

_DESCRIPTION = """\
Draw a data set of textured shapes: unlabeled pictures to pretrain on (unlabeled/), class folders
for the linear probe (classes/train, classes/val) and crowded scenes for detection, in the layout of
PASCAL VOC (VOCdevkit/VOC2007) and as COCO files with masks (coco/). The same settings give the same
bytes on every machine, whatever the number of workers. A folder that already holds the set is left
as it is; any other is refused.
"""

_EXAMPLES = """\
  the default set, in about half a minute:
    python tools/make_shapes.py --output-dir datasets/shapes
  five classes that differ in both form and texture, small enough for a smoke test:
    python tools/make_shapes.py --output-dir datasets/tiny --num-classes 5 --unlabeled 100 \\
        --train 50 --val 50 --detection-train 16 --detection-test 8
  larger pictures, another seed, and one picture of it all:
    python tools/make_shapes.py --output-dir datasets/large --seed 1 --image-size 224 \\
        --detection-size 320 --contact-sheet large.png

classes, in the order --num-classes takes them:
"""

_HELP = {
    "seed": "seed: each of 2^32 gives another data set",
    "num_classes": "the first N of the classes below",
    "unlabeled": "pictures to pretrain on",
    "train": "labeled pictures to train the probe on, all classes together",
    "val": "labeled pictures to score it on",
    "detection_train": "scenes in VOC's trainval; every fourth is val, the others train",
    "detection_test": "scenes in VOC's test",
    "image_size": "side of the unlabeled and labeled pictures, in pixels",
    "detection_size": "shorter side of the scenes, in pixels",
    "min_objects": "fewest objects in a scene",
    "max_objects": "most objects in a scene",
}


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Draw the set unless the folder holds it."""
    _run(_parser().parse_args(argv))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.parser(_DESCRIPTION, _EXAMPLES + _class_table())
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("datasets/shapes"),
        metavar="DIR",
        help="folder to write (%(default)s)",
    )
    for field in fields(ShapesSettings):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=int,
            default=field.default,
            metavar="N",
            help=f"{_HELP[field.name]} (%(default)s)",
        )
    parser.add_argument(
        "--workers", type=int, default=usable_cores(), metavar="N", help="processes (all cores)"
    )
    parser.add_argument(
        "--contact-sheet", type=Path, metavar="PNG", help="also draw one picture of the whole set"
    )
    cli.add_flag(parser, "--verify", "read every file again and compare with the manifest")
    return parser


def _class_table() -> str:
    rounds = [CLASS_NAMES[start : start + 5] for start in range(0, len(CLASS_NAMES), 5)]
    return "\n".join("  " + "".join(f"{name:20}" for name in names).rstrip() for names in rounds)


def _run(arguments: argparse.Namespace) -> None:
    settings = ShapesSettings(
        **{field.name: getattr(arguments, field.name) for field in fields(ShapesSettings)}
    )
    output = arguments.output_dir
    found = find_shapes(output, settings)
    if found:
        print(f"{output} already holds this data set: nothing to do.")
    else:
        start = time.monotonic()
        found = make_shapes(output, settings, arguments.workers, _watch)
        print(f"Drew {found['files']} files into {output} in {time.monotonic() - start:.1f} s.")
    print(f"SHA-256 of all files: {found['sha256']}")
    if arguments.verify:
        verify_shapes(output)
        print("Every file is as the manifest says.")
    if arguments.contact_sheet:
        draw_contact_sheet(output, arguments.contact_sheet)
        print(f"Contact sheet: {arguments.contact_sheet}")


def _watch(results: Iterator[Written], total: int) -> Iterable[Written]:
    """Show a progress bar on a terminal, and elsewhere a line at every tenth of the way."""
    if sys.stderr.isatty():
        yield from tqdm(results, total=total, unit=" pictures", desc="drawing")
        return
    start, step = time.monotonic(), max(total // 10, 1)
    for done, written in enumerate(results, start=1):
        if done % step == 0 or done == total:
            rate = done / (time.monotonic() - start)
            print(f"Drew {done} of {total} pictures, {rate:.0f}/s", file=sys.stderr, flush=True)
        yield written
