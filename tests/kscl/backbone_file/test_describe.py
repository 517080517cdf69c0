"""Metadata of weights from anywhere: refused by file, field and fix, before anything is built."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch

from kscl.backbone_file import Description, load_backbone, save_backbone
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone

NARROW = {"channels": [8, 8, 8, 8]}
GOOD = {
    "version": 1,
    "arch": "resnet18",
    "kwargs": NARROW,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
    "size": 32,
    "source": {},
}
HUGE = 10**400


@pytest.fixture(scope="module")
def state():
    torch.manual_seed(0)
    return build_backbone("resnet18", NARROW).state_dict()


def write(folder, state, about: str):
    path = folder / "b.safetensors"
    path.write_bytes(safetensors.torch.save(state, {"kscl_backbone": about}))
    return path


def test_a_good_description_is_read(tmp_path, state):
    loaded = load_backbone(write(tmp_path, state, json.dumps(GOOD)))
    assert loaded.description == Description("resnet18", NARROW, (0.5,) * 3, (0.25,) * 3, 32, {})


@pytest.mark.parametrize("text", ["", "not JSON", "{", '{"version": 1,', "[" * 5000])
def test_metadata_that_is_not_json_is_refused(tmp_path, state, text):
    with pytest.raises(KsclError, match=r"b\.safetensors: .*'kscl_backbone' is not JSON") as caught:
        load_backbone(write(tmp_path, state, text))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("about", ["null", "3", "[]", '"resnet18"', "true"])
def test_metadata_that_is_not_an_object_is_refused(tmp_path, state, about):
    with pytest.raises(KsclError, match=r"b\.safetensors: the field 'kscl_backbone'"):
        load_backbone(write(tmp_path, state, about))


@pytest.mark.parametrize("field", [field for field in GOOD if field != "version"])
def test_a_missing_field_is_named(tmp_path, state, field):
    about = {key: value for key, value in GOOD.items() if key != field}
    with pytest.raises(KsclError, match=rf"b\.safetensors: the field '{field}' .* missing"):
        load_backbone(write(tmp_path, state, json.dumps(about)))


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None, [1], HUGE])
def test_another_version_is_named(tmp_path, state, version):
    with pytest.raises(KsclError, match=r"b\.safetensors: its version is .* reads version 1"):
        load_backbone(write(tmp_path, state, json.dumps(GOOD | {"version": version})))


WRONG = {
    "arch": [None, 3, ["resnet18"], "", "resnet999", "hf-hub:a/b", "local-dir:/tmp", "x" * 1000],
    "kwargs": [
        None,
        [8],
        {"pretrained": True},
        {"pretrained_cfg_overlay": {"url": "http://127.0.0.1:1/x"}},
        {"checkpoint_path": "/etc/hostname"},
        {"features_only": True},
        {"channels": [HUGE] * 4},
        {"channels": {"a": 1}},
        {"channels": [[[[8]]]]},
        {"layers": list(range(1000))},
    ],
    "mean": [None, 0.5, [], [0.5, 0.5], [0.5] * 4, ["0.5"] * 3, [float("nan")] * 3, [True] * 3],
    "std": [
        None,
        [0.25, 0.25],
        [0.25, 0.0, 0.25],
        [0.25, -1, 0.25],
        [float("nan")] * 3,
        [float("inf")] * 3,
        [HUGE] * 3,
        {"0": 1},
    ],
    "size": [None, 0, -1, 32.0, "32", True, 10**9, HUGE, [32]],
    "source": [None, 1, [], "kscl"],
    "extra": [None, 1],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_wrong_value_is_refused_by_file_and_field_in_one_line(tmp_path, state, field, value):
    path = write(tmp_path, state, json.dumps(GOOD | {field: value}))
    with pytest.raises(KsclError, match=rf"b\.safetensors: the field '{field}'") as caught:
        load_backbone(path)
    message = str(caught.value)
    assert "\n" not in message
    assert "kscl.save_backbone" in message  # the fix
    assert len(message) < 600


def test_the_description_of_a_checkpoint_is_checked_too(tmp_path, state):
    learner = {f"encoder.backbone.{key}": value for key, value in state.items()}
    for about in (GOOD | {"std": (0.25, 0.0, 0.25)}, ["resnet18"]):
        torch.save({"learner": learner, "description": about}, tmp_path / "c.pt")
        with pytest.raises(KsclError, match=r"c\.pt: the field '(std|kscl_backbone)'"):
            load_backbone(tmp_path / "c.pt")
    torch.save({"learner": learner, "description": GOOD}, tmp_path / "c.pt")
    assert load_backbone(tmp_path / "c.pt").description.size == 32


def test_metadata_values_that_are_not_strings_are_refused(tmp_path, state):
    path = write(tmp_path, state, json.dumps(GOOD))
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["kscl_backbone"] = GOOD
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(KsclError, match=r"b\.safetensors"):
        load_backbone(path)


def test_what_we_write_can_be_read(tmp_path, state):
    description = Description("resnet18", NARROW, source={"method": "kscl", "rho": 0.4})
    save_backbone(tmp_path / "b.safetensors", state, description)
    assert load_backbone(tmp_path / "b.safetensors").description == description
