"""The frozen backbone: loaded whole, calibrated where asked, and proven unchanged at the end."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.backbone_file import RANDOM, Loaded, load_backbone, tensors_hash
from kscl.method.batch_norm import batch_norms
from kscl.method.encoder import feature_dim
from kscl.runtime.precision import AMP_TYPES, autocast
from kscl.runtime.processes.ranks import device
from kscl.views.normalize import normalize_exactly
from linear_eval.data.calibration import calibrate
from linear_eval.data.images import LabeledImages
from linear_eval.errors import LinearEvalError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frozen:
    """A backbone that gives features and never changes."""

    loaded: Loaded
    module: nn.Module
    dim: int  # of its pooled features
    mean: Tensor  # (3, 1, 1)
    std: Tensor
    amp: torch.dtype | None  # of kscl.runtime.precision.AMP_TYPES
    calibrated_on: int  # images that BatchNorm statistics were taken from; 0 if they were kept
    tensors_sha256: str  # when the probe began
    decoded: int = 0  # images, for the calibration

    @property
    def layout(self) -> torch.memory_format:
        """Return the memory format of its inputs."""
        return fast_layout(self.device, self.amp)

    @property
    def device(self) -> torch.device:
        """Return the device it is on."""
        return self.mean.device

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return pooled features (B, D), float32, of uint8 images (B, 3, H, W)."""
        images = images.to(self.device, non_blocking=True)
        inputs = normalize_exactly(images, self.mean, self.std)
        inputs = inputs.contiguous(memory_format=self.layout)
        with autocast(self.device, self.amp):
            return self.module(inputs).float()

    def check_unchanged(self) -> None:
        """Raise an error if a tensor differs from when the probe began."""
        if tensors_hash(self.module) != self.tensors_sha256:
            raise LinearEvalError(
                "The backbone's tensors changed while it was probed, so the number is not its own "
                "and no record was written: something trained it or ran it in training mode. "
                "Report this as a bug."
            )

    def check_finite(self, features: Tensor) -> None:
        """Raise an error if a feature is NaN or infinite."""
        if not torch.isfinite(features).all():
            cause = "its weights are broken, or its BatchNorm statistics (BACKBONE.BATCH_NORM)"
            if self.amp is torch.float16:
                cause = "fp16 overflows in it: set SOLVER.AMP bf16 or off"
            raise LinearEvalError(f"The backbone gives features that are not finite: {cause}.")


def freeze(cfg: CfgNode, train: LabeledImages) -> Frozen:
    """Return the backbone that the config names, ready to be probed.

    `train` is for calibration only.
    """
    if cfg.SOLVER.AMP == "fp16" and device().type == "cpu":
        raise LinearEvalError("SOLVER.AMP fp16 needs a GPU: on a CPU set bf16 or off.")
    loaded = load(cfg)
    dim = feature_dim(loaded.backbone, cfg.INPUT.SIZE)
    colors = (loaded.description.mean, loaded.description.std)
    mean, std = (torch.tensor(color, device=device()).view(3, 1, 1) for color in colors)
    amp = AMP_TYPES[cfg.SOLVER.AMP]
    module = loaded.backbone.to(device()).to(memory_format=fast_layout(device(), amp))
    module.requires_grad_(False).eval()
    wanted = cfg.BACKBONE.BATCH_NORM
    if wanted == "auto":
        wanted = "calibrate" if loaded.layout == RANDOM else "keep"
    used, decoded = 0, 0
    if wanted == "calibrate" and batch_norms(module):
        used, decoded = calibrate(cfg, module, loaded, train, mean, std)
    return Frozen(loaded, module, dim, mean, std, amp, used, tensors_hash(module), decoded)


def fast_layout(device: torch.device, amp: torch.dtype | None) -> torch.memory_format:
    """Return channels last on a CPU, where a ResNet-50 then takes two thirds of the time.

    A GPU wants it in half precision only.
    """
    channels_last = device.type == "cpu" or amp is not None
    return torch.channels_last if channels_last else torch.contiguous_format


def load(cfg: CfgNode) -> Loaded:
    """Return the backbone that the config names, in the place and with the input that it says."""
    given = cfg.BACKBONE
    if not given.WEIGHTS:
        raise LinearEvalError(
            f"BACKBONE.WEIGHTS is empty: set it to a file, an address, or '{RANDOM}'."
        )
    if given.KWARGS and not given.NAME:
        raise LinearEvalError(
            "BACKBONE.KWARGS are arguments of a network: set BACKBONE.NAME as well."
        )
    loaded = load_backbone(
        given.WEIGHTS,
        given.NAME or None,
        dict(given.KWARGS),
        cfg.SEED,
        container=given.CONTAINER or None,
        prefix=given.PREFIX or None,
        mean=cfg.INPUT.MEAN or None,
        std=cfg.INPUT.STD or None,
    )
    for sentence in loaded.said:
        log.info(sentence)
    return loaded
