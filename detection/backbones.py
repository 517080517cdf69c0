"""timm networks as Detectron2 backbones: by themselves, under an FPN, or as a plain transformer.

Importing this module registers the builders, and the head of the MoCo protocol; a config names a
builder in MODEL.BACKBONE.NAME and the network in KSCL.TIMM. As in Detectron2's own builders,
MODEL.RESNETS.OUT_FEATURES and NORM say which levels there are and the kind of BatchNorm, and
MODEL.BACKBONE.FREEZE_AT freezes the stem (1) and the stages after it (2 to 5).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from detectron2.config import CfgNode
from detectron2.layers import NaiveSyncBatchNorm, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, Backbone, SimpleFeaturePyramid
from detectron2.modeling.backbone.fpn import FPN, LastLevelMaxPool, LastLevelP6P7
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from timm.layers import BatchNormAct2d, convert_sync_batchnorm, freeze_batch_norm_2d
from torch import Tensor, nn

from kscl.config import plain
from kscl.errors import KsclError
from kscl.methods.encoder import PROBE_SIZE, build_backbone

STRIDES = {"res2": 4, "res3": 8, "res4": 16, "res5": 32}  # Detectron2's names of the levels
LAST = "last"  # the one level of a plain transformer
PLAIN_STRIDE = 16  # to which its patches are resampled; a simple pyramid makes 4 to 32 of it
PLAIN_NORM = "LN"  # of that pyramid (MODEL.FPN.NORM), as in ViTDet
ALL_FROZEN = 5  # of MODEL.BACKBONE.FREEZE_AT
PLAIN_HEAD, EXTRA_NORM_HEAD = "Res5ROIHeads", "Res5ROIHeadsExtraNorm"
EXTRA_NORM = "norm"  # its name inside res5: part of what checkpoints of this protocol look like
SYNCHRONIZED = ("SyncBN", "nnSyncBN")
NAIVE = {"naiveSyncBN": "", "naiveSyncBN_N": "N"}  # Detectron2's name: its mode
# Builders of Detectron2's that a protocol may name. For those with a pyramid: the same with a timm
# network, and with a plain transformer.
C4 = "build_resnet_backbone"
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


@dataclass(frozen=True)
class Level:
    """One output of a network."""

    name: str
    index: int  # in timm's feature_info
    stride: int  # as the detector sees it
    channels: int
    own_stride: int  # the network's


class TimmBackbone(Backbone):
    """The levels of a timm network; everything that they do not need is removed."""

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        levels: Sequence[str],
        norm: str = "BN",
        freeze_at: int = 0,
    ) -> None:
        super().__init__()
        if not name:
            raise KsclError(
                "MODEL.BACKBONE.NAME asks for a timm network, and KSCL.TIMM.NAME is empty. Start "
                "from a folder of kscl convert, or name one."
            )
        network = build_backbone(name, kwargs)
        self.levels = find_levels(network, name, levels)
        _keep_only(network, name, self.levels)
        _freeze(network, name, freeze_at)
        self.network = set_batch_norm(network, norm)
        self.is_frozen = freeze_at == ALL_FROZEN
        self._out_features = [level.name for level in self.levels]
        self._out_feature_strides = {level.name: level.stride for level in self.levels}
        self._out_feature_channels = {level.name: level.channels for level in self.levels}

    @property
    def size_divisibility(self) -> int:
        """The side of an image must be a multiple of this."""
        return max(STRIDES.values())

    def train(self, mode: bool = True) -> TimmBackbone:
        """Set the mode; a frozen network stays in eval mode, without drop path and dropout."""
        super().train(mode)
        if self.is_frozen:
            self.network.eval()
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the values of every level by its name, (B, C, H, W)."""
        values = level_features(self.network, images, self.levels)
        return dict(zip(self._out_features, values, strict=True))


class PlainPyramid(SimpleFeaturePyramid):
    """Detectron2's pyramid of a plain transformer, which misspells its demand on image sizes."""

    @property
    def size_divisibility(self) -> int:
        """The side of an image must be a multiple of this."""
        return self._size_divisibility


