"""Rerun a result from its record, and report whether the new number agrees.

The command writes a suite and its configs from the record and from its pretraining's record,
compares data, code, versions and machine with what was recorded, and runs the suite. The new number
should be equal, or lie in the 95% interval in which one more run is expected given the spread over
seeds. Otherwise the exit code is 1.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.benchmark.reproduce import (
    differences_here,
    missing_data,
    origin,
    other_data,
    parse_settings,
    verdict,
    write_suite,
)
from kscl.errors import KsclError
from kscl.main import python_words

EXAMPLES = """  kscl reproduce output/demo/kscl/seed0/linear-1a2b3c4d/record.json
  kscl reproduce results/shapes.records.jsonl:3 --dry-run
  kscl reproduce results/x.records.jsonl:7 --set knn.DATA.TRAIN=photos
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("record", type=Path, metavar="RECORD", help="the record of an evaluation")
    about = "folder with the record of its pretraining (default: found above RECORD)"
    parser.add_argument("--records", type=Path, metavar="FOLDER", help=about)
    about, metavar = "a setting, such as where data is here; may be repeated", "KIND.KEY=VALUE"
    parser.add_argument("--set", action="append", default=[], metavar=metavar, help=about)
    about = "folder for suite, configs and runs (default: output/reproduce/ID)"
    parser.add_argument("--output-dir", type=Path, help=about)
    about = "processes per stage (default: as recorded)"
    parser.add_argument("--num-gpus", type=int, metavar="N", help=about)
    cli.add_import(parser)
    cli.add_flag(parser, "--dry-run", "write the suite and say what differs, and stop")
    given = parser.parse_args(argv)
    settings = parse_settings(given.set)
    start = origin(given.record, given.records)
    folder = given.output_dir or Path("output/reproduce", start.record.id[:16])
    suite = write_suite(start, folder, settings, given.num_gpus)
    print(f"Written: {suite}")
    differing = differences_here(start, settings, given.num_gpus)
    for sentence in differing:
        print(f"Differs: {sentence}")
    if not differing:
        print("Code, data, libraries and machine are as they were.")
    missing = missing_data(start, settings)
    if given.dry_run:
        print("".join(f"Missing: {sentence}\n" for sentence in missing), end="")
        return 0
    wrong = missing + other_data(start, settings)
    if wrong:
        raise KsclError(" ".join(wrong))
    ended = subprocess.run(python_words("run", str(suite)))
    if ended.returncode:
        return ended.returncode
    found = verdict(start, folder)
    print(found.sentence())
    return 1 if found.inside is False else 0
