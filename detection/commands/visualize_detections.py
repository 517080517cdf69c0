"""Draw a run's detections beside the annotations, with the AP and curve of every class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from detection import MIN_SCORE
from detection.scoring import BOX_SCORERS
from detection.scoring.pictures import draw_sheet
from kscl import cli
from kscl.errors import KsclError

EXAMPLES = """  kscl visualize detections output/kscl/detection
  kscl visualize detections output/kscl/detection --images 8 --min-score 0.7
  kscl visualize detections output/kscl/detection --dataset voc:data/mine:test
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("run", type=Path, help="a folder of kscl train-net, with detections.npz")
    parser.add_argument("--output", type=Path, help="a PNG (default: detections.png in the run)")
    parser.add_argument("--images", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument(
        "--min-score", type=float, default=MIN_SCORE, help="boxes to draw (default: %(default)s)"
    )
    about = "scorer of the AP that is shown (default: %(default)s)"
    first = next(iter(BOX_SCORERS))
    parser.add_argument("--scorer", choices=tuple(BOX_SCORERS), default=first, help=about)
    parser.add_argument(
        "--dataset", help="where the images are, if not where the run's config says"
    )
    arguments = parser.parse_args(argv)
    if arguments.images < 1 or not 0 <= arguments.min_score <= 1:
        raise KsclError("--images must be at least 1, and --min-score between 0 and 1.")
    output = arguments.output or arguments.run / "detections.png"
    draw_sheet(
        arguments.run,
        output,
        arguments.images,
        arguments.min_score,
        arguments.scorer,
        arguments.dataset,
    )
    print(f"Drawn: {output}")
    return 0
