"""What the tests of the converter share: a narrow ResNet, converted, and its config."""

from __future__ import annotations

from pathlib import Path

import pytest
from detectron2.config import CfgNode

from detection.config import load_detection_config
from detection.convert.converter import Converted, convert
from tests.helpers.networks.backbones import NARROW, backbone_file


@pytest.fixture(scope="session")
def narrow_file(tmp_path_factory) -> Path:
    """A backbone file of ours; nobody may change it."""
    return backbone_file(tmp_path_factory.mktemp("backbone"), "resnet50", NARROW)


@pytest.fixture(scope="session")
def converted(narrow_file, tmp_path_factory) -> Converted:
    """The file, converted for the default protocol; nobody may change the folder."""
    return convert(narrow_file, tmp_path_factory.mktemp("converted") / "narrow")


@pytest.fixture
def cfg(converted) -> CfgNode:
    cfg = load_detection_config(converted.folder / "config.yaml")
    cfg.MODEL.DEVICE = "cpu"
    return cfg
