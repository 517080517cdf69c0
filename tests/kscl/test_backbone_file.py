"""Backbone files: ours and other people's, whole or not at all."""

from __future__ import annotations

import json
import pickle

import pytest
import timm
import torch

from kscl.backbone_file import Description, load_backbone, save_backbone, tensors_hash
from kscl.errors import KsclError
from kscl.method.encoder import build_backbone

NARROW = {"channels": [8, 16, 32, 64]}


@pytest.fixture
def backbone():
    torch.manual_seed(0)
    return build_backbone("resnet50", NARROW).eval()


def with_prefix(tensors: dict, prefix: str) -> dict:
    return {prefix + key: value for key, value in tensors.items()}


def test_our_file_says_what_it_is_and_comes_back_the_same(backbone, tmp_path):
    path = tmp_path / "backbone.safetensors"
    description = Description("resnet50", NARROW, size=96, source={"method": "kscl", "epochs": 2})
    save_backbone(path, backbone.state_dict(), description)
    loaded = load_backbone(path)
    assert loaded.description == description
    assert loaded.layout == "kscl backbone"
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    assert not loaded.backbone.training
    assert load_backbone(path, "resnet50", {"channels": (8, 16, 32, 64)}).description == description


def test_timm_takes_our_file_as_it_is(backbone, tmp_path):
    path = tmp_path / "backbone.safetensors"
    save_backbone(path, backbone.state_dict(), Description("resnet50", NARROW))
    arguments = {"num_classes": 0, "channels": (8, 16, 32, 64)}
    theirs = timm.create_model("resnet50", checkpoint_path=str(path), **arguments).eval()
    image = torch.randn(1, 3, 64, 64)
    assert torch.equal(theirs(image), backbone(image))


def foreign(layout: str, state: dict) -> dict:
    head = {"fc.weight": torch.zeros(3, 3), "fc.bias": torch.zeros(3)}
    if layout == "moco":
        both = with_prefix(state | head, "module.encoder_q.")
        both |= with_prefix(state | head, "module.encoder_k.")
        both |= {"module.queue": torch.zeros(2), "module.queue_ptr": torch.zeros(1)}
        return {"epoch": 200, "arch": "resnet50", "state_dict": both, "optimizer": {"lr": 1.0}}
    if layout == "simclr (state_dict, backbone)":
        tensors = with_prefix(state, "backbone.") | {"projector.0.weight": torch.zeros(2)}
        return {"state_dict": tensors}
    if layout == "kscl checkpoint":
        rest = {"encoder.head.0.weight": torch.zeros(2), "dictionary.slots": torch.zeros(2)}
        return {"learner": with_prefix(state, "encoder.backbone.") | rest}
    if layout == "plain":
        return state | head
    if layout == "distributed (state_dict)":
        return {"state_dict": with_prefix(state | head, "module.")}
    raise AssertionError(layout)


@pytest.mark.parametrize(
    "layout",
    [
        "moco",
        "simclr (state_dict, backbone)",
        "kscl checkpoint",
        "plain",
        "distributed (state_dict)",
    ],
)
def test_a_foreign_checkpoint_is_recognised_by_its_layout(backbone, tmp_path, layout):
    path = tmp_path / "x.pth"
    torch.save(foreign(layout, backbone.state_dict()), path)
    loaded = load_backbone(path, "resnet50", NARROW)
    assert loaded.layout == layout
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    assert not any("layer1" in key and "encoder_k" not in key for key in loaded.left_behind)


def test_old_files_without_batch_counters_load(backbone, tmp_path):
    path = tmp_path / "x.pth"
    state = backbone.state_dict()
    torch.save({k: v for k, v in state.items() if "num_batches" not in k}, path)
    assert load_backbone(path, "resnet50", NARROW).layout == "plain"


def test_an_unknown_prefix_is_an_error_that_lists_the_prefixes_found(backbone, tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"state_dict": with_prefix(backbone.state_dict(), "net.trunk.")}, path)
    with pytest.raises(KsclError, match=r"\[state_dict\] net.trunk"):
        load_backbone(path, "resnet50", NARROW)


def test_a_missing_tensor_is_named(backbone, tmp_path):
    path = tmp_path / "x.pth"
    state = backbone.state_dict()
    del state["layer3.0.conv2.weight"]
    torch.save(state, path)
    with pytest.raises(KsclError, match=r"layer3\.0\.conv2\.weight would be missing"):
        load_backbone(path, "resnet50", NARROW)


def test_a_tensor_that_has_no_place_is_named(tmp_path):
    path = tmp_path / "x.pth"
    torch.save(build_backbone("seresnet50", NARROW).state_dict(), path)
    with pytest.raises(KsclError, match=r"se\.fc1\.weight.* would have no place"):
        load_backbone(path, "resnet50", NARROW)


def test_a_network_of_another_width_is_refused(backbone, tmp_path):
    path = tmp_path / "x.pth"
    torch.save(backbone.state_dict(), path)
    with pytest.raises(KsclError, match="another size"):
        load_backbone(path, "resnet50")


def test_a_file_that_does_not_say_what_it_is_needs_a_name(backbone, tmp_path):
    path = tmp_path / "x.pth"
    torch.save(backbone.state_dict(), path)
    with pytest.raises(KsclError, match=r"BACKBONE\.NAME.*--arch"):
        load_backbone(path)


def test_a_description_that_contradicts_the_request_is_refused(backbone, tmp_path):
    path = tmp_path / "backbone.safetensors"
    save_backbone(path, backbone.state_dict(), Description("resnet50", NARROW))
    with pytest.raises(KsclError, match="holds resnet50"):
        load_backbone(path, "resnet101", NARROW)


class Exploit:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_a_pickle_with_code_is_refused_and_nothing_runs(tmp_path):
    canary = tmp_path / "ran"
    torch.save({"state_dict": Exploit(canary)}, tmp_path / "x.pth")
    (tmp_path / "y.pth").write_bytes(pickle.dumps(Exploit(canary)))
    for name in ("x.pth", "y.pth"):
        with pytest.raises(KsclError, match="was not read"):
            load_backbone(tmp_path / name, "resnet50")
    assert not canary.exists()


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint", bytes(100)])
def test_a_damaged_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(KsclError, match=name):
        load_backbone(tmp_path / name, "resnet50")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(KsclError, match="no such file"):
        load_backbone(tmp_path / "none.pth", "resnet50")


def test_random_weights_follow_from_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one = load_backbone("random", "resnet50", NARROW, seed=1)
    assert torch.equal(torch.rand(1), expected)
    again = load_backbone("random", "resnet50", NARROW, seed=1)
    other = load_backbone("random", "resnet50", NARROW, seed=2)
    assert one.tensors_sha256 == again.tensors_sha256 != other.tensors_sha256


def test_the_description_in_the_file_is_plain_json(backbone, tmp_path):
    path = tmp_path / "backbone.safetensors"
    save_backbone(path, backbone.state_dict(), Description("resnet50", NARROW))
    header = path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")]
    about = json.loads(json.loads(header)["__metadata__"]["kscl_backbone"])
    assert about["arch"] == "resnet50"
    assert about["version"] == 1
