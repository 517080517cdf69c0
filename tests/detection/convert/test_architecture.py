"""What maps exactly to a Detectron2 ResNet is found out from the network itself, or refused."""

from __future__ import annotations

import functools

import pytest
import timm
import torch
from torch import nn

from detection.convert.architecture import examine
from detection.convert.weights import LAYERS, network_tensors, rename, to_detectron2, to_timm
from detection.errors import DetectionError
from kscl.methods.encoder import build_backbone

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
REFUSED = [
    ("resnet50d", {}, "deep stem"),
    ("resnet50c", {}, "deep stem"),
    ("resnet50d", {}, "avg_down"),
    ("resnet50", {"avg_down": True}, "avg_down"),
    ("seresnet50", {}, r"squeeze-and-excitation \(SE\)"),
    ("ecaresnet50d", {}, r"efficient channel attention \(ECA\)"),
    ("skresnet50", {}, r"selective kernels \(SK\)"),
    ("resnest50d", {}, r"split attention \(ResNeSt\)"),
    ("res2net50_26w_4s", {}, r"multi-scale blocks \(Res2Net\)"),
    ("resnetblur50", {}, "anti-aliasing: maxpool"),
    ("resnetaa50", {}, "anti-aliasing: maxpool"),
    ("resnet50", {"output_stride": 16}, "dilation"),
    ("resnet50", {"output_stride": 8}, "dilation"),
    ("resnet50", {"norm_layer": functools.partial(nn.BatchNorm2d, eps=1e-3)}, "eps 0.001"),
    ("resnet50", {"norm_layer": "groupnorm1"}, "neither BatchNorm nor GroupNorm"),
    ("resnet50", {"act_layer": "silu"}, r"activation than ReLU \(SiLU\)"),
    ("resnet50", {"act_layer": "leaky_relu"}, "activation than ReLU"),
    ("resnet50", {"in_chans": 1}, "in_chans 1"),
    ("resnet50", {"channels": (64, 128, 256, 256)}, "do not double"),
    ("resnet50", {"channels": (10, 20, 40, 80), "base_width": 100}, "inner widths that do not"),
    ("resnet50", {"replace_stem_pool": True}, "replace_stem_pool"),
    ("resnet50", {"block_reduce_first": 2}, "block_reduce_first"),
    ("resnet50", {"down_kernel_size": 3}, r"\(3, 3\) kernel where Detectron2 has \(1, 1\)"),
    ("resnet26", {}, r"not those of depth 50, 101 or 152: \(2, 2, 2, 2\)"),
    ("resnet200", {}, "not those of depth"),
    ("resnet10t", {}, r"not those of depth 18 or 34: \(1, 1, 1, 1\)"),
    ("resnet18", {"channels": (8, 16, 32, 64)}, "basic blocks of another width"),
    ("resnet34", {"output_stride": 16}, "dilation"),
    ("resnetv2_50", {}, "another family of networks: .*ResNetV2"),
    ("vit_tiny_patch16_224", {}, "another family of networks: .*VisionTransformer"),
]


def without_memory(name: str, kwargs: dict) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, num_classes=0, **kwargs)


@pytest.mark.parametrize(("name", "kwargs", "expected"), SUPPORTED)
def test_a_supported_network_gives_detectron2s_keys_and_a_total_name_map(name, kwargs, expected):
    backbone = without_memory(name, kwargs)
    architecture = examine(backbone, name)
    found = architecture.detectron2_keys()
    keys = ("DEPTH", "NUM_GROUPS", "WIDTH_PER_GROUP", "RES2_OUT_CHANNELS", "NORM")
    assert tuple(found[f"MODEL.RESNETS.{key}"] for key in keys) == expected
    assert found["MODEL.RESNETS.STRIDE_IN_1X1"] is False
    assert found["MODEL.RESNETS.STEM_OUT_CHANNELS"] == 64  # also in narrow ones

    names = [key for key in backbone.state_dict() if not key.endswith("num_batches_tracked")]
    theirs = [to_detectron2(key) for key in names]
    assert len(set(theirs)) == len(names)
    assert [to_timm(key) for key in theirs] == names


@pytest.mark.parametrize(("name", "kwargs", "feature"), REFUSED)
def test_another_network_is_refused_by_naming_the_feature(name, kwargs, feature):
    backbone = without_memory(name, kwargs)
    with pytest.raises(DetectionError, match=feature) as caught:
        examine(backbone, name)
    assert name in str(caught.value)
    assert "These map exactly" in str(caught.value)


