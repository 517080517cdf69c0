"""The two ways of a timm network into a detector.

Exact: Detectron2 builds the same ResNet itself and the tensors are renamed; any detector of
Detectron2's can have it, ours or not. timm: a backbone of ours runs the timm network, under an FPN
or, if it is a plain transformer, under a simple feature pyramid.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from detection.backbones.builders import TimmBackbone
from detection.backbones.levels import LAST, any_size_arguments, find_levels, is_plain
from detection.convert.architecture import SUPPORTED, examine, misfits
from detection.convert.weights import COUNTER, TIMM_PREFIX, rename
from detection.errors import DetectionError
from kscl.methods.encoder import build_backbone

EXACT, TIMM = "exact", "timm"
ROUTES = (EXACT, TIMM)
C4 = "build_resnet_backbone"
# For every backbone of a protocol: the same with a timm network, and with a plain transformer.
TIMM_BUILDERS = {
    "build_resnet_fpn_backbone": ("build_timm_fpn_backbone", "build_timm_plain_backbone"),
    "build_retinanet_resnet_fpn_backbone": (
        "build_retinanet_timm_fpn_backbone",
        "build_retinanet_timm_plain_backbone",
    ),
}
EXACT_BUILDERS = (C4, *TIMM_BUILDERS)
PLAIN_BUILDERS = tuple(plain for _, plain in TIMM_BUILDERS.values())
PROTOCOL_BUILDERS = {new: old for old, both in TIMM_BUILDERS.items() for new in both}
USE_FPN = "Use an FPN or RetinaNet protocol, such as --protocol configs/detection/coco_fpn_1x.yaml"


@dataclass(frozen=True)
class Route:
    """How one network gets into one detector."""

    name: str  # one of ROUTES
    keys: dict[str, Any]  # the config keys that give the detector this network
    shapes: dict[str, tuple[int, ...]] | None  # timm: of the tensors it needs, by timm's names
    prefix: str = ""  # timm: of these names inside the detector

    def carry(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Return a timm network's tensors by the detector's names, and the names left behind."""
        if self.shapes is None:
            return rename(dict(tensors))
        left = [name for name in tensors if name not in self.shapes]
        carried = {
            f"{self.prefix}{name}": tensors[name].detach().cpu().contiguous()
            for name in self.shapes
        }
        return carried, left


def choose_route(
    backbone: nn.Module,
    arch: str,
    kwargs: Mapping[str, Any],
    cfg: CfgNode,
    wanted: str | None = None,
) -> Route:
    """Return the exact route if the network and the protocol's detector allow it, else timm's."""
    builder = PROTOCOL_BUILDERS.get(cfg.MODEL.BACKBONE.NAME, cfg.MODEL.BACKBONE.NAME)
    if builder not in EXACT_BUILDERS:
        raise DetectionError(
            f"MODEL.BACKBONE.NAME is {builder}, and backbones are converted for "
            f"{', '.join(EXACT_BUILDERS)}. Use a protocol from configs/detection/."
        )
    if builder == C4:
        return _into_c4(backbone, arch, wanted)
    if wanted != TIMM and (wanted == EXACT or not misfits(backbone)):
        keys = examine(backbone, arch).detectron2_keys()
        return Route(EXACT, {"MODEL.BACKBONE.NAME": builder, **keys}, None)
    return _timm_route(arch, kwargs, cfg, builder)


def _into_c4(backbone: nn.Module, arch: str, wanted: str | None) -> Route:
    features = misfits(backbone)
    if features or wanted == TIMM:
        raise DetectionError(
            f"{arch} does not fit a C4 detector, whose head is the last stage of Detectron2's own "
            f"ResNet. It has{features or ' been asked for by the timm route'}\n"
            f"These map exactly: {SUPPORTED}. {USE_FPN}, which takes any timm network with "
            "feature levels."
        )
    found = examine(backbone, arch)
    if found.depth < 50:
        raise DetectionError(
            f"{arch} has basic blocks: the C4 head of Detectron2 is always three bottleneck "
            f"blocks, so res5 would not fit. {USE_FPN}, or pretrain a narrow resnet50."
        )
    return Route(EXACT, {"MODEL.BACKBONE.NAME": C4, **found.detectron2_keys()}, None)


def _timm_route(arch: str, kwargs: Mapping[str, Any], cfg: CfgNode, builder: str) -> Route:
    with torch.device("meta"):  # no memory, no random numbers: only its structure is needed
        whole = build_backbone(arch, kwargs)
        plain = is_plain(whole, arch)
        levels = [LAST] if plain else list(cfg.MODEL.RESNETS.OUT_FEATURES)
        find_levels(whole, arch, levels)
        arguments = any_size_arguments(arch, kwargs)
        needed = TimmBackbone(arch, arguments, levels).network
    shapes = {
        name: tuple(value.shape)
        for name, value in needed.state_dict().items()
        if name.rpartition(".")[2] != COUNTER
    }
    keys = {
        "MODEL.BACKBONE.NAME": TIMM_BUILDERS[builder][plain],
        "KSCL.TIMM.NAME": arch,
        "KSCL.TIMM.KWARGS": _lists(arguments),
    }
    return Route(TIMM, keys, shapes, TIMM_PREFIX["net" if plain else "bottom_up"])


def _lists(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as YAML and JSON give them back, which have no tuples."""
    return {key: list(v) if isinstance(v, tuple) else v for key, v in kwargs.items()}
