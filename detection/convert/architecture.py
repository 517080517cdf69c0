"""Which timm networks are, to the last operation, a ResNet that Detectron2 can build.

The built network is examined, never its name: resnetblur50 and resnetaa50 have the keys and shapes
of resnet50 and compute something else. Whatever does not map is named, all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from timm.layers import GroupNorm as TimmGroupNorm
from timm.models import resnet as timm_resnet
from torch import nn

from detection.errors import DetectionError

BLOCKS_OF_DEPTH = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
BASIC_BLOCKS_OF_DEPTH = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
BASIC_WIDTH = 64  # of res2 in a network of basic blocks, fixed in Detectron2
STAGES = ("layer1", "layer2", "layer3", "layer4")
SUPPORTED = (
    "resnet50, resnet101, resnet152, resnext50_32x4d and its like, wide_resnet50_2 and its like, "
    "resnet50_gn, any of these with channels=(c, 2c, 4c, 8c), and, outside of C4, resnet18 and "
    "resnet34"
)
NORM_EPS = 1e-5  # fixed in Detectron2
GROUP_NORM_GROUPS = 32  # fixed in Detectron2
NORM_FAMILY = {
    nn.BatchNorm2d: "BN",
    nn.SyncBatchNorm: "BN",
    nn.GroupNorm: "GN",
    TimmGroupNorm: "GN",
}
ATTENTION = {
    "SEModule": "squeeze-and-excitation (SE)",
    "EcaModule": "efficient channel attention (ECA)",
}
OTHER_BLOCKS = {
    "SelectiveKernelBottleneck": "selective kernels (SK)",
    "SelectiveKernelBasic": "selective kernels (SK)",
    "Bottle2neck": "multi-scale blocks (Res2Net)",
    "ResNestBottleneck": "split attention (ResNeSt)",
}
DILATION = "dilation or a smaller output stride (output_stride)"

Misfit = tuple[str, str]  # the feature, and where it is


@dataclass(frozen=True)
class Architecture:
    """A ResNet in Detectron2's terms."""

    depth: int  # below 50: basic blocks
    num_groups: int
    width_per_group: int
    res2_out_channels: int
    stem_out_channels: int
    norm_family: str  # "BN" or "GN"; which kind of BatchNorm is the protocol's choice
    stride_in_1x1: bool = False  # timm's stride is in the 3x3 convolution

    def detectron2_keys(self) -> dict[str, Any]:
        """Return the config keys that make Detectron2 build this very network."""
        return {
            "MODEL.RESNETS.DEPTH": self.depth,
            "MODEL.RESNETS.NUM_GROUPS": self.num_groups,
            "MODEL.RESNETS.WIDTH_PER_GROUP": self.width_per_group,
            "MODEL.RESNETS.RES2_OUT_CHANNELS": self.res2_out_channels,
            "MODEL.RESNETS.STEM_OUT_CHANNELS": self.stem_out_channels,
            "MODEL.RESNETS.STRIDE_IN_1X1": self.stride_in_1x1,
            "MODEL.RESNETS.RES5_DILATION": 1,
            "MODEL.RESNETS.DEFORM_ON_PER_STAGE": [False] * len(STAGES),
            "MODEL.RESNETS.NORM": self.norm_family,
        }


def examine(backbone: nn.Module, name: str) -> Architecture:
    """Describe a network in Detectron2's terms; one error names every feature that has none."""
    features = misfits(backbone)
    if features:
        raise DetectionError(
            f"{name} cannot become a Detectron2 ResNet without changing what it computes. "
            f"It has{features}\nThese map exactly: {SUPPORTED}."
        )
    stages = _stages(backbone)
    first, stem = stages[0][0], backbone.get_submodule("conv1")
    return Architecture(
        depth=_depth(stages),
        num_groups=first.conv2.groups,
        width_per_group=first.conv2.out_channels // first.conv2.groups,
        res2_out_channels=_last_conv(first).out_channels,
        stem_out_channels=stem.out_channels,  # type: ignore[arg-type]
        norm_family=NORM_FAMILY[type(first.bn1)],
        stride_in_1x1=_in_1x1(stages),
    )


def misfits(backbone: nn.Module) -> str:
    """List every feature of a network that Detectron2's ResNet does not have, one per line."""
    places: dict[str, list[str]] = {}
    for feature, where in _misfits(backbone):
        places.setdefault(feature, []).append(where)
    return "".join(
        f"\n  - {feature}: {where[0]}"
        + (f" and {len(where) - 1} more places" if len(where) > 1 else "")
        for feature, where in places.items()
    )


def _stages(backbone: nn.Module) -> list[Any]:
    return [backbone.get_submodule(stage) for stage in STAGES]


def _depth(stages: list[Any]) -> int:
    counts = tuple(len(stage) for stage in stages)
    depths = BASIC_BLOCKS_OF_DEPTH if _is_basic(stages[0][0]) else BLOCKS_OF_DEPTH
    return next(depth for depth, blocks in depths.items() if blocks == counts)


