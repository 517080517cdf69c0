"""Contents of records as the tools write them, with made-up numbers, for the leaderboard."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode

from kscl.benchmark.leaderboard.rows import Board, Row, build_board
from kscl.keys import PRETRAIN, load_config
from kscl.records.record import RECORD_FILE, Json, Metric, Protocol, TaskInfo, make_record

LINEAR = Protocol("linear-cached", {"epochs": 100, "scorer": "top1"})
KNN = Protocol("knn-20", {"k": 20, "temperature": 0.07})
DETECTION = Protocol("shapes-tiny-c4", {"iterations": 600, "scorer": "voc-11-point"})
IMAGENET = Protocol("imagenet-linear-moco", {"epochs": 100, "lr": 30})
VOC = Protocol("voc0712-c4-24k-moco", {"iterations": 24000, "scorer": "voc-11-point"})

TOP1 = Metric("top1", "top-1", headline=True, per_image=True)
TOP5 = Metric("top5", "top-5", per_image=True)
AP = (
    Metric("AP50", "AP50", unranked_below=5.0, working_from=25.0),
    Metric("AP", "AP", headline=True),
    *(Metric(name, name) for name in ("AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100")),
    *(Metric(f"mask/{name}", f"mask {name}") for name in ("AP50", "AP", "AP75")),
)


def _info(kind: str, title: str, *metrics: Metric, stage: str = "probe") -> TaskInfo:
    hub_task = "object-detection" if stage == "detection" else "image-classification"
    return TaskInfo(kind, title, stage, hub_task, list(metrics))


INFO = {
    "linear": _info("cached", "Classifier (linear probe)", TOP1, TOP5),
    "knn": _info("knn", "Classifier (nearest neighbors)", replace(TOP1, label="kNN")),
    "svm": _info("svm", "Classifier (SVMs)", Metric("mAP", "SVM mAP", headline=True)),
    "detection": _info("detection", "Detector", *AP, stage="detection"),
}

DATA = {"train": {"hash": "aaaa", "files": 10, "bytes": 1000}}
TEST_DATA = {"train": {"hash": "bbbb"}, "test": {"hash": "cccc"}}
# One pixel: enough to be a picture.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
SHAPES = ("circle", "square", "star", "ring", "cross", "arrow")


@functools.cache
def config(*overrides: str) -> CfgNode:
    return load_config(None, overrides)


def sha(*words: object) -> str:
    return hashlib.sha256("/".join(map(str, words)).encode()).hexdigest()


def pretraining(*overrides: str, seed: int = 0, **changes: Any) -> Json:
    """Return a pretraining's record; its backbone's hash follows from settings and seed."""
    chance = random.Random(sha(overrides, seed))
    epochs = list(range(1, 41))
    curves = {
        "epoch": epochs,
        "loss": [7 * 0.93**e + 1 + chance.gauss(0, 0.05) for e in epochs],
        "instance_top1": [90 * (1 - 0.9**e) + chance.gauss(0, 0.8) for e in epochs],
    }
    cfg = config(*overrides, "SEED", str(seed))
    shots = cfg.METHOD.NUM_SHOTS
    details = {"outputs": {"backbone": sha(overrides, seed)}, "curves": curves}
    fields: Json = {
        "kind": "pretrain",
        "task": TaskInfo("pretrain", "Pretraining", "pretrain", "", []),
        "name": f"{cfg.LABEL} seed {seed}",
        "protocol": Protocol("pretrain", {}),
        "metrics": {
            "loss": curves["loss"][-1],
            "mean_rank": 1 + 0.12 * (shots - 1),
            "minutes_per_epoch": 0.1 * (3 + shots),
            "views_per_second": 2000 / (3 + shots) * (1 + shots),
        },
        "seconds": 600.0,
        "seed": seed,
        "cfg": cfg,
        "without_effect": PRETRAIN.without_effect,
        "data": DATA,
    }
    details |= changes.pop("details", {})
    return make_record(**(fields | changes), details=details).as_dict()


def evaluation(
    kind: str, protocol: Protocol, metrics: dict[str, float], backbone: str, **changes: Any
) -> Json:
    fields: Json = {
        "kind": kind,
        "task": INFO.get(kind),
        "name": f"{protocol.id} of {backbone[:6]}",
        "protocol": protocol,
        "metrics": metrics,
        "seconds": 60.0,
        "seed": 0,
        "cfg": config(),
        "without_effect": PRETRAIN.without_effect,
        "data": TEST_DATA,
        "inputs": {"backbone": backbone},
    }
    return make_record(**(fields | changes)).as_dict()


def linear(top1: float, backbone: str, protocol: Protocol = LINEAR, **changes: Any) -> Json:
    metrics = {"top1": top1, "top5": min(100.0, top1 + 20)}
    return evaluation("linear", protocol, metrics, backbone, **changes)


def knn(top1: float, backbone: str, **changes: Any) -> Json:
    return evaluation("knn", KNN, {"top1": top1}, backbone, **changes)


def detection(ap: float, backbone: str, protocol: Protocol = DETECTION, **changes: Any) -> Json:
    metrics = {"AP50": ap + 25, "AP": ap, "AP75": ap + 6, "coco_AP": ap + 1.4}
    details = {
        "per_class": {name: ap + 3 * i - 7 for i, name in enumerate(SHAPES)},
        "certificate": {"tolerance": 1e-4, "res4": 8.1e-6, "res5": 1.4e-5},
    } | changes.pop("details", {})
    return evaluation("detection", protocol, metrics, backbone, details=details, **changes)


def write_all(folder: Path, records: list[Json]) -> Path:
    for i, record in enumerate(records):
        path = folder / f"run_{i:04d}" / RECORD_FILE
        path.parent.mkdir(parents=True)
        # As `write_record` writes it, without waiting for the disk each time.
        path.write_text(json.dumps(record, indent=2))
    return folder


def described(method: str, seed: int | None = None, **words: Any) -> Json:
    """Return details of an evaluation whose backbone no pretraining record made."""
    return {"backbone": {"method": method, "arch": "resnet50", "seed": seed, **words}}


def runs(settings: tuple[str, ...], quality: float, seeds: int, trials: int = 1) -> list[Json]:
    """Return an entry in full: pretrained `seeds` times, each time probed and fine-tuned."""
    records = []
    for seed in range(seeds):
        chance = random.Random(sha(settings, seed, "evaluation"))
        made = pretraining(*settings, seed=seed)
        backbone = made["details"]["outputs"]["backbone"]
        level = quality + chance.gauss(0, 0.3)
        records += [made, linear(level, backbone, details={"n": 5000}), knn(level - 4, backbone)]
        records += [
            detection(level / 2 + chance.gauss(0, 0.2), backbone, seed=trial)
            for trial in range(trials)
        ]
    return records


def kscl(shots: int, rho: float, *more: str) -> tuple[str, ...]:
    return ("METHOD.NUM_SHOTS", str(shots), "METHOD.RHO", str(rho), *more)


MOCO = ("LABEL", "moco_v2", "METHOD.NUM_SHOTS", "1", "METHOD.SIMILARITY", "cosine")


def a_whole_board() -> list[Json]:
    """Return records of several protocols, seeds and methods, with rows of every mark."""
    records = [
        *runs(kscl(5, 0.4), 68.8, seeds=3, trials=2),
        *runs(kscl(5, 0.9), 68.4, seeds=3, trials=2),
        *runs(kscl(3, 0.4), 68.5, seeds=3),
        *runs(kscl(5, 0.4, "METHOD.TEMPERATURE", "0.1"), 66.0, seeds=2),
        *runs(MOCO, 67.0, seeds=3, trials=2),
    ]
    for seed in range(2):
        random_details = described("random", seed)
        records.append(linear(21.0 + seed, sha("random", seed), details=random_details))
        records.append(detection(11.0 + seed, sha("random", seed), details=random_details))
    supervised = described("supervised") | {"n": 5000}
    records.append(linear(76.1, sha("supervised"), details=supervised))
    made = pretraining(*kscl(5, 0.4), seed=0)["details"]["outputs"]["backbone"]
    records.append(linear(67.9, made, protocol=IMAGENET, details={"n": 50000}))
    records += [detection(57.0 + 0.1 * t, made, protocol=VOC, seed=t) for t in range(3)]
    return records


def board_of(folder: Path, records: list, **options: object) -> Board:
    return build_board([write_all(folder, records)], **{"check_stale": False, **options})


def only(rows: list[Row]) -> Row:
    assert len(rows) == 1
    return rows[0]


def backbone_of(record: dict) -> str:
    return record["details"]["outputs"]["backbone"]
