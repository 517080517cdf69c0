"""timm networks as Detectron2 backbones: by themselves, under an FPN, or as a plain transformer.

Importing this module registers the builders, and the head of the MoCo protocol; a config names a
builder in MODEL.BACKBONE.NAME and the network in KSCL.TIMM. As in Detectron2's own builders,
MODEL.RESNETS.OUT_FEATURES and NORM say which levels there are and of which kind BatchNorm is, and
MODEL.BACKBONE.FREEZE_AT freezes the stem (1) and the stages after it (2 to 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import NaiveSyncBatchNorm, ShapeSpec, get_norm
from detectron2.modeling import BACKBONE_REGISTRY, Backbone, SimpleFeaturePyramid
from detectron2.modeling.backbone.fpn import FPN, LastLevelMaxPool, LastLevelP6P7
from detectron2.modeling.roi_heads import ROI_HEADS_REGISTRY, Res5ROIHeads
from timm.layers import BatchNormAct2d, convert_sync_batchnorm, freeze_batch_norm_2d
from torch import Tensor, nn

from detection.backbones.levels import (
    LAST,
    STRIDES,
    feature_info,
    find_levels,
    keep_only,
    level_features,
    parameters_of,
)
from detection.errors import DetectionError
from kscl.config import plain
from kscl.methods.encoder import build_backbone

PLAIN_HEAD, EXTRA_NORM_HEAD = "Res5ROIHeads", "Res5ROIHeadsExtraNorm"
EXTRA_NORM = "norm"  # its name inside res5: part of what checkpoints of this protocol look like
SYNCHRONIZED = ("SyncBN", "nnSyncBN")
NAIVE = {"naiveSyncBN": "", "naiveSyncBN_N": "N"}  # Detectron2's name: its mode


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
            raise DetectionError(
                "MODEL.BACKBONE.NAME asks for a timm network, and KSCL.TIMM.NAME is empty. Start "
                "from a folder of tools/convert.py, or name one."
            )
        network = build_backbone(name, kwargs)
        self.levels = find_levels(network, name, levels)
        keep_only(network, name, self.levels)
        network = _freeze(network, name, freeze_at)
        self.network = set_batch_norm(network, norm)
        self._out_features = [level.name for level in self.levels]
        self._out_feature_strides = {level.name: level.stride for level in self.levels}
        self._out_feature_channels = {level.name: level.channels for level in self.levels}

    @property
    def size_divisibility(self) -> int:
        """The side of an image must be a multiple of this."""
        return max(STRIDES.values())

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Return the values of every level by its name, (B, C, H, W)."""
        values = level_features(self.network, images, self.levels)
        return dict(zip(self._out_features, values, strict=True))


class PlainPyramid(SimpleFeaturePyramid):
    """Detectron2's pyramid of a plain transformer, which misspells what it asks of image sizes."""

    @property
    def size_divisibility(self) -> int:
        """The side of an image must be a multiple of this."""
        return self._size_divisibility


def _freeze(network: nn.Module, name: str, freeze_at: int) -> nn.Module:
    """Freeze the stem (1) and the stages up to stride 4 (2), 8 (3), 16 (4) and 32 (5)."""
    if freeze_at == 0:
        return network
    levels = find_levels(network, name, list(STRIDES)[: max(1, freeze_at - 1)])
    frozen = parameters_of(network, name, levels)[-1]
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
    return network


def _network(cfg: CfgNode, levels: Sequence[str], freeze_at: int) -> TimmBackbone:
    about = cfg.KSCL.TIMM
    return TimmBackbone(about.NAME, plain(about.KWARGS), levels, cfg.MODEL.RESNETS.NORM, freeze_at)


@BACKBONE_REGISTRY.register()
def build_timm_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> TimmBackbone:
    """Return the levels MODEL.RESNETS.OUT_FEATURES of the network."""
    return _network(cfg, cfg.MODEL.RESNETS.OUT_FEATURES, cfg.MODEL.BACKBONE.FREEZE_AT)


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
    if cfg.MODEL.BACKBONE.FREEZE_AT:
        raise DetectionError(
            "MODEL.BACKBONE.FREEZE_AT freezes stages, and a plain transformer has none. Set it to "
            "0."
        )
    return PlainPyramid(
        net=_network(cfg, [LAST], freeze_at=0),
        in_feature=LAST,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        scale_factors=scales,
        top_block=top_block,
        norm="LN",  # of ViTDet
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
            raise DetectionError(
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
    if not any(isinstance(module, nn.BatchNorm2d) for module in network.modules()):
        return network
    if kind == "BN":
        return network
    if kind == "FrozenBN":
        return freeze_batch_norm_2d(network)
    if kind in SYNCHRONIZED:
        return convert_sync_batchnorm(network)
    if kind not in NAIVE:
        raise DetectionError(
            f"MODEL.RESNETS.NORM is '{kind}', and the network has BatchNorm, whose weights fit no "
            f"other norm. Use BN, FrozenBN, {', '.join((*SYNCHRONIZED, *NAIVE))}."
        )
    return _with_naive_norms(network, NAIVE[kind])


def _with_naive_norms(module: nn.Module, mode: str) -> nn.Module:
    if isinstance(module, nn.BatchNorm2d):
        return _naive_norm(module, mode)
    for name, child in module.named_children():
        setattr(module, name, _with_naive_norms(child, mode))
    return module


def _naive_norm(norm: nn.BatchNorm2d, mode: str) -> NaiveSyncBatchNorm:
    if not norm.affine or not norm.track_running_stats:
        raise DetectionError(
            "A BatchNorm of the network has no scale or no running statistics, and Detectron2's "
            "naiveSyncBN needs both. Set MODEL.RESNETS.NORM BN."
        )
    if isinstance(norm, BatchNormAct2d):
        new: NaiveSyncBatchNorm = NaiveSyncBatchNormAct2d(norm, mode)
    else:
        new = NaiveSyncBatchNorm(norm.num_features, norm.eps, norm.momentum, stats_mode=mode)
    new.load_state_dict(norm.state_dict())
    return new
