"""Fine-tuning: train the whole network on few labels, with learning rates for trunk and head.

The last epoch is reported; val is used once, at the end. BatchNorm is synchronized over ranks, as
in SwAV.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.config import Broken, Section, key
from kscl.methods.batch_norm import synchronize_batch_norm
from kscl.records.record import Metric
from kscl.run.task import task
from kscl.runtime.distributed import world_size
from kscl.runtime.logs import LOGGER
from kscl.runtime.precision import autocast
from linear_eval.images import PUBLISHED, LabeledImages, load_center_crops
from linear_eval.probe import Json
from linear_eval.probes.online import ViewTraining
from linear_eval.score import Outcome, ranked_classes, score

log = logging.getLogger(LOGGER)

TEST_BATCH = 128


class Network(nn.Module):
    """A trunk and a linear head on its features."""

    def __init__(self, trunk: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, C), float32, of normalized images."""
        features = self.trunk(images).float()
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features)


@task("finetune", title="Classifier (fine-tuned on few labels)", longer="SOLVER.LONGER")
class Finetune(ViewTraining):
    """Fine-tune the whole network with a new head."""

    trains_backbone = True
    metrics = (
        Metric("top1", "fine-tuned top-1", headline=True, per_image=True),
        Metric("top5", "fine-tuned top-5", per_image=True),
    )

    class Keys(Section):
        class FINETUNE(Section):
            """Fine-tuning; SOLVER has its epochs, batch size and schedule."""

            TRUNK_LR = key(0.02, "Learning rate of the backbone.", at_least=0)
            HEAD_LR = key(5.0, "Learning rate of the new linear layer.", above=0)

    @staticmethod
    def rules(cfg: CfgNode) -> Iterator[Broken]:
        if Finetune.name == cfg.PROBE and cfg.SOLVER.AMP == "fp16":
            why = "gradients vanish in fp16, as the loss is not scaled: set bf16 or off"
            yield ("PROBE", "SOLVER.AMP"), why

    def settings(self) -> Json:
        common = super().settings()
        common["optimizer"] |= {
            "lr": {"trunk": self.cfg.FINETUNE.TRUNK_LR, "head": self.cfg.FINETUNE.HEAD_LR}
        }
        return common | {
            "features": "pooled, trained, BatchNorm in training mode",
            "batch_norm": "trained, over all processes, from what the weights have",
            "processes": world_size(),
        }

    @property
    def protocol_id(self) -> str:
        data = self.cfg.DATA
        if data.SUBSET in PUBLISHED:
            return f"finetune-imagenet-{data.SUBSET.removeprefix('simclr_')}"
        if data.SUBSET:
            return "finetune-list"
        if data.IMAGES_PER_CLASS:
            return f"finetune-{data.IMAGES_PER_CLASS}-per-class"
        return "finetune"

    def build(self) -> tuple[nn.Module, dict[str, nn.Module]]:
        trunk = copy.deepcopy(self.frozen.module).requires_grad_(True)
        network = Network(trunk, self.new_head())
        synchronize_batch_norm(network)
        return network, {"FINETUNE.TRUNK_LR": network.trunk, "FINETUNE.HEAD_LR": network.head}

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        network = self.module.train()
        with autocast(self.frozen.device, self.frozen.amp):
            outputs = network(self.frozen.inputs(images))
        return F.cross_entropy(outputs.float(), labels, reduction="sum")

    def end_epoch(self, epoch: int) -> None:
        self.epochs.append(self.loss_sum / len(self.data["train"]))
        log.info("Epoch %d: train loss %.4f.", epoch, self.epochs[-1])

    def outcomes(self) -> list[Outcome]:
        rates, val = self.cfg.FINETUNE, self.data["val"]
        details = {
            "reported": "last epoch",
            "learning_rates": {"trunk": rates.TRUNK_LR, "head": rates.HEAD_LR},
            "epochs": self.cfg.SOLVER.EPOCHS,
            "curves": {"epoch": list(range(1, len(self.epochs) + 1)), "train_loss": self.epochs},
        }
        ranked = ranked_classes(self.outputs_on(val))
        return [Outcome(score(ranked, val.targets, val.classes), details)]

    @torch.no_grad()
    def outputs_on(self, images: LabeledImages) -> Tensor:
        """Return the logits (N, C) of center crops."""
        network, found = self.module.eval(), []
        for crops in load_center_crops(
            self.cfg, images, torch.arange(len(images)).split(TEST_BATCH)
        ):
            with autocast(self.frozen.device, self.frozen.amp):
                found.append(network(self.frozen.inputs(crops)).float().cpu())
        return torch.cat(found)
