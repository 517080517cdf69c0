"""Prove a conversion: pass the same images through timm and through the built Detectron2 model.

Names and shapes do not distinguish a right conversion from one with another stride, channel order,
BatchNorm eps or smoothing; the outputs of the two networks can. Detectron2's own reading and
preprocessing of images is part of what is compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.modeling import build_backbone, build_model
from detectron2.structures import Boxes
from PIL import Image
from tabulate import tabulate
from torch import Tensor, nn

from detection.backbones import (
    C4,
    EXACT_BUILDERS,
    EXTRA_NORM,
    LAST,
    PLAIN_BUILDERS,
    find_levels,
    level_features,
    outputs_of,
)
from detection.convert.weights import (
    check_rest_is_new,
    compare,
    load_weights,
    quietly,
    read_weights,
)
from kscl.backbone_file import Description
from kscl.config import plain
from kscl.errors import KsclError
from kscl.methods import encoder

TOLERANCE = 1e-4  # right conversions stay below 3e-5; the mildest known mistake gives 5e-3
TRUNK = ("stem", "res2", "res3", "res4", "res5")
HEAD = "roi_heads.res5"
STAGES = (*TRUNK, HEAD)  # of a C4
BOTTOM_UP = "backbone.bottom_up."  # a ResNet's or timm network's levels under an FPN
PLAIN_LEVEL = f"backbone.net.{LAST}"  # a plain transformer's
OWN_SIZE = " at its own size"  # of images, for a network that was made for one
SCALES = ("weight", "gamma", "gamma1", "gamma2", "gamma_1", "gamma_2")  # of norms and LayerScale
TIMM_MODULES = dict(zip(TRUNK, ("maxpool", "layer1", "layer2", "layer3", "layer4"), strict=True))
ROIS = ((3.0, 5.0, 97.5, 80.0), (40.25, 10.0, 130.0, 104.0))
SMALL = 0.1  # smaller differences come from another constant, larger from input or structure
INVISIBLE = 1e-3  # a branch with a smaller scale would hide its mistakes

CAUSES = {  # of a difference that begins at a stage
    "stem": "the input is not that of pretraining: the channel order (INPUT.FORMAT), "
    "MODEL.PIXEL_MEAN or MODEL.PIXEL_STD; or the stem is another one",
    "res2": "the blocks are other ones: groups, widths or activation",
    "res3": "the stride is in another convolution of the blocks (MODEL.RESNETS.STRIDE_IN_1X1), or "
    "something smooths before it",
    "res5": "stages of another depth or dilation (MODEL.RESNETS.DEPTH, RES5_DILATION)",
    HEAD: "the head's res5 was not loaded, or is another block than the trunk's",
}

Outputs = dict[str, Tensor]
IMAGE_SIZE = (107, 133)  # odd, so that paddings and roundings show


def stages_of(cfg: CfgNode, kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stages that a proof must compare for a network with these arguments."""
    builder = cfg.MODEL.BACKBONE.NAME
    if builder == C4:
        return STAGES
    if builder in PLAIN_BUILDERS:
        levels: tuple[str, ...] = (PLAIN_LEVEL,)
    else:
        levels = tuple(f"{BOTTOM_UP}{name}" for name in cfg.MODEL.RESNETS.OUT_FEATURES)
    if builder in EXACT_BUILDERS:
        return (*TRUNK, *levels)
    if _takes_any_size(cfg, kwargs):
        return levels
    return (*levels, *(f"{level}{OWN_SIZE}" for level in levels))


def _takes_any_size(cfg: CfgNode, kwargs: Mapping[str, Any]) -> bool:
    return plain(cfg.KSCL.TIMM.KWARGS) == plain(dict(kwargs))


