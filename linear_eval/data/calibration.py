"""BatchNorm statistics of training images, taken once and kept on disk beside the features."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import cv2
import numpy as np
import PIL
import safetensors
import safetensors.torch
import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.backbone_file import Loaded
from kscl.data.index_cache import cache_folder
from kscl.method.batch_norm import batch_norms, calibrate_batch_norm
from kscl.runtime.files import write_atomically
from kscl.runtime.logs import LOGGER
from kscl.runtime.precision import in_tf32
from kscl.runtime.processes.distributed import rank
from kscl.runtime.processes.ranks import device
from kscl.views.normalize import normalize_exactly
from linear_eval.data.images import LabeledImages, ViewsOfImages, file_state, load_batches
from linear_eval.data.turns import my_turn
from linear_eval.data.views import geometry
from linear_eval.splits import calibration_images

BATCH = 64
log = logging.getLogger(LOGGER)


def calibrate(
    cfg: CfgNode,
    module: nn.Module,
    loaded: Loaded,
    train: LabeledImages,
    mean: Tensor,
    std: Tensor,
) -> tuple[int, int]:
    """Calibrate the module of a loaded backbone; return the numbers (used, decoded)."""
    indices = calibration_images(cfg.SEED, len(train), cfg.BACKBONE.CALIBRATION_IMAGES)
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
    if rank() != 0:  # each rank has the same network and computes the same
        return _calibrate(cfg, module, path, train, indices, mean, std)
    with my_turn(path.with_suffix(".lock")):
        return _calibrate(cfg, module, path, train, indices, mean, std)


def _calibrate(
    cfg: CfgNode,
    module: nn.Module,
    path: Path,
    train: LabeledImages,
    indices: np.ndarray,
    mean: Tensor,
    std: Tensor,
) -> tuple[int, int]:
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
