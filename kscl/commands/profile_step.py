"""Measure where the time of a pretraining step goes on this machine, and what holds it back.

It takes a few steps on the images of the config, writes nothing, and prints one table: loader, copy
to the device, key passes, query pass, loss head, backward pass, optimizer, collectives; and how
often per step the host waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fvcore.common.config import CfgNode
from tabulate import tabulate

from kscl import cli
from kscl.errors import KsclError
from kscl.keys import load_config, print_config

if TYPE_CHECKING:
    from kscl.engine.profile import StepProfile

EXAMPLES = """  kscl profile --num-gpus 8 \\
      --config-file configs/pretrain/kscl_k5_rho40_r50_200ep_gpu8.yaml DATA.TRAIN /data/train
  kscl profile --config-file configs/pretrain/shapes_kscl.yaml \\
      DATA.TRAIN datasets/shapes/unlabeled
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Read the config and measure on every rank."""
    arguments = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_num_gpus(arguments)
    arguments.add_argument(
        "--steps", type=int, default=10, metavar="N", help="steps to measure (default: %(default)s)"
    )
    cli.add_config_arguments(arguments)
    given = arguments.parse_args(argv)
    if given.steps < 1:
        raise KsclError(f"--steps is {given.steps}. It must be at least 1.")
    cfg = load_config(given.config_file, given.overrides)
    if given.print_config:
        print(print_config(cfg), end="")
        return 0

    from kscl.runtime.launch import launch

    return launch(measure, (cfg, given.steps), given.num_gpus)


def measure(job: tuple[CfgNode, int]) -> int:
    """Measure on one rank; rank 0 prints."""
    from kscl.engine.profile import profile_step
    from kscl.runtime.distributed import device, rank, world_size

    profile = profile_step(*job)
    if rank() == 0:
        print(table(profile, world_size(), device().type), flush=True)
    return 0


def table(profile: StepProfile, ranks: int, kind: str) -> str:
    """Return the profile of a rank as text."""
    from kscl.engine.profile import LOADER

    count = profile.budget.workers
    workers = f"{LOADER} ({count} worker{'s' * (count != 1)}, beside the step)"
    rows = [(workers, profile.loader_milliseconds)]
    rows += sorted(profile.phases.items(), key=lambda row: -row[1])
    rows.append(("whole step, undisturbed", profile.milliseconds))
    shown = [(name, f"{spent:,.2f}", f"{spent / profile.milliseconds:.0%}") for name, spent in rows]
    counts = [f"{profile.collectives:g} collectives beside DistributedDataParallel's"]
    if profile.syncs is not None:
        counts.insert(0, f"{profile.syncs:g} host synchronizations")
    head, align = ("of a step", "ms", "of the step"), ("left", "right", "right")
    lines = tabulate(shown, head, tablefmt="github", colalign=align, disable_numparse=True)
    return (
        f"{ranks} x {kind}, {profile.images} images per process\n{lines}\n"
        f"{' and '.join(counts)} per step. Held back by: {profile.held_back_by}."
    )
