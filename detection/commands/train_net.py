"""Fine-tune and score a detector, as Detectron2's train_net.py does, but fail before it starts.

Config, data, weights and detector are checked before a folder is made, the disk before the first
iteration. Every trial has a seed and a folder of its own and ends in a record. Without a GPU it
runs on the CPU; no flag is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from detection.errors import DetectionError
from detection.install import require_detectron2
from kscl import cli
from kscl.config.comments import comments_of
from kscl.config.tree import config_yaml
from kscl.data.annotated.annotations import Problem

if TYPE_CHECKING:
    from detectron2.config import CfgNode

EXAMPLES = """  python tools/train_net.py --config-file output/converted/config.yaml --num-gpus 8 \\
      OUTPUT_DIR output/detector
  python tools/train_net.py --config-file output/converted/config.yaml --num-trials 5 \\
      OUTPUT_DIR output/trials
  python tools/train_net.py --config-file output/converted/config.yaml --resume --num-trials 5 \\
      OUTPUT_DIR output/trials
  python tools/train_net.py --config-file output/converted/config.yaml \\
      DATASETS.TRAIN "('voc:data/mine:train',)" DATASETS.TEST "('voc:data/mine:val',)" \\
      MODEL.ROI_HEADS.NUM_CLASSES 3 OUTPUT_DIR output/mine
  python tools/train_net.py --config-file output/converted/config.yaml --lr-grid 0.01,0.02,0.04 \\
      OUTPUT_DIR output/rates
  python tools/train_net.py --config-file output/mine/config.yaml --eval-only \\
      MODEL.WEIGHTS output/mine/model_final.pth OUTPUT_DIR output/mine-again

On the CPU, small networks are fastest with one thread per process: OMP_NUM_THREADS=1.
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool and return its exit code."""
    parser = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_config_arguments(parser, "SOLVER.BASE_LR 0.01 SEED 3")
    cli.add_run_arguments(parser)
    cli.add_check_arguments(parser, "config, data, weights, detector and disk")
    cli.add_world_size_argument(parser)
    about = "score MODEL.WEIGHTS, a trained detector, and save the pass in OUTPUT_DIR"
    cli.add_flag(parser, "--eval-only", about)
    parser.add_argument(
        "--num-trials",
        type=int,
        default=0,
        metavar="N",
        help="seeds SEED, SEED + 1, …, each in its own folder; finished ones are kept",
    )
    parser.add_argument(
        "--lr-grid",
        metavar="RATES",
        help="choose SOLVER.BASE_LR among these, such as 0.01,0.02,0.04, on a fifth of the "
        "training images; a protocol of its own",
    )
    arguments = parser.parse_args(argv)
    require_detectron2()

    from detection.config import add_kscl_config
    from detection.train.trials import run_evaluation, run_trials

    if arguments.eval_only and arguments.num_trials:
        raise DetectionError("--eval-only scores one detector. Leave --num-trials out.")
    if arguments.check:
        return cli.tell_problems(lambda: _check(arguments))
    cfg, scaled_from, notice = _adapted(arguments)
    if arguments.print_config:
        print(config_yaml(cfg, comments_of(add_kscl_config)), end="")
        return 0
    if arguments.eval_only:
        return run_evaluation(cfg, arguments.num_gpus)
    print(notice, end="", flush=True)
    return run_trials(
        cfg,
        arguments.num_gpus,
        arguments.num_trials,
        resume=arguments.resume,
        auto_resume=arguments.auto_resume,
        allow_world_size_change=arguments.allow_world_size_change,
        scaled_from=scaled_from,
    )


def _adapted(arguments: argparse.Namespace) -> tuple[CfgNode, int, str]:
    from detection.config import load_detection_config
    from detection.train.adapt import adapt
    from detection.train.lr_search import parse_grid

    cfg = load_detection_config(arguments.config_file, arguments.overrides)
    if arguments.lr_grid is not None:
        cfg.KSCL.LR_GRID = parse_grid(arguments.lr_grid)
    return adapt(cfg, arguments.num_gpus)


def _check(arguments: argparse.Namespace) -> list[Problem]:
    from detection.train.check import check_trials

    cfg, _, _ = _adapted(arguments)
    return check_trials(cfg, arguments.check_later)
