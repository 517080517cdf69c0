"""A run to look at: what was found beside what is there, AP of every class, its curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from detection.annotations import AnnotatedImage
from detection.detections import Array, Detections, GroundTruth, read_detections, read_ground_truth
from detection.errors import DetectionError
from detection.scoring import SCORERS, score
from detection.sources import parse_source, read_source
from kscl import cli

EXAMPLES = """  python tools/visualize_detections.py output/kscl/detection
  python tools/visualize_detections.py output/kscl/detection --images 8 --min-score 0.7
  python tools/visualize_detections.py output/kscl/detection --dataset voc:data/mine:test
"""
COLUMNS = 4  # images side by side in the sheet
DOTS_PER_INCH = 110


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
    colours = plt.get_cmap("tab20")(np.linspace(0, 1, max(2, len(truth.class_names))))
    figure = plt.figure(figsize=(3.2 * COLUMNS, 4.6 * rows + 4.4), layout="constrained")
    grid = figure.add_gridspec(rows * 2 + 1, COLUMNS, height_ratios=[1] * (rows * 2) + [1.5])
    for place, image in enumerate(images):
        row, column = divmod(place, COLUMNS)
        for below, title in enumerate(("annotated", f"found, score ≥ {min_score:g}")):
            axes = figure.add_subplot(grid[row * 2 + below, column])
            assert image.path is not None
            axes.imshow(Image.open(image.path).convert("RGB"))
            axes.set_title(f"{image.id}: {title}" if below == 0 else title, fontsize=8)
            axes.axis("off")
            table = detections if below else truth
            _draw_boxes(axes, table, image.id, min_score if below else None, colours)
    _draw_bars(figure.add_subplot(grid[-1, : COLUMNS // 2]), result, scorer)
    _draw_curves(figure.add_subplot(grid[-1, COLUMNS // 2 :]), result, truth.class_names, colours)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=DOTS_PER_INCH)
    plt.close(figure)


def _draw_boxes(
    axes: Any, table: Detections | GroundTruth, image: str, min_score: float | None, colours: Array
) -> None:
    from matplotlib.patches import Rectangle

    for row in np.flatnonzero(table.image == table.image_ids.index(image)):
        label = table.class_names[table.category[row]]
        dashed = isinstance(table, GroundTruth) and bool(table.difficult[row])
        if isinstance(table, Detections):
            if table.scores[row] < (min_score or 0):
                continue
            label += f" {table.scores[row]:.2f}"
        x1, y1, x2, y2 = table.boxes[row]
        colour = colours[table.category[row]]
        style = "--" if dashed else "-"
        box = Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, ec=colour, lw=1.5, ls=style)
        axes.add_patch(box)
        axes.text(
            x1, y1, label, fontsize=5, color="white", va="bottom",
            bbox={"facecolor": colour, "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip


def _draw_bars(axes: Any, result: dict[str, Any], scorer: str) -> None:
    ranked = sorted(result["per_class"].items(), key=lambda item: item[1]["AP50"])
    names = [f"{name} ({row['objects']})" for name, row in ranked]
    axes.barh(names, [row["AP50"] for _, row in ranked], color="#c9d8f5", label="AP50")
    axes.barh(names, [row["AP"] for _, row in ranked], color="#2f5fd0", height=0.45, label="AP")
    axes.set_xlim(0, 100)
    axes.set_title(f"{scorer}: AP {result['AP']:.1f}, AP50 {result['AP50']:.1f}", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_curves(
    axes: Any, result: dict[str, Any], classes: tuple[str, ...], colours: Array
) -> None:
    for name, curves in result["curves"]["precision"].items():
        colour = colours[classes.index(name)]
        axes.plot(result["curves"]["recall"], curves["AP50"], color=colour, lw=1.4, label=name)
    axes.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
    axes.set_title("precision and recall at IoU 0.5", fontsize=9)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, ncols=2 if len(classes) > 8 else 1)
    axes.spines[["top", "right"]].set_visible(False)
