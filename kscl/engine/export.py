"""What a run leaves: the description in its checkpoints, the backbone, and the record."""

from __future__ import annotations

import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kscl.backbone_file import DESCRIPTION_VERSION, Description, save_backbone
from kscl.config.tree import config_hash, config_values
from kscl.engine.doubts import doubts
from kscl.engine.metrics_log import means_of_last_epoch, read_metrics, thinned_curves
from kscl.engine.state import TrainState
from kscl.engine.world_size import WORLD_SIZE, WORLD_SIZES
from kscl.method.cost import num_views
from kscl.method.encoder import backbone_state_dict
from kscl.records.provenance import code_version
from kscl.records.record import Protocol, make_record, write_record
from kscl.runtime.files import sha256_of
from kscl.runtime.processes.distributed import world_size
from kscl.views.sizes import last_size

log = logging.getLogger(__name__)

BACKBONE_FILE = "backbone.safetensors"
KNN_TOP1 = "knn_top1"
PROTOCOL = Protocol("pretrain", {"figures": "means over the last epoch", "version": 1})


def describe(
    state: TrainState, data: dict[str, Any], metrics: dict[str, float] | None = None
) -> Description:
    """Return the description that travels with the backbone's weights."""
    cfg = state.cfg
    source = {
        "method": cfg.LABEL,
        "similarity": cfg.METHOD.SIMILARITY,
        "num_shots": cfg.METHOD.NUM_SHOTS,
        "rho": cfg.METHOD.RHO,
        "epochs": state.step / state.steps_per_epoch,
        "seed": cfg.SEED,
        "config_hash": config_hash(cfg),
        "data": data["hash"],
        "code": code_version()["source_hash"],
        **({"start": state.inputs["weights"]} if state.inputs else {}),
        **(metrics or {}),
    }
    return Description(
        arch=cfg.BACKBONE.NAME,
        kwargs=config_values(cfg)["BACKBONE"]["KWARGS"],
        mean=tuple(cfg.INPUT.MEAN),
        std=tuple(cfg.INPUT.STD),
        size=last_size(cfg.INPUT.SIZE),
        source=source,
    )


def about_checkpoint(
    state: TrainState, data: dict[str, Any], bad_images: dict[int, str]
) -> dict[str, Any]:
    """Return what a checkpoint holds beside the training state."""
    return {
        "description": {"version": DESCRIPTION_VERSION, **asdict(describe(state, data))},
        "config": config_values(state.cfg),
        "data": data,
        "bad_images": bad_images,
        WORLD_SIZE: world_size(),
        WORLD_SIZES: state.world_sizes,
    }


def export(
    state: TrainState, data: dict[str, Any], bad_images: dict[int, str], folder: Path
) -> None:
    """Write the backbone, then the record, which says that the run is complete."""
    cfg = state.cfg
    rows = read_metrics(folder)
    last = means_of_last_epoch(rows)
    means: dict[str, float] = {
        name: last[name] for name in ("loss", "instance_top1", "mean_rank") if name in last
    }
    backbone = folder / BACKBONE_FILE
    save_backbone(
        backbone, backbone_state_dict(state.learner.encoder), describe(state, data, means)
    )
    images_per_second = state.step * cfg.SOLVER.BATCH_SIZE / state.seconds
    metrics: dict[str, float] = {
        **means,
        "minutes_per_epoch": state.seconds / 60 / (state.step / state.steps_per_epoch),
        "images_per_second": images_per_second,
        "views_per_second": images_per_second * num_views(cfg),
        "bad_images": len(bad_images),
    }
    checks = [row for row in rows if KNN_TOP1 in row]
    if checks:
        metrics[KNN_TOP1] = checks[-1][KNN_TOP1]
    curves = thinned_curves(rows)
    warnings = doubts(cfg, data["images"], curves)
    for warning in warnings:
        log.warning("%s", warning)
    record = make_record(
        kind="pretrain",
        name=cfg.LABEL,
        protocol=PROTOCOL,
        metrics=metrics,
        seconds=state.seconds,
        seed=cfg.SEED,
        cfg=cfg,
        data={"train": data},
        inputs=state.inputs,
        details={
            "steps": state.step,
            "epochs": state.step / state.steps_per_epoch,
            "curves": curves,
            "warnings": warnings,
            "knn_curve": [[row["step"], row[KNN_TOP1]] for row in checks],
            "outputs": {"backbone": sha256_of(backbone)},
            "parameters": sum(p.numel() for p in state.learner.encoder.backbone.parameters()),
            "processes": world_size(),
            WORLD_SIZES: state.world_sizes,
        },
    )
    log.info("Wrote %s and %s.", backbone, write_record(record, folder))
