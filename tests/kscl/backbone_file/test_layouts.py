"""Every layout in the table, from a synthetic file of its kind."""

from __future__ import annotations

import pytest
import torch

from kscl.backbone_file import LAYOUTS, Layout, load_backbone, tensors_hash
from kscl.errors import KsclError
from kscl.method.encoder import build_backbone

NARROW = {"channels": [8, 16, 32, 64]}


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(0)
    return build_backbone("resnet18", NARROW).eval()


def file_of(layout: Layout, state: dict) -> dict:
    """A checkpoint of this kind: the backbone under its prefix, and all that it leaves behind."""
    tensors = {layout.prefix + key: value for key, value in state.items()}
    for prefix in layout.leave_behind:
        tensors[f"{prefix}0.weight"] = torch.zeros(2)
    content: dict = tensors
    for key in reversed(layout.container):
        content = {key: content, "epoch": 200, "arch": "resnet18", "optimizer": {"lr": 1.0}}
    return content


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_recognized_by_its_layout(backbone, tmp_path, name):
    layout, path = LAYOUTS[name], tmp_path / "x.pth"
    torch.save(file_of(layout, backbone.state_dict()), path)
    loaded = load_backbone(path, "resnet18", NARROW)
    assert loaded.layout == name
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    assert loaded.left_behind == tuple(f"{prefix}0.weight" for prefix in layout.leave_behind)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_tensor_that_the_layout_does_not_know_is_refused_by_name(backbone, tmp_path, name):
    layout, path = LAYOUTS[name], tmp_path / "x.pth"
    state = backbone.state_dict() | {"layer9.weight": torch.zeros(2)}
    torch.save(file_of(layout, state), path)
    with pytest.raises(KsclError, match=r"layer9\.weight"):
        load_backbone(path, "resnet18", NARROW)


def test_of_mocos_two_encoders_the_query_encoder_is_taken(backbone, tmp_path):
    path = tmp_path / "x.pth"
    both = {f"module.encoder_q.{key}": value for key, value in backbone.state_dict().items()}
    both |= {f"module.encoder_k.{key}": value + 1 for key, value in backbone.state_dict().items()}
    both |= {"module.queue": torch.zeros(2), "module.queue_ptr": torch.zeros(1)}
    torch.save({"state_dict": both}, path)
    loaded = load_backbone(path, "resnet18", NARROW)
    assert loaded.layout == "moco"
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    assert not any("layer1" in key and "encoder_k" not in key for key in loaded.left_behind)
