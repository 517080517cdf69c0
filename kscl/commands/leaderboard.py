"""Make the leaderboard: records in, Markdown, CSV, JSON and one self-contained page out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kscl import cli
from kscl.benchmark.leaderboard.answer import advice, answers, baselines_to_choose, warnings
from kscl.benchmark.leaderboard.differences import EXPLANATION, differences
from kscl.benchmark.leaderboard.exports import as_csv, as_json
from kscl.benchmark.leaderboard.labels_saved import (
    FIGURE,
    draw_labels,
    labels_saved,
    labels_tables,
)
from kscl.benchmark.leaderboard.page import page
from kscl.benchmark.leaderboard.reading import RANDOM
from kscl.benchmark.leaderboard.rows import Board, build_board
from kscl.benchmark.leaderboard.tables import document, insert, markdown, overview, plain
from kscl.benchmark.leaderboard.tables import text as escaped
from kscl.benchmark.leaderboard.time_figure import draw_time
from kscl.errors import KsclError
from kscl.registry import import_modules
from kscl.runtime.files import write_atomically

FORMATS = ("md", "csv", "json", "html")
NAME = "leaderboard"
TITLE = "KSCL leaderboard"

EXAMPLES = """  kscl board output
  kscl board output /mnt/other_machine/output --output-dir board
  kscl board output --formats html --title "Shapes, ResNet-18"
  kscl board output/cifar10 --baseline moco_v2 --insert docs/results/cifar10.md cifar10
  kscl board output/cifar10 --figure accuracy_against_time.png
"""


def write_board(
    board: Board,
    output_dir: str | Path,
    *,
    title: str = TITLE,
    formats: Sequence[str] = FORMATS,
    baselines: Sequence[str] = (),
) -> dict[str, Path]:
    """Write the board in each format, the answer first; equal records give equal bytes."""
    folder = Path(output_dir)
    compared, unfit = compare_with(board, baselines)
    found, warned = answers(board, baselines), [*warnings(board), *unfit]
    cautions, sentences = [f"Warning: {it}" for it in warned], [it.sentence for it in found]
    saved, tables = labels_saved(board, baselines), labels_tables(board)
    sentences += [it.sentence for it in saved]
    chart = draw_labels(board, saved) if tables else b""
    closing = [*advice(found), *baselines_to_choose(board, baselines)]
    first = [escaped(sentence) for sentence in (*cautions, *sentences, *closing)]
    last = ["## Labels saved", f"![Chart]({FIGURE})", *tables] if tables else []
    last += ["## Differences to the baseline", *compared.values(), EXPLANATION] if compared else []
    said = {"answers": [asdict(it) for it in found], "advice": closing, "warnings": warned}
    said["labels_saved"] = [asdict(it) for it in saved]
    make = {
        "md": lambda: markdown(board, title, first, last),
        "csv": lambda: as_csv(board, baselines or (RANDOM,)),
        "json": lambda: as_json(board, title, said),
        "html": lambda: page(board, title, folder, cautions, sentences, closing, chart),
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


def compare_with(board: Board, baselines: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the differences to each baseline, and what is wrong with those that do not fit."""
    compared, unfit = {}, []
    for name in baselines:
        try:
            compared[name] = differences(board, name)
        except KsclError as error:
            unfit.append(str(error))
    return compared, unfit


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
    parser.add_argument("--title", default=TITLE, help="default: %(default)s")
    cli.add_flag(parser, "--no-reported", "leave out published rows")
    parser.add_argument(
        "--baseline",
        metavar="ROW",
        action="append",
        default=[],
        help="also show how every row differs from this one: a method or, if it has several rows, "
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
    title, baselines = arguments.title, arguments.baseline
    written = write_board(
        board, arguments.output_dir, title=title, formats=formats, baselines=baselines
    )
    found = answers(board, baselines)
    said = [f"Warning: {warning}" for warning in warnings(board)]
    said += [answer.sentence for answer in found]
    said += [saved.sentence for saved in labels_saved(board, baselines)]
    for line in [*said, *advice(found), *baselines_to_choose(board, baselines)]:
        print(line)
    compared, unfit = compare_with(board, baselines)
    if unfit:  # the board is written all the same: it may be the end of a long suite
        raise KsclError(" ".join(unfit))
    if arguments.insert:
        path, name = arguments.insert
        insert(Path(path), name, document(board, compared, columns, EXPLANATION))
    if arguments.figure:
        draw_time(board, arguments.figure, title)
        written["figure"] = arguments.figure
    tables = [overview(board), *compared.values(), *([EXPLANATION] if compared else [])]
    print(plain("\n\n".join(tables)))
    for path in written.values():
        print(path)
    return 0
