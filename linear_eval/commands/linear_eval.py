"""Evaluate a backbone on labeled images: linear probes, neighbors, SVMs, masks, or fine-tuning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kscl import cli
from kscl.data.annotations import Problem
from kscl.errors import KsclError

if TYPE_CHECKING:
    from kscl.engine.cost import Gpu, Needs

EXAMPLES = """  kscl probe --config-file configs/linear_eval/linear_cached.yaml \\
      BACKBONE.WEIGHTS output/pretrain/backbone.safetensors \\
      DATA.TRAIN /data/mine/train DATA.VAL /data/mine/val OUTPUT_DIR output/linear_eval/mine
  kscl probe --config-file configs/linear_eval/linear_cached.yaml --num-seeds 3 \\
      BACKBONE.WEIGHTS random BACKBONE.NAME resnet50 DATA.TRAIN … DATA.VAL … OUTPUT_DIR …
  kscl probe --config-file configs/linear_eval/imagenet_linear_moco.yaml \\
      --num-gpus 8 --auto-resume BACKBONE.WEIGHTS moco_v2_800ep.pth.tar BACKBONE.NAME resnet50 \\
      DATA.TRAIN /data/imagenet/train DATA.VAL /data/imagenet/val
  torchrun --nproc-per-node 8 -m kscl probe --auto-resume --config-file …
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_run_arguments(arguments)
    cli.add_check_arguments(arguments)
    arguments.add_argument(
        "--num-seeds",
        type=int,
        default=0,
        metavar="N",
        help="repeat with the seeds SEED, SEED + 1, …, in folders seed0, seed1, … of OUTPUT_DIR, "
        "and print mean and standard deviation",
    )
    cli.add_flag(arguments, "--allow-overlap", "allow val to contain training images")
    cli.add_config_arguments(arguments, "SEED 1 DATA.NUM_WORKERS 8")
    given = arguments.parse_args(argv)

    from kscl.records.provenance import loaded_code
    from kscl.run.engine import Flags, launch_run, seed_configs
    from linear_eval.check import refuse_overlap
    from linear_eval.probe import load_linear_eval_config, probe_of, schema, summary

    words = (given.config_file, given.overrides)
    if given.check:
        how = (given.num_gpus, given.check_later, given.allow_overlap)
        return cli.report_problems(lambda: check(*words, *how))
    cfg = load_linear_eval_config(*words)
    if given.print_config:
        print(schema().print(cfg), end="")
        return 0
    if given.num_seeds < 0:
        raise KsclError(f"--num-seeds must be at least 1, got {given.num_seeds}.")
    configs = seed_configs(cfg, given.num_seeds)
    loaded_code()  # the search for overlaps may take minutes
    first = int(os.environ.get("RANK", 0)) == 0
    if first and not given.allow_overlap:
        refuse_overlap(cfg)
    # The number of processes hardly changes the result, and the record has it.
    flags = Flags(given.resume, given.auto_resume, allow_world_size_change=True)
    for each in configs:
        if code := launch_run(probe_of, each, flags, given.num_gpus):
            return code
    if first:
        print(summary([Path(each.OUTPUT_DIR) for each in configs]), flush=True)
    return 0


def check(
    config: str | None,
    overrides: Sequence[str],
    num_gpus: int = 1,
    later: Sequence[str] = (),
    allow_overlap: bool = False,
) -> list[Problem]:
    """Return what would stop the run; `later` names what another command will make."""
    from linear_eval.check import find_problems
    from linear_eval.probe import load_linear_eval_config

    return list(find_problems(load_linear_eval_config(config, overrides), later, allow_overlap))


def needs(
    config: str | None,
    overrides: Sequence[str],
    gpu: Gpu,
    count: int,
    arch: str,
    kwargs: Mapping[str, Any],
) -> Needs:
    """Return what the probe takes on these GPUs."""
    from linear_eval.check import probe_needs
    from linear_eval.probe import load_linear_eval_config

    return probe_needs(load_linear_eval_config(config, overrides), gpu, count, arch, kwargs)