def _network(cfg: CfgNode, levels: Sequence[str]) -> TimmBackbone:
    name, kwargs = cfg.KSCL.TIMM.NAME, plain(cfg.KSCL.TIMM.KWARGS)
    if name and cfg.KSCL.DROP_PATH:
        kwargs["drop_path_rate"] = cfg.KSCL.DROP_PATH
        try:
            with torch.device("meta"):
                build_backbone(name, kwargs)
        except KsclError as error:
            raise KsclError(f"KSCL.DROP_PATH must be 0 for {name}: {error}") from error
    norm, freeze_at = cfg.MODEL.RESNETS.NORM, cfg.MODEL.BACKBONE.FREEZE_AT
    return TimmBackbone(name, kwargs, levels, norm, freeze_at)


@BACKBONE_REGISTRY.register()
def build_timm_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> TimmBackbone:
    """Return the levels MODEL.RESNETS.OUT_FEATURES of the network."""
    return _network(cfg, cfg.MODEL.RESNETS.OUT_FEATURES)


@BACKBONE_REGISTRY.register()
def build_timm_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Return the network under a feature pyramid, as build_resnet_fpn_backbone does."""
    return _with_fpn(cfg, build_timm_backbone(cfg, input_shape), LastLevelMaxPool())


@BACKBONE_REGISTRY.register()
def build_retinanet_timm_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """Return the network under RetinaNet's pyramid, as Detectron2 does for its ResNets."""
    bottom_up = build_timm_backbone(cfg, input_shape)
    channels = bottom_up.output_shape()["res5"].channels
    return _with_fpn(cfg, bottom_up, LastLevelP6P7(channels, cfg.MODEL.FPN.OUT_CHANNELS))


@BACKBONE_REGISTRY.register()
def build_timm_plain_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> PlainPyramid:
    """Return a plain transformer under the pyramid of ViTDet, levels p2 to p6."""
    return _with_plain_pyramid(cfg, (4.0, 2.0, 1.0, 0.5), LastLevelMaxPool())


@BACKBONE_REGISTRY.register()
def build_retinanet_timm_plain_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> PlainPyramid:
    """Return a plain transformer under the pyramid of ViTDet, levels p3 to p7."""
    width = cfg.MODEL.FPN.OUT_CHANNELS
    return _with_plain_pyramid(cfg, (2.0, 1.0, 0.5), LastLevelP6P7(width, width, "p5"))


def _with_fpn(cfg: CfgNode, bottom_up: Backbone, top_block: nn.Module) -> FPN:
    return FPN(
        bottom_up=bottom_up,
        in_features=cfg.MODEL.FPN.IN_FEATURES,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        top_block=top_block,
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )


def _with_plain_pyramid(
    cfg: CfgNode, scales: tuple[float, ...], top_block: nn.Module
) -> PlainPyramid:
    if cfg.MODEL.BACKBONE.FREEZE_AT not in (0, ALL_FROZEN):
        raise KsclError(
            f"MODEL.BACKBONE.FREEZE_AT must be 0 or {ALL_FROZEN} (all of it) for a plain "
            f"transformer, which has no stages, got {cfg.MODEL.BACKBONE.FREEZE_AT}."
        )
    return PlainPyramid(
        net=_network(cfg, [LAST]),
        in_feature=LAST,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        scale_factors=scales,
        top_block=top_block,
        norm=cfg.MODEL.FPN.NORM,
    )


