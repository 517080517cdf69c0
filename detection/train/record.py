"""The record of a trial: what was measured, from which weights, on which data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from detection.convert.certificate import Certificate
from detection.scoring import ScorerResult, metrics_of
from detection.scoring.result import per_class_numbers
from detection.train.protocol import WITHOUT_EFFECT, protocol_of
from kscl.records.record import make_record, write_record


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
    backbone: dict[str, Any] = {"method": "from scratch"}
    if certificate is not None:
        inputs = {"weights": certificate.weights_sha256, "backbone": certificate.source_sha256}
        backbone = certificate.backbone
        details = {**details, "certificate": certificate.as_dict()}
    headline, per_class = scores[cfg.KSCL.SCORER], per_class_numbers(scores)
    record = make_record(
        kind="detection",
        name=Path(cfg.OUTPUT_DIR).name,
        protocol=protocol_of(cfg),
        metrics=metrics_of(scores, cfg.KSCL.SCORER),
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
