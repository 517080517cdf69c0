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


EXTRAS = {
    "a namespace": argparse.Namespace(lr=0.1, folder=pathlib.Path("a")),
    "a NumPy number": np.float64(70.5),
    "a NumPy array": np.arange(3),
    "a function": functools.partial(print, "x"),
    "a default dict": collections.defaultdict(list, {"a": [1]}),
    "a dict of a project": EasyDict(a=1),
    "an object with slots": Slotted(),
    "a class": argparse.ArgumentParser,
}


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before PyTorch 1.6"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_objects_beside_the_tensors_are_dropped_and_listed(backbone, tmp_path, extra, old):
    path = tmp_path / "x.pth"
    content = {"state_dict": backbone.state_dict(), "extra": EXTRAS[extra], "best": np.float32(1)}
    torch.save(content, path, _use_new_zipfile_serialization=not old)
    loaded = load(path)
    assert loaded.tensors_sha256 == tensors_hash(backbone)
    assert "numpy" in " ".join(loaded.said)


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


def test_a_pickle_with_code_beside_the_tensors_loads_and_nothing_runs(backbone, tmp_path):
    canary = tmp_path / "ran"
    exploits = [Exploit(canary), Builder({"x": Exploit(canary)}), {"deep": [Exploit(canary)]}]
    for old in (False, True):
        content = {"model": backbone.state_dict(), "args": exploits}
        torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=not old)
        assert load(tmp_path / "x.pth").tensors_sha256 == tensors_hash(backbone)
    assert not canary.exists()


def test_a_pickle_with_code_in_place_of_the_tensors_is_refused_and_nothing_runs(tmp_path):
    canary = tmp_path / "ran"
    torch.save({"state_dict": Exploit(canary)}, tmp_path / "x.pth")
    torch.save(Exploit(canary), tmp_path / "y.pth")
    (tmp_path / "z.pth").write_bytes(pickle.dumps(Exploit(canary)))
    command = b"\x80\x02}q\x00X\x01\x00\x00\x00ac" + b"os\nsystem\nX\x05\x00\x00\x00touch\x85Rs."
    (tmp_path / "w.pth").write_bytes(command)
    for name in ("x.pth", "y.pth", "z.pth", "w.pth"):
        with pytest.raises(KsclError, match=name):
            load(tmp_path / name)
    assert not canary.exists()


def test_our_own_checkpoints_are_read_strictly(tmp_path):
    torch.save({"args": argparse.Namespace(lr=0.1)}, tmp_path / "x.pth")
    with pytest.raises(KsclError, match=r"x\.pth"):
        read_plain(tmp_path / "x.pth")


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
    path = tmp_path / "x.pth"
    torch.save({"a": Exploit("x"), "b": argparse.Namespace(x=1)}, path)
    with pytest.raises(KsclError) as caught:
        read(path)
    message = str(caught.value)
    assert "\x1b" not in message
    assert "weights_only=False" not in message
    assert "trust" not in message
    assert "add_safe_globals" not in message


def test_a_name_with_escape_codes_in_a_pickle_is_not_printed_as_such(backbone, tmp_path):
    path = tmp_path / "x.pth"
    torch.save({"model": backbone.state_dict(), "args": argparse.Namespace(x=1)}, path)
    named = type("\x1b[31mred", (), {"__module__": "argparse"})
    argparse_name = named.__name__
    setattr(argparse, argparse_name, named)
    try:
        torch.save({"model": backbone.state_dict(), "args": named()}, path)
    finally:
        delattr(argparse, argparse_name)
    loaded = load(path)
    assert "argparse.red" in " ".join(loaded.said)
    assert "\x1b" not in " ".join(loaded.said)


def test_damaged_pickles_are_errors_that_name_the_file(backbone, tmp_path):
    path = tmp_path / "x.pth"
    content = {"model": backbone.state_dict(), "args": argparse.Namespace(x=1)}
    torch.save(content, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for end in (10, 100, 1000, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:end])
        with pytest.raises(KsclError, match=r"x\.pth"):
            load(path)
