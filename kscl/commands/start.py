"""Propose a comparison for your data and your minutes: measure a few steps, write a suite file.

The suite compares KSCL with what you would do anyway: random weights, also with the pretraining's
time spent on training, ImageNet weights, and MoCo v2; and KSCL that continues from ImageNet
weights. It compares by a detector where there are boxes and by probes where there are class
folders, and has as many contenders as the minutes allow with three seeds. Every choice is explained
in the file. On a machine with GPUs it has the paper's recipes.
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
from kscl.runtime.paths import is_named

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
    about = "ImageNet weights to compare with, timm:NAME or hf-hub:OWNER/NAME, whose network all "
    about += "contenders have; none leaves them out (default: a small network that timm has, and "
    about += "on GPUs a ResNet-50, if they are cached or can be fetched)"
    parser.add_argument("--weights", metavar="NAME", help=about)
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

    from kscl.benchmark import start

    facts = start.look_at(given.data)
    gpus = 0 if given.cpu else torch.cuda.device_count()
    if given.weights not in (None, start.NO_WEIGHTS) and not is_named(given.weights):
        raise KsclError(
            f"--weights {given.weights} is not a name such as {start.CPU_WEIGHTS}. A file of your "
            "own is a contender to add to the written suite."
        )
    if gpus:
        otherwise = start.Network("resnet50", {})
        network = start.find_network(given.weights or start.GPU_WEIGHTS, otherwise)
        seeds = given.num_seeds or start.SEEDS
        text = start.gpu_suite(facts, network, gpus, output_dir, seeds)
        told = [
            *start.left_out(network),
            "The paper's recipes for GPUs take as long as they take, whatever the --minutes; "
            "kscl plan estimates a pretraining, and --cpu keeps to the minutes.",
        ]
    else:
        limits = (given.minutes, usable_cores(), given.num_seeds)
        start.choose_lengths(facts, start.fastest_costs(facts), *limits, start.NARROW.contenders)
        network = start.find_network(given.weights or start.CPU_WEIGHTS, start.NARROW)
        print("Measuring a few steps of every stage on this machine …", flush=True)
        costs = start.measure(facts, network, usable_cores())
        plan = start.choose_lengths(facts, costs, *limits, network.contenders)
        text = start.cpu_suite(plan, network, given.minutes, output_dir)
        comparison, seeds = plan.comparison, plan.comparison.seeds
        told = [
            f"Contenders: {', '.join(comparison.contenders)}.",
            *start.left_out(network, plan),
            f"{seeds} seed{'s' if seeds > 1 else ''}, {comparison.jobs} stages at a time; one "
            f"stage: {start.estimate(plan)}. In all about {clock(plan.total)}.",
        ]
        if seeds == 1:
            minutes = start.minutes_for_three(comparison)
            told.append(
                "One seed cannot answer: how much seeds differ is not measured. For three, allow "
                f"about {minutes} minutes: --minutes {minutes}."
            )
        if facts.boxes is not None:
            told.append(
                f"{start.STARTS_OF_TRAINING} Below an AP50 of {WORKING_AP50:g}, which is common "
                "then, a detector misses or mislabels most objects."
            )
        if costs.slowdown > BUSY:
            told.append(
                "Other programs use this machine. The estimate is for a machine without them; as "
                f"long as they run, it takes about {costs.slowdown:.1f} times as long."
            )
    print("\n".join(told))
    write_atomically(file, text.encode(), replace=False)
    read_suite(file)  # what is written can be read
    print(f"Written: {file}. Next: kscl run {file}")
    return 0