@pytest.mark.parametrize("name", ["resnetblur50", "resnetaa50"])
def test_keys_and_shapes_alone_would_have_let_anti_aliased_networks_through(name):
    plain, smoothed = (without_memory(each, {}).state_dict() for each in ("resnet50", name))
    assert {k: v.shape for k, v in smoothed.items()} == {k: v.shape for k, v in plain.items()}


def test_all_features_of_a_network_are_named_at_once():
    with pytest.raises(DetectionError) as caught:
        examine(without_memory("ecaresnet50d", {}), "ecaresnet50d")
    for feature in ("deep stem", "ECA", "avg_down"):
        assert feature in str(caught.value)


def test_what_someone_has_changed_in_a_network_by_hand_is_noticed():
    def changed(change) -> nn.Module:
        backbone = without_memory("resnet50", {})
        change(backbone)
        return backbone

    def small_image_stem(backbone):
        backbone.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)

    def no_pool(backbone):
        backbone.maxpool = nn.Identity()

    def one_eps(backbone):
        backbone.layer3[4].bn2.eps = 1e-3

    def reflect(backbone):
        backbone.layer2[1].conv2.padding_mode = "reflect"

    class OtherConv(nn.Conv2d):
        pass

    def standardized(backbone):
        backbone.layer1[0].conv1.__class__ = OtherConv

    for change, feature in (
        (small_image_stem, r"\(3, 3\) kernel where Detectron2 has \(7, 7\)"),
        (no_pool, "another pooling in the stem"),
        (one_eps, "eps 0.001.*layer3.4.bn2"),
        (reflect, "another padding.*layer2.1.conv2"),
        (standardized, "convolutions of another kind.*OtherConv"),
    ):
        with pytest.raises(DetectionError, match=feature):
            examine(changed(change), "resnet50")


@pytest.mark.slow
def test_every_resnet_that_timm_names_is_either_mapped_whole_or_refused():
    mapped = set()
    for name in timm.list_models(module="resnet"):
        with torch.device("meta"):
            backbone = timm.create_model(name, num_classes=0)
        try:
            examine(backbone, name)
        except DetectionError:
            continue
        mapped.add(name)
        for key in backbone.state_dict():
            assert key.endswith("num_batches_tracked") or to_timm(to_detectron2(key)) == key
    assert mapped == {
        *("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnet50_gn"),
        *("resnext50_32x4d", "resnext101_32x4d", "resnext101_64x4d"),
        *("resnext101_32x8d", "resnext101_32x16d", "resnext101_32x32d"),
        *("wide_resnet50_2", "wide_resnet101_2"),
    }


@pytest.mark.parametrize(
    "name",
    [
        *("fc.weight", "conv2.weight", "bn2.bias", "conv1.bias", "maxpool.0.weight"),
        *("layer5.0.conv1.weight", "layer1.0.conv4.weight", "layer1.0.se.conv.weight"),
        *(
            "layer1.conv1.weight",
            "layer2.0.downsample.2.weight",
            "layer1.0.bn1.num_batches_tracked",
        ),
    ],
)
def test_a_name_that_is_no_tensor_of_a_resnet_has_no_translation(name):
    with pytest.raises(DetectionError, match="is not a tensor"):
        to_detectron2(name)


@pytest.mark.parametrize(
    "name",
    [
        *("stem.fc.weight", "stem.conv2.weight", "stem.shortcut.weight", "res5.norm.weight"),
        *("res6.0.conv1.weight", "res2.0.conv1.bias", "backbone.stem.conv1.weight", "res2.conv1"),
    ],
)
def test_a_name_that_detectron2_does_not_have_has_no_translation_back(name):
    with pytest.raises(DetectionError, match="is not a tensor"):
        to_timm(name)


def test_counters_are_left_out_by_name_and_nothing_else_is():
    state = build_backbone("resnet50", {"channels": (8, 16, 32, 64)}).state_dict()
    carried, counters = rename(state)
    assert len(carried) == 265
    assert len(counters) == 53
    assert len(carried) + len(counters) == len(state)


def test_a_models_own_prefixes_are_taken_off_and_new_parts_are_not_taken_for_the_network():
    names = [
        "backbone.stem.conv1.weight",
        "backbone.bottom_up.res2.0.conv1.norm.bias",
        "roi_heads.res5.0.shortcut.weight",
        "roi_heads.res5.norm.weight",
        "proposal_generator.rpn_head.conv.weight",
    ]
    found = network_tensors({name: torch.zeros(1) for name in names})
    assert set(found) == {"stem.conv1.weight", "res2.0.conv1.norm.bias", "res5.0.shortcut.weight"}
    assert len(set(LAYERS.values())) == len(LAYERS)
