"""The embedding network: a timm backbone, a projection head, unit length; and its momentum twin."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import timm
import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.distributed import average_
from kscl.errors import KsclError


class Encoder(nn.Module):
    """Images (B, 3, H, W) to unit embeddings (B, D)."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, images: Tensor) -> Tensor:
        embedding = self.head(self.backbone(images))  # (B, D)
        if embedding.dtype in (torch.float16, torch.bfloat16):
            embedding = embedding.float()  # a half precision vector is unit to 3 digits only
        return F.normalize(embedding, dim=1)


def build_encoder(
    name: str = "resnet50",
    kwargs: Mapping[str, Any] | None = None,
    *,
    head: str = "mlp",
    hidden_dim: int = 0,
    dim: int = 128,
    input_size: int = 224,
) -> Encoder:
    """A timm backbone by name, and MoCo's head; `hidden_dim` 0 is the feature dimension.

    `mlp_bn` has BatchNorm between its two layers: no hidden unit is always on or always off, so the
    embeddings drift one way less, and with them the fresh keys away from a queue of older ones.
    """
    if dim < 1:
        raise KsclError(f"embeddings of dimension {dim} hold nothing; HEAD.DIM is 128 in the paper")
    backbone = build_backbone(name, kwargs)
    features = feature_dim(backbone, input_size)
    hidden = hidden_dim or features
    layers: list[nn.Module]
    if head == "mlp":
        layers = [nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim)]
    elif head == "mlp_bn":
        layers = [
            nn.Linear(features, hidden, bias=False),
            nn.BatchNorm1d(hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, dim),
        ]
    elif head == "linear":
        layers = [nn.Linear(features, dim)]
    else:
        raise KsclError(f"there is no head '{head}'; choose mlp, mlp_bn or linear")
    return Encoder(backbone, nn.Sequential(*layers))


def encoder_of(cfg: CfgNode) -> Encoder:
    """The encoder of a pretraining config."""
    return build_encoder(
        cfg.BACKBONE.NAME,
        dict(cfg.BACKBONE.KWARGS),
        head=cfg.HEAD.TYPE,
        hidden_dim=cfg.HEAD.HIDDEN_DIM,
        dim=cfg.HEAD.DIM,
        input_size=cfg.INPUT.SIZE,
    )


def build_backbone(name: str, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """A timm model without classifier; residual blocks start as MoCo's, unless asked otherwise."""
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in (kwargs or {}).items()}
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name}*")[:5]) or "see timm.list_models()"
        raise KsclError(f"timm has no model '{name}'; near it: {near}")
    # timm starts the last BatchNorm of each block at 0, MoCo at 1; not every model has the choice.
    for extra in ({"zero_init_last": False}, {}):
        try:
            return timm.create_model(name, num_classes=0, **{**extra, **given})
        except TypeError as error:
            if "zero_init_last" not in str(error) or "zero_init_last" in given or not extra:
                raise KsclError(f"timm cannot build '{name}' with {given}: {error}") from error
    raise AssertionError("unreachable")


@torch.no_grad()
def feature_dim(backbone: nn.Module, input_size: int) -> int:
    """Width of the pooled features, asked of the model itself: names for it differ in timm."""
    was_training = backbone.training
    try:
        features = backbone.eval()(torch.zeros(1, 3, input_size, input_size))
    except (AssertionError, RuntimeError) as error:
        raise KsclError(
            f"the backbone cannot take images of {input_size} x {input_size} ({error}): change "
            "INPUT.SIZE, or tell the backbone (BACKBONE.KWARGS, for instance img_size)"
        ) from error
    finally:
        backbone.train(was_training)
    if features.ndim != 2:
        raise KsclError(f"the backbone gives {tuple(features.shape)}, not one vector an image")
    return features.shape[1]


def momentum_twin(encoder: Encoder) -> Encoder:
    """A copy that no gradient reaches; `TwinUpdate` lets it follow."""
    return copy.deepcopy(encoder).requires_grad_(False)


class TwinUpdate:
    """θ_k ← m θ_k + (1 − m) θ_q. BatchNorm statistics follow too only where the twin makes none."""

    def __init__(self, twin: Encoder, encoder: Encoder, buffers: bool) -> None:
        self.twin, self.encoder, self.buffers = twin, encoder, buffers
        # Walking through all modules takes as long as the update itself: once is enough.
        self.ours = list[Tensor](twin.parameters())
        self.theirs = list[Tensor](encoder.parameters())

    @torch.no_grad()
    def __call__(self, momentum: float) -> None:
        torch._foreach_lerp_(self.ours, self.theirs, 1 - momentum)
        if self.buffers:
            statistics = [buffer.clone() for buffer in _statistics(self.encoder)]
            average_(statistics)  # each rank has seen other images; twins must stay the same
            torch._foreach_lerp_(_statistics(self.twin), statistics, 1 - momentum)


@torch.no_grad()
def calibrate_batch_norm(encoder: Encoder, views: Tensor) -> None:
    """Take BatchNorm statistics from views (B, K, 3, H, W), each its own batch, averaged.

    At mean 0 and variance 1, where statistics start, a deep network in eval mode tells nothing
    apart.
    """
    norms = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    with in_mode(encoder, training=True):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all forward passes
        for view in views.unbind(1):
            encoder(view)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    average_(_statistics(encoder))


@torch.no_grad()
def copy_statistics(source: Encoder, target: Encoder) -> None:
    for theirs, ours in zip(_statistics(source), _statistics(target), strict=True):
        ours.copy_(theirs)


@contextmanager
def in_mode(encoder: nn.Module, training: bool) -> Iterator[None]:
    before = encoder.training
    encoder.train(training)
    try:
        yield
    finally:
        encoder.train(before)


def backbone_state_dict(encoder: Encoder) -> dict[str, Tensor]:
    """The backbone alone, as timm names it, detached on the CPU: what is exported."""
    return {
        key: value.detach().cpu().clone().contiguous()
        for key, value in encoder.backbone.state_dict().items()
    }


def _statistics(encoder: Encoder) -> list[Tensor]:
    return [buffer for buffer in encoder.buffers() if buffer.is_floating_point()]
