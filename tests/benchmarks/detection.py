"""How much faster a small detector trains on a CPU than plain Detectron2 with the same config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.engine import SimpleTrainer
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer as plain_optimizer
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

from detection.config import load_detection_config
from detection.train.model import build_detector
from detection.train.optimizer import build_optimizer
from tests.benchmarks.harness import figure, time_ratio

OBJECTS, STEPS = 6, 3


@figure(
    "detection-shapes",
    "a training step of plain Detectron2 / ours, shapes_tiny_c4 on a CPU, the same batch",
    at_least=1.3,
    alone=True,
)
def shapes_detector() -> float:
    return _ratio("detection/shapes_tiny_c4.yaml", (160, 200))


@figure(
    "detection-bccd",
    "a training step of plain Detectron2 / ours, bccd_tiny_c4 on a CPU, the same batch",
    at_least=1.3,
    alone=True,
)
def bccd_detector() -> float:
    return _ratio("detection/bccd_tiny_c4.yaml", (200, 267))


def _ratio(config: str, size: tuple[int, int]) -> float:
    words = ["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", "KSCL.FROM_SCRATCH", "True"]
    cfg = load_detection_config(config, [*words, "MODEL.RESNETS.STEM_OUT_CHANNELS", "8"])
    batch = [_image(size, cfg.MODEL.ROI_HEADS.NUM_CLASSES) for _ in range(cfg.SOLVER.IMS_PER_BATCH)]
    plain = _steps(cfg, batch, build_model, plain_optimizer)
    return time_ratio(plain, _steps(cfg, batch, build_detector, build_optimizer))


def _image(size: tuple[int, int], classes: int) -> dict[str, Any]:
    height, width = size
    corners = torch.rand(OBJECTS, 2) * torch.tensor([width - 60, height - 60])
    truth = Instances(size)
    truth.gt_boxes = Boxes(torch.cat([corners, corners + 20 + 40 * torch.rand(OBJECTS, 2)], 1))
    truth.gt_classes = torch.randint(classes, (OBJECTS,))
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    return {"image": image, "instances": truth, "height": height, "width": width}


def _steps(
    cfg: CfgNode,
    batch: list[dict[str, Any]],
    build: Callable[[CfgNode], Any],
    optimizer: Callable[[CfgNode, Any], Any],
) -> Callable[[], None]:
    torch.manual_seed(0)
    model = build(cfg).train()
    trainer = SimpleTrainer(model, [batch] * 10_000, optimizer(cfg, model))

    def steps() -> None:
        with EventStorage(0) as trainer.storage:
            for _ in range(STEPS):
                trainer.run_step()

    return steps
