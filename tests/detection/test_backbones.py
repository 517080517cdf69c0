"""timm networks as Detectron2 backbones: their levels, norms and frozen stages are timm's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.modeling import build_backbone
from timm.layers import FrozenBatchNormAct2d, SyncBatchNormAct
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

from detection.backbones import LAST, STRIDES, TimmBackbone
from detection.config import load_detection_config
from kscl.errors import KsclError
from kscl.methods.encoder import any_size_arguments
from tests.helpers.networks.backbones import lively_backbone
from tests.helpers.networks.small import NETWORKS


def backbone_of(name: str, **options: Any) -> TimmBackbone:
    levels = [LAST] if name.startswith("vit") else list(STRIDES)
    return TimmBackbone(name, any_size_arguments(name, NETWORKS[name]), levels, **options)


def lively(name: str, **options: Any) -> TimmBackbone:
    """The backbone with norms whose statistics and scales are not those of the start."""
    backbone = backbone_of(name, **options)
    state = lively_backbone(name, NETWORKS[name]).state_dict()
    needed = backbone.network.state_dict()
    backbone.network.load_state_dict({key: state[key] for key in needed}, strict=True)
    return backbone.eval()


def outputs_of_modules(network: Any, images: Tensor) -> list[Tensor]:
    """What the modules that timm names put out, taken from a whole network by hooks."""
    found: list[Tensor] = []
    info = list(getattr(network.feature_info, "info", network.feature_info))
    last = {entry["reduction"]: entry["module"] for entry in info}
    wanted = [last[stride] for stride in sorted(last) if stride >= 4]
    for module in wanted:
        network.get_submodule(module).register_forward_hook(
            lambda _module, _input, output: found.append(output.clone())
        )
    network.forward_features(images)
    return found


@pytest.mark.parametrize("name", NETWORKS)
def test_levels_are_what_timms_modules_put_out(name):
    source = lively_backbone(name, NETWORKS[name])
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        ours = lively(name)(images)
        theirs = outputs_of_modules(source, images)
    assert len(ours) == len(theirs)
    for (level, values), expected in zip(ours.items(), theirs, strict=True):
        if expected.ndim == 3:  # tokens, those of the class and of registers first
            expected = (
                expected[:, source.num_prefix_tokens :].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
            )
        elif name.startswith("swin"):
            expected = expected.permute(0, 3, 1, 2)
        assert values.shape[2:] == (64 // STRIDES.get(level, 16),) * 2
        torch.testing.assert_close(values, expected)


def test_patches_of_14_pixels_are_resampled_from_the_corner_to_a_stride_of_16():
    name, kwargs = "vit_small_patch14_reg4_dinov2", {"embed_dim": 24, "depth": 1, "num_heads": 2}
    arguments = any_size_arguments(name, kwargs)
    backbone = TimmBackbone(name, arguments, [LAST]).eval()
    source: Any = lively_backbone(name, arguments)
    backbone.network.load_state_dict(source.state_dict(), strict=False)
    images = torch.randn(2, 3, 96, 160)
    whole = F.pad(images, (0, 12 * 14 - 160, 0, 7 * 14 - 96))  # 7 x 12 patches
    source.norm = nn.Identity()
    with torch.no_grad():
        found = backbone(images)[LAST]
        tokens = source.forward_features(whole)[:, 5:]  # after the class and four registers
    grid = tokens.unflatten(1, (7, 12)).numpy()  # (B, 7, 12, C)

    def lines(count: int, patches: int) -> np.ndarray:  # (count, patches): how much of each patch
        centers = ((np.arange(count) + 0.5) * 16 / 14 - 0.5).clip(0, patches - 1)
        return (1 - np.abs(centers[:, None] - np.arange(patches))).clip(0)

    expected = np.einsum("yh,xw,bhwc->bcyx", lines(6, 7), lines(10, 12), grid)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_that_is_left_is_trained_and_gets_a_gradient(name):
    backbone = backbone_of(name)
    sum(values.mean() for values in backbone(torch.randn(2, 3, 64, 96)).values()).backward()
    left = dict(backbone.named_parameters())
    assert [key for key, parameter in left.items() if parameter.grad is None] == []
    assert not any("head" in key or key.startswith("network.norm.") for key in left)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("resnet18", "FrozenBN"),
        ("efficientnet_lite0", "FrozenBN"),
        ("regnetx_002", "SyncBN"),
        ("efficientnet_lite0", "naiveSyncBN"),
        ("resnet18", "naiveSyncBN_N"),
    ],
)
def test_no_kind_of_batch_norm_changes_what_a_network_computes(name, kind):
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = lively(name)(images)
        found = lively(name, norm=kind)
        for level, values in found(images).items():
            # A lost activation changes everything; frozen statistics round differently.
            assert (values - expected[level]).norm() < 1e-5 * expected[level].norm()
    kinds = {type(module) for module in found.modules() if hasattr(module, "running_mean")}
    wanted = {
        "FrozenBN": (FrozenBatchNorm2d, FrozenBatchNormAct2d),
        "SyncBN": (nn.SyncBatchNorm, SyncBatchNormAct),
    }.get(kind, (NaiveSyncBatchNorm,))
    assert kinds
    assert all(issubclass(kind, wanted) for kind in kinds)


@pytest.mark.portable
def test_a_synchronized_batch_norm_trains_as_any_other_on_one_process():
    images = torch.randn(4, 3, 64, 64)
    plain, synchronized = (
        lively("regnetx_002", norm=kind).train() for kind in ("BN", "naiveSyncBN")
    )
    torch.testing.assert_close(plain(images)["res5"], synchronized(images)["res5"])
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(value, synchronized.state_dict()[key])


def test_a_network_with_batch_norm_takes_no_other_norm():
    with pytest.raises(KsclError, match=r"MODEL.RESNETS.NORM must be .*'GN'"):
        backbone_of("resnet18", norm="GN")


def test_a_config_names_a_network_without_a_pyramid_and_its_levels():
    words = ["MODEL.BACKBONE.NAME", "build_timm_backbone", "MODEL.BACKBONE.FREEZE_AT", "0"]
    words += ["MODEL.RESNETS.OUT_FEATURES", "['res3', 'res5']", "MODEL.RESNETS.NORM", "BN"]
    backbone = build_backbone(load_detection_config(None, [*words, "KSCL.TIMM.NAME", "resnet18"]))
    assert isinstance(backbone, TimmBackbone)
    found = {name: values.shape for name, values in backbone(torch.zeros(1, 3, 64, 96)).items()}
    assert found == {"res3": (1, 128, 8, 12), "res5": (1, 512, 2, 3)}
    told = {name: (shape.channels, shape.stride) for name, shape in backbone.output_shape().items()}
    assert told == {"res3": (128, 8), "res5": (512, 32)}


FROZEN = {  # network: how the names of its stages begin
    "resnet18": ["conv1", "layer1.", "layer2.", "layer3.", "layer4."],
    "convnext_atto": ["stem.", "stages.0.", "stages.1.", "stages.2.", "stages.3."],
    "efficientnet_lite0": ["conv_stem", "blocks.1.", "blocks.2.", "blocks.4.", "blocks.6."],
}


@pytest.mark.parametrize(
    "name",
    ["resnet18", "convnext_atto", pytest.param("efficientnet_lite0", marks=pytest.mark.full)],
)
def test_stages_are_frozen_from_the_stem_on(name):
    for freeze_at in (0, 1, 3, 5):
        network = backbone_of(name, freeze_at=freeze_at).network
        parameters = dict(network.named_parameters())
        for stage, prefix in enumerate(FROZEN[name], 1):
            of_stage = [p.requires_grad for key, p in parameters.items() if key.startswith(prefix)]
            # A frozen norm has no parameters.
            assert set(of_stage) <= {stage > freeze_at}, (freeze_at, prefix)
            assert of_stage
        norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
        if freeze_at == 5:
            assert not norms
