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
from functools import partial
from operator import itemgetter
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
from kscl.runtime.logs import LOGGER
from linear_eval.config import WHOLE
from linear_eval.images import LabeledImages, hold_out
from linear_eval.linear import (
    Chunk,
    Point,
    Rows,
    Solution,
    descend,
    on_raw_features,
    softmax_gradient,
    standardized,
)
from linear_eval.masks import VOC_LISTS, VOID, MaskedImages, open_masked
from linear_eval.probe import Data, Json, schedule_words
from linear_eval.probes.cached import GridProbe, choose, sweep_row
from linear_eval.score import LEVEL, Outcome, Score, beside_end

log = logging.getLogger(LOGGER)

DRAWS = 1000  # of the bootstrap
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
AT_ONCE = 2**21  # numbers in one step through the pixels of a batch: they stay in a CPU's cache
PICTURES_FILE, SHOWN, SIDE = "predictions.png", 8, 160  # images shown, and their longer side


@task("segmentation", title="Segmentation (linear probe)", longer="SOLVER.LONGER")
class Segmentation(GridProbe):
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
        return hold_out(train.labels, self.cfg.SEGMENTATION.HOLD_OUT, self.cfg.SEED)

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
        """Freeze the backbone and look at its maps."""
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

    def points(self) -> list[Point]:
        decay = self.cfg.SOLVER.WEIGHT_DECAY
        return [{"lr": lr, "weight_decay": decay} for lr in self.cfg.SEGMENTATION.LRS]

    def solve(self, images: np.ndarray, points: Sequence[Point]) -> Iterator[int]:
        train, table, pixels = self.masked("train"), self.pixels_of("train"), self.side**2
        indices = (images[:, None] * pixels + np.arange(pixels)).reshape(1, -1)
        rows = standardized(Rows(table, indices, torch.empty(0)))
        size = self.cfg.SEGMENTATION.LABEL_SIZE
        targets = torch.stack([torch.from_numpy(nearest(train.mask(i), size)) for i in images])
        yield from self.sgd(points, table.shape[1], partial(train_maps, rows, targets))
        self.found = [on_raw_features(*solution, rows) for solution in self.found]

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

    def compare(self, points: Sequence[Point], held: np.ndarray) -> list[Json]:
        sweep: list[Json] = []
        sums = [self.sums("train", held.tolist(), solution) for solution in self.found]
        for point, each, loss in zip(points, sums, self.training["losses"][-1], strict=True):
            miou = float(np.nanmean(ious(each.sum(0))))
            sweep.append(sweep_row(point, {"held_out_mIoU": miou, "train_loss": loss}))
        best = choose(sweep, itemgetter("held_out_mIoU"), "SEGMENTATION.LRS")
        beside = beside_end(best, len(points))
        if beside is not None and not sweep[beside]["diverged"]:
            differences = bootstrap(sums[best]) - bootstrap(sums[beside])
            sweep[best]["at_edge"] = bool(np.quantile(differences, ENDS[0]) > 0)
        sweep[best]["chosen"] = True
        log.info("lr %g is the best on %d held-out images.", points[best]["lr"], len(held))
        return sweep

    def outcomes(self) -> list[Outcome]:
        """Score the chosen learning rate on val, and draw some of its predictions."""
        val, (solution,), row = self.masked("val"), self.found, self.sweep[self.chosen]
        if not math.isfinite(self.training["losses"][-1][0]):
            raise KsclError("Training diverged. Lower SEGMENTATION.LRS.")
        sums = self.sums("val", range(len(val)), solution)
        right, true, _ = sums.sum((0, 2))
        per_class, given = ious(sums.sum(0)), self.cfg.SEGMENTATION
        warnings = []
        if row.get("at_edge"):
            listed = ", ".join(f"{lr:g}" for lr in given.LRS)
            warnings = [f"lr {row['lr']:g} at the edge of SEGMENTATION.LRS [{listed}]: add values"]
        details = self.grid_details(given.HOLD_OUT, warnings) | {
            "chosen": {"lr": row["lr"]},
            "per_class_is": "IoU",
            "confidence_interval": {"mIoU": np.quantile(bootstrap(sums), ENDS).tolist()},
            "confidence_level": LEVEL,
            "confidence_method": f"bootstrap over val images, {DRAWS} draws",
            "map_side": self.side,
            "pictures": PICTURES_FILE,
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


def train_maps(
    rows: Rows, targets: Tensor, points: Sequence[Point], state: Json, solver: CfgNode, seed: int
) -> Iterator[int]:
    """Train from the epoch that the state is in to the end; yield the number of each epoch.

    The rows are the pixels of the maps, image by image; targets (n, S, S) classes or VOID, uint8.
    """
    place, count, size = state["weight"].device, *targets.shape[:2]
    side = math.isqrt(len(rows) // count)
    up, rows = upsampling(side, size).to(place), rows.near(place)
    indices = torch.from_numpy(rows.indices[0]).view(count, -1)
    numbers = len(state["weight"]) * size * size  # of an image
    at_once = max(1, AT_ONCE // numbers) if place.type == "cpu" else count

    def batches(epoch: int) -> Iterator[Chunk]:
        order = torch.from_numpy(permutation(seed, epoch, Stream.ORDER, count))
        for images in order.split(solver.BATCH_SIZE):
            taken = indices[images].flatten().to(rows.table.device)
            yield rows.take(taken).to(place), targets[images]  # (b·h·w, D), (b, S, S)

    def gradient(outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        maps = outputs.view(len(outputs), -1, side, side)
        parts = zip(maps.split(at_once, 1), labels.to(place).split(at_once), strict=True)
        gradients, losses = zip(*(pixel_gradient(*p, up, len(points)) for p in parts), strict=True)
        counted = max(1, int((labels != VOID).sum()))
        return torch.cat(gradients, 1).flatten(1), torch.stack(losses).sum(0), counted

    return descend(points, state, solver, batches, gradient)


def pixel_gradient(
    outputs: Tensor, labels: Tensor, up: Tensor, points: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the summed loss by outputs (P·C, b, h, w), and the loss (P,).

    Labels (b, S, S) are classes or VOID.
    """
    fine = up @ outputs @ up.T  # (P·C, b, S, S)
    counted = labels.flatten() != VOID
    own = labels.flatten().long().mul_(counted)
    gradient, losses = softmax_gradient(fine.view(points, len(fine) // points, -1), own)
    gradient.mul_(counted)
    return up.T @ gradient.view_as(fine) @ up, losses.mul_(counted).sum((1, 2))


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
