"""The two routes of a timm network into a detector.

exact: Detectron2 builds the same ResNet and the tensors are renamed, for any Detectron2 detector.
timm: our backbone runs the timm network, under an FPN or, for a plain transformer, under a simple
feature pyramid.

The built network decides whether the exact route is possible, not its name: resnetblur50 has the
keys and shapes of resnet50 but computes something else. It is compared layer by layer with the
plain ResNet of the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.config import CfgNode
from timm.layers import GroupNorm as TimmGroupNorm
from timm.models import resnet as timm_resnet
from torch import Tensor, nn

from detection.backbones import (
    C4,
    EXACT_BUILDERS,
    LAST,
    PLAIN_NORM,
    PROTOCOL_BUILDERS,
    TIMM_BUILDERS,
    TimmBackbone,
    find_levels,
    is_plain,
)
from detection.config import of_timm_only
from detection.convert.weights import UNDER_FPN, UNDER_PLAIN_PYRAMID, is_counter
from kscl.backbone_file.detectron2 import detectron2_name
from kscl.config import plain
from kscl.errors import KsclError
from kscl.methods.encoder import STRIDE_IN_1X1, any_size_arguments, build_backbone

EXACT, TIMM = "exact", "timm"
# The depth by the kind of block and the number of blocks in every stage.
DEPTHS: dict[type, dict[tuple[int, ...], int]] = {
    timm_resnet.Bottleneck: {(3, 4, 6, 3): 50, (3, 4, 23, 3): 101, (3, 8, 36, 3): 152},
    timm_resnet.BasicBlock: {(2, 2, 2, 2): 18, (3, 4, 6, 3): 34},
}
STAGES = ("layer1", "layer2", "layer3", "layer4")
SUPPORTED = (
    "resnet50, resnet101, resnet152, resnext50_32x4d and its like, wide_resnet50_2 and its like, "
    "resnet50_gn, any of these with channels=(c, 2c, 4c, 8c), and, outside of C4, resnet18 and "
    "resnet34"
)
WITHOUT_EFFECT = {"drop_block", "drop_path", "global_pool", "fc"}  # on feature maps in eval mode
GROUP_NORMS = (nn.GroupNorm, TimmGroupNorm)
SAME_KIND = {nn.SyncBatchNorm: nn.BatchNorm2d, TimmGroupNorm: nn.GroupNorm}
NORM_SETTINGS = (  # momentum does not matter in eval mode
    *("num_features", "num_channels", "num_groups", "eps", "affine", "track_running_stats"),
)
# Fixed in Detectron2: res2's width with basic blocks, and the stem's.
BASIC_WIDTH = STEM_WIDTH = 64
USE_FPN = "Use an FPN or RetinaNet protocol, such as --protocol configs/detection/coco_fpn_1x.yaml"

Layer = tuple[type, str]


@dataclass(frozen=True)
class Route:
    """How a network gets into a detector."""

    name: str  # EXACT or TIMM
    keys: dict[str, Any]  # config keys that give the detector this network
    names: dict[str, str]  # timm's tensor names → the detector's
    shapes: dict[str, tuple[int, ...]]  # of these tensors, by the detector's names

    def carry(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
        """Return a timm network's tensors by the detector's names, and the names left behind."""
        carried = {
            theirs: tensors[ours].detach().cpu().contiguous() for ours, theirs in self.names.items()
        }
        return carried, [name for name in tensors if name not in self.names]


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
        raise KsclError(
            f"MODEL.BACKBONE.NAME must be one of {', '.join(EXACT_BUILDERS)}, got {builder}. Use a "
            "protocol from configs/detection/."
        )
    if wanted == TIMM and builder != C4:
        return _timm_route(arch, kwargs, cfg, builder)
    keys, misfits = resnet_keys(backbone)
    if builder == C4 and (misfits or wanted == TIMM):
        raise KsclError(
            f"{arch} does not fit a C4 detector, whose head is the last stage of Detectron2's own "
            f"ResNet{':' if misfits else ', not timm code (--route timm).'}{misfits}\n"
            f"These map exactly: {SUPPORTED}. {USE_FPN}, for any timm network with feature levels."
        )
    if misfits and wanted == EXACT:
        raise KsclError(
            f"{arch} cannot become a Detectron2 ResNet without changing what it computes:{misfits}"
            f"\nThese map exactly: {SUPPORTED}."
        )
    if misfits:
        return _timm_route(arch, kwargs, cfg, builder)
    if builder == C4 and keys["MODEL.RESNETS.DEPTH"] < 50:
        raise KsclError(
            f"{arch} has basic blocks, but Detectron2's C4 head always has three bottleneck "
            f"blocks. {USE_FPN}, or pretrain a narrow resnet50."
        )
    if keys_of_timm := of_timm_only(cfg):
        raise KsclError(
            f"{arch} becomes Detectron2's own ResNet, which has no {' and '.join(keys_of_timm)}. "
            "Use a protocol for ResNets (configs/detection/coco_fpn_1x.yaml), or --route timm."
        )
    state = backbone.state_dict()
    names = {ours: theirs for ours in state if (theirs := detectron2_name(ours)) is not None}
    return _route(EXACT, {"MODEL.BACKBONE.NAME": builder, **keys}, names, state)


def _timm_route(arch: str, kwargs: Mapping[str, Any], cfg: CfgNode, builder: str) -> Route:
    with torch.device("meta"):  # structure only
        whole = build_backbone(arch, kwargs)
        is_pyramid = is_plain(whole, arch)
        levels = [LAST] if is_pyramid else list(cfg.MODEL.RESNETS.OUT_FEATURES)
        find_levels(whole, arch, levels)
        arguments = any_size_arguments(arch, kwargs)
        state = TimmBackbone(arch, arguments, levels).network.state_dict()
    keys = {
        "MODEL.BACKBONE.NAME": TIMM_BUILDERS[builder][is_pyramid],
        "KSCL.TIMM.NAME": arch,
        "KSCL.TIMM.KWARGS": plain(arguments),
    }
    if is_pyramid:
        keys["MODEL.FPN.NORM"] = PLAIN_NORM
    prefix = UNDER_PLAIN_PYRAMID if is_pyramid else UNDER_FPN
    names = {name: f"{prefix}{name}" for name in state if not is_counter(name)}
    return _route(TIMM, keys, names, state)


def _route(
    name: str, keys: dict[str, Any], names: dict[str, str], state: Mapping[str, Tensor]
) -> Route:
    shapes = {theirs: tuple(state[ours].shape) for ours, theirs in names.items()}
    return Route(name, keys, names, shapes)


def resnet_keys(backbone: Any) -> tuple[dict[str, Any], str]:
    """Return the config keys that make Detectron2 build this network, and what it lacks.

    The second is "" if Detectron2's network computes the same, else one line per kind of layer that
    differs.
    """
    stages: list[Any] = [getattr(backbone, stage, None) for stage in STAGES]
    is_resnet = type(backbone) is timm_resnet.ResNet
    if not is_resnet or any(type(stage) is not nn.Sequential for stage in stages):
        kind = f"{type(backbone).__module__}.{type(backbone).__qualname__}"
        return {}, f"\n  - {kind}, where Detectron2 has timm.models.resnet.ResNet of four stages"
    first, second = stages[0][0], stages[1][0]
    is_basic = type(first) is timm_resnet.BasicBlock
    is_bottleneck = type(first) is timm_resnet.Bottleneck
    counts = tuple(len(stage) for stage in stages)
    groups, inner, width = 1, BASIC_WIDTH, BASIC_WIDTH  # of res2
    if is_bottleneck:
        groups, inner = first.conv2.groups, first.conv2.out_channels
        width = first.conv3.out_channels // first.expansion
    family = "GN" if type(backbone.bn1) in GROUP_NORMS else "BN"
    in_1x1 = is_bottleneck and second.conv1.stride == (2, 2)
    depths = DEPTHS[timm_resnet.BasicBlock if is_basic else timm_resnet.Bottleneck]
    arguments: dict[str, Any] = {
        "layers": counts,
        "channels": tuple(width * 2**stage for stage in range(4)),
        "norm_layer": "groupnorm" if family == "GN" else "batchnorm2d",
        "act_layer": "relu",
    }
    if is_bottleneck:
        # timm rounds the width per group down, so add a little.
        per_group = 64 * (inner // groups) / width * (1 + 1e-9)
        arguments |= {"cardinality": groups, "base_width": per_group, STRIDE_IN_1X1: in_1x1}
    with torch.device("meta"):
        reference = build_backbone("resnet18" if is_basic else "resnet50", arguments)
    keys = {
        "MODEL.RESNETS.DEPTH": depths.get(counts),
        "MODEL.RESNETS.NUM_GROUPS": groups,
        "MODEL.RESNETS.WIDTH_PER_GROUP": inner // groups,
        "MODEL.RESNETS.RES2_OUT_CHANNELS": width * first.expansion,
        "MODEL.RESNETS.STEM_OUT_CHANNELS": STEM_WIDTH,
        "MODEL.RESNETS.STRIDE_IN_1X1": in_1x1,
        "MODEL.RESNETS.RES5_DILATION": 1,
        "MODEL.RESNETS.DEFORM_ON_PER_STAGE": [False] * len(STAGES),
        "MODEL.RESNETS.NORM": family,
    }
    reasons = []
    if counts not in depths:
        reasons.append(f"{counts} blocks, where Detectron2 has {', '.join(map(str, depths))}")
    kinds: dict[tuple[str, str], list[str]] = {}  # one line for each pair of kinds
    for name, (_, found), (_, expected) in _differences(backbone, reference):
        pair = (found.partition("(")[0], expected.partition("(")[0])
        line = f"{name}: {found}, where Detectron2 has {expected}"
        kinds.setdefault(pair, []).append(line)
    for line, *more in kinds.values():
        reasons.append(line + (f", and {len(more)} more places" if more else ""))
    return keys, "".join(f"\n  - {reason}" for reason in reasons)


def _differences(backbone: nn.Module, reference: nn.Module) -> Iterator[tuple[str, Layer, Layer]]:
    """Yield the outermost layers that differ: name, found, expected.

    Modules of the same type have the same `forward`, so only settings need to be compared.
    """
    ours, theirs = dict(backbone.named_modules()), dict(reference.named_modules())
    different: tuple[str, ...] = ()
    for name in dict.fromkeys([*ours, *theirs]):
        if WITHOUT_EFFECT.isdisjoint(name.split(".")) and not f"{name}.".startswith(different):
            found, expected = _layer(ours.get(name)), _layer(theirs.get(name))
            if found != expected:
                yield name, found, expected
                different += (f"{name}.",)


def _layer(module: Any) -> Layer:
    """Return a layer's type and its function in eval mode, as text."""
    kind = SAME_KIND.get(type(module), type(module))
    if module is None or kind is nn.Identity:
        return nn.Identity, "nothing"
    if kind is nn.ReLU:
        return kind, "ReLU"  # in place or not
    if kind is nn.Sequential:
        kinds = (SAME_KIND.get(type(child), type(child)).__name__ for child in module)
        return kind, f"a sequence of {', '.join(dict.fromkeys(kinds))}"
    settings = module.extra_repr()
    if kind in (nn.BatchNorm2d, nn.GroupNorm):
        values = {name: getattr(module, name) for name in NORM_SETTINGS if hasattr(module, name)}
        settings = ", ".join(f"{name}={value}" for name, value in values.items())
    return kind, f"{kind.__name__}({settings})"
