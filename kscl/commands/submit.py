"""Pack records into one file under results/ for a pull request.

Absolute paths, user names and host names are removed. Nothing is written if kscl check-submission
would refuse the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.benchmark.submission import RESULTS, submit

EXAMPLES = """  kscl submit output/cifar10 --name kscl_cifar10_2cores
  kscl submit output/mine/kscl/seed0 --name mine --new-protocol
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    about = "record files, or folders to search for records"
    parser.add_argument("records", nargs="+", metavar="RECORDS", help=about)
    parser.add_argument("--name", required=True, help="the name of the submission")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of submissions (default: %(default)s)"
    )
    cli.add_flag(parser, "--new-protocol", "add protocols that are new here to protocols.json")
    given = parser.parse_args(argv)
    path = submit(given.records, given.name, given.results, new_protocols=given.new_protocol)
    described = f"describe it in {given.name}.md if you like"
    print(f"Written: {path}. Look at it, {described}, and open a pull\nrequest.")
    return 0
