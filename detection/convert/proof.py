"""Prove a conversion: pass the same images through timm and through the built Detectron2 model.

Names and shapes cannot tell a right conversion from one with another stride, channel order,
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
from detectron2.config import CfgNode
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.modeling import build_backbone, build_model
from detectron2.structures import Boxes
from PIL import Image
from torch import Tensor, nn

from detection.convert.weights import (
    check_rest_is_new,
    compare,
    load_weights,
    quietly,
    read_weights,
)
from detection.errors import DetectionError
from detection.train.roi_heads import EXTRA_NORM

TOLERANCE = 1e-4  # right conversions stay below 3e-5; the mildest known mistake gives 5e-3
TRUNK = ("stem", "res2", "res3", "res4", "res5")
HEAD = "roi_heads.res5"
STAGES = (*TRUNK, HEAD)
TIMM_MODULES = dict(zip(TRUNK, ("maxpool", "layer1", "layer2", "layer3", "layer4"), strict=True))
IMAGE_SIZE = (107, 133)  # odd, so that paddings and roundings show
ROIS = ((3.0, 5.0, 97.5, 80.0), (40.25, 10.0, 130.0, 104.0))
SMALL = 0.1  # smaller differences come from another constant, larger from input or structure

Outputs = dict[str, Tensor]
Color = tuple[float, ...]


@torch.no_grad()
def stage_differences(
    backbone: nn.Module,
    mean: Color,
    std: Color,
    cfg: CfgNode,
    weights: Path,
) -> dict[str, float]:
    """Return the relative L2 difference at every stage between timm's network and `cfg`'s."""
    model, trunk = _build(cfg, weights)
    # A branch whose last scale is zero (zero_init_last) is invisible: set to one in all three.
    backbone = copy.deepcopy(backbone).float().eval()
    for network in (backbone, model, trunk):
        _lift_zero_scales(network)
    images = _images()
    with quietly("torch.fx"):
        theirs = _detectron2_outputs(model, trunk, images, cfg.INPUT.FORMAT)
    ours = _timm_outputs(backbone, _normalized(images, mean, std), model.roi_heads.pooler)
    return {stage: _difference(ours[stage], theirs[stage], stage) for stage in STAGES}


def check_proof(differences: Mapping[str, float], tolerance: float = TOLERANCE) -> None:
    """Raise an error that names the first stage that differs and what that usually means."""
    failed = [stage for stage, value in differences.items() if not value <= tolerance]
    if not failed:
        return
    table = "".join(
        f"\n  {stage:<15} {value:9.2e}" + ("  differs" if stage in failed else "")
        for stage, value in differences.items()
    )
    first = failed[0]
    raise DetectionError(
        "The Detectron2 model does not compute what the source network computes; it differs first "
        f"at {first} (by {differences[first]:.2e}, allowed is {tolerance:g}).{table}\n"
        f"Usually this means: {usual_cause(first, differences[first])}. Nothing was written."
    )


def usual_cause(stage: str, difference: float) -> str:
    """Return the usual cause of a difference that begins at this stage."""
    if stage == HEAD:
        return "the head's res5 was not loaded, or is another block than the trunk's"
    if difference < SMALL:
        return "another eps in the norms (Detectron2's is 1e-5)"
    if stage == "stem":
        return (
            "the input is not the one of pretraining: the channel order (INPUT.FORMAT), "
            "MODEL.PIXEL_MEAN or MODEL.PIXEL_STD; or the stem is another one"
        )
    if stage == "res2":
        return "the blocks are other ones: groups, widths or activation"
    if stage == "res3":
        return (
            "the stride is in another convolution of the blocks (MODEL.RESNETS.STRIDE_IN_1X1), or "
            "something smooths before it"
        )
    return "stages of another depth or dilation (MODEL.RESNETS.DEPTH, RES5_DILATION)"


def _build(cfg: CfgNode, weights: Path) -> tuple[Any, Any]:
    """Build the config's detector and its trunk with res5, both with the file's weights."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "cpu"
    if "res5" not in cfg.MODEL.ROI_HEADS.NAME.lower():
        raise DetectionError(
            f"MODEL.ROI_HEADS.NAME is {cfg.MODEL.ROI_HEADS.NAME}: the proof is of C4 detectors, "
            "whose head is res5. Use a protocol from configs/detection/."
        )
    whole = cfg.clone()
    whole.MODEL.RESNETS.OUT_FEATURES = list(TRUNK)
    with torch.random.fork_rng(devices=[]):
        model = build_model(cfg).eval()
    check_rest_is_new(model)
    load_weights(model, weights)
    tensors = read_weights(weights)
    with torch.device("meta"):  # no memory, no random numbers: its tensors are those of the file
        trunk = build_backbone(whole).eval()
    trunk.load_state_dict(tensors, strict=False, assign=True)
    compare(trunk, tensors, weights)
    return model, trunk


