"""The record of an evaluation, its classifier, and the lines that a person reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
from fvcore.common.config import CfgNode

from kscl.backbone_file import RANDOM
from kscl.config.tree import CONFIG_FILE, config_values
from kscl.records.record import RECORD_FILE, Protocol, Record, make_record, read_record
from kscl.records.spread import mean_and_std
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import LOG_FILE
from kscl.runtime.processes.distributed import world_size
from linear_eval.backbone import Frozen
from linear_eval.config import WITHOUT_EFFECT_ON_RESULTS
from linear_eval.data.sets import Data
from linear_eval.probes.outcome import Outcome
from linear_eval.protocols import deviations
from linear_eval.score import LEVEL

METRIC_WORDS = {"top1": "top-1", "top5": "top-5"}
CLASSIFIER_FILE = "classifier.safetensors"
# Of a pretraining's description: what distinguishes entries of the leaderboard, and the seed.
DESCRIBING = ("method", "similarity", "num_shots", "rho", "epochs", "seed")

Json = dict[str, Any]


def sizes_of(data: Data) -> dict[str, int]:
    """Count what `linear_eval.protocols.IMAGENET` counts; nothing where there are several sets."""
    if "train" not in data:
        return {}
    train, val = data["train"], data["val"]
    return {"classes": len(train.classes), "train images": len(train), "val images": len(val)}


def record_of(
    cfg: CfgNode,
    protocol: Protocol,
    frozen: Frozen,
    data: Data,
    outcome: Outcome,
    seconds: float,
) -> Record:
    """Return the record of an evaluation that has just ended."""
    score, loaded = outcome.score, frozen.loaded
    backbone = describe_backbone(cfg, frozen)
    details: Json = {
        "backbone": backbone,
        "n": score.n,
        "n_train": sum(len(i) for role, i in data.items() if not role.endswith(("val", "test"))),
        "processes": world_size(),
        "files": {"config": CONFIG_FILE, "log": LOG_FILE},
        **outcome.details,
    }
    if score.per_class:
        details |= {"classes": data["val"].classes, "per_class": score.per_class}
    if score.right:
        details |= {
            "right": score.right,
            "confidence_interval": {name: list(ends) for name, ends in score.intervals.items()},
            "confidence_level": LEVEL,
            "confidence_method": "Wilson, test sampling only",
        }
    if outcome.classifier is not None:
        details["files"]["classifier"] = CLASSIFIER_FILE
    if cfg.PROBE == "online":
        details["differs_from_imagenet_linear_moco"] = deviations(cfg, sizes_of(data))
        details["epochs"] = cfg.SOLVER.EPOCHS
    if cfg.PROBE == "cached" and cfg.CACHED.METHOD == "sgd":
        details["epochs"] = cfg.SOLVER.EPOCHS
    return make_record(
        kind="linear" if cfg.PROBE in ("online", "cached") else cfg.PROBE,
        name=cfg.LABEL
        or backbone.get("method")
        or Path(cfg.BACKBONE.WEIGHTS.removesuffix(".tar")).stem,
        protocol=protocol,
        metrics=score.metrics,
        seconds=seconds,
        seed=cfg.SEED if outcome.seed is None else outcome.seed,
        cfg=cfg,
        data={role: images.fingerprint for role, images in data.items()},
        inputs={"backbone": loaded.file_sha256 or loaded.tensors_sha256},
        details=details,
        without_effect=WITHOUT_EFFECT_ON_RESULTS,
    )


def describe_backbone(cfg: CfgNode, frozen: Frozen) -> Json:
    """Return what a reader should know of the backbone; the leaderboard groups by it."""
    loaded, description = frozen.loaded, frozen.loaded.description
    known: Mapping[str, Any] = description.source
    if cfg.LABEL and known.get("method") in (None, RANDOM):
        known = {**known, "method": cfg.LABEL}
    return {
        **{key: known[key] for key in DESCRIBING if key in known},
        "arch": description.arch,
        "kwargs": config_values(CfgNode(description.kwargs)) if description.kwargs else {},
        "parameters": sum(p.numel() for p in loaded.backbone.parameters()),
        "weights": "random" if loaded.layout == RANDOM else f"file, read as {loaded.layout}",
        "mean": [round(value, 6) for value in frozen.mean.flatten().tolist()],
        "std": [round(value, 6) for value in frozen.std.flatten().tolist()],
        "feature_dim": frozen.dim,
        "batch_norm_calibrated_on": frozen.calibrated_on,
        "sha256": frozen.tensors_sha256,
    }


def write_classifier(outcome: Outcome, data: Data, folder: Path) -> None:
    """Write the linear layer, for features as the backbone gives them, with its class names."""
    if outcome.classifier is None:
        return
    head = outcome.classifier
    tensors = {"weight": head.weight.contiguous(), "bias": head.bias.contiguous()}
    metadata = {"format": "pt", "classes": json.dumps(data["val"].classes)}
    write_atomically(folder / CLASSIFIER_FILE, safetensors.torch.save(tensors, metadata))


def in_words(record: Record, remark: str = "") -> str:
    """Return the result on one line."""
    metrics, details = record.metrics, record.details
    ends = details.get("confidence_interval", {})
    values = [
        f"{METRIC_WORDS.get(name, name)} {value:.2f}"
        + (f" [{ends[name][0]:.2f}, {ends[name][1]:.2f}]" if name in ends and not number else "")
        for number, (name, value) in enumerate(metrics.items())
    ]
    return (
        f"{record.name}: {', '.join(values)} on {details['n']:,} images, {record.protocol.id}, "
        f"seed {record.seed}" + (f" ({remark})" if remark else "")
    )


def summary(folders: Sequence[Path]) -> str:
    """Return one line for one record, and mean ± standard deviation of each metric for several."""
    first = read_record(folders[0] / RECORD_FILE)
    files = [sorted(folder.glob(f"*{RECORD_FILE}")) for folder in folders]
    found = [read_record(file) for of_folder in files for file in of_folder]
    records = [record for record in found if record.protocol == first.protocol]
    others = [record for record in found if record.protocol != first.protocol]
    if len(records) == 1:
        return "\n".join(map(in_words, [first, *others]))
    parts = [
        f"{name} {mean_and_std([record.metrics[name] for record in records])}"
        for name in first.metrics
    ]
    seeds = ", ".join(str(record.seed) for record in records)
    return f"{first.name}: {', '.join(parts)} over seeds {seeds}, {first.protocol.id}"
