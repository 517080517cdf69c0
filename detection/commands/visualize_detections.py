"""A run to look at: what was found beside what is there, AP of every class, its curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image, ImageOps

from detection.errors import DetectionError
from detection.scoring import SCORERS, score
from detection.scoring.boxes import (
    Array,
    Detections,
    GroundTruth,
    fitted,
    read_detections,
    read_ground_truth,
)
from detection.scoring.voc07 import best_overlaps
from kscl import cli
from kscl.data.annotated.annotations import AnnotatedImage
from kscl.data.annotated.specs import parse_source, read_source

EXAMPLES = """  python tools/visualize_detections.py output/kscl/detection
  python tools/visualize_detections.py output/kscl/detection --images 8 --min-score 0.7
  python tools/visualize_detections.py output/kscl/detection --dataset voc:data/mine:test
"""
COLUMNS = 4  # images side by side in the sheet
DOTS_PER_INCH = 130
HIT = 0.5  # IoU above which a box counts as right in the pictures and in the curves
LIGHT = 0.6  # luminance above which white text cannot be read


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument(
        "run", type=Path, help="a folder of tools/train_net.py, with detections.npz"
    )
    parser.add_argument("--output", type=Path, help="a PNG (default: detections.png in the run)")
    parser.add_argument("--images", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument(
        "--min-score", type=float, default=0.5, help="boxes to draw (default: %(default)s)"
    )
    parser.add_argument("--scorer", choices=tuple(SCORERS), default=next(iter(SCORERS)))
    parser.add_argument(
        "--dataset", help="where the images are, if not where the run's config says"
    )
    arguments = parser.parse_args(argv)
    if arguments.images < 1 or not 0 <= arguments.min_score <= 1:
        raise DetectionError("--images is at least 1, and --min-score lies between 0 and 1")
    output = arguments.output or arguments.run / "detections.png"
    draw_sheet(
        arguments.run,
        output,
        arguments.images,
        arguments.min_score,
        arguments.scorer,
        arguments.dataset,
    )
    print(f"drawn: {output}")
    return 0


def draw_sheet(
    run: Path, output: Path, count: int, min_score: float, scorer: str, dataset: str | None = None
) -> None:
    """Images spread evenly over the set, so that the same run gives the same picture."""
    detections = read_detections(run / "detections.npz")
    truth = read_ground_truth(run / "ground_truth.npz")
    result = score(detections, truth, [scorer])[scorer]
    images = {image.id: image for image in _images(run, dataset, truth.class_names)}
    places = np.linspace(0, len(truth.image_ids) - 1, min(count, len(truth.image_ids))).astype(int)
    chosen = [truth.image_ids[place] for place in dict.fromkeys(places.tolist())]
    missing = [name for name in chosen if name not in images]
    if missing:
        raise DetectionError(
            f"image {missing[0]} of the run is not in the data set. Name the set that it was "
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
    colours = _colours(len(truth.class_names))
    wrong = best_overlaps(detections, truth)[0] <= HIT
    shown = detections.scores >= min_score
    titles = (
        "annotated (dashed: difficult)" if truth.difficult.any() else "annotated",
        f"found, score ≥ {min_score:g} (dashed: no such object)",
    )
    figure = plt.figure(figsize=(3.2 * COLUMNS, 5.2 * rows + 3.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[5.2 * rows, 3.6])
    grid = top.add_gridspec(rows * 2, COLUMNS)
    for place, image in enumerate(images):
        row, column = divmod(place, COLUMNS)
        assert image.path is not None
        for below, title in enumerate(titles):
            axes = top.add_subplot(grid[row * 2 + below, column])
            with Image.open(image.path) as picture:
                axes.imshow(ImageOps.exif_transpose(picture).convert("RGB"))
            axes.set_title(title if below else f"{image.id}\n{title}", fontsize=7)
            axes.axis("off")
            if below:
                _draw_boxes(axes, detections, image.id, shown, wrong, colours)
            else:
                _draw_boxes(axes, truth, image.id, None, truth.difficult, colours)
    left, right = bottom.subplots(1, 2)
    _draw_bars(left, result, scorer)
    _draw_curves(right, result, truth.class_names, colours)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DOTS_PER_INCH)
    plt.close(figure)


def _colours(count: int) -> Array:
    """One a class, as different as their number allows. (count, 4)"""
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
    colours: Array,
) -> None:
    from matplotlib.patches import Rectangle

    for row in np.flatnonzero(table.image == table.image_ids.index(image)):
        if shown is not None and not shown[row]:
            continue
        label = table.class_names[table.category[row]]
        if isinstance(table, Detections):
            label += f" {table.scores[row]:.2f}"
        x1, y1, x2, y2 = table.boxes[row]
        colour = colours[table.category[row]]
        style = "--" if dashed[row] else "-"
        box = Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, ec=colour, lw=1.3, ls=style)
        axes.add_patch(box)
        luminance = float(colour[:3] @ (0.299, 0.587, 0.114))
        axes.text(
            x1, y1, label, fontsize=5, va="top", color="black" if luminance > LIGHT else "white",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
            clip_on=True,
        )  # fmt: skip


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
    axes: Any, result: dict[str, Any], classes: tuple[str, ...], colours: Array
) -> None:
    for name, curves in result["curves"]["precision"].items():
        colour = colours[classes.index(name)]
        axes.plot(
            result["curves"]["recall"], curves["AP50"],
            color=colour, lw=1.6, label=name, clip_on=False,
        )  # fmt: skip
    axes.set(xlim=(0, 1), ylim=(0, 1.02))
    axes.set_xlabel("recall", fontsize=8)
    axes.set_ylabel("precision", fontsize=8)
    axes.set_title(f"precision and recall at IoU {HIT:g}", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, ncols=2 if len(classes) > 8 else 1)
    axes.spines[["top", "right"]].set_visible(False)
