"""The embedding network: a timm backbone, a projection head, unit length; and its momentum twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
        raise KsclError(
            f"embeddings of dimension {dim} hold nothing; PROJECTOR.DIM is 128 in the paper"
        )
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


def backbone_state_dict(encoder: Encoder) -> dict[str, Tensor]:
    """The backbone alone, as timm names it, detached on the CPU: what is exported."""
    return {
        key: value.detach().cpu().clone().contiguous()
        for key, value in encoder.backbone.state_dict().items()
    }
