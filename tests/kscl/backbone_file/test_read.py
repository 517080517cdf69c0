"""Checkpoints with more than tensors: what is not data is dropped, and nothing in a file runs."""

from __future__ import annotations

import argparse
import collections
import functools
import pathlib
import pickle

import numpy as np
import pytest
import torch

from kscl.backbone_file import load_backbone, read_plain, tensors_hash
from kscl.backbone_file.read import read_tensors
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone

NARROW = {"channels": [8, 16, 32, 64]}


@pytest.fixture(scope="module")
def backbone():
    torch.manual_seed(2)
    return build_backbone("resnet18", NARROW)


def load(path):
    return load_backbone(path, "resnet18", NARROW)


class Settings(dict):
    """A dict of another project, as EasyDict and ConfigDict are."""


Settings.__name__ = Settings.__qualname__ = "EasyDict"
EasyDict = Settings


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 5


class Exploit:
    """An object that opens a file for writing when it is unpickled."""

    def __init__(self, path, function=open) -> None:
        self.path, self.function = path, function

    def __reduce__(self):
        return (self.function, (str(self.path), "w"))


class Builder:
    """An object whose state another class would act upon."""

    def __init__(self, state) -> None:
        self.state = state

    def __reduce__(self):
        return (argparse.Namespace, (), self.state)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before PyTorch 1.6"])
def test_objects_beside_the_tensors_are_dropped_and_listed_and_nothing_runs(tmp_path, old):
    canary = tmp_path / "ran"
    content = {
        "state_dict": {"a.weight": torch.arange(3.0)},
        "namespace": argparse.Namespace(lr=0.1, folder=pathlib.Path("a")),
        "numbers": [np.float64(70.5), np.arange(3)],
        "function": functools.partial(print, "x"),
        "default": collections.defaultdict(list, {"a": [1]}),
        "project": EasyDict(a=1),
        "slots": Slotted(),
        "class": argparse.ArgumentParser,
        "code": [Exploit(canary), Builder({"x": Exploit(canary)}), {"deep": [Exploit(canary)]}],
    }
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=not old)
    found, dropped = read_tensors(tmp_path / "x.pth")
    assert found.keys() == content.keys()
    assert torch.equal(found["state_dict"]["a.weight"], torch.arange(3.0))
    listed = " ".join(dropped)
    for name in ("argparse.Namespace", "numpy.", "functools.partial", "EasyDict", "io.open"):
        assert name in listed
    assert "torch" not in listed
    assert not canary.exists()


def test_a_backbone_beside_objects_is_loaded_and_they_are_named(backbone, tmp_path):
    named = type("\x1b[31mred", (), {"__module__": "argparse"})
    setattr(argparse, named.__name__, named)
    try:
        torch.save({"model": backbone.state_dict(), "args": named()}, tmp_path / "x.pth")
    finally:
        delattr(argparse, named.__name__)
    loaded = load(tmp_path / "x.pth")
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    assert "argparse.red" in " ".join(loaded.messages)
    assert "\x1b" not in " ".join(loaded.messages)


def test_a_pickle_with_code_in_place_of_the_tensors_is_refused_and_nothing_runs(tmp_path):
    canary = tmp_path / "ran"
    torch.save({"state_dict": Exploit(canary)}, tmp_path / "x.pth")
    torch.save(Exploit(canary), tmp_path / "y.pth")
    (tmp_path / "z.pth").write_bytes(pickle.dumps(Exploit(canary)))
    (tmp_path / "v.pkl").write_bytes(pickle.dumps({"model": {"a": Exploit(canary)}}))
    command = b"\x80\x02}q\x00X\x01\x00\x00\x00ac" + b"os\nsystem\nX\x05\x00\x00\x00touch\x85Rs."
    (tmp_path / "w.pth").write_bytes(command)
    for name in ("x.pth", "y.pth", "z.pth", "v.pkl", "w.pth"):
        with pytest.raises(KsclError, match=name):
            load(tmp_path / name)
    assert not canary.exists()


@pytest.mark.parametrize("whole", [False, True], ids=["in a dict", "alone"])
def test_a_pickled_module_is_refused_with_the_lines_that_save_its_state_dict(
    backbone, tmp_path, whole
):
    torch.save(backbone if whole else {"model": backbone}, tmp_path / "x.pth")
    with pytest.raises(KsclError, match=r"x\.pth") as caught:
        load(tmp_path / "x.pth")
    message = str(caught.value)
    assert "torch.save(model.state_dict()" in message
    assert "timm.models.resnet.ResNet" in message or whole


@pytest.mark.parametrize("read", [load, read_plain])
def test_messages_have_no_escape_codes_and_do_not_advise_unsafe_loading(tmp_path, read):
    torch.save({"a": Exploit("x"), "b": argparse.Namespace(x=1)}, tmp_path / "x.pth")
    with pytest.raises(KsclError, match=r"x\.pth") as caught:
        read(tmp_path / "x.pth")
    for text in ("\x1b", "weights_only=False", "trust", "add_safe_globals"):
        assert text not in str(caught.value)


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before PyTorch 1.6"])
def test_damaged_files_are_errors_that_name_the_file(backbone, tmp_path, old):
    path = tmp_path / "x.pth"
    content = {"model": backbone.state_dict(), "args": argparse.Namespace(x=1)}
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    whole = path.read_bytes()
    for end in (0, 10, 1000, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:end])
        with pytest.raises(KsclError, match=r"x\.pth"):
            load(path)


@pytest.mark.parametrize("name", ["x.pth", "x.safetensors", "x.pkl"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint", bytes(100)])
def test_a_file_that_is_something_else_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(KsclError, match=name):
        load_backbone(tmp_path / name, "resnet18")
