"""Fine-tune and score a detector, like Detectron2's train_net.py, but with checks up front.

Config, data, weights and detector are checked before a folder is made, the disk before the first
iteration. Every trial has its own seed and folder and ends in a record. Without a GPU it runs on
the CPU.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from detection.install import require_detectron2
from kscl import cli
from kscl.data.annotations import Problem
from kscl.errors import KsclError

if TYPE_CHECKING:
    from detectron2.config import CfgNode

    from kscl.engine.cost import Gpu, Needs

STARTED_BY_TORCHRUN = ("--num-gpus", "--num-machines", "--machine-rank", "--dist-url")
EXAMPLES = """  kscl train-net --config-file output/converted/config.yaml --num-gpus 8 \\
      OUTPUT_DIR output/detector
  kscl train-net --config-file output/converted/config.yaml --num-trials 5 \\
      OUTPUT_DIR output/trials
  kscl train-net --config-file output/converted/config.yaml --resume --num-trials 5 \\
      OUTPUT_DIR output/trials
  kscl train-net --config-file output/converted/config.yaml \\
      DATASETS.TRAIN "('voc:data/mine:train',)" DATASETS.TEST "('voc:data/mine:val',)" \\
      MODEL.ROI_HEADS.NUM_CLASSES 3 OUTPUT_DIR output/mine
  kscl train-net --config-file output/converted/config.yaml --lr-grid 0.01,0.02,0.04 \\
      OUTPUT_DIR output/rates
  kscl train-net --config-file output/mine/config.yaml --eval-only
  kscl train-net --config-file output/mine/config.yaml --eval-only \\
      MODEL.WEIGHTS output/mine/model_final.pth OUTPUT_DIR output/mine-again

TEST.EVAL_PERIOD 5000 also scores the detector during training (metrics.json), which does not change
the training; the record has the final number.
On the CPU, small networks are fastest with one thread per process: OMP_NUM_THREADS=1.
"""


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_config_arguments(parser, "SOLVER.BASE_LR 0.01 SEED 3")
    cli.add_run_arguments(parser, resume_starts=True)
    cli.add_check_arguments(parser, "config, data, weights, detector and disk")
    cli.add_world_size_argument(parser)
    about = (
        "score the newest weights of the run in OUTPUT_DIR, or MODEL.WEIGHTS if you set it; in a "
        "run's own folder, results go into its folder inference"
    )
    cli.add_flag(parser, "--eval-only", about)
    _add_machine_arguments(parser)
    parser.add_argument(
        "--num-trials",
        type=int,
        default=0,
        metavar="N",
        help="seeds SEED, SEED + 1, …, each in its own folder; finished ones are kept",
    )
    parser.add_argument(
        "--lr-grid",
        type=_rates,
        metavar="RATES",
        help="choose SOLVER.BASE_LR among these, e.g. 0.01,0.02,0.04, on a fifth of the training "
        "images; this is another protocol",
    )
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = parser.parse_args(words)
    if arguments.num_machines > 1:
        raise KsclError(_with_torchrun(arguments, words))
    require_detectron2()

    from detection.config import GRID_KEY, WEIGHTS_KEY, detection_schema
    from detection.train.trials import run_evaluation, run_trials
    from kscl.run.engine import Flags

    if arguments.eval_only and arguments.num_trials:
        raise KsclError("--eval-only scores one detector. Leave --num-trials out.")
    grid = [GRID_KEY, str(arguments.lr_grid)] if arguments.lr_grid else []
    given = (arguments.config_file, [*arguments.overrides, *grid], arguments.num_gpus)
    if arguments.check:
        how = (arguments.check_later, arguments.eval_only)
        return cli.report_problems(lambda: check(*given, *how))
    cfg, scaled_from, notice = _adapted(*given, arguments.eval_only)
    if arguments.print_config:
        print(detection_schema().print(cfg), end="")
        return 0
    if arguments.eval_only:
        return run_evaluation(cfg, arguments.num_gpus, WEIGHTS_KEY in arguments.overrides[::2])
    print(notice, end="", flush=True)
    flags = Flags(
        auto_resume=arguments.resume or arguments.auto_resume,
        allow_world_size_change=arguments.allow_world_size_change,
    )
    return run_trials(cfg, arguments.num_gpus, arguments.num_trials, flags, scaled_from)


def _add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add Detectron2's options for several machines, for which torchrun is used here."""
    group = parser.add_argument_group("several machines", "see docs/cluster.md")
    about = "if more than 1, print the torchrun command to use instead"
    group.add_argument("--num-machines", type=int, default=1, metavar="N", help=about)
    group.add_argument("--machine-rank", type=int, default=0, metavar="N", help="of this machine")
    about = "tcp://HOST:PORT of machine 0"
    group.add_argument("--dist-url", default="", metavar="URL", help=about)


def _with_torchrun(arguments: argparse.Namespace, words: Sequence[str]) -> str:
    """Return an error with the command that starts this run on several machines."""
    host, _, port = arguments.dist_url.removeprefix("tcp://").rpartition(":")
    if not (host and port.isdigit()):
        host, port = "HOST_OF_MACHINE_0", "29500"
    where = {
        "--nnodes": arguments.num_machines,
        "--node-rank": arguments.machine_rank,
        "--nproc-per-node": arguments.num_gpus,
        "--master-addr": host,
        "--master-port": port,
    }
    rest, skipped = [], False
    for word in words:
        if skipped or word.partition("=")[0] in STARTED_BY_TORCHRUN:
            skipped = not skipped and "=" not in word  # the value that follows
        else:
            rest.append(word)
    options = [f"{name}={value}" for name, value in where.items()]
    command = shlex.join(["torchrun", *options, "-m", "kscl", "train-net", *rest])
    return (
        f"--num-machines is {arguments.num_machines}, which needs torchrun. Run this on machine "
        f"{arguments.machine_rank}, and the same with its own --node-rank on every other:\n"
        f"  {command}"
    )


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def check(
    config: str | None,
    overrides: Sequence[str],
    num_gpus: int = 1,
    later: Sequence[str] = (),
    eval_only: bool = False,
) -> list[Problem]:
    """Return what would stop the run; `later` names what another command will make."""
    require_detectron2()
    from detection.train.trials import check_trials

    cfg, _, _ = _adapted(config, overrides, num_gpus, eval_only)
    return check_trials(cfg, later)


def needs(
    config: str | None,
    overrides: Sequence[str],
    gpu: Gpu,
    count: int,
    arch: str,
    kwargs: Mapping[str, Any],
) -> Needs:
    """Return what one trial takes on these GPUs."""
    require_detectron2()
    from detection.config import load_detection_config
    from detection.train.trials import trial_needs

    return trial_needs(load_detection_config(config, overrides), gpu, count, arch, kwargs)


def _adapted(
    config: str | None, overrides: Sequence[str], num_gpus: int, eval_only: bool
) -> tuple[CfgNode, int, str]:
    from detection.config import load_detection_config
    from detection.train.trials import adapt

    cfg = load_detection_config(config, overrides)
    if eval_only:
        cfg.SOLVER.REFERENCE_WORLD_SIZE = 0  # scaling is for training
    return adapt(cfg, num_gpus)
