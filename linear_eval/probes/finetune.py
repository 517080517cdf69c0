"""Fine-tuning: the whole network trained on few labels, with learning rates for trunk and head.

The number is that of the last epoch; nothing is chosen on val, which is used once, at the end.
BatchNorm normalizes the batch of all ranks (SyncBN), as SwAV's does.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.config import Broken, Section, key
from kscl.methods.batch_norm import synchronize_batch_norm
from kscl.records.record import Metric, Protocol
from kscl.run.task import task
from kscl.runtime.distributed import world_size
from kscl.runtime.logs import LOGGER
from kscl.runtime.precision import autocast
from kscl.views.normalize import normalize_exactly
from linear_eval.images import LabeledImages, ViewsOfImages, geometry, load_batches
from linear_eval.probe import Json
from linear_eval.probes.online import Progress, ViewTraining, linear_head
from linear_eval.score import Outcome, ranked_classes, score
from linear_eval.subsets import PUBLISHED

log = logging.getLogger(LOGGER)

TEST_BATCH = 128


class Network(nn.Module):
    """A trunk that gives features and a linear head on them."""

    def __init__(self, trunk: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, C), float32, of normalized images."""
        features = self.trunk(images).float()
        with torch.autocast(features.device.type, enabled=False):
            return self.head(features)


@task("finetune", title="Classifier (fine-tuned on few labels)")
class Finetune(ViewTraining):
    """Train the whole network further, with a new head."""

    metrics = (
        Metric("top1", "fine-tuned top-1", headline=True, per_image=True),
        Metric("top5", "fine-tuned top-5", per_image=True),
    )

    class Keys(Section):
        class FINETUNE(Section):
            """Fine-tuning; its epochs, batches and schedule are SOLVER's."""

            TRUNK_LR = key(0.02, "Learning rate of the backbone.", at_least=0)
            HEAD_LR = key(5.0, "Learning rate of the new linear layer.", above=0)

    @staticmethod
    def rules(cfg: CfgNode) -> Iterator[Broken]:
        """Refuse fp16."""
        if Finetune.name == cfg.PROBE and cfg.SOLVER.AMP == "fp16":
            yield (
                ("PROBE", "SOLVER.AMP"),
                "small gradients vanish in fp16, and fine-tuning does not scale its loss: set bf16 "
                "or off",
            )

    def settings(self) -> Json:
        """Return what the online probe has, with the rates of trunk and head."""
        common = super().settings()
        common["optimizer"] |= {
            "lr": {"trunk": self.cfg.FINETUNE.TRUNK_LR, "head": self.cfg.FINETUNE.HEAD_LR}
        }
        return common | {
            "features": "pooled, trained, BatchNorm in training mode",
            "batch_norm": "trained, over all processes, from what the weights have",
            "processes": world_size(),
        }

    def protocol(self, sizes: Mapping[str, int]) -> Protocol:
        """Name the protocol after the part of the training images."""
        data = self.cfg.DATA
        part = f"{100 * data.FRACTION:g}percent"
        if data.SUBSET in PUBLISHED:
            part = f"imagenet-{data.SUBSET.removeprefix('simclr_')}"
        elif data.SUBSET:
            part = "list"
        elif data.IMAGES_PER_CLASS:
            part = f"{data.IMAGES_PER_CLASS}-per-class"
        return Protocol(f"finetune-{part}", self.definition())

    def start(self) -> Progress:
        """Return the network and its optimizer."""
        trunk = copy.deepcopy(self.frozen.module).requires_grad_(True)
        head = linear_head(self.cfg, self.frozen, len(self.data["train"].classes))
        network = Network(trunk, head)
        synchronize_batch_norm(network)
        groups = [{"params": list(part.parameters())} for part in (network.trunk, network.head)]
        decay, momentum = self.cfg.SOLVER.WEIGHT_DECAY, self.cfg.SOLVER.MOMENTUM
        return Progress(network, torch.optim.SGD(groups, 1.0, momentum, weight_decay=decay))

    def base_lrs(self) -> dict[str, float]:
        """Return the learning rates of trunk and head."""
        return {f"FINETUNE.{key}": self.cfg.FINETUNE[key] for key in ("TRUNK_LR", "HEAD_LR")}

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the network in training."""
        network = self.state.module.train()
        with autocast(self.frozen.device, self.frozen.amp):
            outputs = network(self.inputs_of(images))
        return F.cross_entropy(outputs.float(), labels, reduction="sum")

    def end_epoch(self, epoch: int) -> None:
        """Note and log the loss."""
        self.state.epochs.append(self.state.loss_sum / len(self.data["train"]))
        log.info("Epoch %d: train loss %.4f.", epoch, self.state.epochs[-1])

    def outcomes(self) -> list[Outcome]:
        """Score the network on val."""
        rates, losses, val = self.cfg.FINETUNE, self.state.epochs, self.data["val"]
        details = {
            "reported": "last epoch",
            "learning_rates": {"trunk": rates.TRUNK_LR, "head": rates.HEAD_LR},
            "epochs": self.cfg.SOLVER.EPOCHS,
            "curves": {"epoch": list(range(1, len(losses) + 1)), "train_loss": losses},
        }
        ranked = ranked_classes(self.outputs_on(val))
        return [Outcome(score(ranked, val.targets, val.classes), details)]

    @torch.no_grad()
    def outputs_on(self, images: LabeledImages) -> Tensor:
        """Return the logits (N, C) of center crops."""
        network = self.state.module.eval()
        shape = geometry(self.cfg)
        dataset = ViewsOfImages(images, lambda picture, epoch, number: [shape.center(picture)])
        starts = range(0, len(images), TEST_BATCH)
        batches = [[(0, i) for i in range(s, min(s + TEST_BATCH, len(images)))] for s in starts]
        found = []
        for batch in load_batches(dataset, batches, self.cfg.DATA.NUM_WORKERS):
            with autocast(self.frozen.device, self.frozen.amp):
                found.append(network(self.inputs_of(batch.views[:, 0])).float().cpu())
        return torch.cat(found)

    def inputs_of(self, images: Tensor) -> Tensor:
        """Return images (B, 3, H, W), uint8, as the backbone's input."""
        frozen = self.frozen
        images = images.to(frozen.device, non_blocking=True)
        inputs = normalize_exactly(images, frozen.mean, frozen.std)
        return inputs.contiguous(memory_format=frozen.layout)
