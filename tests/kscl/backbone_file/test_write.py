"""Our backbone file: one byte stream per content, plain JSON inside, and timm reads it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest
import safetensors.torch
import timm
import torch

from kscl.backbone_file import Description, load_backbone, save_backbone, to_safetensors
from kscl.methods.encoder import build_backbone

NARROW = {"channels": [8, 16, 32, 64]}


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return build_backbone("resnet50", NARROW).eval()


def test_timm_takes_our_file_as_it_is(backbone, tmp_path):
    path = tmp_path / "backbone.safetensors"
    save_backbone(path, backbone.state_dict(), Description("resnet50", NARROW))
    arguments = {"num_classes": 0, "channels": (8, 16, 32, 64)}
    theirs = timm.create_model("resnet50", checkpoint_path=str(path), **arguments).eval()
    image = torch.randn(1, 3, 64, 64)
    assert torch.equal(theirs(image), backbone(image))


def test_the_description_in_the_file_is_plain_json(backbone, tmp_path):
    path = tmp_path / "backbone.safetensors"
    save_backbone(path, backbone.state_dict(), Description("resnet50", NARROW))
    header = path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    about = json.loads(json.loads(header)["__metadata__"]["kscl_backbone"])
    assert about["arch"] == "resnet50"
    assert about["version"] == 1


def test_the_same_weights_are_the_same_bytes(backbone, tmp_path):
    state = backbone.state_dict()
    turned = dict(reversed(state.items()))
    sources = ({"method": "kscl", "epochs": 2}, {"epochs": 2, "method": "kscl"})
    digests = set()
    for number in range(8):
        path = tmp_path / f"{number}.safetensors"
        description = Description("resnet50", NARROW, source=sources[number % 2])
        save_backbone(path, turned if number % 2 else state, description)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1
    assert load_backbone(path).description.source == sources[0]


def test_the_same_weights_are_the_same_bytes_in_another_process():
    program = (
        "import hashlib, torch; from kscl.backbone_file import to_safetensors;"
        "print(hashlib.sha256(to_safetensors({'b': torch.ones(3), 'a': torch.zeros(2)},"
        "{str(n): 'x' for n in range(9)})).hexdigest())"
    )
    tensors = {"a": torch.zeros(2), "b": torch.ones(3)}
    here = hashlib.sha256(to_safetensors(tensors, {str(n): "x" for n in range(9)})).hexdigest()
    there = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here


def test_tensors_of_every_type_come_back_the_same():
    tensors = {
        "half": torch.randn(3).half(),
        "single": torch.randn(2, 3),
        "counter": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }
    back = safetensors.torch.load(to_safetensors(tensors, {"format": "pt", "é": "ü"}))
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(back[key], value), key
        assert back[key].dtype == value.dtype