@torch.no_grad()
def stage_differences(
    backbone: nn.Module, about: Description, cfg: CfgNode, weights: Path
) -> dict[str, float]:
    """Return the relative L2 difference at every stage between timm's network and `cfg`'s."""
    if cfg.MODEL.BACKBONE.NAME == C4 and "res5" not in cfg.MODEL.ROI_HEADS.NAME.lower():
        raise KsclError(
            f"MODEL.ROI_HEADS.NAME is {cfg.MODEL.ROI_HEADS.NAME}: a detector without FPN can only "
            "be proven if its head is res5 (C4). Use a protocol from configs/detection/."
        )
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    with torch.random.fork_rng(devices=[]):
        model = build_model(cfg).eval()
    check_rest_is_new(model, cfg.MODEL.META_ARCHITECTURE)
    load_weights(model, weights)
    # A branch whose last scale is zero (zero_init_last) is invisible: set to one in all of them.
    backbone = copy.deepcopy(backbone).float().eval()
    for network in (backbone, model):
        _lift_zero_scales(network)
    with quietly("torch.fx"):
        if cfg.MODEL.BACKBONE.NAME in EXACT_BUILDERS:
            ours, theirs = _exact_outputs(backbone, about, model, cfg, weights)
        else:
            ours, theirs = _timm_outputs(backbone, about, model, cfg)
    stages = stages_of(cfg, about.kwargs)
    return {stage: _difference(ours[stage], theirs[stage], stage) for stage in stages}


def check_proof(differences: Mapping[str, float]) -> None:
    """Raise an error that names the first stage that differs and what that usually means."""
    failed = [stage for stage, value in differences.items() if not value <= TOLERANCE]
    if not failed:
        return
    rows = [
        (stage, f"{value:.2e}", "differs" if stage in failed else "")
        for stage, value in differences.items()
    ]
    first = failed[0]
    raise KsclError(
        "The Detectron2 model does not compute what the source network computes; it differs first "
        f"at {first} (by {differences[first]:.2e}, allowed is {TOLERANCE:g}).\n"
        f"{tabulate(rows, tablefmt='plain', disable_numparse=True)}\n"
        f"Usually this means: {usual_cause(first, differences[first])}. Nothing was written."
    )


def usual_cause(stage: str, difference: float) -> str:
    """Return the usual cause of a difference that begins at this stage."""
    if stage.startswith("backbone."):
        return (
            "the input is not that of pretraining (INPUT.FORMAT, MODEL.PIXEL_MEAN or "
            "MODEL.PIXEL_STD), or the network has other arguments (KSCL.TIMM.KWARGS)"
        )
    if stage in TRUNK and difference < SMALL:
        return "another eps in the norms (Detectron2's is 1e-5)"
    return CAUSES.get(stage, CAUSES["res5"])


def _exact_outputs(
    backbone: Any, about: Description, model: Any, cfg: CfgNode, weights: Path
) -> tuple[Outputs, Outputs]:
    """Return what timm's ResNet and Detectron2's put out at every stage."""
    images = draw_images()
    batch = preprocessed(model, images, cfg.INPUT.FORMAT)
    with outputs_of(backbone, list(TIMM_MODULES.values())) as outputs:
        backbone(padded(normalized(images, about), batch))
    ours = {stage: outputs[module] for stage, module in TIMM_MODULES.items()}
    theirs = dict(_build_trunk(cfg, weights)(batch))
    if cfg.MODEL.BACKBONE.NAME == C4:
        pooler, boxes = model.roi_heads.pooler, [Boxes(torch.tensor(ROIS)) for _ in images]
        ours[HEAD] = backbone.layer4(pooler([ours["res4"]], boxes))
        features = model.backbone(batch)
        pooled = pooler([features[name] for name in model.roi_heads.in_features], boxes)
        for name, block in model.roi_heads.res5.named_children():
            pooled = block(pooled) if name != EXTRA_NORM else pooled
        theirs[HEAD] = pooled
    else:
        for name, values in model.backbone.bottom_up(batch).items():
            theirs[f"{BOTTOM_UP}{name}"] = values
            ours[f"{BOTTOM_UP}{name}"] = ours[name]
    return ours, theirs


def _build_trunk(cfg: CfgNode, weights: Path) -> Any:
    """Build Detectron2's ResNet by itself, with every stage as an output."""
    whole = cfg.clone()
    whole.MODEL.BACKBONE.NAME = C4
    whole.MODEL.RESNETS.OUT_FEATURES = list(TRUNK)
    tensors = read_weights(weights)
    with torch.device("meta"):  # no memory, no random numbers: its tensors are those of the file
        trunk = build_backbone(whole).eval()
    trunk.load_state_dict(tensors, strict=False, assign=True)
    compare(trunk, tensors, weights)
    _lift_zero_scales(trunk)
    return trunk


