"""A linear classifier of pixels: a 1×1 convolution on frozen feature maps, bilinearly upsampled.

A picture is made square without cropping, and its maps are stored once. Each channel is scaled to
mean 0 and variance 1 over the training maps, as by the BatchNorm in front of DINOv2's linear head;
SGD trains all learning rates of the grid on the same batches. The best on a held-out part of train
is trained again on all of it. Val is scored at the size of its own masks, so that every pixel
counts once: the IoU of a class is intersection over union in the confusion matrix of all pixels.

Upsampling is linear, A x Aᵀ with a thin matrix A, and its gradient is Aᵀ g A: two matrix products
that give the same bits in every run, on a GPU too.
"""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from PIL import Image, ImageDraw
from torch import Tensor

from kscl.config import Section, key
from kscl.data.masks import palette
from kscl.data.source import read_picture
from kscl.errors import KsclError
from kscl.records.record import Metric
from kscl.rng import Stream, permutation, random_words
from kscl.run.task import task
from kscl.runtime.distributed import device
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import LOGGER, progress
from linear_eval.config import WHOLE
from linear_eval.images import LabeledImages, hold_out, rarest_class
from linear_eval.linear import (
    Point,
    Rows,
    Solution,
    descend,
    on_raw_features,
    rate_factor,
    settings_of,
    solutions_of,
    standardized,
    start_grid,
)
from linear_eval.masks import VOC_LISTS, VOID, MaskedImages, open_masked
from linear_eval.probe import Data, Json, Probe, schedule_words
from linear_eval.score import LEVEL, Outcome, Score

log = logging.getLogger(LOGGER)

DRAWS = 1000  # of the bootstrap
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
AT_ONCE = 2**21  # numbers in one step through the pixels of a batch: they stay in a CPU's cache
PICTURES_FILE, SHOWN, SIDE = "predictions.png", 8, 160  # images shown, and their longer side


