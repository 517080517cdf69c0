"""The record of a trial: what was measured, from which weights, on which data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode

from detection.convert.certificate import Certificate
from detection.scoring import ScorerResult, metrics_of
from detection.scoring.result import per_class_numbers
from detection.train.protocol import OF_RESNETS, WITHOUT_EFFECT, protocol_of
from kscl.backbone_file import RANDOM
from kscl.config.tree import plain, value_at
from kscl.engine.world_size import WORLD_SIZES
from kscl.method.encoder import build_backbone
from kscl.records.record import LEAST_AP50, make_record, write_record

HARDLY_FOUND = 1.0  # percent AP50 of a class


def _described(cfg: CfgNode, certificate: Certificate) -> dict[str, Any]:
    """Return what a reader should know of the backbone; the leaderboard groups by it."""
    found = certificate.backbone
    if cfg.KSCL.LABEL and found.get("method") in (None, RANDOM):
        found["method"] = cfg.KSCL.LABEL
    with torch.device("meta"):  # only its structure is needed
        backbone = build_backbone(certificate.arch, certificate.arch_kwargs)
    return found | {"parameters": sum(p.numel() for p in backbone.parameters())}


def _network(cfg: CfgNode) -> dict[str, Any]:
    """Return the network of a training from scratch, so that another one has a row of its own."""
    if cfg.KSCL.TIMM.NAME:
        return {"arch": cfg.KSCL.TIMM.NAME, "kwargs": plain(cfg.KSCL.TIMM.KWARGS)}
    resnet = {key.rpartition(".")[2].lower(): value_at(cfg, key) for key in OF_RESNETS}
    return {"arch": f"resnet{resnet.pop('depth')}", "kwargs": resnet}


def _hardly_found(headline: ScorerResult) -> list[str]:
    """Return a note for every class that is as good as never found, while others are."""
    return [
        f"The class '{name}' is hardly found (AP50 below {HARDLY_FOUND:g}). Train longer, or "
        "annotate more objects of it."
        for name, row in headline["per_class"].items()
        if row["AP50"] < HARDLY_FOUND
    ]


def write_trial_record(
    cfg: CfgNode,
    certificate: Certificate | None,
    data: dict[str, dict[str, Any]],
    scores: dict[str, ScorerResult],
    seconds: float,
    details: dict[str, Any],
) -> None:
    """Write record.json into the trial's folder."""
    inputs: dict[str, str] = {}
    backbone: dict[str, Any] = {"method": "from scratch", **_network(cfg)}
    if certificate is not None:
        inputs = {"weights": certificate.weights_sha256, "backbone": certificate.source_sha256}
        backbone = _described(cfg, certificate)
        details = {**details, "certificate": certificate.as_dict()}
    headline, per_class = scores[cfg.KSCL.SCORER], per_class_numbers(scores)
    metrics = metrics_of(scores, cfg.KSCL.SCORER)
    if metrics["AP50"] < LEAST_AP50:
        low = f"AP50 is {metrics['AP50']:.1f}, too low to compare. Train longer or on more images."
        details = {**details, "warnings": [low]}
    elif missed := _hardly_found(headline):
        details = {**details, "warnings": missed}
    processes = [number for _, number in details.get(WORLD_SIZES, [(0, 1)])]
    record = make_record(
        kind="detection",
        name=Path(cfg.OUTPUT_DIR).name,
        protocol=protocol_of(cfg, processes),
        metrics=metrics,
        seconds=seconds,
        seed=cfg.SEED,
        cfg=cfg,
        data=data,
        inputs=inputs,
        details={
            **details,
            "backbone": backbone,
            "scorer": cfg.KSCL.SCORER,
            "per_class": per_class[cfg.KSCL.SCORER],
            "per_class_by_scorer": per_class,
            "absent_classes": headline["absent_classes"],
            "curves": headline["curves"],
        },
        without_effect=WITHOUT_EFFECT,
    )
    write_record(record, cfg.OUTPUT_DIR)
