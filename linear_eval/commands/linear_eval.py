"""Evaluate a backbone on labeled images: linear probes, neighbors, SVMs, or fine-tuning."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kscl import cli
from kscl.config.comments import comments_of
from kscl.config.tree import config_yaml
from linear_eval.config import linear_eval_defaults, load_linear_eval_config

EXAMPLES = """  python tools/linear_eval.py --config-file configs/linear_eval/linear_cached.yaml \\
      BACKBONE.WEIGHTS output/pretrain/backbone.safetensors \\
      DATA.TRAIN /data/mine/train DATA.VAL /data/mine/val OUTPUT_DIR output/linear_eval/mine
  python tools/linear_eval.py --config-file configs/linear_eval/linear_cached.yaml --num-seeds 3 \\
      BACKBONE.WEIGHTS random BACKBONE.NAME resnet50 DATA.TRAIN … DATA.VAL … OUTPUT_DIR …
  python tools/linear_eval.py --config-file configs/linear_eval/imagenet_linear_moco.yaml \\
      --num-gpus 8 --auto-resume BACKBONE.WEIGHTS moco_v2_800ep.pth.tar BACKBONE.NAME resnet50 \\
      DATA.TRAIN /data/imagenet/train DATA.VAL /data/imagenet/val
  torchrun --nproc-per-node 8 tools/linear_eval.py --auto-resume --config-file …
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
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
    cli.add_flag(arguments, "--allow-overlap", "evaluate even on images that are trained on")
    cli.add_config_arguments(arguments, "SEED 1 DATA.NUM_WORKERS 8")
    given = arguments.parse_args(argv)

    from kscl.runtime.processes.launch import launch
    from linear_eval.check import check_evaluation
    from linear_eval.data.overlap import refuse_overlap
    from linear_eval.run import jobs_of, run_all

    if given.check:
        return cli.tell_problems(
            lambda: check_evaluation(
                load_linear_eval_config(given.config_file, given.overrides),
                given.check_later,
                given.allow_overlap,
            )
        )
    cfg = load_linear_eval_config(given.config_file, given.overrides)
    if given.print_config:
        print(config_yaml(cfg, comments_of(linear_eval_defaults)), end="")
        return 0
    if not given.allow_overlap and int(os.environ.get("RANK", 0)) == 0:
        refuse_overlap(cfg)
    jobs = jobs_of(cfg, given.num_seeds, given.resume, given.auto_resume)
    return launch(run_all, jobs, given.num_gpus)
