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
from detectron2.modeling import build_model
from detectron2.utils.logger import setup_logger

from detection.certificate import verify_start
from detection.checkpointing import load_detector
from detection.config import load_detection_config
from detection.datasets import register_datasets, source_of
from detection.errors import DetectionError
from detection.preflight import preflight
from detection.run import Trial, claim_folder, evaluate, finished, run_trial
from detection.scoring import as_table
from kscl import cli
from kscl.config import config_yaml
from kscl.launch import launch
from kscl.records import RECORD_FILE, read_record

EXAMPLES = """  python tools/train_net.py --config-file output/converted/config.yaml --num-gpus 8
  python tools/train_net.py --config-file output/converted/config.yaml --trials 5
  python tools/train_net.py --config-file output/converted/config.yaml --resume --trials 5
  python tools/train_net.py --config-file output/converted/config.yaml \\
      DATASETS.TRAIN "('voc:data/mine:train',)" DATASETS.TEST "('voc:data/mine:val',)" \\
      MODEL.ROI_HEADS.NUM_CLASSES 3 OUTPUT_DIR output/mine
  python tools/train_net.py --config-file output/mine/config.yaml --eval-only \\
      MODEL.WEIGHTS output/mine/model_final.pth
"""
HEADLINE = ("AP50", "AP", "AP75")


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_config_arguments(parser)
    cli.add_run_arguments(parser)
    parser.add_argument("--eval-only", action="store_true", help="score MODEL.WEIGHTS, a detector")
    parser.add_argument(
        "--trials",
        type=int,
        default=0,
        metavar="N",
        help="seeds SEED, SEED + 1, …, each in a folder of its own; what is finished is kept",
    )
    arguments = parser.parse_args(argv)
    cfg, scaled_from = _config(arguments)
    if arguments.print_config:
        print(config_yaml(cfg), end="")
        return 0
    _check_data(cfg)
    if arguments.eval_only:
        return _evaluate_only(cfg)
    certificate = verify_start(cfg)
    resume = arguments.resume or arguments.auto_resume
    trials = [
        Trial(trial_cfg, certificate, resume, scaled_from)
        for trial_cfg in _trial_configs(cfg, arguments.trials)
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


def _config(arguments: argparse.Namespace) -> tuple[CfgNode, int]:
    """The effective config, and the number of processes it was scaled from (0: as it was)."""
    cfg = load_detection_config(arguments.config_file, arguments.overrides)
    if cfg.SEED < 0:  # Detectron2's "random" is the same order of images in every trial
        cfg.SEED = 0
    if not torch.cuda.is_available():
        cfg.MODEL.DEVICE = "cpu"
        if cfg.SOLVER.AMP.ENABLED:
            raise DetectionError(
                "SOLVER.AMP.ENABLED needs a GPU and there is none. Set it to False."
            )
    world = int(os.environ.get("WORLD_SIZE", max(1, arguments.num_gpus)))
    reference = cfg.SOLVER.REFERENCE_WORLD_SIZE
    scaled = DefaultTrainer.auto_scale_workers(cfg, world)
    if scaled is not cfg:
        print(
            f"written for {reference} processes, running on {world}: batch "
            f"{cfg.SOLVER.IMS_PER_BATCH} → {scaled.SOLVER.IMS_PER_BATCH}, learning rate "
            f"{cfg.SOLVER.BASE_LR:g} → {scaled.SOLVER.BASE_LR:g}, iterations "
            f"{cfg.SOLVER.MAX_ITER} → {scaled.SOLVER.MAX_ITER}, steps {scaled.SOLVER.STEPS}, "
            f"warm-up {scaled.SOLVER.WARMUP_ITERS}. The record says so and the protocol's hash is "
            "another: BatchNorm sees fewer images at once, which no scaling mends.",
            flush=True,
        )
    if len(cfg.DATASETS.TEST) != 1:
        raise DetectionError(
            f"DATASETS.TEST is {tuple(cfg.DATASETS.TEST)}: name one set, a record has one result."
        )
    return scaled, reference if scaled is not cfg else 0


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


def _evaluate_only(cfg: CfgNode) -> int:
    setup_logger(name="detection")
    register_datasets(cfg.DATASETS.TRAIN, cfg.DATASETS.TEST, cfg.KSCL.CLASS_NAMES or None)
    model = build_model(cfg)
    load_detector(model, cfg.MODEL.WEIGHTS)
    print(as_table(evaluate(cfg, model)))
    return 0


def _summary(records: list[dict[str, Any]]) -> None:
    """One line: mean ± standard deviation of the trials."""
    parts = []
    for name in HEADLINE:
        values = [record["metrics"][name] for record in records]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        parts.append(f"{name} {statistics.fmean(values):.2f}{spread}")
    count = "1 trial" if len(records) == 1 else f"{len(records)} trials"
    print(f"{', '.join(parts)} ({count}, {records[0]['details']['scorer']})")
