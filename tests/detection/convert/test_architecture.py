"""Whether a network maps exactly to a Detectron2 ResNet is read off the network, layer by layer."""

from __future__ import annotations

import functools
import re

import pytest
import timm
import torch
from torch import nn

from detection.convert.routes import resnet_keys
from kscl.backbone_file.detectron2 import bare_name, detectron2_name, timm_name

SUPPORTED = [  # depth, groups, width per group, res2's channels, norm
    ("resnet50", {}, (50, 1, 64, 256, "BN")),
    ("resnet101", {}, (101, 1, 64, 256, "BN")),
    ("resnet152", {}, (152, 1, 64, 256, "BN")),
    ("resnext50_32x4d", {}, (50, 32, 4, 256, "BN")),
    ("resnext101_32x8d", {}, (101, 32, 8, 256, "BN")),
    ("resnext101_64x4d", {}, (101, 64, 4, 256, "BN")),
    ("wide_resnet50_2", {}, (50, 1, 128, 256, "BN")),
    ("wide_resnet101_2", {}, (101, 1, 128, 256, "BN")),
    ("resnet50_gn", {}, (50, 1, 64, 256, "GN")),
    ("resnet18", {}, (18, 1, 64, 64, "BN")),
    ("resnet34", {}, (34, 1, 64, 64, "BN")),
    ("resnet50", {"channels": (8, 16, 32, 64)}, (50, 1, 8, 32, "BN")),
    ("resnet50", {"channels": (16, 32, 64, 128)}, (50, 1, 16, 64, "BN")),
    ("resnet101", {"channels": (32, 64, 128, 256)}, (101, 1, 32, 128, "BN")),
    ("resnext50_32x4d", {"channels": (32, 64, 128, 256)}, (50, 32, 2, 128, "BN")),
    ("resnet50", {"base_width": 96}, (50, 1, 96, 256, "BN")),
    ("resnet50", {"cardinality": 2, "base_width": 32}, (50, 2, 32, 256, "BN")),
    ("resnet50", {"drop_path_rate": 0.1, "drop_block_rate": 0.1}, (50, 1, 64, 256, "BN")),
]
# Layers that differ. By keys and shapes alone, resnetblur50 and resnetaa50 would pass.
REFUSED = [
    ("resnet50c", {}, "conv1: a sequence of Conv2d"),
    ("resnet50", {"avg_down": True}, "layer2.0.downsample: a sequence of AvgPool2d, Conv2d"),
    ("seresnet50", {}, "layer1.0.se: SEModule"),
    ("ecaresnet50d", {}, "layer1.0.se: EcaModule"),
    ("skresnet50", {}, "layer1: a sequence of SelectiveKernelBottleneck"),
    ("resnest50d", {}, "layer1: a sequence of ResNestBottleneck"),
    ("res2net50_26w_4s", {}, "layer1: a sequence of Bottle2neck"),
    ("resnetblur50", {}, "maxpool: a sequence of MaxPool2d, BlurPool2d"),
    ("resnetaa50", {}, "layer2.0.aa: AvgPool2d"),
    ("resnet50", {"output_stride": 16}, "layer4.0.conv2: Conv2d"),
    ("resnet50", {"norm_layer": functools.partial(nn.BatchNorm2d, eps=1e-3)}, "bn1: .*eps=0.001"),
    ("resnet50", {"norm_layer": "groupnorm1"}, "bn1: GroupNorm1"),
    ("resnet50", {"act_layer": "silu"}, "act1: SiLU"),
    ("resnet50", {"in_chans": 1}, r"conv1: Conv2d\(1,"),
    ("resnet50", {"channels": (64, 128, 256, 256)}, "layer4.0.conv1"),
    (
        "resnet50",
        {"channels": (10, 20, 40, 80), "base_width": 100},
        r"layer2.0.conv1: Conv2d\(40, 31",
    ),
    ("resnet50", {"replace_stem_pool": True}, "maxpool: a sequence of Conv2d"),
    ("resnet50", {"block_reduce_first": 2}, r"layer1.0.conv1: Conv2d\(64, 32"),
    ("resnet50", {"down_kernel_size": 3}, r"layer2.0.downsample.0: .*\(3, 3\)"),
    ("resnet26", {}, r"\(2, 2, 2, 2\) blocks"),
    ("resnet10t", {}, r"\(1, 1, 1, 1\) blocks"),
    ("resnet18", {"channels": (8, 16, 32, 64)}, r"layer1.0.conv1: Conv2d\(64, 8"),
    ("resnetv2_50", {}, "ResNetV2"),
    ("vit_tiny_patch16_224", {}, "VisionTransformer"),
]


