"""The frozen backbone: loaded whole, calibrated where asked, and proven unchanged at the end.

Calibration takes BatchNorm statistics of training images once and keeps them on disk beside the
features.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import cv2
import numpy as np
import PIL
import safetensors
import safetensors.torch
import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.backbone_file import RANDOM, Loaded, load_backbone, tensors_hash
from kscl.data.source import cache_folder
from kscl.errors import KsclError
from kscl.methods.batch_norm import batch_norms, calibrate_batch_norm
from kscl.methods.encoder import feature_dim
from kscl.rng import Stream, permutation
from kscl.runtime.distributed import device, rank
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import LOGGER
from kscl.runtime.precision import AMP_TYPES, autocast, in_tf32
from kscl.views.normalize import normalize_exactly
from linear_eval.images import LabeledImages, ViewsOfImages, file_state, geometry, load_batches

BATCH = 64  # of the calibration
POLL_SECONDS = 0.2
log = logging.getLogger(LOGGER)


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
            raise KsclError(
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
            raise KsclError(f"The backbone gives features that are not finite: {cause}.")


def freeze(cfg: CfgNode, train: LabeledImages, loaded: Loaded | None = None) -> Frozen:
    """Return the backbone that the config names, ready to be probed.

    `train` is for calibration only. `loaded` is the backbone if it was loaded already.
    """
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
        raise KsclError(f"BACKBONE.WEIGHTS is empty: set it to a file, an address, or '{RANDOM}'.")
    if given.KWARGS and not given.NAME:
        raise KsclError("BACKBONE.KWARGS are arguments of a network: set BACKBONE.NAME as well.")
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


def calibrate(
    cfg: CfgNode,
    module: nn.Module,
    loaded: Loaded,
    train: LabeledImages,
    mean: Tensor,
    std: Tensor,
) -> tuple[int, int]:
    """Calibrate the module of a loaded backbone; return the numbers (used, decoded)."""
    order = permutation(cfg.SEED, 0, Stream.CALIBRATION, len(train))
    indices = order[: cfg.BACKBONE.CALIBRATION_IMAGES]
    about = {
        "backbone": loaded.tensors_sha256,
        "arch": [loaded.description.arch, loaded.description.kwargs],
        "data": [train.fingerprint["hash"], file_state(train)],
        "images": hashlib.sha256(indices.tobytes()).hexdigest(),
        "views": asdict(geometry(cfg)),
        "input": [*mean.flatten().tolist(), *std.flatten().tolist()],
        "libraries": [torch.__version__, np.__version__, PIL.__version__, cv2.__version__],
        "computed": [device().type, in_tf32(device())],
    }
    name = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:32]
    path = cache_folder(cfg.DATA.CACHE_DIR) / "batch_norm" / f"{name}.safetensors"
    # All ranks compute the same, so only rank 0 takes turns with other runs.
    turn = my_turn(path.with_suffix(".lock")) if rank() == 0 else contextlib.nullcontext()
    with turn:
        norms = batch_norms(module)
        try:
            known = safetensors.torch.load(path.read_bytes())
            for number, norm in enumerate(norms):
                norm.load_state_dict(
                    {key: known[f"{number}.{key}"] for key in norm.state_dict()}, strict=True
                )
            return len(indices), 0
        except FileNotFoundError:
            pass
        except (OSError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
            log.warning("%s is damaged and made anew: %s", path, error)
        batches = (part.to(device()) for part in _center_crops(cfg, train, indices))
        calibrate_batch_norm(module, (normalize_exactly(part, mean, std) for part in batches))
        tensors = {
            f"{number}.{key}": value.contiguous()
            for number, norm in enumerate(norms)
            for key, value in norm.state_dict().items()
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, safetensors.torch.save(tensors))
        except OSError as error:  # it costs the next probe a moment, not this one its result
            log.warning("%s cannot be written: %s.", path, error.strerror)
        return len(indices), len(indices)


def _center_crops(cfg: CfgNode, images: LabeledImages, indices: np.ndarray) -> Iterator[Tensor]:
    """Yield batches (B, 3, H, W), uint8, of about one size, as each counts the same."""
    shape = geometry(cfg)
    dataset = ViewsOfImages(images, lambda picture, epoch, number: [shape.center(picture)])
    parts = np.array_split(indices, max(1, len(indices) // BATCH))
    batches = [[(0, int(index)) for index in part] for part in parts]
    for batch in load_batches(dataset, batches, cfg.DATA.NUM_WORKERS):
        yield batch.views[:, 0]


@contextlib.contextmanager
def my_turn(path: Path, while_waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold a lock file; the system releases it however the process ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("w")
    except OSError:  # whoever writes there next says what is wrong
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
            except OSError:  # a file system without locks: both make them, which is only slower
                break
        yield
