"""The embedding network: a timm backbone, a projection head, unit length."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import timm
import torch
import torch.nn.functional as F
from timm.models.resnet import Bottleneck, ResNet
from torch import Tensor, nn

from kscl.errors import KsclError
from kscl.methods.batch_norm import in_mode

# What may reach timm.create_model: names that describe an architecture and touch neither network
# nor files, as `pretrained`, `checkpoint_path` and others do. Values are plain numbers, words,
# true, false, null, or lists of them.
SIZES = (
    "img_size in_chans patch_size embed_dim embed_dims dim dims channels depth depths layers "
    "num_heads head_dim num_features window_size mlp_ratio mlp_ratios kernel_size kernel_sizes "
    "output_stride base_width cardinality growth_rate width_mult depth_mult"
)
PARTS = (
    "stem_type stem_width stem_size stem_chs stem_kernel_size replace_stem_pool block_reduce_first "
    "down_kernel_size avg_down pad_type conv_mlp conv_bias use_grn act_layer norm_layer aa_layer "
    "norm_eps qkv_bias qk_norm proj_bias class_token reg_tokens no_embed_class pos_embed pre_norm "
    "final_norm fc_norm global_pool dynamic_img_size dynamic_img_pad always_partition "
    "strict_img_size head_norm_first"
)
STARTING_AND_DROPPING = (
    "zero_init_last weight_init fix_init init_values ls_init_value layer_scale_init_value "
    "drop_rate drop_path_rate drop_block_rate proj_drop_rate attn_drop_rate pos_drop_rate "
    "patch_drop_rate"
)
# The one argument that is ours: bottleneck blocks stride in their first 1x1 convolution, as the
# original ResNets of MSRA do, and not in their 3x3.
STRIDE_IN_1X1 = "stride_in_1x1"
ARCHITECTURE_ARGUMENTS = frozenset(
    [*f"{SIZES} {PARTS} {STARTING_AND_DROPPING}".split(), STRIDE_IN_1X1]
)
# Arguments that make a network take images of any size, tried in this order.
ANY_SIZE: tuple[dict[str, Any], ...] = (
    {},
    {"dynamic_img_size": True},
    {"dynamic_img_size": True, "dynamic_img_pad": True},  # to whole patches
    {"strict_img_size": False},
)
PROBE_SIZE = (96, 160)  # neither is a usual size of pretraining, both are multiples of 32
LARGEST_ARGUMENT = 16_384  # a width or a depth beyond it is a mistake, or an attack on the memory
LONGEST_LIST = 64


class Encoder(nn.Module):
    """Images (B, 3, H, W) to embeddings (B, D), of unit length unless `unit` is False."""

    def __init__(self, backbone: nn.Module, head: nn.Module, unit: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.unit = unit

    def forward(self, images: Tensor) -> Tensor:
        """Return embeddings (B, D) in float32 or better."""
        embedding = self.head(self.backbone(images))  # (B, D)
        if embedding.dtype in (torch.float16, torch.bfloat16):
            embedding = embedding.float()  # a half precision vector is unit to 3 digits only
        return F.normalize(embedding, dim=1) if self.unit else embedding


def build_encoder(
    name: str = "resnet50",
    kwargs: Mapping[str, Any] | None = None,
    *,
    head: str = "mlp",
    hidden_dim: int = 0,
    dim: int = 128,
    input_size: int = 224,
) -> Encoder:
    """Return a timm backbone with a head; `hidden_dim` 0 is the feature dimension.

    `mlp_bn` has BatchNorm between its two layers: no hidden unit is always on or always off, so the
    embeddings drift one way less, and with them the fresh keys away from a queue of older ones.
    `mlp3_bn` is the one of VICReg and Barlow Twins, its expander.
    `simclr` is SimCLR's head with two layers: BatchNorm after both, the last one without a shift.
    """
    backbone = build_backbone(name, kwargs)
    features = feature_dim(backbone, input_size)
    hidden = hidden_dim or features
    layers: list[nn.Module]
    if head == "mlp":
        layers = [nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, dim)]
    elif head == "mlp_bn":
        layers = [*normalized_layer(features, hidden), nn.Linear(hidden, dim)]
    elif head == "mlp3_bn":
        layers = [*normalized_layer(features, hidden), *normalized_layer(hidden, hidden)]
        layers += [nn.Linear(hidden, dim, bias=False)]
    elif head == "simclr":
        layers = normalized_layer(features, hidden)
        last, norm = nn.Linear(hidden, dim, bias=False), nn.BatchNorm1d(dim)
        for layer in (layers[0], last):
            nn.init.normal_(layer.get_parameter("weight"), std=0.01)
        norm.bias.requires_grad_(False)  # stays 0
        layers += [last, norm]
    else:
        assert head == "linear"
        layers = [nn.Linear(features, dim)]
    return Encoder(backbone, nn.Sequential(*layers))


def normalized_layer(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a hidden layer with BatchNorm, which needs no bias before it."""
    return [
        nn.Linear(inputs, outputs, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(inplace=True),
    ]


def build_backbone(name: str, kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Return a timm model without classifier, with random weights.

    Residual blocks start as MoCo's, unless `zero_init_last` is given. Only arguments in
    `ARCHITECTURE_ARGUMENTS` are accepted, from a config as from the metadata of a file.
    """
    check_arguments(kwargs or {})
    given = {key: tuple(v) if isinstance(v, list) else v for key, v in (kwargs or {}).items()}
    in_1x1 = given.pop(STRIDE_IN_1X1, False)
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name}*")[:5]) or "see timm.list_models()"
        raise KsclError(f"BACKBONE.NAME: timm has no model '{name}'; near it: {near}.")
    # timm starts the last BatchNorm of each block at 0, MoCo at 1; not every model has the choice.
    for extra in ({"zero_init_last": False}, {}):
        try:
            backbone = timm.create_model(name, num_classes=0, **{**extra, **given})
            break
        except Exception as error:  # timm checks little: a wrong value fails anywhere inside
            unknown = isinstance(error, TypeError) and "zero_init_last" in str(error)
            if unknown and extra and "zero_init_last" not in given:
                continue
            raise KsclError(
                f"timm cannot build '{name}' with {given} ({type(error).__name__}: {error}): "
                "correct BACKBONE.KWARGS."
            ) from error
    if in_1x1:
        _stride_in_1x1(backbone, name)
    return backbone


def any_size_arguments(
    name: str, kwargs: Mapping[str, Any], size: tuple[int, int] = PROBE_SIZE
) -> dict[str, Any]:
    """Return the arguments with which a network also takes images of this size."""
    reason = ""
    for extra in ANY_SIZE:
        try:
            with torch.device("meta"), torch.no_grad():  # only shapes are computed
                network: Any = build_backbone(name, {**kwargs, **extra}).eval()
                network.forward_features(torch.zeros(1, 3, *size))
            return {**kwargs, **extra}
        except Exception as error:  # whatever a model does with a size that does not suit it
            reason = reason or f"{type(error).__name__}: {error}"
    raise KsclError(
        f"{name} {dict(kwargs)} cannot take images of {size[0]} x {size[1]} ({reason}). Choose "
        "another size (INPUT.SIZE of a probe) or another network."
    )


def _stride_in_1x1(backbone: nn.Module, name: str) -> None:
    """Move the stride of every bottleneck block from its 3x3 to its first 1x1 convolution."""
    blocks: list[Any] = [m for m in backbone.modules() if type(m) is Bottleneck]
    smoothed = any(not isinstance(block.aa, nn.Identity | None) for block in blocks)
    if type(backbone) is not ResNet or not blocks or smoothed:
        raise KsclError(
            f"BACKBONE.KWARGS: {STRIDE_IN_1X1} is for ResNets of plain bottleneck blocks, such as "
            f"resnet50, and {name} is none: remove it."
        )
    for block in blocks:
        block.conv1.stride, block.conv2.stride = block.conv2.stride, (1, 1)


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """Raise an error that names the first argument that does not describe an architecture."""
    for name, value in kwargs.items():
        if name not in ARCHITECTURE_ARGUMENTS:
            near = difflib.get_close_matches(str(name), sorted(ARCHITECTURE_ARGUMENTS), n=1)
            hint = f"did you mean '{near[0]}'?" if near else "remove it."
            raise KsclError(
                f"BACKBONE.KWARGS: '{name}' is not an argument that describes an architecture, and "
                f"no other reaches timm: {hint} Weights to start from are named by "
                "BACKBONE.WEIGHTS."
            )
        if name == STRIDE_IN_1X1 and not isinstance(value, bool):
            raise KsclError(f"BACKBONE.KWARGS: {name} must be true or false, got {value!r:.80}.")
        if not _is_plain(value, nested=2):
            raise KsclError(
                f"BACKBONE.KWARGS: '{name}' is {str(value)[:80]!r}: give a number up to "
                f"{LARGEST_ARGUMENT:,}, a word, true, false, null, or a list of up to "
                f"{LONGEST_LIST} of them."
            )


def _is_plain(value: object, nested: int) -> bool:
    if isinstance(value, list | tuple):
        return (
            nested > 0
            and len(value) <= LONGEST_LIST
            and all(_is_plain(v, nested - 1) for v in value)
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        return abs(value) <= LARGEST_ARGUMENT  # NaN is not
    return value is None or isinstance(value, bool | str)


@torch.no_grad()
def feature_dim(backbone: nn.Module, input_size: int, key: str = "INPUT.SIZE") -> int:
    """Return the width of the pooled features, measured: timm has several names for it."""
    try:
        with in_mode(backbone, training=False):
            features = backbone(torch.zeros(1, 3, input_size, input_size))
    except Exception as error:  # whatever a model does with images that do not suit it
        raise KsclError(
            f"The backbone cannot take images of {input_size} x {input_size} ({error}): change "
            f"{key}, or tell the backbone (BACKBONE.KWARGS, for instance img_size or "
            "dynamic_img_size)."
        ) from error
    if features.ndim != 2:
        raise KsclError(
            f"The backbone gives {tuple(features.shape)}, not one vector per image: choose another "
            "BACKBONE.NAME, or set global_pool in BACKBONE.KWARGS."
        )
    return features.shape[1]
