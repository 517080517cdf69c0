"""The online probe: new views in every epoch, as in MoCo's main_lincls.py.

The last epoch is reported; val is scored after every epoch for the curve only, on features that are
computed once. Batches, views and order do not depend on the number of ranks: each rank takes its
share of the global batch, and the gradients are added.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from kscl.config import value_at
from kscl.data.loader import StepSampler
from kscl.errors import KsclError
from kscl.methods.batch_norm import SyncBatchNorm
from kscl.run.engine import changed_keys
from kscl.run.task import task
from kscl.runtime.distributed import rank, world_size
from kscl.runtime.logs import LOGGER, progress
from kscl.views.batch import Batch
from linear_eval.config import CENTER
from linear_eval.images import augmented, center, load_views
from linear_eval.linear import CHUNK, new_head, rate_factor
from linear_eval.probe import (
    VIEW_WORDS,
    Json,
    Probe,
    random_crop_words,
    schedule_words,
    schema,
)
from linear_eval.score import ACCURACY, Outcome, Score, ranked_classes, score

log = logging.getLogger(LOGGER)

IMAGENET_LINEAR_MOCO = "imagenet-linear-moco"
LINEAR_ONLINE = "linear-online"  # with other settings, or on other data
IMAGENET = {"classes": 1000, "train images": 1_281_167, "val images": 50_000}


class ViewTraining(Probe):
    """Plain SGD on new views in every epoch, for the online probe and fine-tuning.

    The state is the same on all ranks.
    """

    module: nn.Module
    optimizer: torch.optim.SGD
    lr_keys: list[str]  # of its parameter groups
    step = 0
    loss_sum = 0.0  # over the images of this epoch so far
    epochs: list[Any]  # the report of each

    def build(self) -> tuple[nn.Module, dict[str, nn.Module]]:
        """Return what is trained, and its parts by the key of their learning rate."""
        raise NotImplementedError

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the summed loss of images (b, 3, H, W), uint8, with labels (b,)."""
        raise NotImplementedError

    def end_epoch(self, epoch: int) -> None:
        """Log an epoch and add it to `self.epochs`."""
        raise NotImplementedError

    def settings(self) -> Json:
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

    def new_head(self) -> nn.Linear:
        """Return a new linear layer on the backbone's features."""
        classes, dim = len(self.data["train"].classes), self.frozen.dim
        head = nn.Linear(dim, classes)
        weight, bias = new_head(classes, dim, self.cfg.SOLVER.INIT_STD, self.cfg.SEED)
        head.load_state_dict({"weight": weight, "bias": bias})
        return head.to(self.frozen.device)

    def prepare(self, saved: Mapping[str, Any]) -> None:
        super().prepare(saved)
        self.start()
        if saved:
            self.module.load_state_dict(saved["module"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.step, self.loss_sum = saved["step"], saved["loss_sum"]
            self.epochs = list(saved["epochs"])
        refuse_idle_ranks(self.module, len(self.data["train"]), self.cfg.SOLVER.BATCH_SIZE)

    def start(self) -> None:
        """Set the state before the first step."""
        solver = self.cfg.SOLVER
        self.module, parts = self.build()
        self.lr_keys, self.epochs = list(parts), []
        groups = [{"params": list(part.parameters())} for part in parts.values()]
        settings = {"momentum": solver.MOMENTUM, "weight_decay": solver.WEIGHT_DECAY}
        self.optimizer = torch.optim.SGD(groups, 1.0, **settings)

    def state_dict(self) -> Json:
        return {
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            **{name: getattr(self, name) for name in ("step", "loss_sum", "epochs")},
        }

    def work(self) -> Iterator[int]:
        """Train to the end of the last epoch."""
        size, steps = self.cfg.INPUT.SIZE, self.steps_per_epoch
        batches = self.batches()
        if rank() == 0:
            left = steps * self.solver.EPOCHS - self.step
            batches = progress(batches, f"probe {self.name}", left)
        for batch in batches:
            if not len(batch.instances):  # fewer images than ranks are left in this epoch
                batch = batch._replace(views=torch.empty(0, 1, 3, size, size, dtype=torch.uint8))
            self.take_step(batch)
            if self.step % steps == 0:
                self.end_epoch(self.step // steps)
                self.loss_sum = 0.0
            yield self.step

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of batches per epoch; the last may be smaller."""
        return math.ceil(len(self.data["train"]) / self.cfg.SOLVER.BATCH_SIZE)

    def batches(self) -> Iterator[Batch]:
        """Yield this rank's share of every remaining batch."""
        cfg, train = self.cfg, self.data["train"]
        steps = (self.step, self.steps_per_epoch * self.solver.EPOCHS)
        batch_size, ranks = cfg.SOLVER.BATCH_SIZE, (rank(), world_size())
        sampler = StepSampler(len(train), batch_size, cfg.SEED, *steps, *ranks, drop_last=False)
        return load_views(train, self.views_of, sampler, cfg.DATA.NUM_WORKERS)

    def views_of(self, picture: Image.Image, epoch: int, number: int) -> list[Image.Image]:
        """Return the training view of a picture in an epoch."""
        given = self.cfg.INPUT
        if given.AUGMENT == CENTER:
            return [center(picture, given)]
        return [augmented(picture, given, self.cfg.SEED, epoch, number)]

    def seen_and_stored(self, train: int, val: int) -> tuple[int, int]:
        """Return the images of all epochs, and those of val."""
        return self.solver.EPOCHS * train + val, val

    def take_step(self, batch: Batch) -> None:
        """Take one step of SGD on the global batch."""
        solver, targets = self.solver, self.data["train"].targets
        epoch, place = divmod(self.step, self.steps_per_epoch)
        in_batch = min(solver.BATCH_SIZE, len(targets) - place * solver.BATCH_SIZE)  # all ranks
        for group, key in zip(self.optimizer.param_groups, self.lr_keys, strict=True):
            group["lr"] = value_at(self.cfg, key) * rate_factor(solver, epoch)
        loss = torch.zeros((), device=self.frozen.device)
        self.optimizer.zero_grad()
        # A rank without images still takes part in SyncBN's collectives.
        if len(batch.instances) or synced_norms(self.module):
            labels = targets[batch.instances].to(self.frozen.device)
            loss = self.loss_of(batch.views[:, 0], labels)
            (loss / in_batch).backward()
        total = _add_over_ranks(self.module, loss.detach())
        if not math.isfinite(total):
            raise KsclError(
                f"The loss of step {self.step} is not finite. Lower {' or '.join(self.lr_keys)}."
            )
        self.optimizer.step()
        self.loss_sum += total
        self.step += 1


def synced_norms(network: nn.Module) -> list[SyncBatchNorm]:
    return [module for module in network.modules() if isinstance(module, SyncBatchNorm)]


def refuse_idle_ranks(network: nn.Module, images: int, batch_size: int) -> None:
    """Raise an error if a CPU rank would run SyncBN without images, which can crash it."""
    left = images % batch_size
    on_cpu = next(network.parameters()).device.type == "cpu"
    if synced_norms(network) and on_cpu and 0 < left < world_size():
        raise KsclError(
            f"The last batch of an epoch has {left} of {images} images for {world_size()} "
            f"processes, and a process without images cannot synchronize BatchNorm on a CPU. "
            f"Change SOLVER.BATCH_SIZE {batch_size}, or use {left} processes."
        )


def _add_over_ranks(module: nn.Module, loss: Tensor) -> float:
    """Sum gradients and losses in one message; copy rank 0's buffers."""
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


@task("online", title="Classifier (linear probe)", kind="linear", longer="SOLVER.LONGER")
class Online(ViewTraining):
    """Train a linear classifier on augmented images."""

    metrics = ACCURACY

    @property
    def protocol_id(self) -> str:
        return LINEAR_ONLINE if self.deviations() else IMAGENET_LINEAR_MOCO

    def deviations(self) -> list[str]:
        """List the differences from MoCo's probe on ImageNet."""
        reference = type(self)(schema().defaults())
        differing = [
            f"{key} is {ours}, not {theirs}"
            for key, theirs, ours in changed_keys(reference.definition(), self.definition())
        ]
        return differing + [
            f"{size:,} {what}, not {IMAGENET[what]:,}"
            for what, size in self.sizes().items()
            if size != IMAGENET[what]
        ]

    def sizes(self) -> dict[str, int]:
        """Count classes and images."""
        train, val = self.data["train"], self.data["val"]
        return dict(zip(IMAGENET, (len(train.classes), len(train), len(val)), strict=True))

    def announce(self) -> None:
        super().announce()
        if differences := self.deviations():
            log.info("This is not %s: %s.", IMAGENET_LINEAR_MOCO, "; ".join(differences))

    def build(self) -> tuple[nn.Module, dict[str, nn.Module]]:
        head = self.new_head()
        return head, {"SOLVER.BASE_LR": head}

    def loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.frozen.features(images)  # (b, D)
        return F.cross_entropy(self.module(features), labels, reduction="sum")

    def work(self) -> Iterator[int]:
        """Compute the features of val, then train."""
        self.features = {"val": self.extract(self.data["val"], [CENTER])}
        yield from super().work()

    def end_epoch(self, epoch: int) -> None:
        result, val_loss = self.val_score()
        row = {
            "epoch": epoch,
            "lr": self.optimizer.param_groups[0]["lr"],
            "train_loss": self.loss_sum / len(self.data["train"]),
            "val_loss": val_loss,
            **{f"val_{name}": value for name, value in result.metrics.items()},
        }
        self.epochs.append(row)
        log.info(
            "Epoch %d: train loss %.4f, val top-1 %.2f.",
            *(row["epoch"], row["train_loss"], row["val_top1"]),
            extra={"data": row},
        )

    @torch.no_grad()
    def val_score(self) -> tuple[Score, float]:
        """Return scores and loss on val."""
        val, parts = self.data["val"], self.centers("val").split(CHUNK)
        outputs = torch.cat([self.module(part.to(self.frozen.device)).cpu() for part in parts])
        loss = float(F.cross_entropy(outputs, val.targets))
        return score(ranked_classes(outputs), val.targets, val.classes), loss

    def outcomes(self) -> list[Outcome]:
        """Return the last epoch's result, and in the details the best one on val."""
        rows = self.epochs
        best = max(rows, key=lambda row: row["val_top1"])
        picked = {"epoch": best["epoch"], "top1": best["val_top1"], "picked_on": "val"}
        details = {
            "reported": "last epoch",
            "best_epoch_picked_on_val": picked,
            "curves": {name: [row[name] for row in rows] for name in rows[0]},
            "differs_from_imagenet_linear_moco": self.deviations(),
            "epochs": self.solver.EPOCHS,
        }
        remark = f"last epoch; best {picked['top1']:.2f} in epoch {picked['epoch']}, picked on val"
        weight, bias = (value.detach().cpu() for value in self.module.parameters())
        return [Outcome(self.val_score()[0], details, remark, (weight, bias))]
