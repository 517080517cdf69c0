"""Put the records of results/ into README, RESULTS.md and docs/: tables, boards and figures.

    python -m tests.helpers.result_pages

No number of a table is typed by hand, and a test compares the committed tables with the records.
The paper's numbers beside ours are of ImageNet, VOC and a full ResNet-50: compare their order.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from scipy.stats import spearmanr

from kscl.benchmark.leaderboard.columns import COLUMNS, Column
from kscl.benchmark.leaderboard.differences import EXPLANATION
from kscl.benchmark.leaderboard.reported import IMAGENET_LINEAR, PAPER, VOC_C4, reported_rows
from kscl.benchmark.leaderboard.rows import Board, Row, build_board
from kscl.benchmark.leaderboard.tables import SHORT_LEGEND, chosen_columns, document, insert, origin
from kscl.benchmark.leaderboard.time_figure import draw_time
from kscl.commands.leaderboard import find, write_board
from kscl.records.record import RECORDS_FILE
from tests.helpers.commands import ROOT
from tests.helpers.page.browser import photograph

CIFAR10, SHAPES, BCCD = "docs/results/cifar10.md", "docs/results/shapes.md", "docs/results/bccd.md"
PAPERS_TABLE_1 = ("random", "simclr", "moco_v2", "kscl")
PAPERS_TABLE_2 = ("moco_v2", "kscl", "mean")


class Table(NamedTuple):
    """Some columns, and the rows of some methods, of a submission."""

    document: str
    mark: str
    submission: str
    columns: str
    methods: tuple[str, ...] = ()  # all, if none is named
    only_paper: bool = False  # of KSCL, the setting of the paper
    kind: str = ""  # of an evaluation that a row must have


class Whole(NamedTuple):
    """A submission's whole board, with the differences to some rows."""

    document: str
    submission: str
    baselines: tuple[str, ...]


TABLES = (
    Table("README.md", "shapes", "shapes", "method,epochs,K,pretrain min,top-1,AP (a),AP (b)"),
    Table(
        *("RESULTS.md", "table1", "cifar10_epochs", "method,epochs,K,ρ,top-1,paper: top-1"),
        *(PAPERS_TABLE_1, True),
    ),
    Table(
        *("RESULTS.md", "table2", "cifar10_epochs"),
        "method,K,ρ,top-1,s/epoch,paper: top-1,paper: min/epoch",
        PAPERS_TABLE_2,
    ),
    Table(
        *("RESULTS.md", "table3", "shapes"),
        "method,epochs,K,AP50 (a),AP (a),AP75 (a),AP (b),paper: AP50,paper: AP,paper: AP75",
        kind="detection",
    ),
    Table("RESULTS.md", "time", "cifar10_time", "method,K,epochs,pretrain min,top-1"),
    Table("RESULTS.md", "bccd", "bccd", "method,epochs,K,AP50,AP,AP75"),
)
BOARDS = (
    Whole(CIFAR10, "cifar10_epochs", ("moco_v2", "kscl@15,K=1")),
    Whole(
        *(CIFAR10, "cifar10_time"),
        ("moco_v2", "simclr@42.5", "simclr@85", "moco_v2_as_remembered", "kscl_k1_as_remembered"),
    ),
    Whole(SHAPES, "shapes", ("moco_v2", "random")),
    Whole(BCCD, "bccd", ("random", "random_longer")),
)


def published(row: Row, protocol: str) -> dict[str, float]:
    """Return what the paper reports after 200 epochs for a row's method, K and ρ."""
    it = row.entry
    for found in reported_rows(protocol):
        alike = it.method != "kscl" or (found.shots, found.rho) == (it.shots, it.rho)
        # Under VOC the paper repeats MoCo's. SimCLR's first batch size is that of the others.
        papers = protocol == VOC_C4 or found.source.startswith(PAPER)
        if alike and papers and (found.method, found.epochs) == (it.method, 200):
            return {**found.metrics, "min/epoch": found.minutes_per_epoch or 0}
    return {}


