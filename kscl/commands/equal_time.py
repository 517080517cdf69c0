"""Measure what a step of each contender of a suite takes, and give all the same time.

All contenders train a few steps alternately in this process. The steps that take as long as the
reference's epochs are written to the end of the suite file (`steps`); run the suite afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from tabulate import tabulate

from kscl import cli
from kscl.benchmark.suite.spec import read_suite
from kscl.config import find_config
from kscl.errors import KsclError
from kscl.runtime.logs import clock

EXAMPLES = """  kscl equal-time configs/suites/small/screen_cifar10.yaml
  kscl equal-time configs/suites/small/screen_cifar10.yaml --epochs 60 --dry-run
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("suite", metavar="FILE", help="a suite; see configs/suites/")
    parser.add_argument(
        "--reference", default="moco_v2", metavar="NAME", help="contender (default: moco_v2)"
    )
    about = "epochs that the reference gets (default: %(default)s)"
    parser.add_argument("--epochs", type=float, default=30, metavar="N", help=about)
    about = "measurements per contender (default: %(default)s)"
    parser.add_argument("--turns", type=int, default=8, metavar="N", help=about)
    cli.add_flag(parser, "--dry-run", "change no file")
    arguments = parser.parse_args(argv)

    from kscl.benchmark.suite.equal_time import measure_steps, refuse_own_steps, write_steps

    if not 0 < arguments.epochs < float("inf"):
        raise KsclError(f"--epochs is {arguments.epochs:g}; it must be greater than 0.")
    if arguments.turns < 1:
        raise KsclError(f"--turns is {arguments.turns}; it must be at least 1.")
    path = find_config(arguments.suite)
    if not arguments.dry_run:
        refuse_own_steps(path)
    suite = read_suite(path, steps={})
    times = measure_steps(suite, arguments.turns)
    steps = times.equal_steps(arguments.reference, arguments.epochs)
    rows = [(name, f"{times.milliseconds[name]:.1f}", count) for name, count in steps.items()]
    print(tabulate(rows, ["pretraining", "ms per step", "steps"], disable_numparse=True))
    each = times.milliseconds[arguments.reference] * steps[arguments.reference] / 1000
    timed = [it for it in read_suite(path, steps=steps).contenders if it.pretrain]
    in_all = sum(it.lengths[0] * len(it.seeds) for it in timed)
    print(
        f"{clock(each)} per pretraining of length 1; with all lengths and seeds, {suite.jobs} at "
        f"the same time: {clock(each * in_all / suite.jobs)}, without probes."
    )
    if not arguments.dry_run:
        write_steps(path, times, steps)
        print(f"Wrote the steps to {path}.")
    return 0
