"""Draw boxes with labels: on one picture, or a run beside its annotations with AP and curves."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import yaml
from PIL import Image, ImageColor, ImageDraw, ImageFont

from detection import MIN_SCORE
from detection.scoring import score
from detection.scoring.boxes import (
    Array,
    Detections,
    GroundTruth,
    fitted,
)
from detection.scoring.voc07 import best_overlaps
from kscl.data.annotations import AnnotatedImage, parse_source, read_source
from kscl.data.formats import decode_image
from kscl.errors import KsclError
from kscl.runtime.files import write_atomically

if TYPE_CHECKING:
    from detection.predict import Found

MOSAIC_FILE = "detections.jpg"  # in the folder of a run; the leaderboard's page shows it
MOSAIC_IMAGES = 4
MOSAIC_CELL = 256  # pixels; the page stays small
MOSAIC_QUALITY = 82
TITLE = 24  # pixels above each row of a mosaic
COLUMNS = 4  # images side by side in the sheet
INCHES = 3.2  # width of one of them
DOTS_PER_INCH = 130
HIT = 0.5  # IoU above which a box counts as right in the pictures and in the curves
LIGHT = 0.6  # luminance above which white text cannot be read
COLORS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#800000")
GAP = 1.0  # pixels between two labels
DASH = 6  # its length in widths of the line
ROUNDING = 1e-6  # pixels

Item = TypeVar("Item")
Layer = tuple[Detections | GroundTruth, Array, Array]  # (N,) bool: which are drawn, which dashed


def draw_sheet(
    run: Path, output: Path, count: int, min_score: float, scorer: str, dataset: str | None = None
) -> None:
    """Draw images spread evenly over the set, so that the same run gives the same picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    detections, truth = _tables(run)
    result = score(detections, truth, [scorer])[scorer]
    images = {image.id: image for image in _images(run, dataset, truth.class_names)}
    chosen = _spread_evenly(truth.image_ids, count)
    missing = [name for name in chosen if name not in images]
    if missing:
        raise KsclError(
            f"Image {missing[0]} of the run is not in the data set. Name the set that it was "
            "evaluated on with --dataset."
        )
    layers = _layers(detections, truth, min_score)
    titles = (
        "annotated (dashed: difficult)" if truth.difficult.any() else "annotated",
        f"found, score ≥ {min_score:g} (dashed: no such object)",
    )
    rows = -(-len(chosen) // COLUMNS)
    figure = plt.figure(figsize=(INCHES * COLUMNS, 5.2 * rows + 3.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[5.2 * rows, 3.6])
    grid = top.add_gridspec(rows * 2, COLUMNS)
    for number, name in enumerate(chosen):
        row, column = divmod(number, COLUMNS)
        pictures = _with_boxes(images[name], round(INCHES * DOTS_PER_INCH), layers)
        for below, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
            axes = top.add_subplot(grid[row * 2 + below, column])
            axes.imshow(picture)
            axes.set_title(title if below else f"{name}\n{title}", fontsize=7)
            axes.axis("off")
    left, right = bottom.subplots(1, 2)
    _draw_bars(left, result, scorer)
    _draw_curves(right, result, truth.class_names)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DOTS_PER_INCH)
    plt.close(figure)


def draw_mosaic(run: Path, images: Sequence[AnnotatedImage]) -> None:
    """Draw a few test images of a run: what is annotated above, what was found below.

    They are spread evenly over those with objects, so all runs of a protocol show the same ones.
    """
    layers = _layers(*_tables(run), MIN_SCORE)
    shown = [image for image in images if image.objects] or list(images)
    chosen = _spread_evenly(shown, MOSAIC_IMAGES)
    columns = [_with_boxes(image, MOSAIC_CELL, layers) for image in chosen]
    step, height = MOSAIC_CELL + 8, max(above.height for above, _ in columns)
    sheet = Image.new("RGB", (step * len(columns) - 8, 2 * (height + TITLE)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    titles = ("annotated", f"found with a score of {MIN_SCORE:g} or more (dashed: no such object)")
    for below, title in enumerate(titles):
        top = below * (height + TITLE)
        draw.text((0, top + 3), title, fill="black", font=font)
        for number, cells in enumerate(columns):
            sheet.paste(cells[below], (step * number, top + TITLE))
    content = io.BytesIO()
    sheet.save(content, "JPEG", quality=MOSAIC_QUALITY)
    write_atomically(run / MOSAIC_FILE, content.getvalue())


def _tables(run: Path) -> tuple[Detections, GroundTruth]:
    detections = Detections.read(run / "detections.npz")
    truth = GroundTruth.read(run / "ground_truth.npz")
    return fitted(detections, truth), truth


def _spread_evenly(items: Sequence[Item], count: int) -> list[Item]:
    """Return up to `count` of the items, from the first to the last."""
    indices = np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)
    return [items[index] for index in indices]


def _images(run: Path, dataset: str | None, classes: tuple[str, ...]) -> list[AnnotatedImage]:
    if dataset is None:
        try:
            config = yaml.safe_load((run / "config.yaml").read_text())
            (dataset,) = config["DATASETS"]["TEST"]
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError) as error:
            raise KsclError(
                f"{run}/config.yaml does not say what the run was evaluated on ({error}). Name the "
                "set with --dataset."
            ) from error
    return read_source(parse_source(str(dataset)), classes).checked().images


def _layers(detections: Detections, truth: GroundTruth, min_score: float) -> tuple[Layer, Layer]:
    """Return what is annotated, difficult objects dashed, and what was found, wrong boxes dashed.

    A found box is wrong if no object of its class is there.
    """
    wrong = best_overlaps(detections, truth)[0] <= HIT
    is_sure = detections.scores >= min_score
    return (truth, np.ones(len(truth), bool), truth.difficult), (detections, is_sure, wrong)


def _with_boxes(image: AnnotatedImage, side: int, layers: Iterable[Layer]) -> list[Image.Image]:
    """Return the picture once per layer, its longer side of this length, with the layer's boxes."""
    assert image.path is not None
    picture = Image.fromarray(decode_image(image.path.read_bytes()))
    scale = side / max(picture.size)
    pictures = []
    for table, drawn, dashed in layers:
        mine = np.flatnonzero((table.image == table.image_ids.index(image.id)) & drawn)
        labels = [table.class_names[table.category[row]] for row in mine]
        if isinstance(table, Detections):
            scores = table.scores[mine]
            labels = [f"{name} {score:.2f}" for name, score in zip(labels, scores, strict=True)]
        colors = _colors(len(table.class_names))
        pictures.append(
            draw_boxes(
                picture.resize((round(picture.width * scale), round(picture.height * scale))),
                table.boxes[mine] * scale,
                labels,
                [colors[table.category[row]] for row in mine],
                dashed[mine],
            )
        )
    return pictures


def _colors(count: int) -> list[str]:
    """Return one color per class, as different as their number allows."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if count > 20:
        found = colormaps["turbo"](np.linspace(0, 1, count))
    else:
        found = colormaps["tab10" if count <= 10 else "tab20"](np.arange(count))
    return [to_hex(color) for color in found]


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


def _draw_curves(axes: Any, result: dict[str, Any], classes: tuple[str, ...]) -> None:
    colors = dict(zip(classes, _colors(len(classes)), strict=True))
    recall = result["curves"]["recall"]
    for name, curves in result["curves"]["precision"].items():
        axes.plot(recall, curves["AP50"], color=colors[name], lw=1.6, label=name, clip_on=False)
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_xlabel("recall", fontsize=8)
    axes.set_ylabel("precision", fontsize=8)
    axes.set_title(f"precision and recall at IoU {HIT:g}", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, ncols=2 if len(classes) > 8 else 1)
    axes.spines[["top", "right"]].set_visible(False)


def draw_found(picture: Array, found: Iterable[Found], output: Path) -> None:
    """Write the picture with a labeled box per object; a class has the same color everywhere."""
    ordered = sorted(found, key=lambda thing: -thing.score)  # the surest get the nearest places
    image = draw_boxes(
        Image.fromarray(picture),
        np.array([thing.box for thing in ordered]).reshape(-1, 4),
        [f"{thing.name} {thing.score:.2f}" for thing in ordered],
        [COLORS[zlib.crc32(thing.name.encode()) % len(COLORS)] for thing in ordered],
        np.zeros(len(ordered), bool),
    )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        image.save(output)
    except OSError as error:
        raise KsclError(f"{output} cannot be written: {error}. Choose another.") from error


def draw_boxes(
    image: Image.Image,
    boxes: Array,  # (N, 4)
    labels: Sequence[str],
    colors: Sequence[str],
    dashed: Array,  # (N,) bool
) -> Image.Image:
    """Draw into the image and return it; the labels lie above all boxes, none over another."""
    draw = ImageDraw.Draw(image)
    line = max(1, round(max(image.size) / 400))
    font = ImageFont.load_default(size=max(10, max(image.size) // 50))
    wanted = np.zeros((len(labels), 4))
    for row, box, label in zip(wanted, boxes, labels, strict=True):
        x, y = np.floor(box[:2])
        right, bottom = draw.textbbox((0, 0), label, font=font)[2:]
        row[:] = (x, y - bottom - 2 * line, x + right + 2 * line, y)
    for box, color, is_dashed in zip(boxes.tolist(), colors, dashed, strict=True):
        if is_dashed:
            _draw_dashed(draw, box, color, line)
        else:
            draw.rectangle(box, outline=color, width=line)
    places = np.round(spread(wanted, (0, 0, *image.size)))
    for place, color, label in zip(places, colors, labels, strict=True):
        x1, y1, x2, y2 = place.tolist()
        draw.rectangle((x1, y1, x2 - 1, y2 - 1), fill=color)
        luminance = np.array(ImageColor.getrgb(color)) @ (0.299, 0.587, 0.114) / 255
        text_color = "black" if luminance > LIGHT else "white"
        draw.text((x1 + line, y1 + line), label, fill=text_color, font=font)
    return image


def _draw_dashed(draw: ImageDraw.ImageDraw, box: Sequence[float], color: str, line: int) -> None:
    x1, y1, x2, y2 = box
    step = DASH * line
    for start in np.arange(x1, x2, 2 * step):
        for y in (y1, y2):
            draw.line((start, y, min(start + step, x2), y), fill=color, width=line)
    for start in np.arange(y1, y2, 2 * step):
        for x in (x1, x2):
            draw.line((x, start, x, min(start + step, y2)), fill=color, width=line)


def spread(labels: Array, canvas: Sequence[float]) -> Array:
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


def _covers(corner: Array, size: Array, others: Array) -> bool:
    """Return whether a label here would cover one of the others by more than rounding."""
    begins = corner < others[:, 2:] - ROUNDING  # (N, 2)
    ends = corner + size > others[:, :2] + ROUNDING
    return bool((begins & ends).all(1).any())
