"""What the tests of the converter share: a narrow ResNet, converted, and its config."""

from __future__ import annotations

import pytest
from detectron2.config import CfgNode

from detection.config import load_detection_config
from detection.convert.converter import Converted, convert
from tests.helpers.networks.backbones import NARROW, backbone_file


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Converted:
    folder = tmp_path_factory.mktemp("converted")
    return convert(backbone_file(folder, "resnet50", NARROW), folder / "narrow")


@pytest.fixture
def cfg(converted) -> CfgNode:
    cfg = load_detection_config(converted.folder / "config.yaml")
    cfg.MODEL.DEVICE = "cpu"
    return cfg
