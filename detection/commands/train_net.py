"""Fine-tune and score a detector, as Detectron2's train_net.py does, but failing before it starts.

Data, weights and config are checked first, all problems at once. Every trial has a seed and a
folder of its own and ends in a record. Without a GPU it runs on the CPU; no flag is needed.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from detection.install import require_detectron2

require_detectron2()

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer

from detection.config import add_kscl_config, load_detection_config
from detection.convert.certificate import verify_start
from detection.data.catalog import register_datasets, source_of
from detection.data.preflight import preflight
from detection.errors import DetectionError
from detection.train.trial import (
    Trial,
    claim_folder,
    data_of,
    finished,
    refuse_run_folder,
    run_trial,
    score_detector,
)
from kscl import cli
from kscl.config.comments import comments_of
from kscl.config.tree import config_yaml
from kscl.records.record import RECORD_FILE, read_record
from kscl.runtime.launch import launch

EXAMPLES = """  python tools/train_net.py --config-file output/converted/config.yaml --num-gpus 8
  python tools/train_net.py --config-file output/converted/config.yaml --num-trials 5
  python tools/train_net.py --config-file output/converted/config.yaml --resume --num-trials 5
  python tools/train_net.py --config-file output/converted/config.yaml \\
      DATASETS.TRAIN "('voc:data/mine:train',)" DATASETS.TEST "('voc:data/mine:val',)" \\
      MODEL.ROI_HEADS.NUM_CLASSES 3 OUTPUT_DIR output/mine
  python tools/train_net.py --config-file output/mine/config.yaml --eval-only \\
      MODEL.WEIGHTS output/mine/model_final.pth OUTPUT_DIR output/mine-again

