"""Make the leaderboard: records in; text, Markdown, CSV, JSON and one self-contained page out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kscl import cli
from kscl.benchmark.leaderboard.answer import (
    Answer,
    advice,
    answers,
    baselines_to_choose,
    scores,
    warnings,
)
from kscl.benchmark.leaderboard.differences import EXPLANATION, differences
from kscl.benchmark.leaderboard.exports import as_csv, as_json
from kscl.benchmark.leaderboard.labels_saved import (
    FIGURE,
    Saved,
    draw_labels,
    labels_saved,
    labels_tables,
)
from kscl.benchmark.leaderboard.page import page
from kscl.benchmark.leaderboard.reading import RANDOM
from kscl.benchmark.leaderboard.rows import Board, build_board
from kscl.benchmark.leaderboard.tables import document, insert, markdown
from kscl.benchmark.leaderboard.tables import text as escaped
from kscl.benchmark.leaderboard.terminal import first_of_each, summary
from kscl.benchmark.leaderboard.time_figure import draw_time
from kscl.errors import KsclError
from kscl.registry import import_modules
from kscl.runtime.files import write_atomically

FORMATS = ("txt", "md", "csv", "json", "html")
NAME = "leaderboard"
TITLE = "KSCL leaderboard"

EXAMPLES = """  kscl board output
  kscl board output /mnt/other_machine/output --output-dir board
  kscl board output --formats html --title "Shapes, ResNet-18"
  kscl board output/cifar10 --baseline moco_v2 --insert docs/results/cifar10.md cifar10
  kscl board output/cifar10 --figure accuracy_against_time.png
"""


@dataclass(frozen=True)
class Findings:
    """What the board says in words, and the tables of its differences."""

    scores: list[str]  # all rows of each task, in one line
    answers: list[Answer]
    labels_saved: list[Saved]
    warnings: list[str]
    advice: list[str]
    compared: dict[str, str]  # baseline → Markdown
    unfit: list[str]  # what is wrong with the baselines that do not fit

    @property
    def sentences(self) -> list[str]:
        """Return all answers."""
        found = [it.sentence for it in self.answers] + [it.sentence for it in self.labels_saved]
        return [*self.scores, *found]


def find(board: Board, baselines: Sequence[str] = ()) -> Findings:
    """Return what the board says; the baseline is random weights unless named."""
    compared, unfit = {}, []
    for name in baselines:
        try:
            compared[name] = differences(board, name)
        except KsclError as error:
            unfit.append(str(error))
    found = answers(board, baselines)
    closing = [*advice(found), *baselines_to_choose(board, baselines)]
    warned = [*warnings(board), *unfit]
    saved = labels_saved(board, baselines)
    return Findings(scores(board), found, saved, warned, closing, compared, unfit)


def summary_of(board: Board, found: Findings) -> str:
    """Return what a terminal shows."""
    sentences = [*found.scores]
    sentences += first_of_each((it.protocol, it.sentence) for it in found.answers)
    sentences += [it.sentence for it in found.labels_saved]
    cautions = [f"Warning: {it}" for it in found.warnings]
    return summary(board, cautions, sentences, found.advice)


def write_board(
    board: Board,
    output_dir: str | Path,
    *,
    title: str = TITLE,
    formats: Sequence[str] = FORMATS,
    baselines: Sequence[str] = (),
    found: Findings | None = None,
) -> dict[str, Path]:
    """Write the board in each format, the answer first; equal records give equal bytes."""
    folder, found = Path(output_dir), found or find(board, baselines)
    cautions, tables = [f"Warning: {it}" for it in found.warnings], labels_tables(board)
    chart = draw_labels(board, found.labels_saved) if tables else b""
    first = [escaped(it) for it in (*cautions, *found.sentences, *found.advice)]
    last = ["## Labels saved", f"![Chart]({FIGURE})", *tables] if tables else []
    if found.compared:
        last += ["## Differences to the baseline", *found.compared.values(), EXPLANATION]
    said = {
        "scores": found.scores,
        "answers": [asdict(it) for it in found.answers],
        "advice": found.advice,
        "warnings": found.warnings,
        "labels_saved": [asdict(it) for it in found.labels_saved],
    }
    make = {
        "txt": lambda: summary_of(board, found),
        "md": lambda: markdown(board, title, first, last),
        "csv": lambda: as_csv(board, baselines or (RANDOM,)),
        "json": lambda: as_json(board, title, said),
        "html": lambda: page(board, title, folder, cautions, found.sentences, found.advice, chart),
    }
    written = {}
    if chart:
        written["labels"] = folder / FIGURE
        write_atomically(written["labels"], chart)
    for name in formats:
        written[name] = folder / f"{NAME}.{name}"
        # A record can contain half of a surrogate pair, which no file can.
        write_atomically(written[name], make[name]().encode("utf-8", "replace"))
    return written


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_folders(parser, "folders")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("output/leaderboard"),
        help="folder for the files (default: %(default)s)",
    )
    parser.add_argument(
        "--formats", default=",".join(FORMATS), help="some of %(default)s (default: all)"
    )
    parser.add_argument("--title", default=TITLE, help="title of the page (default: %(default)s)")
    cli.add_flag(parser, "--no-reported", "leave out published numbers")
    parser.add_argument(
        "--baseline",
        metavar="ROW",
        action="append",
        default=[],
        help="compare every row with this one: a method, or if it has several rows, its settings "
        "as in kscl@2,K=5,40%%; may be repeated",
    )
    cli.add_import(parser)
    cli.add_insert(parser)
    about = "put only these columns into FILE, in this order: 'method,epochs,pretrain min,top-1'"
    parser.add_argument("--columns", metavar="NAMES", help=about)
    parser.add_argument(
        "--figure",
        type=cli.picture_path,
        metavar="FILE",
        help="also draw accuracy against the time of pretraining, with 95%% intervals over seeds",
    )
    arguments = parser.parse_args(argv)
    import_modules()  # what the suite that starts this command has imported
    formats = [name.strip() for name in arguments.formats.split(",") if name.strip()]
    if not formats or not set(formats) <= set(FORMATS):
        raise KsclError(f"--formats must be some of {', '.join(FORMATS)}, got {arguments.formats}.")
    if arguments.columns and not arguments.insert:
        raise KsclError("--columns: It needs --insert FILE NAME, whose table it is about.")
    columns = [name.strip() for name in (arguments.columns or "").split(",") if name.strip()]
    board = build_board(
        arguments.folders,
        check_stale=not arguments.no_stale_check,
        with_reported=not arguments.no_reported,
    )
    for problem in board.problems:
        print(f"Not counted: {problem}", file=sys.stderr)
    found = find(board, arguments.baseline)
    written = write_board(
        board,
        arguments.output_dir,
        title=arguments.title,
        formats=formats,
        baselines=arguments.baseline,
        found=found,
    )
    if arguments.figure:
        draw_time(board, arguments.figure, arguments.title)
        written["figure"] = arguments.figure
    print(summary_of(board, found))
    if found.unfit:  # the board is written all the same: it may be the end of a long suite
        raise KsclError(" ".join(found.unfit))
    if arguments.insert:
        path, name = arguments.insert
        insert(Path(path), name, document(board, found.compared, columns, EXPLANATION))
    page_file = written.pop("html", None)
    others = ", ".join(map(str, written.values()))
    print(f"The page is {page_file}" if page_file else f"Written: {others}")
    return 0
