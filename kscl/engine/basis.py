"""Basis images, the paper's "cat" figure: what each eigenvector of an instance's views looks like.

For eigenvector w_i of Σ_n and key views x^k with embeddings v^k the weights are w_iᵀ v^k, and the
basis image is Σ_k (w_iᵀ v^k) x^k: the combination of views in pixels that w_i is in the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.backbone_file import read_plain
from kscl.data.formats import UnreadableImage, decode_image
from kscl.errors import KsclError
from kscl.keys import PRETRAIN
from kscl.methods.base import encoder_of
from kscl.methods.batch_norm import calibrate_batch_norm
from kscl.methods.encoder import Encoder
from kscl.methods.kernels import full_precision
from kscl.methods.keys import recipe_of_others
from kscl.methods.subspace import eigenpairs, kept_rank, max_rank
from kscl.rng import Stream, uniforms
from kscl.run.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
from kscl.views.augment import draws_per_view, make_views, resolve
from kscl.views.normalize import normalize
from kscl.views.sizes import last_size

CALIBRATION_VIEWS = 16  # of the picture, for the BatchNorm statistics of random weights


class BasisImages(NamedTuple):
    """The eigenvectors of one instance, by descending eigenvalue."""

    weights: Tensor  # (K, K) row i: w_iᵀ v^k for k = 1..K
    images: Tensor  # (K, 3, H, W) Σ_k weights[i, k] x^k
    fractions: Tensor  # (K,) of the eigenvalue mass
    kept: int  # L_n, the number of them that the subspace keeps


def basis_images(views: Tensor, keys: Tensor, rho: float) -> BasisImages:
    """Return the basis images of K views (K, 3, H, W) with unit embeddings (K, D)."""
    with full_precision(keys.detach(), views) as (keys, views):
        eigenvalues, vectors = eigenpairs(keys @ keys.T)  # (K,), (K, K)
    weights = (vectors * eigenvalues.sqrt()).T  # (K, K): w_iᵀ v^k = √λ_i u_i[k]
    # The sign of an eigenvector means nothing; this one makes a mean of views look like them.
    weights = weights * torch.where(weights.sum(1, keepdim=True) < 0, -1, 1)
    images = torch.einsum("ik,kchw->ichw", weights, views)
    fractions = eigenvalues / eigenvalues.sum().clamp_min(torch.finfo(eigenvalues.dtype).tiny)
    return BasisImages(weights, images, fractions, int(kept_rank(eigenvalues[None], rho)))


def draw_basis_of(
    image: Path,
    cfg: CfgNode,
    state: dict[str, Tensor] | None,
    num_shots: int,
    rho: float,
    seed: int,
    outputs: Sequence[Path],
) -> BasisImages:
    """Draw the basis images of K views of an image to every output; return them."""
    max_rank(num_shots, rho)  # raises an error before any work
    torch.manual_seed(seed)
    encoder = key_encoder(cfg, state)
    views = views_of(image, cfg, num_shots, seed)  # (K, 3, H, W)
    mean, std = cfg.INPUT.MEAN, cfg.INPUT.STD
    if state is None:
        more = views_of(image, cfg, CALIBRATION_VIEWS, seed + 1)
        calibrate_batch_norm(encoder, [normalize(more, mean, std)])
    with torch.no_grad():
        keys = encoder(normalize(views, mean, std))  # (K, D)
    basis = basis_images(views / 255, keys, rho)
    draw(views / 255, basis, outputs, rho)
    return basis


def views_of(path: Path, cfg: CfgNode, num_shots: int, seed: int) -> Tensor:
    """Return K views of an image as pretraining makes them, uint8 (K, 3, size, size)."""
    try:
        picture = decode_image(path.read_bytes())
    except OSError as error:
        raise KsclError(f"{path} cannot be read ({error.strerror}): correct --image.") from error
    except UnreadableImage as error:
        raise KsclError(
            f"{path} is not an image that can be read ({error}): choose another --image."
        ) from error
    ops, size = resolve(recipe_of_others(cfg)), last_size(cfg.INPUT.SIZE)
    views = np.empty((num_shots, 3, size, size), np.uint8)
    numbers = uniforms(seed, 0, Stream.VIEWS, 0, num_shots * draws_per_view(ops))
    make_views(picture, ops, size, numbers, views)
    return torch.from_numpy(views)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], CfgNode]:
    """Return the learner's tensors, and the config of its run over the defaults of this release.

    Given a folder (of a run, or of its checkpoints), read the newest checkpoint.
    """
    if path.is_dir():
        found = find_checkpoints(path) or find_checkpoints(path / CHECKPOINT_FOLDER)
        if not found:
            raise KsclError(
                f"{path} holds no checkpoint of kscl pretrain: name the folder of a run."
            )
        path = found[0]
    content = read_plain(path)
    if not {"learner", "config"} <= set(content):
        raise KsclError(
            f"{path} is not a checkpoint of kscl pretrain, which has a learner and a config: "
            "name one of those in the folder checkpoints of a run."
        )
    name = content["config"]["METHOD"].get("NAME", "kscl")
    if name != "kscl":
        raise KsclError(f"{path} was trained by {name}. Only KSCL has subspaces: name another run.")
    cfg = PRETRAIN.defaults()
    cfg.merge_from_other_cfg(CfgNode(content["config"]))
    return content["learner"], cfg


def key_encoder(cfg: CfgNode, state: dict[str, Tensor] | None) -> Encoder:
    """Return the encoder that made the keys, in eval mode; with random weights without a state."""
    encoder = encoder_of(cfg).eval()
    if state is not None:
        has_own = any(key.startswith("key_encoder.") for key in state)
        prefix = "key_encoder." if has_own else "encoder."
        own = {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
        try:
            encoder.load_state_dict(own)
        except RuntimeError as error:
            raise KsclError(
                f"The checkpoint does not fit the config ({error}): leave BACKBONE and PROJECTOR "
                "as they are in it."
            ) from error
    return encoder


def draw(views: Tensor, basis: BasisImages, outputs: Sequence[Path], rho: float) -> None:
    """Draw one row per eigenvector: the views (K, 3, H, W) in [0, 1], their weights, its image."""
    from matplotlib.figure import Figure  # takes a second to import, and only this needs it
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

    mass = float(basis.fractions[: basis.kept].sum())
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
        text(0.25, y + 0.72, f"{basis.fractions[row]:.1%} of the mass", color=tone)
        if is_kept:
            text(0.25, y + 0.95, "kept", color=positive, fontweight="bold")
        else:
            text(0.25, y + 0.95, "dropped", color=faint)
        for column, weight in enumerate(weights.tolist()):
            words, x = in_words(weight), left + column * across
            color = {"+": positive, "−": negative}.get(words[0], faint)
            picture(x, y, views[column], color, 0.5 + 2.5 * abs(weight) / heaviest, alpha)
            text(x + cell / 2, y + cell + 0.2, words, fontsize=10, ha="center", color=color)
        text(last - gap / 2 - 0.06, y + cell / 2 + 0.05, "=", ha="center", fontsize=14, color=tone)
        picture(last, y, to_display(basis.images[row], weights), tone, 0.8, max(alpha, 0.8))
    for output in outputs:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(output, dpi=160)
        except OSError as error:
            raise KsclError(
                f"{output} cannot be written ({error.strerror}): choose another --output."
            ) from error


def in_words(weight: float) -> str:
    """Return a weight with its sign, unless it is 0 but for rounding."""
    words = f"{weight:+.2f}".replace("-", "−")
    return words if words.strip("+−0.") else "0.00"


def to_display(image: Tensor, weights: Tensor) -> Tensor:
    """Map an image into [0, 1]: a mean of views as it is, a difference of views around mid-gray."""
    if bool((weights >= 0).all()) and bool(weights.any()):
        return image / weights.sum()
    return 0.5 + 0.5 * image / image.abs().max().clamp_min(1e-9)
