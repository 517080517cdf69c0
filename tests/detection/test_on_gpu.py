"""One step of a detector on a GPU, pretended where there is none: no device is mixed up."""

from __future__ import annotations

import contextlib

import pytest
import torch
from detectron2.engine import AMPTrainer, SimpleTrainer
from detectron2.modeling import build_model
from detectron2.solver import build_optimizer
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage

from detection.config import load_detection_config
from tests.helpers.detection_runs import SMALL
from tests.helpers.gpu.pretend import pretend_gpu

pytestmark = pytest.mark.full


def loss_of_a_step(device: str, amp: bool) -> float:
    """Return the loss of one step from random weights."""
    words = [*SMALL, "MODEL.DEVICE", device, "MODEL.RESNETS.RES2_OUT_CHANNELS", "32"]
    words += ["MODEL.RESNETS.STEM_OUT_CHANNELS", "8", "MODEL.RESNETS.WIDTH_PER_GROUP", "8"]
    cfg = load_detection_config("detection/shapes_tiny_c4.yaml", words)
    torch.manual_seed(0)
    model = build_model(cfg).train()
    truth = Instances((64, 64))
    truth.gt_boxes = Boxes(torch.tensor([[5.0, 5.0, 40.0, 40.0]]))
    truth.gt_classes = torch.tensor([1])
    image = torch.randint(0, 256, (3, 64, 64), generator=torch.Generator().manual_seed(0))
    batch = [{"image": image.to(torch.uint8), "instances": truth, "height": 64, "width": 64}]
    trainer = (AMPTrainer if amp else SimpleTrainer)(model, [batch], build_optimizer(cfg, model))
    with EventStorage(0) as trainer.storage:
        trainer.run_step()
        model.eval()([{"image": batch[0]["image"], "height": 64, "width": 64}])
        return trainer.storage.latest()["total_loss"][0]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU (make test-gpu)")
@pytest.mark.parametrize("amp", [False, True])
def test_a_detector_takes_a_step_on_a_gpu(amp):
    check(amp, pretend_gpu())


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [False, True])
def test_a_detector_takes_a_step_on_a_real_gpu(amp):
    check(amp, contextlib.nullcontext())


def check(amp: bool, gpu: contextlib.AbstractContextManager[object]) -> None:
    with gpu:
        loss = loss_of_a_step("cuda", amp)
    # Proposals are drawn by the device's own generator, so that only the size can be compared.
    assert loss == pytest.approx(loss_of_a_step("cpu", False), rel=0.5)