On the CPU, small networks are fastest with one thread a process: OMP_NUM_THREADS=1.
"""
HEADLINE = ("AP50", "AP", "AP75")


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_config_arguments(parser, "SOLVER.BASE_LR 0.01 SEED 3")
    cli.add_run_arguments(parser)
    parser.add_argument(
        "--eval-only",
        action="store_true",
        help="score MODEL.WEIGHTS, a trained detector, and save the pass in OUTPUT_DIR",
    )
    parser.add_argument(
        "--num-trials",
        type=int,
        default=0,
        metavar="N",
        help="seeds SEED, SEED + 1, …, each in a folder of its own; what is finished is kept",
    )
    arguments = parser.parse_args(argv)
    if arguments.eval_only and arguments.num_trials:
        raise DetectionError("--eval-only scores one detector: leave --num-trials out")
    cfg = _config(arguments)
    cfg, scaled_from, notice = _scaled(cfg, arguments)
    if arguments.print_config:
        print(config_yaml(cfg, comments_of(add_kscl_config)), end="")
        return 0
    _check_data(cfg)
    if arguments.eval_only:
        refuse_run_folder(cfg)
        return launch(score_detector, cfg, arguments.num_gpus)
    print(notice, end="", flush=True)
    certificate = verify_start(cfg)
    register_datasets(cfg.DATASETS.TRAIN, cfg.DATASETS.TEST, cfg.KSCL.CLASS_NAMES or None)
    data = data_of(cfg)
    resume = arguments.resume or arguments.auto_resume
    trials = [
        Trial(trial_cfg, certificate, resume, scaled_from, data)
        for trial_cfg in _trial_configs(cfg, arguments.num_trials)
    ]
    if arguments.resume and not any(Path(t.cfg.OUTPUT_DIR).is_dir() for t in trials):
        raise DetectionError(
            f"there is nothing to resume in {cfg.OUTPUT_DIR}. Leave --resume out to start, or say "
            "--auto-resume for either."
        )
    for trial in trials:
        if resume and finished(trial):
            print(f"{trial.cfg.OUTPUT_DIR}: finished before, kept")
            continue
        if int(os.environ.get("RANK", 0)) == 0:
            claim_folder(trial)
        code = launch(run_trial, trial, arguments.num_gpus)
        if code:
            return code
    if int(os.environ.get("RANK", 0)) == 0:
        _summary([read_record(Path(trial.cfg.OUTPUT_DIR) / RECORD_FILE) for trial in trials])
    return 0


def _config(arguments: argparse.Namespace) -> CfgNode:
    cfg = load_detection_config(arguments.config_file, arguments.overrides)
    if cfg.SEED < 0:  # Detectron2's "random" is the same order of images in every trial
        cfg.SEED = 0
    if not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
        if cfg.SOLVER.AMP.ENABLED:
            raise DetectionError(
                "SOLVER.AMP.ENABLED needs a GPU and there is none. Set it to False."
            )
        if arguments.num_gpus > 1 and cfg.MODEL.RESNETS.NORM in ("SyncBN", "nnSyncBN"):
            raise DetectionError(
                f"MODEL.RESNETS.NORM {cfg.MODEL.RESNETS.NORM} needs GPUs and there is none. Set it "
                "to naiveSyncBN, which computes the same on any device."
            )
    if len(cfg.DATASETS.TEST) != 1:
        raise DetectionError(
            f"DATASETS.TEST is {tuple(cfg.DATASETS.TEST)}: name one set, a record has one result."
        )
    return cfg


def _scaled(cfg: CfgNode, arguments: argparse.Namespace) -> tuple[CfgNode, int, str]:
    """The config for this number of processes, the number it was for (0: this), and a notice."""
    world = int(os.environ.get("WORLD_SIZE", max(1, arguments.num_gpus)))
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    if reference in (0, world):
        return cfg, 0, ""
    if cfg.SOLVER.IMS_PER_BATCH % reference:
        raise DetectionError(
            f"SOLVER.IMS_PER_BATCH is {cfg.SOLVER.IMS_PER_BATCH}, which the {reference} processes "
            "of the protocol cannot share, so it cannot be scaled. Set SOLVER.REFERENCE_WORLD_SIZE "
            "0 to use batch, learning rate and iterations as they are."
        )
    scaled = DefaultTrainer.auto_scale_workers(cfg, world)
    notice = (
        f"written for {reference} processes, running on {world}: batch "
        f"{cfg.SOLVER.IMS_PER_BATCH} → {scaled.SOLVER.IMS_PER_BATCH}, learning rate "
        f"{cfg.SOLVER.BASE_LR:g} → {scaled.SOLVER.BASE_LR:g}, iterations "
        f"{cfg.SOLVER.MAX_ITER} → {scaled.SOLVER.MAX_ITER}, steps {scaled.SOLVER.STEPS}, "
        f"warm-up {scaled.SOLVER.WARMUP_ITERS}. The record says so and the protocol's hash is "
        f"another: BatchNorm sees {'fewer' if world < reference else 'more'} images at once, "
        "which no scaling fixes. SOLVER.REFERENCE_WORLD_SIZE 0 uses the numbers as they are.\n"
    )
    return scaled, reference, notice


def _trial_configs(cfg: CfgNode, trials: int) -> list[CfgNode]:
    configs = []
    for number in range(max(1, trials)):
        trial_cfg = cfg.clone()
        if trials:
            trial_cfg.SEED = cfg.SEED + number
            trial_cfg.OUTPUT_DIR = str(Path(cfg.OUTPUT_DIR) / f"seed{trial_cfg.SEED}")
        trial_cfg.freeze()
        configs.append(trial_cfg)
    return configs


def _check_data(cfg: CfgNode) -> None:
    report = preflight(
        [source_of(name) for name in cfg.DATASETS.TRAIN],
        [source_of(name) for name in cfg.DATASETS.TEST],
        cfg.KSCL.CLASS_NAMES or None,
        num_classes=cfg.MODEL.ROI_HEADS.NUM_CLASSES,
    )
    report.checked()
    print(report, flush=True)


def _summary(records: list[dict[str, Any]]) -> None:
    """One line: mean ± standard deviation of the trials."""
    parts = []
    for name in HEADLINE:
        values = [record["metrics"][name] for record in records]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        parts.append(f"{name} {statistics.fmean(values):.2f}{spread}")
    count = "1 trial" if len(records) == 1 else f"{len(records)} trials"
    print(f"{', '.join(parts)} ({count}, {records[0]['details']['scorer']})")
