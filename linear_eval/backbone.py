"""The frozen backbone: loaded whole, calibrated where asked, and proven unchanged at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.backbone_file import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    RANDOM,
    Loaded,
    load_backbone,
    tensors_hash,
)
from kscl.method.encoder import feature_dim
from kscl.runtime.launch import device
from linear_eval.data.images import LabelledImages, ViewsOfImages, load_batches
from linear_eval.data.views import geometry, normalise
from linear_eval.errors import LinearEvalError
from linear_eval.splits import calibration_images

AMP_TYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CALIBRATION_BATCH = 64


@dataclass(frozen=True)
class Frozen:
    """A backbone that is only looked through."""

    loaded: Loaded
    module: nn.Module
    dim: int  # of its pooled features
    mean: Tensor  # (3, 1, 1)
    std: Tensor
    amp: torch.dtype | None
    calibrated_on: int  # images that BatchNorm's statistics were taken from; 0 if they were kept
    tensors_sha256: str  # when the probe began

    @property
    def layout(self) -> torch.memory_format:
        return fast_layout(self.device)

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Pooled features (B, D), float32, of uint8 images (B, 3, H, W)."""
        inputs = normalise(images.to(self.device, non_blocking=True), self.mean, self.std)
        inputs = inputs.contiguous(memory_format=self.layout)
        half = (
            contextlib.nullcontext()
            if self.amp is None
            else torch.autocast(self.device.type, self.amp)
        )
        with half:
            return self.module(inputs).float()

    def check_unchanged(self) -> None:
        if tensors_hash(self.module) != self.tensors_sha256:
            raise LinearEvalError(
                "the backbone's tensors changed while it was probed, so the number is not its own "
                "and no record was written: something trained it or ran it in training mode"
            )

    def check_finite(self, features: Tensor) -> None:
        if not torch.isfinite(features).all():
            cause = "its weights are broken, or its BatchNorm statistics (BACKBONE.BATCH_NORM)"
            if self.amp is torch.float16:
                cause = "fp16 overflows in it: set SOLVER.AMP bf16 or off"
            raise LinearEvalError(f"the backbone gives features that are not finite: {cause}")


def freeze(cfg: CfgNode, train: LabelledImages) -> Frozen:
    """The backbone that the config names, ready to be probed; `train` is for calibration only."""
    if cfg.SOLVER.AMP == "fp16" and device().type == "cpu":
        raise LinearEvalError("SOLVER.AMP fp16 needs a GPU; a CPU can do bf16")
    loaded = _load(cfg)
    dim = feature_dim(loaded.backbone, cfg.INPUT.SIZE)
    mean, std = (
        torch.tensor(v, device=device()).view(3, 1, 1) for v in _normalisation(cfg, loaded)
    )
    module = loaded.backbone.to(device()).to(memory_format=fast_layout(device()))
    module.requires_grad_(False).eval()
    wanted = cfg.BACKBONE.BATCH_NORM
    if wanted == "auto":
        wanted = "calibrate" if loaded.layout == RANDOM else "keep"
    calibrated_on = 0
    if wanted == "calibrate" and batch_norms(module):
        places = calibration_images(cfg.SEED, len(train), cfg.BACKBONE.CALIBRATION_IMAGES)
        images = _centre_crops(cfg, train, places)
        calibrate_batch_norm(module, (normalise(part.to(device()), mean, std) for part in images))
        calibrated_on = len(places)
    amp = AMP_TYPES[cfg.SOLVER.AMP]
    return Frozen(loaded, module, dim, mean, std, amp, calibrated_on, tensors_hash(module))


def fast_layout(device: torch.device) -> torch.memory_format:
    """On a CPU, channels last: convolutional networks take less time, a ResNet-50 two thirds."""
    return torch.channels_last if device.type == "cpu" else torch.contiguous_format


def batch_norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@torch.no_grad()
def calibrate_batch_norm(module: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set BatchNorm's statistics to their mean over batches of images; nothing else changes."""
    norms = batch_norms(module)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all forward passes
        norm.train()  # the norms alone: dropout and the like stay off
    for batch in batches:
        module(batch)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()


def _load(cfg: CfgNode) -> Loaded:
    given = cfg.BACKBONE
    if not given.WEIGHTS:
        raise LinearEvalError(
            f"no backbone is named: set BACKBONE.WEIGHTS to a file, or to '{RANDOM}'"
        )
    if given.KWARGS and not given.NAME:
        raise LinearEvalError("BACKBONE.KWARGS belong to a network: set BACKBONE.NAME as well")
    return load_backbone(given.WEIGHTS, given.NAME or None, dict(given.KWARGS), cfg.SEED)


def _normalisation(cfg: CfgNode, loaded: Loaded) -> tuple[tuple[float, ...], tuple[float, ...]]:
    described = (loaded.description.mean, loaded.description.std)
    if not cfg.INPUT.MEAN:
        return described
    given = (tuple(cfg.INPUT.MEAN), tuple(cfg.INPUT.STD))
    if described not in (given, (IMAGENET_MEAN, IMAGENET_STD)):
        raise LinearEvalError(
            f"INPUT.MEAN and STD are {given}, but the backbone was trained with {described}: leave "
            "them empty to take what its file says"
        )
    return given


def _centre_crops(cfg: CfgNode, images: LabelledImages, places: np.ndarray) -> Iterator[Tensor]:
    """Batches (B, 3, H, W), uint8, of about one size, as each counts the same."""
    shape = geometry(cfg)
    dataset = ViewsOfImages(images, lambda picture, epoch, number: [shape.centre(picture)])
    parts = np.array_split(places, max(1, len(places) // CALIBRATION_BATCH))
    batches = [[(0, int(place)) for place in part] for part in parts]
    for batch in load_batches(dataset, batches, cfg.DATA.NUM_WORKERS):
        yield batch.views[:, 0]
