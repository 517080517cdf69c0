"""The frozen backbone: loaded whole, calibrated if requested, and checked at the end."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.backbone_file import RANDOM, Loaded, load_backbone, tensors_hash
from kscl.data.source import cache_folder
from kscl.errors import KsclError
from kscl.methods.batch_norm import batch_norms, calibrate_batch_norm
from kscl.methods.encoder import any_size_arguments, build_backbone, feature_dim
from kscl.rng import Stream, permutation
from kscl.runtime.distributed import device, rank
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import LOGGER
from kscl.runtime.precision import AMP_TYPES, autocast, in_tf32
from kscl.views.normalize import normalize_exactly
from linear_eval.images import LabeledImages, file_state, load_center_crops, view_settings

BATCH = 64  # of the calibration
POLL_SECONDS = 0.2
log = logging.getLogger(LOGGER)


@dataclass(frozen=True)
class Frozen:
    """A backbone that is not trained."""

    loaded: Loaded
    module: nn.Module
    dim: int  # of its features
    mean: Tensor  # (3, 1, 1)
    std: Tensor
    amp: torch.dtype | None  # of kscl.runtime.precision.AMP_TYPES
    calibrated_on: int  # number of images behind the BatchNorm statistics; 0 if they were kept
    tensors_sha256: str  # when the probe began
    decoded: int = 0  # images decoded for the calibration
    levels: tuple[int, ...] = ()  # whose maps are the features, row by row; () is pooled features

    @property
    def device(self) -> torch.device:
        return self.mean.device

    def inputs(self, images: Tensor) -> Tensor:
        """Normalize uint8 images (B, 3, H, W)."""
        images = images.to(self.device, non_blocking=True)
        inputs = normalize_exactly(images, self.mean, self.std)
        return inputs.contiguous(memory_format=fast_layout(self.device, self.amp))

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return features (B, D), float32, of uint8 images (B, 3, H, W)."""
        inputs = self.inputs(images)
        with autocast(self.device, self.amp):
            features: Tensor = self.maps(inputs).flatten(1) if self.levels else self.module(inputs)
        features = features.float()
        if not torch.isfinite(features).all():
            cause = "its weights or BatchNorm statistics (BACKBONE.BATCH_NORM) are broken"
            if self.amp is torch.float16:
                cause = "fp16 overflows: set SOLVER.AMP bf16 or off"
            raise KsclError(f"The backbone's features are not finite: {cause}.")
        return features

    def maps(self, inputs: Tensor) -> Tensor:
        """Return the maps of its levels, concatenated at the finest resolution: (B, h, w, C)."""
        network: Any = self.module
        maps = network.forward_intermediates(
            inputs, indices=list(self.levels), norm=True, intermediates_only=True
        )
        finest = max((one.shape[2:] for one in maps), key=lambda size: size[0])
        resized = [F.interpolate(one.float(), finest, mode="bilinear") for one in maps]
        return torch.cat(resized, 1).permute(0, 2, 3, 1)

    def check_unchanged(self) -> None:
        """Raise an error if a tensor changed since the probe began."""
        if tensors_hash(self.module) != self.tensors_sha256:
            raise KsclError(
                "The backbone's tensors changed during the evaluation, so no record was written: "
                "something trained it or ran it in training mode. Report this as a bug."
            )


def freeze(cfg: CfgNode, train: LabeledImages, loaded: Loaded | None = None) -> Frozen:
    """Return the config's backbone, frozen; `train` is for calibration only."""
    if cfg.SOLVER.AMP == "fp16" and device().type == "cpu":
        raise KsclError("SOLVER.AMP fp16 needs a GPU: on a CPU set bf16 or off.")
    loaded = loaded or load(cfg)
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
        used, decoded = calibrate(cfg, loaded, train, mean, std)
    return Frozen(loaded, module, dim, mean, std, amp, used, tensors_hash(module), decoded)


