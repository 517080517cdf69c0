"""The proof of a timm network inside a detector: small mistakes of every kind are caught."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from detection.config import load_detection_config
from detection.convert.certificate import read_certificate, write_certificate
from detection.convert.converter import Converted, convert
from detection.convert.proof import OWN_SIZE, TOLERANCE, stage_differences
from detection.convert.routes import Route
from detection.convert.verify import verify_start
from detection.errors import DetectionError
from kscl.backbone_file import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Description,
    load_backbone,
    save_backbone,
)
from kscl.runtime.files import sha256_of
from tests.helpers.networks.backbones import lively_backbone
from tests.helpers.networks.small import NETWORKS

VIT = "vit_tiny_patch16_224"
KWARGS = NETWORKS[VIT]
SCALE = "backbone.net.network.blocks.0.ls1.gamma"
PROTOCOL = "detection/shapes_tiny_fpn.yaml"


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


def differences(vit: tuple[Path, Converted], change) -> dict[str, float]:
    """Of the delivered weights and a source network that was changed."""
    source, converted = vit
    backbone = load_backbone(source).backbone
    with torch.no_grad():
        change(backbone)
    cfg = load_detection_config(converted.folder / "config.yaml")
    return stage_differences(backbone, KWARGS, IMAGENET_MEAN, IMAGENET_STD, cfg, converted.weights)


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
    assert min(differences(vit, change).values()) > TOLERANCE


def test_what_the_detector_does_not_use_may_differ(vit):
    found = differences(vit, lambda network: network.norm.weight.fill_(3.0))
    assert max(found.values()) < 1e-5


def test_another_input_is_seen(vit):
    source, converted = vit
    cfg = load_detection_config(converted.folder / "config.yaml")
    backbone = load_backbone(source).backbone
    half = (0.5, 0.5, 0.5)
    found = stage_differences(backbone, KWARGS, half, half, cfg, converted.weights)
    assert min(found.values()) > TOLERANCE


def test_the_input_of_a_timm_file_is_that_of_timms_data_config(vit, tmp_path):
    source, _ = vit
    torch.save(load_backbone(source).backbone.state_dict(), tmp_path / "vit.pth")
    options = {"arch": VIT, "kwargs": KWARGS, "protocol": PROTOCOL}
    converted = convert(tmp_path / "vit.pth", tmp_path / "out", **options)
    assert converted.cfg.MODEL.PIXEL_MEAN == [127.5] * 3
    assert converted.cfg.MODEL.PIXEL_STD == [127.5] * 3
    given = convert(tmp_path / "vit.pth", tmp_path / "given", mean=(0.4, 0.4, 0.4), **options)
    assert given.cfg.MODEL.PIXEL_MEAN == [102.0] * 3


def test_a_wrong_conversion_writes_nothing(vit, tmp_path, monkeypatch):
    source, _ = vit
    right = Route.carry

    def wrong(self, tensors):
        carried, left = right(self, tensors)
        return carried | {SCALE: carried[SCALE] * 2}, left

    monkeypatch.setattr(Route, "carry", wrong)
    with pytest.raises(DetectionError, match=r"differs first at backbone\.net\.last") as caught:
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
    with pytest.raises(DetectionError, match=key.removesuffix(".reg_tokens")):
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
    with pytest.raises(DetectionError, match=SCALE):
        verify_start(load_detection_config(folder / "config.yaml"))
