"""Our backbone file: one byte stream per content, read by timm, and checked field by field."""

from __future__ import annotations

import hashlib
import json

import pytest
import safetensors.torch
import timm
import torch

from kscl.backbone_file import Description, load_backbone, save_backbone, tensors_hash
from kscl.backbone_file.file import check_description, to_safetensors
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone

NARROW = {"channels": [8, 16, 32, 64]}
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
def backbone():
    torch.manual_seed(0)
    return build_backbone("resnet18", NARROW).eval()


@pytest.fixture(scope="module")
def saved(backbone, tmp_path_factory):
    """A file of ours; nobody may change it."""
    path = tmp_path_factory.mktemp("ours") / "backbone.safetensors"
    description = Description("resnet18", NARROW, size=96, source={"method": "kscl", "seed": 0})
    save_backbone(path, backbone.state_dict(), description)
    return path


def write(folder, state, about: str):
    path = folder / "b.safetensors"
    path.write_bytes(safetensors.torch.save(state, {"kscl_backbone": about}))
    return path


def test_our_file_says_what_it_is_and_comes_back_the_same(backbone, saved):
    loaded = load_backbone(saved)
    source = {"method": "kscl", "seed": 0}
    assert loaded.description == Description("resnet18", NARROW, size=96, source=source)
    assert loaded.layout == "kscl backbone"
    assert loaded.path == saved
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    assert not loaded.backbone.training
    same = load_backbone(saved, "resnet18", {"channels": (8, 16, 32, 64)})
    assert same.description == loaded.description
    with pytest.raises(KsclError, match="holds resnet18"):
        load_backbone(saved, "resnet34", NARROW)


def test_timm_takes_our_file_as_it_is(backbone, saved):
    arguments = {"num_classes": 0, "channels": (8, 16, 32, 64)}
    theirs = timm.create_model("resnet18", checkpoint_path=str(saved), **arguments).eval()
    image = torch.randn(1, 3, 64, 64)
    assert torch.equal(theirs(image), backbone(image))


@pytest.mark.parametrize(("part", "flipped"), [("tensors", 1), ("tensors", 41), ("description", 1)])
def test_a_file_of_ours_with_flipped_bits_is_refused(saved, tmp_path, part, flipped):
    content = bytearray(saved.read_bytes())
    if part == "description":
        content = content.replace(b'\\"seed\\": 0', b'\\"seed\\": 1')
    else:
        for number in range(flipped):
            content[-1 - 997 * number] ^= 4
    (tmp_path / "b.safetensors").write_bytes(content)
    with pytest.raises(KsclError, match=r"b\.safetensors is damaged"):
        load_backbone(tmp_path / "b.safetensors")


def test_the_same_weights_are_the_same_bytes(backbone, tmp_path):
    state = backbone.state_dict()
    turned = dict(reversed(state.items()))
    sources = ({"method": "kscl", "epochs": 2}, {"epochs": 2, "method": "kscl"})
    digests = set()
    for number in range(8):
        path = tmp_path / f"{number}.safetensors"
        description = Description("resnet18", NARROW, source=sources[number % 2])
        save_backbone(path, turned if number % 2 else state, description)
        digests.add(hashlib.sha256(path.read_bytes()).hexdigest())
    assert len(digests) == 1


def test_tensors_of_every_type_come_back_the_same():
    tensors = {
        "half": torch.randn(3).half(),
        "counter": torch.tensor(7),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.zeros(0, 4),
    }
    back = safetensors.torch.load(to_safetensors(tensors, {"format": "pt", "é": "ü"}))
    assert back.keys() == tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(back[key], value), key
        assert back[key].dtype == value.dtype


@pytest.mark.parametrize(
    "text", ["", "not JSON", '{"version": 1,', "[" * 5000, "null", "[]", '{"version": 2}']
)
def test_metadata_that_is_no_description_is_refused_in_one_line(tmp_path, backbone, text):
    with pytest.raises(KsclError, match=r"b\.safetensors: the field '(kscl_|ver)") as caught:
        load_backbone(write(tmp_path, backbone.state_dict(), text))
    assert "\n" not in str(caught.value)


def test_metadata_values_that_are_not_strings_are_refused(tmp_path, backbone):
    path = write(tmp_path, backbone.state_dict(), json.dumps(GOOD))
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["kscl_backbone"] = GOOD
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    with pytest.raises(KsclError, match=r"b\.safetensors"):
        load_backbone(path)


WRONG = {
    "version": [0, 2, "1", 1.0, True, None, [1], HUGE],
    "arch": [None, 3, ["resnet18"], "", "resnet999", "hf-hub:a/b", "local-dir:/tmp", "x" * 1000],
    "kwargs": [
        *(None, [8], {"pretrained": True}, {"checkpoint_path": "/etc/hostname"}),
        {"pretrained_cfg_overlay": {"url": "http://127.0.0.1:1/x"}},
        *({"channels": [HUGE] * 4}, {"channels": {"a": 1}}, {"channels": [[[[8]]]]}),
        {"layers": list(range(1000))},
    ],
    "mean": [None, 0.5, [], [0.5, 0.5], [0.5] * 4, ["0.5"] * 3, [float("nan")] * 3, [True] * 3],
    "std": [[0.25, 0.0, 0.25], [0.25, -1, 0.25], [float("inf")] * 3, [HUGE] * 3, {"0": 1}],
    "size": [None, 0, -1, 32.0, "32", True, 10**9, HUGE, [32]],
    "source": [None, 1, [], "kscl"],
    "extra": [None, 1],
}


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_is_refused_by_file_and_field_in_one_line(field):
    assert check_description(GOOD, "b").std == (0.25,) * 3
    missing = {key: value for key, value in GOOD.items() if key != field}
    wrong = [GOOD | {field: value} for value in WRONG[field]]
    for about in wrong if field == "extra" else [missing, *wrong]:
        with pytest.raises(KsclError, match=rf"^b: the field '{field}'") as caught:
            check_description(about, "b")
        message = str(caught.value)
        assert "\n" not in message
        assert "kscl.save_backbone" in message  # the fix
        assert len(message) < 600


def test_the_description_of_a_checkpoint_is_checked_too(tmp_path, backbone):
    learner = {f"encoder.backbone.{key}": value for key, value in backbone.state_dict().items()}
    for about in (GOOD | {"std": (0.25, 0.0, 0.25)}, ["resnet18"]):
        torch.save({"learner": learner, "description": about}, tmp_path / "c.pt")
        with pytest.raises(KsclError, match=r"c\.pt: the field '(std|kscl_backbone)'"):
            load_backbone(tmp_path / "c.pt")
    torch.save({"learner": learner, "description": GOOD}, tmp_path / "c.pt")
    loaded = load_backbone(tmp_path / "c.pt")
    assert (loaded.layout, loaded.description.size) == ("kscl checkpoint", 32)
