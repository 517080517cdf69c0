"""Check every submission under results/; exit code 1 if one must be refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.benchmark.submission import RESULTS, check_results

EXAMPLES = """  kscl check-submission
  kscl check-submission --results results
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of submissions (default: %(default)s)"
    )
    given = parser.parse_args(argv)
    count, problems = check_results(given.results)
    for problem in problems:
        print(problem)
    refused = f"; {len(problems)} problems" if problems else "; all can be accepted"
    print(f"Submissions checked: {count}{refused}.")
    return 1 if problems else 0