def _timm_outputs(
    backbone: Any, about: Description, model: Any, cfg: CfgNode
) -> tuple[Outputs, Outputs]:
    """Return what the whole timm network and the detector's put out at every level."""
    is_pyramid = cfg.MODEL.BACKBONE.NAME in PLAIN_BUILDERS
    inside = model.backbone.net if is_pyramid else model.backbone.bottom_up
    prefix = PLAIN_LEVEL.removesuffix(LAST) if is_pyramid else BOTTOM_UP
    name, images = cfg.KSCL.TIMM.NAME, draw_images()
    levels = find_levels(backbone, name, [level.name for level in inside.levels])
    ours: Outputs = {}
    theirs: Outputs = {}

    def add(network: Any, pixels: Tensor, batch: Tensor, suffix: str = "") -> None:
        values = level_features(network, pixels, levels)
        ours.update({f"{prefix}{k.name}{suffix}": v for k, v in zip(levels, values, strict=True)})
        theirs.update({f"{prefix}{k}{suffix}": v for k, v in inside(batch).items()})

    batch = preprocessed(model, images, cfg.INPUT.FORMAT)
    pixels = padded(normalized(images, about), batch)
    if _takes_any_size(cfg, about.kwargs):
        add(backbone, pixels, batch)
        return ours, theirs
    # The source takes one size of images. There it is compared as it is; at another size, with
    # timm's own network for any size that has its weights.
    flexible: Any = encoder.build_backbone(name, plain(cfg.KSCL.TIMM.KWARGS)).eval()
    flexible.load_state_dict(backbone.state_dict(), strict=True)
    add(flexible, pixels, batch)
    size = getattr(getattr(backbone, "patch_embed", None), "img_size", None)
    own = draw_images(tuple(size or backbone.pretrained_cfg["input_size"][1:]))
    exact = normalized(own, about)
    cut = preprocessed(model, own, cfg.INPUT.FORMAT)[..., : exact.shape[2], : exact.shape[3]]
    add(backbone, exact, cut, OWN_SIZE)
    return ours, theirs


def _lift_zero_scales(network: nn.Module) -> None:
    for module in network.modules():
        for name in SCALES:
            scale = getattr(module, name, None)
            if not isinstance(scale, Tensor) or scale.dim() != 1:
                continue  # only norms and LayerScale have a vector
            if scale.abs().max() < INVISIBLE:
                scale.data.fill_(1.0)


def _difference(ours: Tensor, theirs: Tensor, stage: str) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    size = ours.double().norm().item()
    if not math.isfinite(size) or size == 0:
        what = "only zeros" if size == 0 else "NaN or infinite values"
        raise KsclError(
            f"The source network gives {what} at {stage}, so nothing can be compared: its weights "
            "are damaged or were never trained with these statistics. Nothing was written."
        )
    return (theirs.double() - ours.double()).norm().item() / size


def draw_images(size: tuple[int, int] = IMAGE_SIZE) -> list[Image.Image]:
    """Draw two pictures with structure at several scales and different channels."""
    chance = np.random.default_rng(0)
    height, width = size
    pictures = []
    for _ in range(2):
        coarse = chance.uniform(0, 255, (7, 9, 3)).astype(np.uint8)
        large = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(large) * (1.0, 0.7, 0.4) + chance.normal(0, 20, (height, width, 3))
        pictures.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    return pictures


def normalized(images: list[Image.Image], about: Description) -> Tensor:
    """Normalize as pretraining does: RGB in [0, 1], then mean and std."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (about.mean, about.std))
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    scaled = pixels.permute(0, 3, 1, 2).float() / 255  # (B, 3, H, W)
    return (scaled - mean) / std


def preprocessed(model: Any, images: list[Image.Image], order: str) -> Tensor:
    """Return the batch as Detectron2 reads, normalizes and pads it."""
    arrays = [convert_PIL_to_numpy(image, order) for image in images]
    inputs = [{"image": torch.from_numpy(array.transpose(2, 0, 1).copy())} for array in arrays]
    return model.preprocess_image(inputs).tensor


def padded(images: Tensor, like: Tensor) -> Tensor:
    """Pad with zeros on the right and below, as Detectron2 does."""
    return F.pad(images, (0, like.shape[3] - images.shape[3], 0, like.shape[2] - images.shape[2]))
