"""The online probe: every epoch sees new views of the images, as in MoCo's main_lincls.py.

The reported number is that of the last epoch. Val is scored after every epoch for the curve only;
as the backbone is frozen, its val features never change and are computed once.

Batches, views and order do not depend on the number of ranks: each takes its part of the global
batch, and the gradients of the parts are added.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from PIL import Image
from torch import Tensor, nn

from kscl.config import leaves
from kscl.data.loader import Batch, StepSampler
from kscl.errors import KsclError
from kscl.methods.batch_norm import SyncBatchNorm
from kscl.records.record import Metric, Protocol
from kscl.run.task import task
from kscl.runtime.distributed import rank, world_size
from kscl.runtime.logs import LOGGER, progress
from linear_eval.backbone import Frozen
from linear_eval.config import CENTER
from linear_eval.features import Features
from linear_eval.images import LabeledImages, MakeViews, ViewsOfImages, geometry, load_batches
from linear_eval.probe import (
    VIEW_WORDS,
    Json,
    Probe,
    random_crop_words,
    schedule_words,
    schema,
)
from linear_eval.probes.cached import new_head, rate_factor
from linear_eval.score import Classifier, Outcome, Score, ranked_classes, score

log = logging.getLogger(LOGGER)

IMAGENET_LINEAR_MOCO = "imagenet-linear-moco"
LINEAR_ONLINE = "linear-online"  # the same kind of probe with other settings, or on other data
IMAGENET = {"classes": 1000, "train images": 1_281_167, "val images": 50_000}


@dataclass
class Progress:
    """The state between two steps, the same on all ranks."""

    module: nn.Module
    optimizer: torch.optim.SGD
    step: int = 0
    loss_sum: float = 0.0  # of the images of this epoch so far
    epochs: list[Any] = field(default_factory=list)  # what is reported of each

    def state_dict(self) -> Json:
        """Return what a checkpoint stores."""
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in ("step", "loss_sum", "epochs")},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.loss_sum = state["step"], state["loss_sum"]
        self.epochs = list(state["epochs"])


class ViewTraining(Probe):
    """Plain SGD on new views in every epoch: what the online probe and fine-tuning share."""

    state: Progress

    def start(self) -> Progress:
        """Return the state before the first step."""
        raise NotImplementedError

    def base_lrs(self) -> dict[str, float]:
        """Return the learning rate of every parameter group by its config key."""
        raise NotImplementedError

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of images (b, 3, H, W), uint8, with labels (b,)."""
        raise NotImplementedError

    def end_epoch(self, epoch: int) -> None:
        """Report an epoch, in `self.state.epochs` too."""
        raise NotImplementedError

    def settings(self) -> Json:
        """Return head, views and optimizer."""
        solver = self.cfg.SOLVER
        return {
            "head": {"layer": "linear", "weight_std": solver.INIT_STD, "bias": 0},
            "train_view": VIEW_WORDS.get(self.cfg.INPUT.AUGMENT) or random_crop_words(self.cfg),
            "optimizer": {
                "name": "sgd",
                "lr": solver.BASE_LR,
                "momentum": solver.MOMENTUM,
                "weight_decay": solver.WEIGHT_DECAY,
                "lr_scaling": "none",
            },
            "batch_size": solver.BATCH_SIZE,
            "epochs": solver.EPOCHS,
            "schedule": schedule_words(self.cfg),
            "reported": "last epoch",
        }

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Build the state, or restore what was saved."""
        super().prepare(saved)
        self.state = self.start()
        if saved:
            self.state.load_state_dict(saved["training"])
        images, batch_size = len(self.data["train"]), self.cfg.SOLVER.BATCH_SIZE
        refuse_idle_ranks(self.state.module, images, batch_size)

    def state_dict(self) -> Json:
        """Return the state of the training."""
        return {"training": self.state.state_dict()}

    def work(self) -> Iterator[int]:
        """Train to the end of the last epoch."""
        cfg, state, train = self.cfg, self.state, self.data["train"]
        steps = math.ceil(len(train) / cfg.SOLVER.BATCH_SIZE)  # per epoch; the last may be smaller
        sampler = train_sampler(cfg, len(train), state.step, steps * cfg.SOLVER.EPOCHS)
        batches = load_batches(ViewsOfImages(train, view_maker(cfg)), sampler, cfg.DATA.NUM_WORKERS)
        if rank() == 0:
            left = steps * cfg.SOLVER.EPOCHS - state.step
            batches = progress(batches, f"probe {self.name}", left)
        for batch in batches:
            if not len(batch.instances):  # fewer images than ranks are left of the epoch
                size = cfg.INPUT.SIZE
                batch = batch._replace(views=torch.empty(0, 1, 3, size, size, dtype=torch.uint8))
            self.take_step(batch, train.targets)
            if state.step % steps == 0:
                self.end_epoch(state.step // steps)
                state.loss_sum = 0.0
            yield state.step

    def take_step(self, batch: Batch, targets: Tensor) -> None:
        """Take one step of SGD on the batch of all ranks; `targets` are those of all images."""
        state, solver = self.state, self.cfg.SOLVER
        epoch, place = divmod(state.step, math.ceil(len(targets) / solver.BATCH_SIZE))
        in_batch = min(solver.BATCH_SIZE, len(targets) - place * solver.BATCH_SIZE)  # of all ranks
        rates = self.base_lrs()
        for group, base_lr in zip(state.optimizer.param_groups, rates.values(), strict=True):
            group["lr"] = base_lr * rate_factor(solver, epoch)
        device = next(state.module.parameters()).device
        loss = torch.zeros((), device=device)
        state.optimizer.zero_grad()
        synced = any(isinstance(module, SyncBatchNorm) for module in state.module.modules())
        if len(batch.instances) or synced:  # a rank without images takes part in SyncBN's messages
            loss = self.loss_of(batch.views[:, 0], targets[batch.instances].to(device))
            (loss / in_batch).backward()
        total = _add_over_ranks(state.module, loss.detach())
        if not math.isfinite(total):
            keys = " or ".join(rates)
            raise KsclError(f"The loss of step {state.step} is not finite. Lower {keys}.")
        state.optimizer.step()
        state.loss_sum += total
        state.step += 1


def refuse_idle_ranks(network: nn.Module, images: int, batch_size: int) -> None:
    """Raise an error if SyncBN would run on a CPU without images: its messages do not match then.

    On several threads that ends the process.
    """
    synced = [module for module in network.modules() if isinstance(module, SyncBatchNorm)]
    left = images % batch_size
    on_cpu = next(network.parameters()).device.type == "cpu"
    if synced and on_cpu and 0 < left < world_size():
        raise KsclError(
            f"The last batch of an epoch has {left} of {images} images for {world_size()} "
            f"processes, and a process without images cannot synchronize BatchNorm on a CPU. "
            f"Change SOLVER.BATCH_SIZE {batch_size}, or use {left} processes."
        )


@task("online", title="Classifier (linear probe)", kind="linear")
class Online(ViewTraining):
    """Train a linear classifier on augmented images."""

    metrics = (
        Metric("top1", "top-1", headline=True, per_image=True),
        Metric("top5", "top-5", per_image=True),
    )

    def protocol(self, sizes: Mapping[str, int]) -> Protocol:
        """Return MoCo's protocol if nothing differs from it."""
        to_the_letter = not self.deviations(sizes)
        return Protocol(IMAGENET_LINEAR_MOCO if to_the_letter else LINEAR_ONLINE, self.definition())

    def deviations(self, sizes: Mapping[str, int]) -> list[str]:
        """List how this differs from MoCo's probe on ImageNet; empty if it does not."""
        reference = type(self)(schema().defaults())
        ours, theirs = (dict(leaves(each.definition())) for each in (self, reference))
        differing = [
            f"{key} is {ours.get(key)}, not {theirs.get(key)}"
            for key in dict.fromkeys([*theirs, *ours])
            if ours.get(key) != theirs.get(key)
        ]
        return differing + [
            f"{sizes[what]:,} {what}, not {count:,}"
            for what, count in IMAGENET.items()
            if sizes[what] != count
        ]

    def announce(self) -> None:
        """Log how it differs from the paper's protocol too."""
        super().announce()
        if differences := self.deviations(self.sizes()):
            log.info("This is not %s: %s.", IMAGENET_LINEAR_MOCO, "; ".join(differences))

    def start(self) -> Progress:
        """Return a new linear layer and its optimizer."""
        solver = self.cfg.SOLVER
        head = linear_head(self.cfg, self.frozen, len(self.data["train"].classes))
        optimizer = torch.optim.SGD(
            head.parameters(),
            lr=solver.BASE_LR,
            momentum=solver.MOMENTUM,
            weight_decay=solver.WEIGHT_DECAY,
        )
        return Progress(head, optimizer)

    def base_lrs(self) -> dict[str, float]:
        """Return the learning rate of the layer."""
        return {"SOLVER.BASE_LR": self.cfg.SOLVER.BASE_LR}

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the layer on frozen features."""
        features = self.frozen.features(images)  # (b, D)
        self.frozen.check_finite(features)
        return F.cross_entropy(self.state.module(features), labels, reduction="sum")

    def work(self) -> Iterator[int]:
        """Compute the features of val, then train."""
        self.features = {"val": self.extract(self.data["val"], [CENTER])}
        yield from super().work()

    def end_epoch(self, epoch: int) -> None:
        """Add a row to the curve, and log it."""
        state = self.state
        result, val_loss = val_score(state.module, self.data["val"], self.features["val"])
        row = {
            "epoch": epoch,
            "lr": state.optimizer.param_groups[0]["lr"],
            "train_loss": state.loss_sum / len(self.data["train"]),
            "val_loss": val_loss,
            **{f"val_{name}": value for name, value in result.metrics.items()},
        }
        state.epochs.append(row)
        log.info(
            "Epoch %d: train loss %.4f, val top-1 %.2f.",
            *(row["epoch"], row["train_loss"], row["val_top1"]),
            extra={"data": row},
        )

    def outcomes(self) -> list[Outcome]:
        """Return the result of the last epoch, with the best one marked as picked on val."""
        rows, head = self.state.epochs, self.state.module
        assert isinstance(head, nn.Linear)
        best = max(rows, key=lambda row: row["val_top1"])
        picked = {"epoch": best["epoch"], "top1": best["val_top1"], "picked_on": "val"}
        details = {
            "reported": "last epoch",
            "best_epoch_picked_on_val": picked,
            "curves": {name: [row[name] for row in rows] for name in rows[0]},
            "differs_from_imagenet_linear_moco": self.deviations(self.sizes()),
            "epochs": self.cfg.SOLVER.EPOCHS,
        }
        remark = f"last epoch; best {picked['top1']:.2f} in epoch {picked['epoch']}, picked on val"
        result, _ = val_score(head, self.data["val"], self.features["val"])
        trained = Classifier(head.weight.detach().cpu(), head.bias.detach().cpu())
        return [Outcome(result, details, remark, trained)]


@torch.no_grad()
def val_score(head: nn.Module, val: LabeledImages, features: Features) -> tuple[Score, float]:
    """Return scores and loss on val."""
    device = next(head.parameters()).device
    parts = [head(part.to(device)).cpu() for part in features.of_view(CENTER).split(65536)]
    outputs = torch.cat(parts)
    loss = float(F.cross_entropy(outputs, val.targets))
    return score(ranked_classes(outputs), val.targets, val.classes), loss


def _add_over_ranks(module: nn.Module, loss: Tensor) -> float:
    """Add gradients and losses in one message; take rank 0's buffers."""
    if world_size() == 1:
        return float(loss)
    weights = list(module.parameters())
    grads = [w.grad if w.grad is not None else torch.zeros_like(w) for w in weights]
    flat = torch.cat([*(grad.flatten() for grad in grads), loss.view(1)])
    dist.all_reduce(flat)
    *parts, total = flat.split([*(w.numel() for w in weights), 1])
    for weight, part in zip(weights, parts, strict=True):
        weight.grad = part.view_as(weight)
    for buffer in module.buffers():
        dist.broadcast(buffer, 0)
    return float(total)


def linear_head(cfg: CfgNode, frozen: Frozen, classes: int) -> nn.Linear:
    """Return a new linear layer on the features, on their device."""
    head = nn.Linear(frozen.dim, classes)
    weight, bias = new_head(classes, frozen.dim, cfg.SOLVER.INIT_STD, cfg.SEED)
    head.load_state_dict({"weight": weight, "bias": bias})
    return head.to(frozen.device)


def train_sampler(cfg: CfgNode, num_images: int, first_step: int, last_step: int) -> StepSampler:
    """Return this rank's part of every batch; each epoch shows every image."""
    steps = (first_step, last_step)
    size, seed = cfg.SOLVER.BATCH_SIZE, cfg.SEED
    return StepSampler(num_images, size, seed, *steps, rank(), world_size(), drop_last=False)


def view_maker(cfg: CfgNode) -> MakeViews:
    """Return a function that makes the one view of a picture that an epoch sees."""
    shape, seed = geometry(cfg), cfg.SEED

    def make(picture: Image.Image, epoch: int, number: int) -> list[Image.Image]:
        if cfg.INPUT.AUGMENT == CENTER:
            return [shape.center(picture)]
        return [shape.augmented(picture, seed, epoch, number)]

    return make
