"""Wrong conversions that names and shapes do not show are caught, and at the right stage."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from detection.config import load_detection_config, set_network
from detection.convert.certificate import read_certificate, verify_start, write_certificate
from detection.convert.converter import Converted, convert
from detection.convert.proof import (
    OWN_SIZE,
    STAGES,
    TOLERANCE,
    check_proof,
    stage_differences,
    usual_cause,
)
from detection.convert.routes import Route, resnet_keys
from detection.convert.weights import weights_bytes
from kscl.backbone_file import (
    Description,
    load_backbone,
    save_backbone,
)
from kscl.errors import KsclError
from kscl.runtime.files import sha256_of
from tests.helpers.networks.backbones import NARROW, lively_backbone, renamed
from tests.helpers.networks.small import NETWORKS

BGR_MEAN, BGR_STD = "[103.53, 116.28, 123.675]", "[57.375, 57.12, 58.395]"
VIT = "vit_tiny_patch16_224"
KWARGS = NETWORKS[VIT]
SCALE = "backbone.net.network.blocks.0.ls1.gamma"
PROTOCOL = "detection/shapes_tiny_fpn.yaml"


@pytest.fixture(scope="module")
def backbone() -> nn.Module:
    return lively_backbone("resnet50", NARROW)


@pytest.fixture(scope="module")
def weights(backbone, tmp_path_factory):
    return write(backbone, tmp_path_factory.mktemp("weights"))


def write(backbone, folder):
    path = folder / "weights.pth"
    path.write_bytes(weights_bytes(renamed(backbone.state_dict())))
    return path


def differences(backbone, weights, *overrides) -> dict[str, float]:
    """Of a Detectron2 model with these keys set wrongly."""
    cfg = load_detection_config("detection/voc0712_c4_24k_moco.yaml")
    set_network(cfg, resnet_keys(lively_backbone("resnet50", NARROW))[0])
    cfg.merge_from_list(list(overrides))
    return stage_differences(backbone, Description("resnet50", NARROW), cfg, weights)


def first_failure(found: dict[str, float]) -> str:
    return next(stage for stage in STAGES if not found[stage] <= TOLERANCE)


def test_a_right_conversion_passes_at_every_stage(backbone, weights):
    found = differences(backbone, weights)
    assert max(found.values()) < 1e-5
    check_proof(found)


@pytest.mark.parametrize(
    ("overrides", "stage", "cause"),
    [
        (("MODEL.RESNETS.STRIDE_IN_1X1", "True"), "res3", "STRIDE_IN_1X1"),
        (("MODEL.RESNETS.RES5_DILATION", "2"), "res5", "dilation"),
        (("INPUT.FORMAT", "BGR"), "stem", "channel order"),
        (
            (
                *("INPUT.FORMAT", "BGR"),
                *("MODEL.PIXEL_MEAN", BGR_MEAN, "MODEL.PIXEL_STD", BGR_STD),
            ),
            "stem",
            "channel order",
        ),
        (("MODEL.PIXEL_MEAN", BGR_MEAN), "stem", "PIXEL_MEAN"),
        (("MODEL.PIXEL_STD", "[1.0, 1.0, 1.0]"), "stem", "PIXEL_STD"),
    ],
)
def test_a_wrong_config_fails_first_where_it_is_wrong(overrides, stage, cause, backbone, weights):
    found = differences(backbone, weights, *overrides)
    assert first_failure(found) == stage
    assert all(found[s] < 1e-5 for s in STAGES[: STAGES.index(stage)])
    with pytest.raises(KsclError, match=f"differs first at {stage}") as caught:
        check_proof(found)
    assert cause in str(caught.value)


@pytest.mark.parametrize("place", ["everywhere", "layer3"])
def test_another_eps_fails_and_is_taken_for_what_it_is(place, weights):
    changed = lively_backbone("resnet50", NARROW)
    part = changed if place == "everywhere" else changed.layer3
    for module in part.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eps = 1e-3
    found = differences(changed, weights)
    stage = {"everywhere": "stem", "layer3": "res4"}[place]
    assert first_failure(found) == stage
    assert "eps" in usual_cause(stage, found[stage])


@pytest.mark.parametrize(
    ("name", "kwargs", "stage"),
    [
        ("resnetblur50", {}, "stem"),
        ("resnet50", {"output_stride": 16}, "res5"),
        ("resnet50", {"act_layer": "leaky_relu"}, "stem"),
    ],
)
def test_networks_with_the_same_tensors_that_compute_something_else_fail(
    name, kwargs, stage, backbone, weights
):
    other = lively_backbone(name, {**NARROW, **kwargs})
    other.load_state_dict(backbone.state_dict())
    assert first_failure(differences(other, weights)) == stage


def test_branches_that_start_at_zero_do_not_hide_a_wrong_stride(tmp_path):
    hidden = lively_backbone("resnet50", NARROW)
    for module in hidden.modules():
        if hasattr(module, "zero_init_last"):
            module.zero_init_last()
    path = write(hidden, tmp_path)
    assert max(differences(hidden, path).values()) < 1e-5
    wrong = differences(hidden, path, "MODEL.RESNETS.STRIDE_IN_1X1", "True")
    assert first_failure(wrong) == "res3"
    assert not hidden.layer1[0].bn3.weight.any()  # the source is left as it was


def test_a_dead_network_proves_nothing(tmp_path):
    dead = lively_backbone("resnet50", NARROW)
    dead.bn1.weight.data.fill_(-1e-3)
    dead.bn1.bias.data.fill_(-1e3)
    with pytest.raises(KsclError, match="only zeros at stem"):
        differences(dead, write(dead, tmp_path))


def test_a_difference_that_is_no_number_is_a_failure():
    with pytest.raises(KsclError, match="differs first at res2"):
        check_proof({"stem": 0.0, "res2": float("nan")})


def test_the_proof_leaves_the_global_random_state_alone(backbone, weights):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    differences(backbone, weights)
    assert torch.rand(1) == expected


@pytest.fixture(scope="module")
def vit(tmp_path_factory) -> tuple[Path, Converted]:
    """A transformer whose attention and tokens matter, which those of the start hardly do."""
    folder = tmp_path_factory.mktemp("vit")
    backbone, source = lively_backbone(VIT, KWARGS), folder / "vit.safetensors"
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if parameter.ndim == 2 or name.endswith(("cls_token", "reg_token")):
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) / 3
                )
    save_backbone(source, backbone.state_dict(), Description(VIT, KWARGS, source={"epochs": 1}))
    return source, convert(source, folder / "out", protocol=PROTOCOL)


def vit_differences(vit: tuple[Path, Converted], change) -> dict[str, float]:
    """Of the delivered weights and a source network that was changed."""
    source, converted = vit
    backbone = load_backbone(source).backbone
    with torch.no_grad():
        change(backbone)
    cfg = load_detection_config(converted.folder / "config.yaml")
    return stage_differences(backbone, Description(VIT, KWARGS), cfg, converted.weights)


@pytest.mark.portable
def test_a_plain_transformer_is_proven_at_its_own_size_and_at_another(vit):
    _, converted = vit
    level = "backbone.net.last"
    assert set(converted.certificate.differences) == {level, f"{level}{OWN_SIZE}"}
    assert max(converted.certificate.differences.values()) < 1e-5
    cfg = load_detection_config(converted.folder / "config.yaml")
    assert verify_start(cfg) == read_certificate(converted.folder / "certificate.json")
    assert not (converted.folder / "config_plain.yaml").exists()  # its backbone is ours


@pytest.mark.parametrize(
    "change",
    [
        lambda network: network.pos_embed.add_(0.01),
        lambda network: network.reg_token.add_(torch.linspace(-1, 1, 32)),
        lambda network: network.cls_token.add_(torch.linspace(-1, 1, 32)),
        lambda network: network.blocks[0].ls1.gamma.fill_(1.0),
        lambda network: network.blocks[1].attn.qkv.weight.mul_(1.01),
    ],
)
def test_a_part_of_a_transformer_that_differs_is_seen(change, vit):
    assert min(vit_differences(vit, change).values()) > TOLERANCE


def test_what_the_detector_does_not_use_may_differ(vit):
    found = vit_differences(vit, lambda network: network.norm.weight.fill_(3.0))
    assert max(found.values()) < 1e-5


def test_another_input_is_seen(vit):
    source, converted = vit
    cfg = load_detection_config(converted.folder / "config.yaml")
    backbone = load_backbone(source).backbone
    half = (0.5, 0.5, 0.5)
    found = stage_differences(
        backbone, Description(VIT, KWARGS, half, half), cfg, converted.weights
    )
    assert min(found.values()) > TOLERANCE


def test_a_wrong_conversion_writes_nothing(vit, tmp_path, monkeypatch):
    source, _ = vit
    right = Route.carry

    def wrong(self, tensors):
        carried, left = right(self, tensors)
        return carried | {SCALE: carried[SCALE] * 2}, left

    monkeypatch.setattr(Route, "carry", wrong)
    with pytest.raises(KsclError, match=r"differs first at backbone\.net\.last") as caught:
        convert(source, tmp_path / "out", protocol=PROTOCOL)
    assert "Nothing was written" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("KSCL.TIMM.NAME", "vit_small_patch16_224"),
        ("KSCL.TIMM.KWARGS.reg_tokens", "3"),
        ("MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone"),
        ("MODEL.FPN.OUT_CHANNELS", "32"),
        ("MODEL.MASK_ON", "True"),
    ],
)
def test_another_network_or_detector_than_the_certified_one_is_refused(key, value, vit):
    _, converted = vit
    cfg = load_detection_config(converted.folder / "config.yaml", [key, value])
    with pytest.raises(KsclError, match=key.removesuffix(".reg_tokens")):
        verify_start(cfg)


def test_changed_weights_of_a_timm_network_are_told_from_their_source(vit, tmp_path):
    _, converted = vit
    folder = Path(shutil.copytree(converted.folder, tmp_path / "forged"))
    content = torch.load(folder / "weights.pth")
    content["model"][SCALE] += 1e-3
    torch.save(content, folder / "weights.pth")
    forged = dataclasses.replace(
        converted.certificate, weights_sha256=sha256_of(folder / "weights.pth")
    )
    write_certificate(forged, folder / "certificate.json")
    with pytest.raises(KsclError, match=SCALE):
        verify_start(load_detection_config(folder / "config.yaml"))
