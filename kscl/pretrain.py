"""Pretraining from a config: images in, `backbone.safetensors` and `record.json` out."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fvcore.common.config import CfgNode

from kscl import cli
from kscl.amx import avoid_broken_amx
from kscl.bad_images import BadImages
from kscl.budget import measure_budget
from kscl.checkpoint import CHECKPOINT_FOLDER
from kscl.config import (
    config_hash,
    config_values,
    config_yaml,
    derived_values,
    load_config,
    save_config,
)
from kscl.data import TrainLoader, build_train_loader, steps_per_epoch
from kscl.distributed import rank, world_size
from kscl.encoder import backbone_state_dict
from kscl.engine import settle, train
from kscl.errors import KsclError
from kscl.files import sha256_of
from kscl.fingerprint import fingerprint
from kscl.launch import device, launch, on_first_rank
from kscl.logs import set_up_logging
from kscl.memory import keep_freed_memory
from kscl.metrics import RunLog, means_of_last_epoch, read_metrics, thinned_curves
from kscl.online_knn import KnnCheck
from kscl.provenance import code_version
from kscl.records import RECORD_FILE, Protocol, make_record, write_record
from kscl.run_folder import find_start, only_run_in
from kscl.signals import StopRequest, stop_requests
from kscl.sources import ImageSource, open_source
from kscl.training import Training, build_training, restore
from kscl.weights import DESCRIPTION_VERSION, Description, read_plain, save_backbone

log = logging.getLogger(__name__)

BACKBONE_FILE = "backbone.safetensors"
KNN_TOP1 = "knn_top1"
SAMPLED_IMAGES = 64
PROTOCOL = Protocol("pretrain", {"figures": "means over the last epoch", "version": 1})
EXAMPLES = """  python tools/pretrain.py --config-file configs/pretrain/shapes_kscl.yaml \\
      DATA.TRAIN datasets/shapes/train OUTPUT_DIR output/mine
  python tools/pretrain.py --config-file configs/pretrain/kscl_k5_rho40_r50_200ep.yaml \\
      --num-gpus 8 --auto-resume DATA.TRAIN /data/imagenet/train
  torchrun --nnodes 2 --nproc-per-node 8 … tools/pretrain.py --auto-resume --config-file …
"""


@dataclass(frozen=True)
class Job:
    """What every rank is told."""

    cfg: CfgNode
    resume: bool
    auto_resume: bool


@cli.command
def main(argv: Sequence[str] | None = None) -> int:
    arguments = cli.parser(__doc__ or "", EXAMPLES)
    cli.add_run_arguments(arguments)
    cli.add_config_arguments(arguments)
    given = arguments.parse_args(argv)
    cfg = load_config(given.config_file, given.overrides)
    if given.print_config:
        print(config_yaml(cfg), end="")
        return 0
    return launch(run, Job(cfg, given.resume, given.auto_resume), given.num_gpus)


def run(job: Job) -> int:
    """One rank's part, from the folder's claim to the record."""
    cfg, folder = job.cfg, Path(job.cfg.OUTPUT_DIR)
    set_up_logging(rank=rank())
    if device().type == "cpu":
        keep_freed_memory()
        if cfg.SOLVER.AMP == "bf16":
            avoid_broken_amx()
    with contextlib.ExitStack() as until_the_end:

        def claim() -> Path | None:
            until_the_end.enter_context(only_run_in(folder))
            return find_start(cfg, job.resume, job.auto_resume)

        checkpoint = on_first_rank(claim)
        if (folder / RECORD_FILE).exists():
            log.info("this run has ended: %s", folder / RECORD_FILE)
            return 0
        source = open_in_turn(cfg)
        data = on_first_rank(lambda: data_fingerprint(cfg.DATA.TRAIN, source))
        steps = steps_per_epoch(len(source), cfg.SOLVER.BATCH_SIZE)
        training = build_training(cfg, len(source), steps, device())
        saved = read_plain(checkpoint) if checkpoint is not None else None
        if saved is not None:
            refuse_other_data(saved["data"], data, cfg.DATA.TRAIN)
            restore(training, saved)
        loader = build_train_loader(
            cfg,
            first_step=training.step,
            last_step=training.total_steps,
            rank=rank(),
            world_size=world_size(),
        )
        loader.bad_images.reasons.update(saved["bad_images"] if saved is not None else {})
        knn = KnnCheck(cfg) if cfg.EVAL.KNN_PERIOD else None
        # Nothing is left to refuse. The config is written first: it tells whose folder this is.
        on_first_rank(lambda: save_config(cfg, folder))
        set_up_logging(folder, rank())
        announce(training, data, checkpoint)
        with stop_requests() as stop:
            if not go_on(training, loader, knn, data, stop):
                return stop.exit_code
        bad_images = all_reasons(loader.bad_images)
        on_first_rank(lambda: finish(training, data, bad_images, folder))
    return 0


def open_in_turn(cfg: CfgNode) -> ImageSource:
    """Rank 0 first: the index of files that it leaves is then there for the others."""
    opened: list[ImageSource] = []
    on_first_rank(lambda: opened.append(open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR)))
    return opened[0] if opened else open_source(cfg.DATA.TRAIN, cfg.DATA.CACHE_DIR)


def go_on(
    training: Training,
    loader: TrainLoader,
    knn: KnnCheck | None,
    data: dict[str, Any],
    stop: StopRequest,
) -> bool:
    """Train to the end, or until asked to stop; whether the end was reached."""
    cfg, folder = training.cfg, Path(training.cfg.OUTPUT_DIR)
    if training.step == training.total_steps:
        return True
    budget = measure_budget(loader.dataset, cfg.DATA.NUM_WORKERS).with_encode(settle(training))
    log.info("a process: %s", budget)

    def about() -> dict[str, Any]:
        return {
            "description": {"version": DESCRIPTION_VERSION, **asdict(describe(training, data))},
            "config": config_values(cfg),
            "data": data,
            "bad_images": all_reasons(loader.bad_images),
        }

    def check(epoch: int) -> dict[str, float]:
        if knn is None or (epoch % cfg.EVAL.KNN_PERIOD and epoch != cfg.SOLVER.EPOCHS):
            return {}
        top1 = knn.accuracy(training.learner.encoder.backbone, training.device)
        log.info("epoch %d: kNN %.2f %%", epoch, top1)
        return {KNN_TOP1: top1}

    run_log = RunLog(
        folder if rank() == 0 else None,
        training.step,
        training.total_steps,
        training.steps_per_epoch,
        cfg.METHOD.NUM_SHOTS + 1,
    )
    with run_log:
        return train(training, loader, folder / CHECKPOINT_FOLDER, run_log, stop, about, check)


def announce(training: Training, data: dict[str, Any], checkpoint: Path | None) -> None:
    """What will be done, for a person to check before a long run."""
    cfg = training.cfg
    for line in derived_values(cfg):
        log.info(line)
    log.info(
        "%s images, fingerprint %s; %d steps an epoch, %d in all; on %s",
        f"{data['images']:,}",
        data["hash"],
        training.steps_per_epoch,
        training.total_steps,
        f"{world_size()} x {training.device.type}",
    )
    if checkpoint is not None:
        log.info("going on after step %d from %s", training.step, checkpoint)


def data_fingerprint(where: str, source: ImageSource) -> dict[str, Any]:
    """Of names, sizes and a sample of the contents; without sizes where the data is not a file."""
    if Path(where).exists():
        return {**fingerprint(where).as_dict(), "images": len(source)}
    digest = hashlib.sha256()
    for index in range(len(source)):
        digest.update(f"{source.name(index)}\0".encode("utf-8", "surrogateescape"))
    for index in range(0, len(source), max(1, len(source) // SAMPLED_IMAGES)):
        digest.update(source.read(index))
    return {"hash": digest.hexdigest()[:16], "images": len(source)}


def refuse_other_data(before: dict[str, Any], now: dict[str, Any], where: str) -> None:
    if before["hash"] != now["hash"]:
        raise KsclError(
            f"DATA.TRAIN {where} has changed since the checkpoint was written (fingerprint "
            f"{before['hash']} with {before['images']:,} images then, {now['hash']} with "
            f"{now['images']:,} now): bring the images back, or start a new run"
        )


def all_reasons(bad_images: BadImages) -> dict[int, str]:
    """The ranks' accounts of bad images in one."""
    if world_size() == 1:
        return dict(bad_images.reasons)
    parts: list[Any] = [None] * world_size()
    dist.all_gather_object(parts, bad_images.reasons)
    return {index: reason for part in parts for index, reason in part.items()}