def _is_basic(block: Any) -> bool:
    return type(block) is timm_resnet.BasicBlock


def _in_1x1(stages: list[Any]) -> bool:
    """Return whether bottleneck blocks stride in their first convolution (`stride_in_1x1`)."""
    first = stages[1][0].conv1
    return getattr(first, "kernel_size", None) == (1, 1) and first.stride == (2, 2)


def _last_conv(block: Any) -> Any:
    return block.conv2 if _is_basic(block) else block.conv3


def _misfits(backbone: Any) -> Iterator[Misfit]:
    # An exact type also fixes `forward`, so only the attributes it uses need to be examined.
    if type(backbone) is not timm_resnet.ResNet:
        kind = type(backbone)
        yield "another family of networks", f"{kind.__module__}.{kind.__qualname__}"
        return
    yield from _stem_misfits(backbone)
    stages = _stages(backbone)
    if any(type(stage) is not nn.Sequential for stage in stages):
        yield "stages that were taken out or replaced", ", ".join(STAGES)
        return
    kinds = {type(block) for stage in stages for block in stage}
    if kinds not in ({timm_resnet.Bottleneck}, {timm_resnet.BasicBlock}):
        for kind in kinds - {timm_resnet.Bottleneck, timm_resnet.BasicBlock}:
            feature = OTHER_BLOCKS.get(kind.__name__, "residual blocks of another kind")
            yield feature, kind.__name__
        if kinds == {timm_resnet.Bottleneck, timm_resnet.BasicBlock}:
            yield "basic and bottleneck blocks in one network", ", ".join(STAGES)
        return
    basic = kinds == {timm_resnet.BasicBlock}
    depths = BASIC_BLOCKS_OF_DEPTH if basic else BLOCKS_OF_DEPTH
    counts = tuple(len(stage) for stage in stages)
    if counts not in depths.values():
        *most, last = map(str, depths)
        text = f"{', '.join(most)} or {last}"
        yield f"numbers of blocks that are not those of depth {text}", str(counts)
    in_1x1 = _in_1x1(stages)
    for index, (stage_name, stage) in enumerate(zip(STAGES, stages, strict=True)):
        for number, block in enumerate(stage):
            stride = 2 if index > 0 and number == 0 else 1
            yield from _block_misfits(block, f"{stage_name}.{number}", stride, in_1x1)
    yield from _width_misfits(stages)
    yield from _norm_family_misfits(backbone)


def _stem_misfits(backbone: Any) -> Iterator[Misfit]:
    conv, pool = backbone.conv1, backbone.maxpool
    if isinstance(conv, nn.Sequential):
        yield "a deep stem (several convolutions)", "conv1"
    else:
        yield from _conv_misfits(conv, "conv1", kernel=7, stride=2)
        if getattr(conv, "in_channels", 3) != 3:
            yield f"in_chans {conv.in_channels} (Detectron2 reads color images, 3)", "conv1"
    yield from _norm_misfits(backbone.bn1, "bn1")
    yield from _activation_misfits(backbone.act1, "act1")
    if any(isinstance(module, nn.Conv2d) for module in pool.modules()):
        yield "a convolution in place of the stem's pooling (replace_stem_pool)", "maxpool"
    elif isinstance(pool, nn.AvgPool2d | nn.Sequential):
        yield "anti-aliasing", f"maxpool ({type(pool).__name__})"
    elif type(pool) is not nn.MaxPool2d or not _is_stem_pool(pool):
        yield "another pooling in the stem than Detectron2's 3x3 maximum of stride 2", "maxpool"


def _is_stem_pool(pool: nn.MaxPool2d) -> bool:
    size = tuple(_pair(value) for value in (pool.kernel_size, pool.stride, pool.padding))
    plain = _pair(pool.dilation) == (1, 1) and not pool.ceil_mode
    return size == ((3, 3), (2, 2), (1, 1)) and plain


def _block_misfits(block: Any, where: str, stride: int, in_1x1: bool) -> Iterator[Misfit]:
    smoothed = not isinstance(block.aa, nn.Identity | None)
    if smoothed:
        yield "anti-aliasing", f"{where}.aa ({type(block.aa).__name__})"
    groups = block.conv2.groups
    # Anti-aliasing also takes the stride; one feature is named once.
    stride_of_conv = 1 if smoothed else stride
    if _is_basic(block):
        yield from _conv_misfits(block.conv1, f"{where}.conv1", 3, stride_of_conv)
        yield from _conv_misfits(block.conv2, f"{where}.conv2", kernel=3, stride=1)
    else:
        strides = (stride_of_conv, 1) if in_1x1 else (1, stride_of_conv)
        yield from _conv_misfits(block.conv1, f"{where}.conv1", 1, strides[0])
        yield from _conv_misfits(block.conv2, f"{where}.conv2", 3, strides[1], groups)
        yield from _conv_misfits(block.conv3, f"{where}.conv3", kernel=1, stride=1)
    for number in (1, 2) if _is_basic(block) else (1, 2, 3):
        yield from _norm_misfits(getattr(block, f"bn{number}"), f"{where}.bn{number}")
        yield from _activation_misfits(getattr(block, f"act{number}"), f"{where}.act{number}")
    if block.se is not None:
        kind = type(block.se).__name__
        yield ATTENTION.get(kind, f"attention in the blocks ({kind})"), f"{where}.se"
    yield from _shortcut_misfits(block, where, stride)