def _images() -> list[Image.Image]:
    """Draw two pictures with structure at several scales and different channels."""
    chance = np.random.default_rng(0)
    height, width = IMAGE_SIZE
    pictures = []
    for _ in range(2):
        coarse = chance.uniform(0, 255, (7, 9, 3)).astype(np.uint8)
        large = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        noisy = np.asarray(large) * (1.0, 0.7, 0.4) + chance.normal(0, 20, (height, width, 3))
        pictures.append(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)))
    return pictures


def _normalized(images: list[Image.Image], mean: Color, std: Color) -> Tensor:
    """Normalize as pretraining does: RGB in [0, 1], then mean and std."""
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    scaled = pixels.permute(0, 3, 1, 2).float() / 255  # (B, 3, H, W)
    return (scaled - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def _detectron2_outputs(model: Any, trunk: Any, images: list[Image.Image], order: str) -> Outputs:
    arrays = [convert_PIL_to_numpy(image, order) for image in images]
    inputs = [{"image": torch.from_numpy(array.transpose(2, 0, 1).copy())} for array in arrays]
    batch = model.preprocess_image(inputs).tensor
    features = [model.backbone(batch)[name] for name in model.roi_heads.in_features]
    pooled = model.roi_heads.pooler(features, _rois(len(images)))
    for name, block in model.roi_heads.res5.named_children():
        pooled = block(pooled) if name != EXTRA_NORM else pooled
    return {**trunk(batch), HEAD: pooled}


def _timm_outputs(backbone: Any, batch: Tensor, pooler: nn.Module) -> Outputs:
    outputs: Outputs = {}
    handles = [
        backbone.get_submodule(module).register_forward_hook(
            lambda _module, _input, output, stage=stage: outputs.update({stage: output.clone()})
        )
        for stage, module in TIMM_MODULES.items()
    ]
    backbone(batch)
    for handle in handles:
        handle.remove()
    outputs[HEAD] = backbone.layer4(pooler([outputs["res4"]], _rois(len(batch))))
    return outputs


def _rois(images: int) -> list[Boxes]:
    return [Boxes(torch.tensor(ROIS)) for _ in range(images)]


def _lift_zero_scales(network: nn.Module) -> None:
    for module in network.modules():
        scale = getattr(module, "weight", None)
        if (
            isinstance(scale, Tensor) and scale.dim() == 1 and not scale.any()
        ):  # only norms have one
            scale.data.fill_(1.0)


def _difference(ours: Tensor, theirs: Tensor, stage: str) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    size = ours.double().norm().item()
    if not math.isfinite(size) or size == 0:
        what = "only zeros" if size == 0 else "NaN or infinite values"
        raise DetectionError(
            f"The source network gives {what} at {stage}, so nothing can be compared: its weights "
            "are damaged or were never trained with these statistics. Nothing was written."
        )
    return (theirs.double() - ours.double()).norm().item() / size
