"""The basis images of one picture's views, by the encoder of a checkpoint or by random weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.backbone_file import read_plain
from kscl.data.formats import UnreadableImage, decode_image
from kscl.data.loader import key_recipe
from kscl.errors import KsclError
from kscl.keys import PRETRAIN
from kscl.methods.basis_images import BasisImages, basis_images
from kscl.methods.batch_norm import calibrate_batch_norm
from kscl.methods.build import encoder_of
from kscl.methods.draw_basis import draw
from kscl.methods.encoder import Encoder
from kscl.methods.subspace import max_rank
from kscl.rng import Stream, uniforms
from kscl.run.checkpoint import CHECKPOINT_FOLDER, find_checkpoints
from kscl.views.augment import draws_per_view, make_views, resolve
from kscl.views.normalize import normalize
from kscl.views.sizes import last_size

CALIBRATION_VIEWS = 16  # of the picture, for the BatchNorm statistics of random weights


def draw_basis_of(
    image: Path,
    cfg: CfgNode,
    state: dict[str, Tensor] | None,
    num_shots: int,
    rho: float,
    seed: int,
    outputs: Sequence[Path],
) -> BasisImages:
    """Draw the basis images of K views of an image to every output; return them."""
    max_rank(num_shots, rho)
    torch.manual_seed(seed)
    encoder = key_encoder(cfg, state)
    views = views_of(image, cfg, num_shots, seed)  # (K, 3, H, W)
    mean, std = cfg.INPUT.MEAN, cfg.INPUT.STD
    if state is None:
        more = views_of(image, cfg, CALIBRATION_VIEWS, seed + 1)
        calibrate_batch_norm(encoder, [normalize(more, mean, std)])
    with torch.no_grad():
        keys = encoder(normalize(views, mean, std))  # (K, D)
    basis = basis_images(views / 255, keys, rho)
    draw(views / 255, basis, outputs, rho)
    return basis


def views_of(path: Path, cfg: CfgNode, num_shots: int, seed: int) -> Tensor:
    """Return K views of an image as pretraining makes them, uint8 (K, 3, size, size)."""
    try:
        picture = decode_image(path.read_bytes())
    except OSError as error:
        raise KsclError(f"{path} cannot be read ({error.strerror}): correct --image.") from error
    except UnreadableImage as error:
        raise KsclError(
            f"{path} is not an image that can be read ({error}): choose another --image."
        ) from error
    ops, size = resolve(key_recipe(cfg)), last_size(cfg.INPUT.SIZE)
    views = np.empty((num_shots, 3, size, size), np.uint8)
    numbers = uniforms(seed, 0, Stream.VIEWS, 0, num_shots * draws_per_view(ops))
    make_views(picture, ops, size, numbers, views)
    return torch.from_numpy(views)


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], CfgNode]:
    """Return the learner's tensors, and the config of its run over the defaults of this release.

    Of a folder, that of a run or of its checkpoints, the newest checkpoint is read.
    """
    if path.is_dir():
        found = find_checkpoints(path) or find_checkpoints(path / CHECKPOINT_FOLDER)
        if not found:
            raise KsclError(
                f"{path} holds no checkpoint of tools/pretrain.py: name the folder of a run."
            )
        path = found[0]
    content = read_plain(path)
    if not {"learner", "config"} <= set(content):
        raise KsclError(
            f"{path} is not a checkpoint of tools/pretrain.py, which has a learner and a config: "
            "name one of those in the folder checkpoints of a run."
        )
    cfg = PRETRAIN.defaults()
    cfg.merge_from_other_cfg(CfgNode(content["config"]))
    return content["learner"], cfg


def key_encoder(cfg: CfgNode, state: dict[str, Tensor] | None) -> Encoder:
    """Return the encoder that made the keys, in eval mode; with random weights without a state."""
    encoder = encoder_of(cfg).eval()
    if state is not None:
        prefix = (
            "key_encoder." if any(key.startswith("key_encoder.") for key in state) else "encoder."
        )
        own = {key.removeprefix(prefix): v for key, v in state.items() if key.startswith(prefix)}
        try:
            encoder.load_state_dict(own)
        except RuntimeError as error:
            raise KsclError(
                f"The checkpoint does not fit the config ({error}): leave BACKBONE and PROJECTOR "
                "as they are in it."
            ) from error
    return encoder
