"""Draw what was found: on one picture, or a run beside its annotations with AP and curves."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from PIL import Image, ImageDraw, ImageFont, ImageOps

from detection.errors import DetectionError
from detection.scoring import score
from detection.scoring.boxes import (
    Array,
    Detections,
    GroundTruth,
    fitted,
    read_detections,
    read_ground_truth,
)
from detection.scoring.voc07 import best_overlaps
from kscl.data.annotations import AnnotatedImage, parse_source, read_source

if TYPE_CHECKING:
    from detection.predict import Found

COLUMNS = 4  # images side by side in the sheet
DOTS_PER_INCH = 130
HIT = 0.5  # IoU above which a box counts as right in the pictures and in the curves
LIGHT = 0.6  # luminance above which white text cannot be read
COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")
GAP = 1.0  # pixels between two labels
ROUNDING = 1e-6  # pixels


def draw_sheet(
    run: Path, output: Path, count: int, min_score: float, scorer: str, dataset: str | None = None
) -> None:
    """Draw images spread evenly over the set, so that the same run gives the same picture."""
    detections = read_detections(run / "detections.npz")
    truth = read_ground_truth(run / "ground_truth.npz")
    result = score(detections, truth, [scorer])[scorer]
    images = {image.id: image for image in _images(run, dataset, truth.class_names)}
    indices = np.linspace(0, len(truth.image_ids) - 1, min(count, len(truth.image_ids))).astype(int)
    chosen = [truth.image_ids[index] for index in dict.fromkeys(indices.tolist())]
    missing = [name for name in chosen if name not in images]
    if missing:
        raise DetectionError(
            f"Image {missing[0]} of the run is not in the data set. Name the set that it was "
            "evaluated on with --dataset."
        )
    detections = fitted(detections, truth)
    _plot([images[name] for name in chosen], detections, truth, result, min_score, scorer, output)


def _images(run: Path, dataset: str | None, classes: tuple[str, ...]) -> list[AnnotatedImage]:
    if dataset is None:
        try:
            config = yaml.safe_load((run / "config.yaml").read_text())
            (dataset,) = config["DATASETS"]["TEST"]
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise DetectionError(
                f"{run}/config.yaml does not say what the run was evaluated on ({error}). Name the "
                "set with --dataset."
            ) from error
    return read_source(parse_source(str(dataset)), classes).checked().images


def _plot(
    images: list[AnnotatedImage],
    detections: Detections,
    truth: GroundTruth,
    result: dict[str, Any],
    min_score: float,
    scorer: str,
    output: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = -(-len(images) // COLUMNS)
    colors = _colors(len(truth.class_names))
    wrong = best_overlaps(detections, truth)[0] <= HIT
    shown = detections.scores >= min_score
    titles = (
        "annotated (dashed: difficult)" if truth.difficult.any() else "annotated",
        f"found, score ≥ {min_score:g} (dashed: no such object)",
    )
    figure = plt.figure(figsize=(3.2 * COLUMNS, 5.2 * rows + 3.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[5.2 * rows, 3.6])
    grid = top.add_gridspec(rows * 2, COLUMNS)
    for number, image in enumerate(images):
        row, column = divmod(number, COLUMNS)
        assert image.path is not None
        for below, title in enumerate(titles):
            axes = top.add_subplot(grid[row * 2 + below, column])
            with Image.open(image.path) as picture:
                axes.imshow(ImageOps.exif_transpose(picture).convert("RGB"))
            axes.set_title(title if below else f"{image.id}\n{title}", fontsize=7)
            axes.axis("off")
            if below:
                _draw_boxes(axes, detections, image.id, shown, wrong, colors)
            else:
                _draw_boxes(axes, truth, image.id, None, truth.difficult, colors)
    left, right = bottom.subplots(1, 2)
    _draw_bars(left, result, scorer)
    _draw_curves(right, result, truth.class_names, colors)
    figure.draw_without_rendering()  # places the axes, and so gives the labels their sizes
    for axes in top.axes:
        _spread_labels(axes)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DOTS_PER_INCH)
    plt.close(figure)


def _colors(count: int) -> Array:
    """Return one color per class, as different as their number allows: (count, 4)."""
    from matplotlib import colormaps

    if count > 20:
        return colormaps["turbo"](np.linspace(0, 1, count))
    return colormaps["tab10" if count <= 10 else "tab20"](np.arange(count))


def _draw_boxes(
    axes: Any,
    table: Detections | GroundTruth,
    image: str,
    shown: Array | None,  # (N,) bool; None for all
    dashed: Array,  # (N,) bool
    colors: Array,
) -> None:
    from matplotlib.patches import Rectangle

    for row in np.flatnonzero(table.image == table.image_ids.index(image)):
        if shown is not None and not shown[row]:
            continue
        label = table.class_names[table.category[row]]
        if isinstance(table, Detections):
            label += f" {table.scores[row]:.2f}"
        x1, y1, x2, y2 = table.boxes[row]
        color = colors[table.category[row]]
        style = "--" if dashed[row] else "-"
        box = Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, ec=color, lw=1.3, ls=style)
        axes.add_patch(box)
        luminance = float(color[:3] @ (0.299, 0.587, 0.114))
        axes.text(
            x1, y1, label, fontsize=5, va="top", color="black" if luminance > LIGHT else "white",
            bbox={"facecolor": color, "edgecolor": "none", "pad": 0.5},
            clip_on=True, in_layout=False,
        )  # fmt: skip


def _spread_labels(axes: Any) -> None:
    """Shift the labels of one image so that all can be read."""
    patches = [text.get_bbox_patch() for text in axes.texts]
    if not patches:
        return
    here = np.array([patch.get_window_extent().extents for patch in patches])
    places = spread(here, axes.bbox.extents)
    to_pixels = axes.transData
    for text, moved in zip(axes.texts, places - here, strict=True):
        corner = to_pixels.transform(text.get_position()) + moved[:2]
        text.set_position(to_pixels.inverted().transform(corner))


def _draw_bars(axes: Any, result: dict[str, Any], scorer: str) -> None:
    ranked = sorted(result["per_class"].items(), key=lambda item: item[1]["AP50"])
    names = [f"{name} ({row['objects']})" for name, row in ranked]
    bars = axes.barh(names, [row["AP50"] for _, row in ranked], color="#c9d8f5", label="AP50")
    axes.barh(names, [row["AP"] for _, row in ranked], color="#2f5fd0", height=0.45, label="AP")
    numbers = [f"{row['AP']:.1f} / {row['AP50']:.1f}" for _, row in ranked]
    axes.bar_label(bars, numbers, fontsize=6, padding=3)
    axes.set_xlim(0, 112)  # room for the numbers behind a bar of 100
    axes.set_xticks(range(0, 101, 20))
    axes.set_title(
        f"{scorer}: AP {result['AP']:.1f}, AP50 {result['AP50']:.1f}, AP75 {result['AP75']:.1f}",
        fontsize=9,
    )
    axes.set_xlabel("AP / AP50 of each class, with its number of objects", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curves(
    axes: Any, result: dict[str, Any], classes: tuple[str, ...], colors: Array
) -> None:
    for name, curves in result["curves"]["precision"].items():
        color = colors[classes.index(name)]
        axes.plot(
            result["curves"]["recall"], curves["AP50"],
            color=color, lw=1.6, label=name, clip_on=False,
        )  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_xlabel("recall", fontsize=8)
    axes.set_ylabel("precision", fontsize=8)
    axes.set_title(f"precision and recall at IoU {HIT:g}", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, ncols=2 if len(classes) > 8 else 1)
    axes.spines[["top", "right"]].set_visible(False)


def draw_found(picture: np.ndarray, found: Iterable[Found], output: Path) -> None:
    """Write the picture with a labeled box per object; a class has the same color everywhere."""
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image)
    line = max(1, round(max(image.size) / 400))
    font = ImageFont.load_default(size=max(10, max(image.size) // 50))
    ordered = sorted(found, key=lambda thing: -thing.score)  # the surest get the nearest places
    colors = [COLORS[zlib.crc32(thing.name.encode()) % len(COLORS)] for thing in ordered]
    texts = [f"{thing.name} {thing.score:.2f}" for thing in ordered]
    wanted = np.zeros((len(texts), 4))
    for row, thing, text in zip(wanted, ordered, texts, strict=True):
        x, y = np.floor(thing.box[:2])
        right, bottom = draw.textbbox((0, 0), text, font=font)[2:]
        height = bottom + 2 * line
        row[:] = (x, y - height, x + right + 2 * line, y)
    for thing, color in zip(ordered, colors, strict=True):
        draw.rectangle(thing.box, outline=color, width=line)
    places = np.round(spread(wanted, (0, 0, *image.size)))  # the labels above all boxes
    for label, color, text in zip(places, colors, texts, strict=True):
        x1, y1, x2, y2 = label.tolist()
        draw.rectangle((x1, y1, x2 - 1, y2 - 1), fill=color)
        draw.text((x1 + line, y1 + line), text, fill="white", font=font)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        image.save(output)
    except OSError as error:
        raise DetectionError(f"{output} cannot be written: {error}. Choose another.") from error


def spread(labels: np.ndarray, canvas: Sequence[float]) -> np.ndarray:
    """Shift labels (N, 4), each as little as it can be, until none covers another.

    Earlier ones choose first. All stay on the canvas (x1, y1, x2, y2); one for which no room is
    left covers others.
    """
    low, end = np.reshape(canvas, (2, 2)).astype(float)
    placed = np.zeros((0, 4))
    for label in labels:
        around = placed + np.array((-GAP, -GAP, GAP, GAP))
        size = label[2:] - label[:2]
        high = np.maximum(low, end - size)
        wanted = label[:2].clip(low, high)
        # The nearest free place is beside another label, unless it is the wanted one.
        columns, rows = (
            np.concatenate([[wanted[axis]], around[:, axis] - size[axis], around[:, axis + 2]])
            for axis in (0, 1)
        )
        corners = np.stack(np.meshgrid(columns, rows), -1).reshape(-1, 2)
        corners = corners[((corners >= low) & (corners <= high)).all(1)]
        corners = corners[np.argsort(np.abs(corners - wanted).sum(1), kind="stable")]
        corner = next((c for c in corners if not _covers(c, size, around)), wanted)
        placed = np.concatenate([placed, [[*corner, *(corner + size)]]])
    return placed


def _covers(corner: np.ndarray, size: np.ndarray, others: np.ndarray) -> bool:
    """Return whether a label here would cover one of the others by more than rounding."""
    begins = corner < others[:, 2:] - ROUNDING  # (N, 2)
    ends = corner + size > others[:, :2] + ROUNDING
    return bool((begins & ends).all(1).any())