def _shortcut_misfits(block: Any, where: str, stride: int) -> Iterator[Misfit]:
    # Detectron2 has a projection exactly where the number of channels changes.
    needed = block.conv1.in_channels != _last_conv(block).out_channels
    if block.downsample is None:
        if needed:
            yield "a shortcut without projection where the width changes", where
        return
    parts = list(block.downsample)
    if len(parts) == 3:
        yield "average pooling in the shortcuts (avg_down)", f"{where}.downsample"
    elif len(parts) != 2 or not needed:
        yield "another shortcut than one convolution and its norm", f"{where}.downsample"
    else:
        yield from _conv_misfits(parts[0], f"{where}.downsample.0", kernel=1, stride=stride)
        yield from _norm_misfits(parts[1], f"{where}.downsample.1")


def _conv_misfits(
    conv: Any, where: str, kernel: int, stride: int, groups: int = 1
) -> Iterator[Misfit]:
    if type(conv) is not nn.Conv2d:
        yield "convolutions of another kind", f"{where} ({type(conv).__name__})"
        return
    if conv.kernel_size != _pair(kernel):
        yield f"a {conv.kernel_size} kernel where Detectron2 has {_pair(kernel)}", where
    elif conv.stride != _pair(stride) or conv.dilation != (1, 1):
        yield DILATION, where
    elif conv.padding != _pair(kernel // 2) or conv.padding_mode != "zeros":
        yield "another padding of a convolution", where
    if conv.groups != groups:
        yield "a grouped convolution where Detectron2 has none", where
    if conv.bias is not None:
        yield "a convolution with bias", where


def _norm_misfits(norm: nn.Module, where: str) -> Iterator[Misfit]:
    family = NORM_FAMILY.get(type(norm))
    if family is None:
        yield "a norm that is neither BatchNorm nor GroupNorm", f"{where} ({type(norm).__name__})"
        return
    # One layer's settings decide both what it computes and which tensors it has.
    kind = "BatchNorm" if family == "BN" else "GroupNorm"
    if norm.eps != NORM_EPS:
        yield f"{kind} eps {norm.eps:g} (Detectron2's is {NORM_EPS:g})", where
    if not norm.affine or (family == "BN" and not norm.track_running_stats):
        yield f"{kind} without scale or without running statistics", where
    if family == "GN" and norm.num_groups != GROUP_NORM_GROUPS:
        yield f"GroupNorm of {norm.num_groups} groups (Detectron2's has 32)", where


def _activation_misfits(activation: nn.Module, where: str) -> Iterator[Misfit]:
    if type(activation) is not nn.ReLU:
        yield f"another activation than ReLU ({type(activation).__name__})", where


def _width_misfits(stages: list[Any]) -> Iterator[Misfit]:
    blocks = [block for stage in stages for block in stage]
    outs = [_last_conv(stage[0]).out_channels for stage in stages]
    inner = [stage[0].conv2.out_channels for stage in stages]
    for widths, what in ((outs, "channels"), (inner, "inner widths")):
        if any(after != 2 * before for before, after in pairwise(widths)):
            yield f"{what} that do not double from stage to stage", str(tuple(widths))
    if any(block.conv1.out_channels != block.conv2.out_channels for block in blocks):
        yield "a narrower first convolution in the blocks (block_reduce_first)", "layer1"
    if len({block.conv2.groups for block in blocks}) > 1:
        yield "numbers of groups that differ between blocks", "layer1 to layer4"
    for stage_name, stage in zip(STAGES, stages, strict=True):
        widths_in = {(block.conv2.out_channels, _last_conv(block).out_channels) for block in stage}
        if len(widths_in) > 1:
            yield "widths that differ within a stage", stage_name
    if _is_basic(blocks[0]) and outs[0] != BASIC_WIDTH:
        yield f"basic blocks of another width than Detectron2's {BASIC_WIDTH}", STAGES[0]


def _norm_family_misfits(backbone: nn.Module) -> Iterator[Misfit]:
    kinds = {
        NORM_FAMILY[type(module)] for module in backbone.modules() if type(module) in NORM_FAMILY
    }
    if len(kinds) > 1:
        yield "BatchNorm and GroupNorm in one network", "bn1 to layer4"


def _pair(value: Any) -> tuple[int, int]:
    return value if isinstance(value, tuple) else (value, value)
