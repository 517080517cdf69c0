"""Draw the basis images of one picture's views."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl import cli
from kscl.backbone_file import read_plain
from kscl.config.defaults import pretrain_defaults
from kscl.config.merge import load_config
from kscl.config.tree import config_yaml
from kscl.data.decode import decode_image
from kscl.data.formats import UnreadableImage
from kscl.engine.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
from kscl.errors import KsclError
from kscl.method.basis_images import BasisImages, basis_images
from kscl.method.batch_norm import calibrate_batch_norm
from kscl.method.build import encoder_of
from kscl.method.encoder import Encoder
from kscl.method.subspace import max_rank
from kscl.rng import VIEWS, uniforms
from kscl.views.augment import make_views, numbers_needed
from kscl.views.normalize import normalise
from kscl.views.recipes import with_defaults

CALIBRATION_VIEWS = 16  # of the picture, for the BatchNorm statistics of random weights
EXAMPLES = """\
  python tools/visualize_basis.py --image cat.jpg --checkpoint output/pretrain/checkpoints/C.pt
  python tools/visualize_basis.py --image cat.jpg --checkpoint C.pt METHOD.RHO 0.9 INPUT.SIZE 160
  python tools/visualize_basis.py --image cat.jpg --random-weights --output a.png --output a.pdf