def without_memory(name: str, kwargs: dict) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, num_classes=0, **kwargs)


@pytest.mark.parametrize(("name", "kwargs", "expected"), SUPPORTED)
def test_a_supported_network_gives_detectron2s_keys_and_a_total_name_map(name, kwargs, expected):
    backbone = without_memory(name, kwargs)
    found, misfits = resnet_keys(backbone)
    assert misfits == ""
    keys = ("DEPTH", "NUM_GROUPS", "WIDTH_PER_GROUP", "RES2_OUT_CHANNELS", "NORM")
    assert tuple(found[f"MODEL.RESNETS.{key}"] for key in keys) == expected
    assert found["MODEL.RESNETS.STRIDE_IN_1X1"] is False
    assert found["MODEL.RESNETS.STEM_OUT_CHANNELS"] == 64  # also in narrow ones
    names = [key for key in backbone.state_dict() if not key.endswith("num_batches_tracked")]
    theirs = [detectron2_name(key) for key in names]
    assert len(set(theirs)) == len(names)
    assert [timm_name(key or "") for key in theirs] == names


@pytest.mark.parametrize(("name", "kwargs", "layer"), REFUSED)
def test_another_network_is_refused_by_naming_the_layer(name, kwargs, layer):
    _, misfits = resnet_keys(without_memory(name, kwargs))
    assert re.search(layer, misfits), misfits


def test_all_layers_of_a_network_that_differ_are_named_at_once():
    _, misfits = resnet_keys(without_memory("ecaresnet50d", {}))
    for layer in ("conv1:", "layer1.0.se:", "layer2.0.downsample:"):
        assert layer in misfits


class OtherConv(nn.Conv2d):
    pass


OtherConv.__name__ = "Conv2d"


@pytest.mark.parametrize(
    ("place", "change"),
    [
        ("conv1", lambda net: setattr(net, "conv1", nn.Conv2d(3, 64, 3, padding=1, bias=False))),
        ("maxpool", lambda net: setattr(net, "maxpool", nn.Identity())),
        ("layer3.4.bn2", lambda net: setattr(net.layer3[4].bn2, "eps", 1e-3)),
        ("layer2.1.conv2", lambda net: setattr(net.layer2[1].conv2, "padding_mode", "reflect")),
        ("layer1.0.conv1", lambda net: setattr(net.layer1[0].conv1, "__class__", OtherConv)),
    ],
)
def test_what_someone_has_changed_in_a_network_by_hand_is_noticed(place, change):
    backbone = without_memory("resnet50", {})
    change(backbone)
    assert f"- {place}: " in resnet_keys(backbone)[1]


@pytest.mark.slow
def test_every_resnet_that_timm_names_is_either_mapped_whole_or_refused():
    mapped = {
        name
        for name in timm.list_models(module="resnet")
        if not resnet_keys(without_memory(name, {}))[1]
    }
    assert mapped == {
        *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet50_gn"),
        *("resnext50_32x4d", "resnext101_32x4d", "resnext101_64x4d"),
        *("resnext101_32x8d", "resnext101_32x16d", "resnext101_32x32d"),
        *("wide_resnet50_2", "wide_resnet101_2"),
    }


def test_a_name_that_is_no_tensor_of_a_resnet_has_no_translation():
    for name in (
        *("fc.weight", "conv2.weight", "bn2.bias", "conv1.bias", "maxpool.0.weight"),
        *("layer5.0.conv1.weight", "layer1.0.conv4.weight", "layer1.0.se.conv.weight"),
        *("layer1.conv1.weight", "layer2.0.downsample.2.weight"),
        *("layer1.0.bn1.num_batches_tracked", "stem.conv1.weight"),
    ):
        assert detectron2_name(name) is None, name
    for name in (
        *("stem.fc.weight", "stem.conv2.weight", "stem.shortcut.weight", "res5.norm.weight"),
        *("res6.0.conv1.weight", "res2.0.conv1.bias", "res2.conv1", "head.res2.0.conv1.weight"),
    ):
        assert timm_name(name) is None, name


def test_a_models_own_prefixes_are_taken_off_and_new_parts_are_not_taken_for_the_network():
    for name, bare in (
        ("backbone.stem.conv1.weight", "stem.conv1.weight"),
        ("backbone.bottom_up.res2.0.conv1.norm.bias", "res2.0.conv1.norm.bias"),
        ("roi_heads.res5.0.shortcut.weight", "res5.0.shortcut.weight"),
        ("roi_heads.res5.norm.weight", None),
        ("proposal_generator.rpn_head.conv.weight", None),
    ):
        assert bare_name(name) == bare
