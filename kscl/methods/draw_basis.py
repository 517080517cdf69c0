"""Draw the basis images of one instance, as the paper's "cat" figure does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from kscl.errors import KsclError
from kscl.methods.basis_images import BasisImages


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