def fast_layout(device: torch.device, amp: torch.dtype | None) -> torch.memory_format:
    """Return channels last on CPUs (a third less time for a ResNet-50) and for mixed precision."""
    channels_last = device.type == "cpu" or amp is not None
    return torch.channels_last if channels_last else torch.contiguous_format


def load(cfg: CfgNode) -> Loaded:
    """Load the config's backbone, for images of INPUT.SIZE."""
    given = cfg.BACKBONE
    if not given.WEIGHTS:
        raise KsclError(f"BACKBONE.WEIGHTS must be a file, a name or '{RANDOM}', got ''.")
    if given.KWARGS and not given.NAME:
        raise KsclError("BACKBONE.KWARGS needs BACKBONE.NAME: set both.")
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
    for sentence in loaded.messages:
        log.info(sentence)
    # For a transformer made for another size (DINOv2: 518), timm interpolates the position
    # embeddings and pads images to whole patches.
    about, size = loaded.description, cfg.INPUT.SIZE
    kwargs = any_size_arguments(about.arch, about.kwargs, (size, size))
    if kwargs == about.kwargs:
        return loaded
    backbone = build_backbone(about.arch, kwargs)
    backbone.load_state_dict(loaded.backbone.state_dict(), strict=True)
    log.info("%s is built for INPUT.SIZE %d with %s.", about.arch, size, kwargs)
    return replace(loaded, backbone=backbone.eval())


def calibrate(
    cfg: CfgNode, loaded: Loaded, train: LabeledImages, mean: Tensor, std: Tensor
) -> tuple[int, int]:
    """Take BatchNorm statistics from training images, or from the cache.

    Return the number of images behind them, and how many of these were decoded now.
    """
    order = permutation(cfg.SEED, 0, Stream.CALIBRATION, len(train))
    indices = order[: cfg.BACKBONE.CALIBRATION_IMAGES]
    about = {
        "backbone": loaded.tensors_sha256,
        "arch": [loaded.description.arch, loaded.description.kwargs],
        "data": [train.fingerprint["hash"], file_state(train)],
        "images": hashlib.sha256(indices.tobytes()).hexdigest(),
        "views": view_settings(cfg),
        "input": [*mean.flatten().tolist(), *std.flatten().tolist()],
        "libraries": [torch.__version__, np.__version__, PIL.__version__, cv2.__version__],
        "computed": [device().type, in_tf32(device())],
    }
    path = cache_folder(cfg.DATA.CACHE_DIR) / "batch_norm" / f"{cache_name(about)}.safetensors"
    norms = nn.ModuleList(batch_norms(loaded.backbone))
    # All ranks compute the same, so only rank 0 takes turns with other runs.
    with my_turn(path.with_suffix(".lock")) if rank() == 0 else contextlib.nullcontext():
        try:
            norms.load_state_dict(safetensors.torch.load(path.read_bytes()))
            return len(indices), 0
        except FileNotFoundError:
            pass
        except (OSError, RuntimeError, safetensors.SafetensorError) as error:
            log.warning("%s is damaged and will be recomputed: %s", path, error)
        # Batches of about equal size, since each counts the same.
        parts = np.array_split(indices, max(1, len(indices) // BATCH))
        crops = (part.to(device()) for part in load_center_crops(cfg, train, parts))
        inputs = (normalize_exactly(part, mean, std) for part in crops)
        calibrate_batch_norm(loaded.backbone, inputs)
        tensors = {name: value.contiguous() for name, value in norms.state_dict().items()}
        try:
            write_atomically(path, safetensors.torch.save(tensors))
        except KsclError as error:  # only the next probe needs the file
            log.warning("%s", error)
        return len(indices), len(indices)


def cache_name(about: dict[str, Any]) -> str:
    """Return a hash of a description."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]


@contextlib.contextmanager
def my_turn(path: Path, while_waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; the system releases it however the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError:  # the next write reports it
        yield
        return
    with lock:
        while True:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                while_waiting()
                time.sleep(POLL_SECONDS)
            except OSError:  # no locks on this file system: two runs may do the same work
                break
        yield
