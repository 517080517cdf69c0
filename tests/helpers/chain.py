"""The whole chain, as small as it gets, built once per test session for all workers of xdist."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from tests.helpers.commands import tool

NETWORK = {"channels": [8, 16, 32, 64]}
TINY_SHAPES = {
    "num_classes": 2,
    "unlabeled": 32,
    "train": 24,
    "val": 16,
    "detection_train": 8,
    "detection_test": 4,
    "image_size": 48,
    "detection_size": 64,
    "min_objects": 2,
    "max_objects": 3,
    "workers": 1,
}


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` filled once in this session; every worker gets the same one.

    It is shared: tests read it, or copy it before they change anything.
    """
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, made = root / f"shared_{name}", root / f"shared_{name}.made"
    with FileLock(root / f"shared_{name}.lock"):
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            made.touch()
    return folder


@dataclass(frozen=True)
class Chain:
    """What the smoke suite has made."""

    folder: Path  # has suite.yaml, and said.txt with what the suite printed

    @property
    def suite(self) -> Path:
        return self.folder / "suite.yaml"

    @property
    def shapes(self) -> Path:
        """The drawn set: unlabeled/, classes/{train,val}/, VOCdevkit/VOC2007/ and coco/."""
        return self.folder / "shapes"

    @property
    def output(self) -> Path:
        """The runs of the contenders "kscl" and "random", and leaderboard/."""
        return self.folder / "output"

    def run(self, stage: str, contender: str = "kscl") -> Path:
        """Return the folder of one stage: pretrain, convert, knn or detection."""
        (found,) = (self.output / contender / "seed0").glob(f"{stage}-*")
        return found

    @property
    def backbone(self) -> Path:
        return self.run("pretrain") / "backbone.safetensors"


def make_chain(folder: Path) -> None:
    done = tool("run_suite", smoke_suite(folder), timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder / "said.txt").write_text(done.stdout)


def smoke_suite(folder: Path, **changes: object) -> Path:
    """Write the suite of the chain: what is tested is the way, not the numbers."""
    data = folder / "shapes"
    voc = f"voc:{data}/VOCdevkit/VOC2007"
    probe = {
        "DATA.TRAIN": f"{data}/classes/train",
        "DATA.VAL": f"{data}/classes/val",
        "DATA.NUM_WORKERS": 0,
        "DATA.CACHE_DIR": str(folder / "cache"),
        "INPUT.SIZE": 32,
        "INPUT.RESIZE": 32,
    }
    suite = {
        "name": "smoke",
        "jobs": 2,
        "output_dir": str(folder / "output"),
        "shapes": {"output_dir": str(data), **TINY_SHAPES},
        "basis_image": f"{data}/unlabeled/000000.jpg",
        "pretrain_overrides": {
            "DATA.TRAIN": f"{data}/unlabeled",
            "DATA.NUM_WORKERS": 0,
            "DATA.CACHE_DIR": str(folder / "cache"),
            "INPUT.SIZE": 32,
            "SOLVER.EPOCHS": 2,
            "SOLVER.BATCH_SIZE": 16,
            "CHECKPOINT.PERIOD_STEPS": 1,
        },
        "contenders": {
            "random": {"arch": "resnet50", "kwargs": NETWORK},
            "kscl": {
                "pretrain": "pretrain/shapes_kscl.yaml",
                "overrides": {"METHOD.NUM_SHOTS": 2, "BACKBONE.KWARGS": NETWORK},
            },
        },
        "evaluations": {
            "knn": {"config": "linear_eval/shapes_knn.yaml", "overrides": {**probe, "KNN.K": [3]}},
            "detection": {
                "config": "detection/shapes_tiny_c4.yaml",
                "overrides": {
                    "DATASETS.TRAIN": [f"{voc}:trainval"],
                    "DATASETS.TEST": [f"{voc}:test"],
                    "MODEL.ROI_HEADS.NUM_CLASSES": 2,
                    "MODEL.RPN.POST_NMS_TOPK_TEST": 20,
                    "INPUT.MIN_SIZE_TRAIN": [64],
                    "INPUT.MIN_SIZE_TEST": 64,
                    "SOLVER.IMS_PER_BATCH": 2,
                    "SOLVER.MAX_ITER": 3,
                    "SOLVER.STEPS": [2],
                    "SOLVER.CHECKPOINT_PERIOD": 1,
                    "TEST.PRECISE_BN.NUM_ITER": 2,
                },
            },
        },
    }
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(suite | changes))
    return path


def numbers(folder: Path) -> dict:
    """All that a reader of the board compares, by contender, protocol and metric."""
    board = json.loads((folder / "output" / "leaderboard" / "leaderboard.json").read_text())
    return {
        (row["method"], result["protocol"], name): values["mean"]
        for row in board["rows"]
        for result in row["results"]
        for name, values in result["metrics"].items()
    }
