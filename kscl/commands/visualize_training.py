"""Curves of training runs side by side: what a subspace holds, and how the loss went."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.engine.metrics_log import Row, read_metrics
from kscl.errors import KsclError

SHARES, SHARE = "eigenvalue_shares", "eigenvalue_"
LABELS = {
    SHARES: "share of each eigenvalue in the mass",
    "loss": "loss",
    "instance_top1": "own instance found first",
    "mean_rank": "mean rank kept",
    "eigenvalue_mass": "share of the eigenvalue mass kept",
    "positive_length": "projection on the own instance",
    "hardest_negative_length": "longest projection on another",
    "embedding_spread": "spread of the embeddings",
}
DEFAULT = (SHARES, "mean_rank", "loss")
EXAMPLES = """  python tools/visualize_training.py output/k3 output/k5 --output runs.png
  python tools/visualize_training.py output/k* --names K=3 K=5 --figures loss mean_rank
"""


def draw(runs: dict[str, list[Row]], figures: Sequence[str], output: Path) -> None:
    """One panel a figure, one colour a run, over epochs; eigenvalues from dark to light."""
    from matplotlib.figure import Figure  # takes a moment to load
    from matplotlib.lines import Line2D

    canvas = Figure(figsize=(4.2 * len(figures), 3.4), layout="constrained")
    panels = canvas.subplots(1, len(figures), squeeze=False)[0]
    for panel, name in zip(panels, figures, strict=True):
        for number, rows in enumerate(runs.values()):
            for place, curve in enumerate(curves(name, rows)):
                points = [(row["epoch"], row[curve]) for row in rows if curve in row]
                style = {"color": f"C{number}", "alpha": 1 / (1 + place / 3), "linewidth": 1.4}
                panel.plot(*zip(*points, strict=True), **style)
        panel.set(title=LABELS[name], xlabel="epoch")
        panel.grid(alpha=0.3)
    named = {f"C{number}": label for number, label in enumerate(runs)}
    handles = [Line2D([], [], color=colour, label=label) for colour, label in named.items()]
    panels[0].legend(handles=handles, fontsize=8)
    output.parent.mkdir(parents=True, exist_ok=True)
    canvas.savefig(output, dpi=140)


def curves(figure: str, rows: Sequence[Row]) -> list[str]:
    """The columns of a figure that a run has: of eigenvalues K, the largest first."""
    known = {name for row in rows for name in row}
    if figure == SHARES:
        places = [int(name[len(SHARE) :]) for name in known if re.fullmatch(SHARE + r"\d+", name)]
        return [f"{SHARE}{place}" for place in sorted(places)]
    return [figure] if figure in known else []


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("runs", nargs="+", type=Path, metavar="FOLDER", help="of tools/pretrain.py")
    parser.add_argument("--names", nargs="+", help="of the runs (default: their folders)")
    parser.add_argument(
        "--figures", nargs="+", choices=LABELS, default=DEFAULT, help="default: %(default)s"
    )
    parser.add_argument(
        "--output", type=cli.picture_path, default=Path("training.png"), help="png, svg or pdf"
    )
    given = parser.parse_args(argv)
    names = given.names or [str(run) for run in given.runs]
    if len(names) != len(given.runs):
        raise KsclError(f"--names has {len(names)} names for {len(given.runs)} runs")
    runs = {name: read_metrics(folder) for name, folder in zip(names, given.runs, strict=True)}
    for name, rows in runs.items():
        if not any(curves(figure, rows) for figure in given.figures):
            raise KsclError(f"{name} holds no metrics of tools/pretrain.py yet")
    draw(runs, given.figures, given.output)
    print(given.output)
    return 0
