"""Propose a comparison for your data and your minutes: measure a few steps, write a suite file.

The suite compares random weights, MoCo v2 and KSCL, the latter two with the same seconds of
pretraining, by a detector where there are boxes and by probes where there are class folders. Every
choice is explained in the file. On a machine with GPUs it has the paper's recipes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kscl import cli
from kscl.benchmark.suite.spec import read_suite
from kscl.errors import KsclError
from kscl.records.record import WORKING_AP50
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import clock
from kscl.runtime.machine import usable_cores

EXAMPLES = """  kscl prepare own --images photos --annotations labels \\
      --output-dir data/mine
  kscl start data/mine --minutes 30
  kscl start data/mine --minutes 60 --num-seeds 3 --output-dir output/mine3
  kscl run output/mine/suite.yaml
"""
SUITE_FILE = "suite.yaml"
BUSY = 1.5  # a slowdown to tell of


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    parser.add_argument("data", type=Path, help="a folder made by kscl prepare own")
    about = "how long the comparison may take (%(default)g)"
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help=about)
    about = "to run per contender (default: three, or one if the minutes do not allow three)"
    parser.add_argument("--num-seeds", type=int, metavar="N", help=about)
    about = "for the suite and its results (default: output/ and the name of the data)"
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help=about)
    cli.add_flag(parser, "--cpu", "use the CPU though there are GPUs")
    given = parser.parse_args(argv)
    if not given.minutes > 0:
        raise KsclError(f"--minutes is {given.minutes:g}. It must be greater than 0.")
    if given.num_seeds is not None and given.num_seeds < 1:
        raise KsclError(f"--num-seeds is {given.num_seeds}. It must be at least 1.")
    output_dir = given.output_dir or Path("output", given.data.resolve().name)
    file = output_dir / SUITE_FILE
    if file.exists():
        raise KsclError(
            f"{file} is there already. For more seeds, run kscl run {file} "
            "--num-seeds 3, which keeps what is finished. For another plan, delete it or choose "
            "another --output-dir."
        )

    import torch

    from kscl.benchmark.start import (
        STARTS_OF_TRAINING,
        choose_lengths,
        choose_sizes,
        cpu_suite,
        estimate,
        fastest_costs,
        gpu_suite,
        look_at,
        measure,
    )

    facts = look_at(given.data)
    gpus = 0 if given.cpu else torch.cuda.device_count()
    if gpus:
        text = gpu_suite(facts, gpus, output_dir, given.num_seeds or 3)
        print(
            "The paper's recipes for GPUs take as long as they take, whatever the --minutes; "
            "kscl plan estimates a pretraining, and --cpu keeps to the minutes."
        )
    else:
        sizes = choose_sizes(facts)
        cores = usable_cores()
        choose_lengths(facts, fastest_costs(facts), given.minutes, cores, given.num_seeds)
        print("Measuring a few steps of every stage on this machine …", flush=True)
        costs = measure(facts, sizes, cores)
        plan = choose_lengths(facts, costs, given.minutes, cores, given.num_seeds)
        text = cpu_suite(facts, sizes, plan, given.minutes, output_dir)
        print(
            f"{plan.seeds} seed{'s' if plan.seeds > 1 else ''}, {plan.jobs} stages at a time; one "
            f"stage: {estimate(plan)}. In all about {clock(plan.total)}."
        )
        if facts.boxes is not None:
            print(
                f"{STARTS_OF_TRAINING} Below an AP50 of {WORKING_AP50:g}, which is common then, a "
                "detector misses or mislabels most objects."
            )
        if costs.slowdown > BUSY:
            print(
                "Other programs use this machine. The estimate is for a machine without them; as "
                f"long as they run, it takes about {costs.slowdown:.1f} times as long."
            )
    write_atomically(file, text.encode(), replace=False)
    read_suite(file)  # what is written can be read
    print(f"Written: {file}. Next: kscl run {file}")
    return 0