"""


def draw(views: Tensor, basis: BasisImages, outputs: Sequence[Path], rho: float) -> None:
    """A row an eigenvector: the views (K, 3, H, W), in [0, 1], with their weights; its image."""
    from matplotlib.figure import Figure  # a second to import, and only needed here
    from matplotlib.patches import Rectangle

    ink, faint, positive, negative, band = "#1d2733", "#7d8893", "#1f6fb4", "#c2452d", "#eef4fa"
    rows, columns = len(basis.weights), len(views)
    cell, left, gap, top = 1.25, 1.62, 0.34, 1.15  # inches, as all measures below
    across, down = cell + 0.12, cell + 0.42
    last = left + columns * across + gap
    width, height = last + cell + 0.25, top + rows * down
    heaviest = float(basis.weights.abs().max().clamp_min(1e-9))
    figure = Figure(figsize=(width, height), facecolor="white")

    def text(x: float, y: float, words: str, **style: Any) -> None:
        figure.text(x / width, 1 - y / height, words, **{"color": ink, "fontsize": 9, **style})

    def picture(x: float, y: float, image: Tensor, frame: str, line: float, alpha: float) -> None:
        box = (x / width, 1 - (y + cell) / height, cell / width, cell / height)
        axes = figure.add_axes(box, xticks=[], yticks=[])
        axes.imshow(image.permute(1, 2, 0).clamp(0, 1).numpy(), alpha=alpha)
        for spine in axes.spines.values():
            spine.set(color=frame, linewidth=line)

    mass = float(basis.share[: basis.kept].sum())
    kept = f"{basis.kept} of {rows} eigenvectors {'is' if basis.kept == 1 else 'are'} kept"
    text(0.25, 0.36, "Basis images of one instance", fontsize=13, fontweight="bold")
    text(
        0.25, 0.62, f"K = {columns} views, ρ = {rho:g}: {kept}, {mass:.1%} of the mass", color=faint
    )
    for column in range(columns):
        text(left + column * across + cell / 2, top - 0.17, f"view {column + 1}", ha="center")
    text(last + cell / 2, top - 0.17, "basis image", ha="center", fontweight="bold")
    if basis.kept:
        size = (1 - 0.2 / width, basis.kept * down / height)
        corner = (0.1 / width, 1 - (top - 0.09 + basis.kept * down) / height)
        figure.add_artist(Rectangle(corner, *size, color=band, zorder=-1))
    for row, weights in enumerate(basis.weights):
        y, is_kept = top + row * down, row < basis.kept
        alpha, tone = (1.0, ink) if is_kept else (0.5, faint)
        text(0.25, y + 0.45, f"$w_{{{row + 1}}}$", fontsize=15, color=tone)
        text(0.25, y + 0.72, f"{basis.share[row]:.1%} of the mass", color=tone)
        if is_kept:
            text(0.25, y + 0.95, "kept", color=positive, fontweight="bold")
        else:
            text(0.25, y + 0.95, "dropped", color=faint)
        for column, weight in enumerate(weights.tolist()):
            words, x = in_words(weight), left + column * across
            colour = {"+": positive, "−": negative}.get(words[0], faint)
            picture(x, y, views[column], colour, 0.5 + 2.5 * abs(weight) / heaviest, alpha)
            text(x + cell / 2, y + cell + 0.2, words, fontsize=10, ha="center", color=colour)
        text(last - gap / 2 - 0.06, y + cell / 2 + 0.05, "=", ha="center", fontsize=14, color=tone)
        picture(last, y, to_display(basis.images[row], weights), tone, 0.8, max(alpha, 0.8))
    for output in outputs:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(output, dpi=160)
        except OSError as error:
            raise KsclError(f"{output} cannot be written: {error.strerror}") from error


def in_words(weight: float) -> str:
    """With its sign, unless it is 0 but for rounding."""
    words = f"{weight:+.2f}".replace("-", "−")
    return words if words.strip("+−0.") else "0.00"


def to_display(image: Tensor, weights: Tensor) -> Tensor:
    """Into [0, 1]: a mean of views as it is, a difference of views around mid-grey."""
    if bool((weights >= 0).all()) and bool(weights.any()):
        return image / weights.sum()
    return 0.5 + 0.5 * image / image.abs().max().clamp_min(1e-9)


def views_of(path: Path, cfg: CfgNode, num_shots: int, seed: int) -> Tensor:
    """K views of an image as pretraining makes them, uint8 (K, 3, size, size)."""
    try:
        picture = decode_image(path.read_bytes())
    except OSError as error:
        raise KsclError(f"{path} cannot be read: {error.strerror}") from error
    except UnreadableImage as error:
        raise KsclError(f"{path} is no image that can be read: {error}") from error
    ops, size = with_defaults(cfg.AUGMENT), cfg.INPUT.SIZE
    views = np.empty((num_shots, 3, size, size), np.uint8)
    numbers = uniforms(seed, 0, VIEWS, 0, numbers_needed(ops, num_shots))
    make_views(picture, ops, size, numbers, views)
    return torch.from_numpy(views)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], CfgNode]:
    """The learner's tensors, and the config of its run over the defaults of this release.

    Of a folder, that of a run or of its checkpoints, the newest.
    """
    if path.is_dir():
        found = find_checkpoints(path) or find_checkpoints(path / CHECKPOINT_FOLDER)
        if not found:
            raise KsclError(f"{path} holds no checkpoint of tools/pretrain.py")
        path = found[0]
    content = read_plain(path)
    if not {"learner", "config"} <= set(content):
        raise KsclError(f"{path} is no checkpoint of tools/pretrain.py: no learner, or no config")
    cfg = pretrain_defaults()
    cfg.merge_from_other_cfg(CfgNode(content["config"]))
    return content["learner"], cfg


def key_encoder(cfg: CfgNode, state: dict[str, Tensor] | None) -> Encoder:
    """The encoder that made the keys, in eval mode; with random weights where there is no state."""
    encoder = encoder_of(cfg).eval()
    if state is not None:
        prefix = (
            "key_encoder." if any(key.startswith("key_encoder.") for key in state) else "encoder."
        )
        own = {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
        try:
            encoder.load_state_dict(own)
        except RuntimeError as error:
            raise KsclError(f"the checkpoint does not fit the config: {error}") from error
    return encoder


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser("Draw the basis images of one picture's views.", EXAMPLES)
    cli.add_config_arguments(parser)
    weights = parser.add_mutually_exclusive_group(required=True)
    weights.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="of tools/pretrain.py, or the folder of a run; its config stands in for the defaults",
    )
    weights.add_argument("--random-weights", action="store_true", help="an untrained encoder")
    parser.add_argument("--image", type=Path, required=True, metavar="FILE")
    parser.add_argument("--num-shots", type=int, metavar="K", help="views (default: the config's)")
    parser.add_argument("--rho", type=float, help="mass to keep (default: the config's)")
    parser.add_argument("--seed", type=int, default=0, help="of the views (default: %(default)s)")
    parser.add_argument(
        "--output",
        type=cli.picture_path,
        action="append",
        metavar="FILE",
        help="ends in png, svg or pdf; may be given several times (default: basis.png)",
    )
    arguments = parser.parse_args(argv)
    outputs = arguments.output or [Path("basis.png")]
    state, start = None, pretrain_defaults()
    if arguments.checkpoint:
        state, start = read_checkpoint(arguments.checkpoint)
    cfg = load_config(arguments.config_file, arguments.overrides, lambda: start)
    if arguments.print_config:
        print(config_yaml(cfg))
        return 0
    num_shots = cfg.METHOD.NUM_SHOTS if arguments.num_shots is None else arguments.num_shots
    rho = cfg.METHOD.RHO if arguments.rho is None else arguments.rho
    max_rank(num_shots, rho)
    torch.manual_seed(arguments.seed)
    encoder = key_encoder(cfg, state)
    views = views_of(arguments.image, cfg, num_shots, arguments.seed)  # (K, 3, H, W)
    mean, std = cfg.INPUT.MEAN, cfg.INPUT.STD
    if state is None:
        more = views_of(arguments.image, cfg, CALIBRATION_VIEWS, arguments.seed + 1)
        calibrate_batch_norm(encoder, normalise(more, mean, std)[:, None])
    with torch.no_grad():
        keys = encoder(normalise(views, mean, std))  # (K, D)
    basis = basis_images(views / 255, keys, rho)
    draw(views / 255, basis, outputs, rho)
    mass, drawn = float(basis.share[: basis.kept].sum()), ", ".join(map(str, outputs))
    print(f"{basis.kept} of {num_shots} eigenvectors hold {mass:.1%} of the mass; drawn to {drawn}")
    return 0