def of_paper(protocol: str, metric: str, digits: int = 1) -> Column:
    def value(row: Row) -> float | None:
        return published(row, protocol).get(metric) or None

    label = f"paper: {metric.replace('top1', 'top-1')}"
    return Column(label, label, value, digits, "", lowest_first=False)


def seconds_per_epoch(row: Row) -> float | None:
    minutes = row.figure("minutes_per_epoch")
    return None if minutes is None else 60 * minutes


COLUMNS_OF_PAPER = {
    column.name: column
    for column in (
        Column("s/epoch", "s/epoch", seconds_per_epoch, 2, "", lowest_first=True),
        of_paper(IMAGENET_LINEAR, "top1"),
        of_paper(IMAGENET_LINEAR, "min/epoch", digits=0),
        *(of_paper(VOC_C4, metric) for metric in ("AP50", "AP", "AP75")),
    )
}


@functools.cache
def board_of(submission: str) -> Board:
    path = ROOT / "results" / f"{submission}{RECORDS_FILE}"
    return build_board([path], check_stale=False, with_reported=False)


def of_methods(board: Board, table: Table) -> Board:
    """Return the board with the rows that a table shows; what was tested stays the same."""

    def is_shown(row: Row) -> bool:
        it = row.entry
        if table.only_paper and it.method == "kscl" and (it.shots, it.rho) != (5, 0.4):
            return False
        if table.kind and table.kind not in {file.record.kind for file in row.records}:
            return False
        return not table.methods or it.method in table.methods

    return dataclasses.replace(board, rows=[row for row in board.rows if is_shown(row)])


def rankme() -> str:
    """Return how RankMe orders the rows of each board, beside their headline metrics."""
    lines = []
    for submission in dict.fromkeys(it.submission for it in BOARDS):
        for section in board_of(submission).sections:
            rows = [(COLUMNS["rankme"].value(it), section.headline(it).mean) for it in section.rows]
            known = [(rank, mean) for rank, mean in rows if isinstance(rank, float)]
            if len(known) > 3:
                found = spearmanr(*zip(*known, strict=True)).statistic
                label = f"{section.headline_label} under {section.protocol.id}"
                lines.append(f"- {submission}, {label}: ρ = {found:+.2f} over {len(known)} rows")
    return "\n".join(lines)


@functools.cache
def whole(submission: str) -> str:
    """Return the whole board of a submission, with its answers and differences."""
    baselines = next(it.baselines for it in BOARDS if it.submission == submission)
    with tempfile.TemporaryDirectory() as folder:
        written = write_board(board_of(submission), folder, formats=("md",), baselines=baselines)
        return written["md"].read_text()


def write(root: Path = ROOT) -> None:
    """Write every table and board into the documents below `root`."""
    explained: set[object] = set()
    for table in TABLES:
        board = board_of(table.submission)
        with patch.dict(COLUMNS, COLUMNS_OF_PAPER):
            shown = chosen_columns(of_methods(board, table), table.columns.split(","))
        legend = [] if table.document in explained else [f"{SHORT_LEGEND}."]
        told = [] if (table.document, table.submission) in explained else [origin(board)]
        explained |= {table.document, (table.document, table.submission)}
        insert(root / table.document, table.mark, "\n\n".join([shown, *legend, *told]))
    for it in BOARDS:
        board = board_of(it.submission)
        compared = find(board, it.baselines).compared
        insert(root / it.document, it.submission, document(board, compared, (), EXPLANATION))
    insert(root / "docs/results/method.md", "rankme", rankme())


def main() -> None:
    write()
    title = "CIFAR-10, 2,000 images: linear top-1 at equal time"
    draw_time(board_of("cifar10_time"), ROOT / "docs/accuracy_time.png", title)
    with tempfile.TemporaryDirectory() as folder:
        written = write_board(board_of("shapes"), folder, title="Drawn shapes")
        photograph(written["html"], ROOT / "docs/leaderboard.png")


if __name__ == "__main__":
    main()