def describe(
    training: Training, data: dict[str, Any], figures: dict[str, float] | None = None
) -> Description:
    """What travels with the backbone's weights."""
    cfg = training.cfg
    source = {
        "method": cfg.METHOD.NAME,
        "similarity": cfg.METHOD.SIMILARITY,
        "num_shots": cfg.METHOD.NUM_SHOTS,
        "rho": cfg.METHOD.RHO,
        "epochs": training.step / training.steps_per_epoch,
        "seed": cfg.SEED,
        "config_hash": config_hash(cfg),
        "data": data["hash"],
        "code": code_version()["source_hash"],
        **(figures or {}),
    }
    return Description(
        arch=cfg.BACKBONE.NAME,
        kwargs=config_values(cfg)["BACKBONE"]["KWARGS"],
        mean=tuple(cfg.INPUT.MEAN),
        std=tuple(cfg.INPUT.STD),
        size=cfg.INPUT.SIZE,
        source=source,
    )


def finish(
    training: Training, data: dict[str, Any], bad_images: dict[int, str], folder: Path
) -> None:
    """Write the backbone, then the record, which says that the run is complete."""
    cfg = training.cfg
    rows = read_metrics(folder)
    last = means_of_last_epoch(rows)
    figures: dict[str, float] = {
        name: last[name] for name in ("loss", "instance_top1", "mean_rank") if name in last
    }
    backbone = folder / BACKBONE_FILE
    description = describe(training, data, figures)
    save_backbone(backbone, backbone_state_dict(training.learner.encoder), description)
    rate = training.step * cfg.SOLVER.BATCH_SIZE / training.seconds
    metrics: dict[str, float] = {
        **figures,
        "minutes_per_epoch": training.seconds / 60 / cfg.SOLVER.EPOCHS,
        "images_per_second": rate,
        "views_per_second": rate * (cfg.METHOD.NUM_SHOTS + 1),
        "bad_images": len(bad_images),
    }
    checks = [row for row in rows if KNN_TOP1 in row]
    if checks:
        metrics[KNN_TOP1] = checks[-1][KNN_TOP1]
    record = make_record(
        kind="pretrain",
        name=cfg.METHOD.NAME,
        protocol=PROTOCOL,
        metrics=metrics,
        seconds=training.seconds,
        seed=cfg.SEED,
        cfg=cfg,
        data={"train": data},
        details={
            "curves": thinned_curves(rows),
            "knn_curve": [[row["step"], row[KNN_TOP1]] for row in checks],
            "outputs": {"backbone": sha256_of(backbone)},
            "processes": world_size(),
        },
    )
    log.info("written: %s and %s", backbone, write_record(record, folder))