@task("segmentation", title="Segmentation (linear probe)", longer="SOLVER.LONGER")
class Segmentation(Probe):
    """Train a 1×1 convolution on the maps of the frozen backbone to name each pixel's class."""

    metrics = (
        Metric("mIoU", "seg. mIoU", headline=True),
        Metric("pixel_accuracy", "pixel accuracy"),
    )
    hub_task = "image-segmentation"
    protocol_id = "segmentation-linear"
    takes_subset = False
    view, voc_lists = WHOLE, VOC_LISTS

    class Keys(Section):
        class SEGMENTATION(Section):
            """The segmentation probe."""

            LEVELS = key(
                [-1],
                """Levels of the backbone (stages, or blocks of a transformer) whose maps are
                classified, side by side and as fine as the finest of them; -1 is the last.""",
                distinct=True,
            )
            LABEL_SIZE = key(128, "Width and height at which the loss is taken.", at_least=2)
            LRS = key(
                [0.01, 0.03, 0.1, 0.3, 1.0], "The grid of learning rates.", rising=True, above=0
            )
            HOLD_OUT = key(
                0.1,
                "Fraction of the training images that chooses the learning rate.",
                above=0,
                below=1,
            )
            IGNORE = key(255, "The value of pixels that do not count.", at_least=0, at_most=255)
            MASKS = key("SegmentationClass", "The folder of the masks in a set in VOC's layout.")

    sweep: list[Json]  # a row per learning rate, once it is done
    training: Json  # the state of SGD on the grid, then on the chosen learning rate
    found: list[Solution]  # on features as the backbone gives them
    side: int  # of the maps

    def sources(self) -> list[dict[str, str]]:
        """Return both sets; of a folder its images alone, as two masks may well be equal."""
        (named,) = super().sources()
        inside = {name: os.path.join(where, "images") for name, where in named.items()}
        return [{n: inside[n] if os.path.isdir(inside[n]) else named[n] for n in named}]

    def open_data(self) -> Data:
        """Open two sets with the same classes; name every mask that cannot be used."""
        data = self.cfg.DATA
        train = open_masked("DATA.TRAIN", data.TRAIN, self.cfg)
        val = open_masked("DATA.VAL", data.VAL, self.cfg)
        if train.classes != val.classes:
            raise KsclError(
                f"DATA.TRAIN {data.TRAIN} and DATA.VAL {data.VAL} must have the same classes in "
                f"the same order, got {', '.join(train.classes)} and {', '.join(val.classes)}."
            )
        if len(self.cfg.SEGMENTATION.LRS) > 1 and not len(self.split(train)[1]):
            raise KsclError(
                f"DATA.TRAIN {data.TRAIN} leaves no image to choose a learning rate on. Use more "
                "images, or one learning rate (SEGMENTATION.LRS)."
            )
        return {"train": train, "val": val}

    def split(self, train: LabeledImages) -> tuple[np.ndarray, np.ndarray]:
        """Return the images that the grid is trained on, and those that it is compared on."""
        rarest = rarest_class(train.labels)
        return hold_out(rarest, self.cfg.SEGMENTATION.HOLD_OUT, self.cfg.SEED)

    def masked(self, role: str) -> MaskedImages:
        """Return one of its sets."""
        images = self.data[role]
        assert isinstance(images, MaskedImages)
        return images

    def settings(self) -> Json:
        """Return maps, head, solver, choice and score."""
        given, solver, shape = self.cfg.SEGMENTATION, self.cfg.SOLVER, self.cfg.INPUT
        standardized = "each channel, over train"
        sgd = {"momentum": solver.MOMENTUM, "weight_decay": solver.WEIGHT_DECAY}
        return {
            "features": {"frozen maps of levels": list(given.LEVELS), "standardized": standardized},
            "test_view": {"resize": [shape.SIZE] * 2, "interpolation": shape.INTERPOLATION},
            "head": {"layer": "1x1 convolution", "weight_std": solver.INIT_STD, "bias": 0},
            "loss": {"name": "cross-entropy", "size": [given.LABEL_SIZE] * 2},
            "optimizer": {"name": "sgd", **sgd},
            "grid": {"lr": list(given.LRS)},
            "batch_size": solver.BATCH_SIZE,
            "epochs": solver.EPOCHS,
            "schedule": schedule_words(self.cfg),
            "ignored_value": given.IGNORE,
            "chosen_on": {"held_out_of_train": given.HOLD_OUT, "by": "mIoU"},
            "scorer": "mean IoU over classes, of all pixels, at the size of each mask",
            "reported": "chosen learning rate, trained again on all of train",
        }

    def prepare(self, saved: Mapping[str, Any]) -> None:
        """Freeze the backbone, look at its maps, and start or continue from a checkpoint."""
        super().prepare(saved)
        size, levels = self.cfg.INPUT.SIZE, tuple(self.cfg.SEGMENTATION.LEVELS)
        dense, arch = replace(self.frozen, levels=levels), self.loaded.description.arch
        network: Any = dense.module
        try:
            with torch.no_grad():
                maps = dense.maps(torch.zeros(1, 3, size, size, device=device()))  # (1, h, w, C)
            stride = math.lcm(*(network.feature_info[level]["reduction"] for level in levels))
        except Exception as error:  # whatever a model does with levels that it does not have
            raise KsclError(
                f"SEGMENTATION.LEVELS {list(levels)}: {arch} has no maps there "
                f"({type(error).__name__}: {error}). Name others, or another backbone."
            ) from error
        if size % stride:
            raise KsclError(
                f"INPUT.SIZE must be a multiple of {stride} for {arch}, or its maps would show "
                f"more than the image, got {size}. Set INPUT.SIZE and INPUT.RESIZE to "
                f"{-(-size // stride) * stride}."
            )
        self.side = maps.shape[1]
        self.frozen = replace(dense, dim=maps.numel())
        self.sweep = saved.get("sweep", [])
        self.training = {
            name: value.to(device()) if isinstance(value, Tensor) else value
            for name, value in saved.get("training", {}).items()
        }

    def state_dict(self) -> Json:
        """Return the results of the grid, and how far the solver is."""
        return {"sweep": self.sweep, "training": self.training}

    @property
    def chosen(self) -> int:
        """Return the number of the chosen learning rate."""
        return next(number for number, row in enumerate(self.sweep) if row["chosen"])

    def fit(self) -> Iterator[int]:
        """Train the grid on a part of train, then the best learning rate on all of it."""
        decay, train = self.cfg.SOLVER.WEIGHT_DECAY, self.data["train"]
        points = [{"lr": lr, "weight_decay": decay} for lr in self.cfg.SEGMENTATION.LRS]
        if len(points) == 1:
            self.sweep = [points[0] | {"chosen": True}]
        if not self.sweep:
            kept, held = self.split(train)
            yield from self.solve(kept, points)
            self.sweep, self.training = self.compare(points, held.tolist()), {}
        for step in self.solve(np.arange(len(train)), [points[self.chosen]]):
            yield self.solver.EPOCHS + step

    def solve(self, images: np.ndarray, points: Sequence[Point]) -> Iterator[int]:
        """Train points on images, into `self.found`, from where a checkpoint is."""
        solver, seed, train = self.solver, self.cfg.SEED, self.masked("train")
        table, pixels = self.pixels_of("train"), self.side**2
        indices = (images[:, None] * pixels + np.arange(pixels)).reshape(1, -1)
        rows = standardized(Rows(table, indices, torch.empty(0)))
        size = self.cfg.SEGMENTATION.LABEL_SIZE
        targets = torch.stack([torch.from_numpy(nearest(train.mask(i), size)) for i in images])
        if not self.training:
            shape = (len(points), len(train.classes), table.shape[1])
            self.training = start_grid(*shape, solver.INIT_STD, seed, device())
        epochs = train_maps(rows, targets, points, self.training, solver, seed)
        left = solver.EPOCHS - len(self.training["losses"])
        yield from progress(epochs, f"epochs of {len(points)} classifiers", left)
        solved = solutions_of(self.training, len(points))
        self.found = [on_raw_features(*solution, rows) for solution in solved]

    def pixels_of(self, role: str) -> Tensor:
        """Return the features (N·h·w, D) of all pixels of the maps."""
        features = self.features[role].of_view(WHOLE)
        return features.view(len(features) * self.side**2, -1)

    @torch.no_grad()
    def predict(
        self, role: str, images: Sequence[int], solution: Solution
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield mask and predicted classes (H, W) of each image, uint8."""
        weight, bias = (part.to(device()) for part in solution)
        maps = self.pixels_of(role).view(len(self.data[role]), self.side**2, -1)
        for index in images:
            truth = self.masked(role).mask(index)
            coarse = torch.addmm(bias[:, None], weight, maps[index].to(device()).T)
            down, across = (upsampling(self.side, to).to(device()) for to in truth.shape)
            outputs = down @ coarse.view(-1, self.side, self.side) @ across.T  # (C, H, W)
            yield truth, outputs.argmax(0).to(torch.uint8).cpu().numpy()

    def sums(self, role: str, images: Sequence[int], solution: Solution) -> np.ndarray:
        """Return for each image and class how many pixels are right, true, predicted: (n, 3, C)."""
        classes = len(self.data[role].classes)
        pairs = self.predict(role, images, solution)
        found = [confusion(*pair, classes) for pair in pairs]
        return np.stack([(each.diagonal(), each.sum(1), each.sum(0)) for each in found])

    def compare(self, points: Sequence[Point], held: Sequence[int]) -> list[Json]:
        """Return one row per learning rate, with its mIoU on the held-out part of train."""
        sweep: list[Json] = []
        sums = [self.sums("train", held, solution) for solution in self.found]
        for point, each, loss in zip(points, sums, self.training["losses"][-1], strict=True):
            row = {"held_out_mIoU": float(np.nanmean(ious(each.sum(0)))), "train_loss": loss}
            row = row if math.isfinite(loss) else dict.fromkeys(row)
            sweep.append({**point, **row, "diverged": not math.isfinite(loss), "chosen": False})
        usable = [number for number, row in enumerate(sweep) if not row["diverged"]]
        if not usable:
            raise KsclError("Every learning rate diverged. Lower SEGMENTATION.LRS.")
        best = max(usable, key=lambda number: sweep[number]["held_out_mIoU"])
        beside = {0: 1, len(points) - 1: len(points) - 2}.get(best)
        if len(points) > 2 and beside in usable:
            differences = bootstrap(sums[best]) - bootstrap(sums[beside])
            sweep[best]["at_edge"] = bool(np.quantile(differences, ENDS[0]) > 0)
        sweep[best]["chosen"] = True
        log.info("lr %g is the best on %d held-out images.", points[best]["lr"], len(held))
        return sweep

    def outcomes(self) -> list[Outcome]:
        """Score the chosen learning rate on val, and draw some of its predictions."""
        val, (solution,), row = self.masked("val"), self.found, self.sweep[self.chosen]
        losses = [loss for (loss,) in self.training["losses"]]
        if not math.isfinite(losses[-1]):
            raise KsclError("Training diverged. Lower SEGMENTATION.LRS.")
        sums = self.sums("val", range(len(val)), solution)
        right, true, _ = sums.sum((0, 2))
        per_class, given = ious(sums.sum(0)), self.cfg.SEGMENTATION
        warnings = []
        if row.get("at_edge"):
            listed = ", ".join(f"{lr:g}" for lr in given.LRS)
            warnings = [f"lr {row['lr']:g} at the edge of SEGMENTATION.LRS [{listed}]: add values"]
            log.warning("%s.", warnings[0])
        details: Json = {
            "sweep": self.sweep,
            "chosen": {"lr": row["lr"]},
            "chosen_on": f"{given.HOLD_OUT:g} of train, held out; then trained on all of train",
            "warnings": warnings,
            "per_class_is": "IoU",
            "confidence_interval": {"mIoU": np.quantile(bootstrap(sums), ENDS).tolist()},
            "confidence_level": LEVEL,
            "confidence_method": f"bootstrap over val images, {DRAWS} draws",
            "map_side": self.side,
            "pictures": PICTURES_FILE,
            "curves": {"epoch": list(range(1, len(losses) + 1)), "train_loss": losses},
        }
        metrics = {"mIoU": float(per_class.mean()), "pixel_accuracy": 100 * float(right / true)}
        score = Score(metrics, dict(zip(val.classes, per_class.tolist(), strict=True)), len(val))
        shown = np.unique(np.linspace(0, len(val) - 1, SHOWN).round().astype(int)).tolist()
        pictures = [read_picture(val.source, i, val.max_pixels) for i in shown]
        pairs = self.predict("val", shown, solution)
        triples = [(picture, *pair) for picture, pair in zip(pictures, pairs, strict=True)]
        write_atomically(self.folder / PICTURES_FILE, mosaic(triples, val.classes))
        remark = f"lr {row['lr']:g}, chosen of {len(self.sweep)} within train"
        return [Outcome(score, details, remark, solution)]


# Training


def nearest(mask: np.ndarray, size: int) -> np.ndarray:
    """Return the mask at the centers of size x size pixels."""
    rows, columns = (((np.arange(size) + 0.5) * side / size).astype(int) for side in mask.shape)
    return np.asarray(mask[rows[:, None], columns])


def upsampling(size: int, to: int) -> Tensor:
    """Return the matrix (to, size) of linear interpolation between the centers of pixels."""
    return F.interpolate(torch.eye(size)[None], to, mode="linear", align_corners=False)[0].T


@torch.no_grad()
def train_maps(
    rows: Rows, targets: Tensor, points: Sequence[Point], state: Json, solver: CfgNode, seed: int
) -> Iterator[int]:
    """Train from the epoch that the state is in to the end; yield the number of each epoch.

    The rows are the pixels of the maps, image by image; targets (n, S, S) classes or VOID, uint8.
    """
    weight, bias = state["weight"], state["bias"]
    place, count, size = weight.device, *targets.shape[:2]
    side = math.isqrt(len(rows) // count)
    rates, decays = settings_of(points, len(weight) // len(points), place)
    up, rows = upsampling(side, size).to(place), rows.near(place)
    indices = torch.from_numpy(rows.indices[0]).view(count, -1)
    at_once = max(1, AT_ONCE // (len(weight) * size * size)) if place.type == "cpu" else count
    for epoch in range(len(state["losses"]), solver.EPOCHS):
        epoch_rates = rates * rate_factor(solver, epoch)
        total, pixels = torch.zeros(len(points), device=place), 0
        order = torch.from_numpy(permutation(seed, epoch, Stream.ORDER, count))
        for images in order.split(solver.BATCH_SIZE):
            taken = indices[images].flatten().to(rows.table.device)
            features = rows.take(taken).to(place)  # (b·h·w, D)
            outputs = torch.addmm(bias, weight, features.T).view(len(weight), -1, side, side)
            labels = targets[images]
            counted = max(1, int((labels != VOID).sum()))
            parts = zip(outputs.split(at_once, 1), labels.to(place).split(at_once), strict=True)
            found = [pixel_gradient(*part, up, len(points)) for part in parts]
            gradient = torch.cat([each for each, _ in found], 1).flatten(1)  # (P·C, b·h·w)
            descend(state, gradient, features, 1 / counted, epoch_rates, decays, solver.MOMENTUM)
            total += torch.stack([loss for _, loss in found]).sum(0)
            pixels += counted
        state["losses"].append((total / pixels).tolist())
        yield epoch + 1


def pixel_gradient(
    outputs: Tensor, labels: Tensor, up: Tensor, points: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the summed loss by outputs (P·C, b, h, w), and the loss (P,).

    Labels (b, S, S) are classes or VOID.
    """
    fine = up @ outputs @ up.T  # (P·C, b, S, S)
    log_p = fine.view(points, len(fine) // points, -1).log_softmax(1)  # (P, C, b·S·S)
    counted = labels.flatten() != VOID
    own = labels.flatten().long().mul_(counted).expand(points, 1, -1)  # (P, 1, b·S·S)
    loss = -log_p.gather(1, own).mul_(counted).sum((1, 2))
    minus_one = torch.full(own.shape, -1.0, device=outputs.device)
    gradient = log_p.exp_().scatter_add_(1, own, minus_one).mul_(counted)
    return up.T @ gradient.view_as(fine) @ up, loss


# Scores


def confusion(truth: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Return the number of pixels by true class (row) and predicted class (column): (C, C)."""
    counted = truth != VOID
    pairs = truth[counted].astype(np.int64) * classes + predicted[counted]
    return np.bincount(pairs, minlength=classes * classes).reshape(classes, classes)


def ious(sums: np.ndarray) -> np.ndarray:
    """Return intersection over union in percent (…, C) of sums (…, 3, C); NaN without a pixel."""
    right, true, predicted = np.moveaxis(sums.astype(np.float64), -2, 0)
    with np.errstate(invalid="ignore"):
        return np.asarray(100 * right / (true + predicted - right))


def bootstrap(sums: np.ndarray) -> np.ndarray:
    """Return the mIoU (DRAWS,) of images drawn with replacement, from sums (n, 3, C)."""
    n = len(sums)
    words = random_words(0, 0, Stream.BOOTSTRAP, n, DRAWS * n).reshape(DRAWS, n) % np.uint64(n)
    times = np.stack([np.bincount(drawn, minlength=n) for drawn in words.astype(np.int64)])
    totals = times.astype(np.float64) @ sums.reshape(n, -1)  # exact: whole numbers
    return np.asarray(np.nanmean(ious(totals.reshape(DRAWS, *sums.shape[1:])), 1))


# Pictures


def mosaic(
    triples: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray]], classes: Sequence[str]
) -> bytes:
    """Draw images, their masks and what was predicted, side by side, with a legend below."""
    colors = palette()
    colors[VOID] = (224, 224, 192)
    step, line, across = SIDE + 4, 16, 6
    shown = sorted({c for _, *masks in triples for mask in masks for c in np.unique(mask)})
    rows, lines = -(-len(triples) // 2), -(-len(shown) // across)
    sheet = Image.new("RGB", (across * step, line + rows * step + lines * line), "white")
    pen = ImageDraw.Draw(sheet)
    for place, (picture, *masks) in enumerate(triples):
        truth, predicted = (colors[mask] for mask in masks)
        tiles = {"image": picture, "truth": truth, "predicted": predicted}
        for number, (name, pixels) in enumerate(tiles.items(), start=3 * (place % 2)):
            tile = Image.fromarray(pixels)
            tile.thumbnail((SIDE, SIDE), Image.Resampling[("NEAREST", "BICUBIC")[name == "image"]])
            sheet.paste(tile, (number * step, line + place // 2 * step))
            pen.text((number * step, 2), name, fill="black")
    for place, c in enumerate(shown):
        left, top = place % across * step, line + rows * step + place // across * line
        pen.rectangle((left, top + 2, left + 12, top + 13), fill=tuple(colors[c].tolist()))
        name = "ignored" if c == VOID else classes[c]
        pen.text((left + 16, top + 2), name, fill="black")
    png = io.BytesIO()
    sheet.save(png, "PNG")
    return png.getvalue()
