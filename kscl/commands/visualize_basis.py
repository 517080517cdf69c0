"""Draw what the subspace of an image holds: its views, the basis images and their weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.keys import PRETRAIN

EXAMPLES = """\
  kscl visualize basis --image cat.jpg --checkpoint output/pretrain/checkpoints/C.pt
  kscl visualize basis --image cat.jpg --checkpoint C.pt METHOD.RHO 0.9 INPUT.SIZE 160
  kscl visualize basis --image cat.jpg --random-weights --output a.png --output a.pdf
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = cli.parser("Draw the basis images of one picture's views.", EXAMPLES)
    cli.add_config_arguments(parser)
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="a checkpoint of kscl pretrain, or the folder of a run; its config replaces the "
        "defaults",
    )
    cli.add_flag(weights, "--random-weights", "use an untrained encoder")
    parser.add_argument("--image", type=Path, required=True, metavar="FILE", help="the image")
    about = "number of views (default: the config's)"
    parser.add_argument("--num-shots", type=int, metavar="K", help=about)
    parser.add_argument("--rho", type=float, help="eigenvalue mass to keep (default: the config's)")
    about = "seed of the views (default: %(default)s)"
    parser.add_argument("--seed", type=int, default=0, help=about)
    about = "file to draw to (png, svg or pdf); may be given several times (default: basis.png)"
    parser.add_argument(
        "--output", type=cli.picture_path, action="append", metavar="FILE", help=about
    )
    arguments = parser.parse_args(argv)

    from kscl.engine.basis import draw_basis_of, read_checkpoint

    outputs = arguments.output or [Path("basis.png")]
    state, start = None, PRETRAIN.defaults()
    if arguments.checkpoint:
        state, start = read_checkpoint(arguments.checkpoint)
    schema = dataclasses.replace(PRETRAIN, make=lambda: start)
    cfg = schema.load(arguments.config_file, arguments.overrides)
    if arguments.print_config:
        print(PRETRAIN.print(cfg), end="")
        return 0
    num_shots = cfg.METHOD.NUM_SHOTS if arguments.num_shots is None else arguments.num_shots
    rho = cfg.METHOD.RHO if arguments.rho is None else arguments.rho
    basis = draw_basis_of(arguments.image, cfg, state, num_shots, rho, arguments.seed, outputs)
    mass, drawn = float(basis.fractions[: basis.kept].sum()), ", ".join(map(str, outputs))
    print(
        f"{basis.kept} of {num_shots} eigenvectors hold {mass:.1%} of the mass; drawn to {drawn}."
    )
    return 0