@ROI_HEADS_REGISTRY.register()
class Res5ROIHeadsExtraNorm(Res5ROIHeads):
    """The C4 head of the MoCo protocol: res5 with one more norm at its end (MoCo, section 4.2).

    Backbones of different pretraining give the new predictors features of different magnitude; the
    norm calibrates them, so that one learning rate works for all contenders.
    """

    def __init__(self, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> None:
        super().__init__(cfg, input_shape)
        kind = cfg.MODEL.RESNETS.NORM
        norm = get_norm(kind, self.res5[-1].out_channels)
        if norm is None:
            raise KsclError(
                f"MODEL.RESNETS.NORM is '{kind}', and the head Res5ROIHeadsExtraNorm appends a "
                "norm. Name one (naiveSyncBN), or set MODEL.ROI_HEADS.NAME Res5ROIHeads."
            )
        self.res5.add_module(EXTRA_NORM, norm)


class NaiveSyncBatchNormAct2d(NaiveSyncBatchNorm):
    """Detectron2's synchronized BatchNorm with the dropout and activation of timm's layer.

    timm fuses a norm with its activation in one layer (RegNet, EfficientNet); Detectron2's own
    conversions replace such a layer by a norm alone, and the activation is gone.
    """

    def __init__(self, norm: BatchNormAct2d, mode: str) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, stats_mode=mode)
        self.drop, self.act = norm.drop, norm.act

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalized and activated values."""
        return self.act(self.drop(super().forward(images)))


def set_batch_norm(network: nn.Module, kind: str) -> nn.Module:
    """Return the network with its BatchNorms of this kind; other norms stay what they are."""
    has_batch_norm = any(isinstance(module, nn.BatchNorm2d) for module in network.modules())
    if kind == "BN" or not has_batch_norm:
        return network
    if kind == "FrozenBN":
        return freeze_batch_norm_2d(network)
    if kind in SYNCHRONIZED:
        return convert_sync_batchnorm(network)
    if kind in NAIVE:
        return _with_naive_norms(network, NAIVE[kind])
    raise KsclError(
        f"MODEL.RESNETS.NORM must be BN, FrozenBN or one of {', '.join((*SYNCHRONIZED, *NAIVE))} "
        f"for a network with BatchNorm, whose weights fit no other norm, got '{kind}'."
    )


def _with_naive_norms(module: nn.Module, mode: str) -> nn.Module:
    for name, child in module.named_children():
        setattr(module, name, _with_naive_norms(child, mode))
    if not isinstance(module, nn.BatchNorm2d):
        return module
    if not module.affine or not module.track_running_stats:
        raise KsclError(
            "A BatchNorm of the network has no scale or no running statistics, and Detectron2's "
            "naiveSyncBN needs both. Set MODEL.RESNETS.NORM BN."
        )
    if isinstance(module, BatchNormAct2d):
        new: NaiveSyncBatchNorm = NaiveSyncBatchNormAct2d(module, mode)
    else:
        new = NaiveSyncBatchNorm(module.num_features, module.eps, module.momentum, stats_mode=mode)
    new.load_state_dict(module.state_dict())
    return new


def _freeze(network: nn.Module, name: str, freeze_at: int) -> None:
    """Freeze the stem (1) and the stages up to stride 4 (2), 8 (3), 16 (4) and 32 (5)."""
    if freeze_at == 0:
        return
    if is_plain(network, name):
        network.requires_grad_(False)
        return
    levels = find_levels(network, name, list(STRIDES)[: max(1, freeze_at - 1)])
    frozen = _parameters_of(network, name, levels)[-1]
    if freeze_at == 1:  # all before the first stage
        stage = feature_info(network, name)[levels[0].index]["module"]
        frozen = {key for key in frozen if not key.startswith(f"{stage}.")}
    for key, parameter in network.named_parameters():
        if key in frozen:
            parameter.requires_grad_(False)
    for key, module in list(network.named_modules()):
        if isinstance(module, nn.BatchNorm2d) and f"{key}.weight" in frozen:
            parent, _, child = key.rpartition(".")
            setattr(network.get_submodule(parent), child, freeze_batch_norm_2d(module))


def feature_info(network: nn.Module, name: str) -> list[dict[str, Any]]:
    """Return timm's description of a network's levels; a network without one is an error."""
    info = getattr(network, "feature_info", None)
    found = list(getattr(info, "info", info) or [])
    if not found or not all(entry.get("reduction") for entry in found):
        raise KsclError(
            f"{name} has no feature_info, so timm does not say where its feature levels are, and "
            "no detector can be built on it. Choose a network with levels: "
            "timm.list_models(module=...) of resnet, regnet, convnext, efficientnet, "
            "swin_transformer or vision_transformer."
        )
    return found


def is_plain(network: nn.Module, name: str) -> bool:
    """Return whether all levels have one stride, as in a plain transformer."""
    return len({entry["reduction"] for entry in feature_info(network, name)}) == 1


def find_levels(network: nn.Module, name: str, wanted: Sequence[str]) -> list[Level]:
    """Return the levels of these names; a stride that the network does not have is an error."""
    info = feature_info(network, name)
    strides = [int(entry["reduction"]) for entry in info]
    one_stride = is_plain(network, name)
    levels = []
    for level in wanted:
        stride = STRIDES.get(level, PLAIN_STRIDE)
        own_stride = strides[0] if level == LAST else stride
        if own_stride not in strides or (level == LAST and not one_stride):
            raise KsclError(
                f"{name} has feature levels of strides {', '.join(map(str, strides))}, and the "
                f"detector needs {stride} ({level}). Choose a network with strides 4, 8, 16 "
                "and 32, or a plain transformer."
            )
        index = max(i for i, found in enumerate(strides) if found == own_stride)
        levels.append(Level(level, index, stride, int(info[index]["num_chs"]), own_stride))
    return levels


def level_features(network: Any, images: Tensor, levels: Sequence[Level]) -> list[Tensor]:
    """Return the values of the levels as (B, C, H, W), before any final norm."""
    if hasattr(network, "forward_intermediates"):
        found = network.forward_intermediates(
            images,
            indices=[level.index for level in levels],
            norm=False,
            stop_early=True,
            output_fmt="NCHW",
            intermediates_only=True,
        )
        return [
            resample(values, level, images.shape[2:])
            for values, level in zip(found, levels, strict=True)
        ]
    info = feature_info(network, type(network).__name__)
    modules = [info[level.index]["module"] for level in levels]
    with outputs_of(network, modules) as outputs:
        network.forward_features(images)
    return [outputs[name] for name in modules]


def resample(values: Tensor, level: Level, size: Sequence[int]) -> Tensor:
    """Return a map (B, C, h, w) at the detector's stride, for images of this size.

    Both strides count from the same corner: a network pads images to whole patches on the right and
    below.
    """
    if level.own_stride == level.stride:
        return values
    values = F.interpolate(values, scale_factor=level.own_stride / level.stride, mode="bilinear")
    return values[..., : size[0] // level.stride, : size[1] // level.stride]


@contextmanager
def outputs_of(network: nn.Module, modules: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """Collect what modules put out, by their names."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str, _module: nn.Module, _input: Any, output: Tensor) -> None:
        outputs[name] = output.clone()  # the next layer may work in place

    handles = [
        network.get_submodule(name).register_forward_hook(functools.partial(keep, name))
        for name in modules
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _keep_only(network: Any, name: str, levels: Sequence[Level]) -> None:
    """Remove the layers that no level needs: parameters without gradient end a parallel run."""
    if hasattr(network, "prune_intermediate_layers"):
        indices = [level.index for level in levels]
        network.prune_intermediate_layers(indices, prune_norm=True, prune_head=True)
    used = set().union(*_parameters_of(network, name, levels))
    _remove_unused(network, used)
    for key, parameter in network.named_parameters():
        if key not in used:  # of a module that has used ones too
            parameter.requires_grad_(False)
    _check_shapes(network, name, levels)


def _remove_unused(module: nn.Module, used: set[str], prefix: str = "") -> None:
    for name, child in module.named_children():
        parameters = [f"{prefix}{name}.{key}" for key, _ in child.named_parameters()]
        if parameters and not used.intersection(parameters):
            setattr(module, name, nn.Identity())
        elif parameters:
            _remove_unused(child, used, f"{prefix}{name}.")


@torch.enable_grad()
def _parameters_of(network: nn.Module, name: str, levels: Sequence[Level]) -> list[set[str]]:
    """Return, for every level, the names of the parameters that its values depend on."""
    ghost = copy.deepcopy(network).to("meta").eval().requires_grad_(True)
    names, parameters = zip(*ghost.named_parameters(), strict=True)
    found = []
    for values in _probe(ghost, name, levels):
        gradients = torch.autograd.grad(
            values.sum(), parameters, allow_unused=True, retain_graph=True
        )
        found.append(
            {key for key, value in zip(names, gradients, strict=True) if value is not None}
        )
    return found


@torch.no_grad()
def _check_shapes(network: nn.Module, name: str, levels: Sequence[Level]) -> None:
    """Raise an error unless the levels have the channels and strides that timm promises."""
    ghost = copy.deepcopy(network).to("meta").eval()
    for level, values in zip(levels, _probe(ghost, name, levels), strict=True):
        expected = (1, level.channels, *(side // level.stride for side in PROBE_SIZE))
        if tuple(values.shape) != expected:
            raise KsclError(
                f"{name} gives {tuple(values.shape)} at {level.name} where its feature_info "
                f"promises {expected}, so no detector is built on it. Choose another network."
            )


def _probe(ghost: nn.Module, name: str, levels: Sequence[Level]) -> list[Tensor]:
    images = torch.zeros(1, 3, *PROBE_SIZE, device="meta")
    try:
        return level_features(ghost, images, levels)
    except Exception as error:  # whatever a model does with a size that does not suit it
        raise KsclError(
            f"{name} gives no feature levels for images of {PROBE_SIZE[0]} x {PROBE_SIZE[1]} "
            f"({type(error).__name__}: {error}). Choose another network."
        ) from error
