"""Draw training curves of several runs in one figure: eigenvalues, rank kept, loss and others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.engine.metrics_log import Row, read_metrics
from kscl.errors import KsclError

FRACTIONS, COLUMN = "eigenvalue_fractions", "eigenvalue_"
LABELS = {
    FRACTIONS: "fraction of each eigenvalue in the mass",
    "loss": "loss",
    "instance_top1": "own instance found first",
    "batch_top1": "own instance found first, among the batch",
    "mean_rank": "mean rank kept",
    "eigenvalue_mass": "fraction of the eigenvalue mass kept",
    "positive_length": "projection onto the own instance",
    "hardest_negative_length": "longest projection onto another",
    "embedding_spread": "spread of the embeddings",
}
DEFAULT = (FRACTIONS, "mean_rank", "loss")
EXAMPLES = """  kscl visualize training output/k3 output/k5 --output runs.png
  kscl visualize training output/k* --names K=3 K=5 --figures loss mean_rank
"""


def draw(runs: dict[str, list[Row]], figures: Sequence[str], output: Path) -> None:
    """Draw one panel per figure, one color per run, over epochs; eigenvalues dark to light."""
    from matplotlib.figure import Figure  # slow to import
    from matplotlib.lines import Line2D

    canvas = Figure(figsize=(4.2 * len(figures), 3.4), layout="constrained")
    panels = canvas.subplots(1, len(figures), squeeze=False)[0]
    for panel, name in zip(panels, figures, strict=True):
        for number, rows in enumerate(runs.values()):
            for index, curve in enumerate(curves(name, rows)):
                points = [(row["epoch"], row[curve]) for row in rows if curve in row]
                style = {"color": f"C{number}", "alpha": 1 / (1 + index / 3), "linewidth": 1.4}
                panel.plot(*zip(*points, strict=True), **style)
        panel.set(title=LABELS[name], xlabel="epoch")
        panel.grid(alpha=0.3)
    handles = [Line2D([], [], color=f"C{number}", label=name) for number, name in enumerate(runs)]
    panels[0].legend(handles=handles, fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(output, dpi=140)


def curves(figure: str, rows: Sequence[Row]) -> list[str]:
    """Return the columns of a figure that a run has: K for eigenvalues, the largest first."""
    known = {name for row in rows for name in row}
    if figure == FRACTIONS:
        columns = [name for name in known if re.fullmatch(COLUMN + r"\d+", name)]
        return sorted(columns, key=lambda name: int(name.removeprefix(COLUMN)))
    return [figure] if figure in known else []


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Draw the runs that the command line names."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="FOLDER", help="output folders of kscl pretrain"
    )
    parser.add_argument(
        "--names", nargs="+", help="names of the runs (default: their folders' names)"
    )
    parser.add_argument(
        "--figures",
        nargs="+",
        choices=LABELS,
        default=DEFAULT,
        metavar="NAME",
        help=f"curves to draw: some of {', '.join(LABELS)} (default: {', '.join(DEFAULT)})",
    )
    parser.add_argument(
        "--output",
        type=cli.picture_path,
        default=Path("training.png"),
        help="file to write: png, svg or pdf",
    )
    given = parser.parse_args(argv)
    names = given.names or [str(run) for run in given.runs]
    if len(names) != len(given.runs):
        raise KsclError(
            f"--names has {len(names)} names for {len(given.runs)} runs. Give one name per run."
        )
    runs = {name: read_metrics(folder) for name, folder in zip(names, given.runs, strict=True)}
    for name, rows in runs.items():
        if not any(curves(figure, rows) for figure in given.figures):
            raise KsclError(
                f"{name} holds no metrics yet. Name a folder that kscl pretrain writes to."
            )
    draw(runs, given.figures, given.output)
    print(given.output)
    return 0
