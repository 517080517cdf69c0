"""Print in Markdown how rows of the leaderboard differ from the first one named."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kscl import cli
from kscl.benchmark.leaderboard.differences import comparison
from kscl.benchmark.leaderboard.rows import build_board
from kscl.benchmark.leaderboard.terminal import wrapped

EXAMPLES = """  kscl compare moco_v2 kscl
  kscl compare moco_v2 kscl@2,K=5,40% --folders output/demo /mnt/other_machine/output
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    about = (
        "a method, with settings if it has several rows (kscl@2,K=5,40%%), or the key on the page"
    )
    parser.add_argument("rows", nargs="+", metavar="ROW", help=about)
    cli.add_folders(parser, "--folders")
    given = parser.parse_args(argv)
    board = build_board(given.folders, check_stale=not given.no_stale_check)
    for problem in board.problems:
        print(f"Not counted: {problem}", file=sys.stderr)
    print(wrapped(comparison(board, given.rows)), end="")
    return 0
