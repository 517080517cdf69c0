"""Converted weights: what Detectron2 loads of them, and files that it would load wrongly."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_model
from torch import nn

from detection.convert.converter import convert
from detection.convert.weights import (
    check_rest_is_new,
    compare,
    load_weights,
    read_weights,
)
from kscl.errors import KsclError
from tests.helpers.networks.backbones import NARROW, backbone_file, lively_backbone, renamed

MARKS = {"matching_heuristics": True, "__author__": "someone"}


def holds(model: nn.Module, tensors: dict) -> int:
    """How many of the network's tensors a model has from a file, counted without our code."""
    state = model.state_dict()
    found = [state.get(f"backbone.{k}", state.get(f"roi_heads.{k}")) for k in tensors]
    pairs = zip(found, tensors.values(), strict=True)
    return sum(ours.shape == theirs.shape and torch.equal(ours, theirs) for ours, theirs in pairs)


def test_after_detectron2s_own_load_every_tensor_is_the_files(converted, cfg):
    model = build_model(cfg)
    assert load_weights(model, converted.weights) == 265
    tensors = read_weights(converted.weights)
    assert holds(model, tensors) == 265
    assert compare(model, tensors, converted.weights) == 265
    check_rest_is_new(model, "GeneralizedRCNN")
    model.roi_heads.res5[2].conv3.norm.running_var[5] += 1e-6
    with pytest.raises(KsclError, match=r"264 of the 265(?s:.)*res5.2.conv3.norm.running_var"):
        compare(model, tensors, converted.weights)


@pytest.mark.parametrize("norm", ["FrozenBN", "BN", "SyncBN"])
def test_every_flavour_of_batch_norm_holds_the_weights(norm, converted, cfg):
    cfg.MODEL.RESNETS.NORM = norm
    assert load_weights(build_model(cfg), converted.weights) == 265


def test_a_part_that_is_not_known_to_start_at_random_is_named(cfg):
    model = build_model(cfg)
    model.backbone.extra = nn.Linear(2, 2)
    with pytest.raises(KsclError, match=r"backbone.extra.weight"):
        check_rest_is_new(model, "GeneralizedRCNN")


def raw_timm(tensors, path):
    torch.save(lively_backbone("resnet50", NARROW).state_dict(), path)


def all_in_the_backbone(tensors, path):
    torch.save({"model": {f"backbone.{key}": v for key, v in tensors.items()}}, path)


def without_res5(tensors, path):
    kept = {key: value for key, value in tensors.items() if not key.startswith("res5")}
    torch.save({"model": kept, **MARKS}, path)


def of_full_width(tensors, path):
    wide = {key: torch.zeros(*(2 * size for size in v.shape)) for key, v in tensors.items()}
    torch.save({"model": wide, **MARKS}, path)


def of_basic_blocks(tensors, path):
    state = lively_backbone("resnet18", seed=1).state_dict()
    torch.save({"model": renamed(state), **MARKS}, path)


def with_one_tensor_too_few(tensors, path):
    torch.save({"model": dict(list(tensors.items())[:-1]), **MARKS}, path)


def with_a_classifier(tensors, path):
    torch.save({"model": tensors | {"stem.fc.weight": torch.zeros(2, 2)}, **MARKS}, path)


SILENT = [  # Detectron2 ends without an exception and holds `count` tensors of 265
    (raw_timm, "w.pth", 0, "not a converted file"),
    (all_in_the_backbone, "w.pth", 215, "not a converted file"),
    (without_res5, "w.pth", 215, "not in the file, so random: res5"),
    (of_full_width, "w.pth", 0, "with another shape or value"),
    (of_basic_blocks, "w.pth", 0, "not in the file, so random: res2"),
    (with_one_tensor_too_few, "w.pth", 264, "264 of the 265"),
    (with_a_classifier, "w.pth", 265, "stem.fc.weight"),
]


@pytest.mark.parametrize(("make", "name", "count", "reason"), SILENT)
def test_what_detectron2_loads_wrongly_in_silence_is_our_error(
    make, name, count, reason, converted, cfg, tmp_path
):
    tensors, path = read_weights(converted.weights), tmp_path / name
    make(tensors, path)
    model = build_model(cfg)
    DetectionCheckpointer(model).load(str(path))
    assert holds(model, tensors) == count
    with pytest.raises(KsclError, match=reason):
        load_weights(build_model(cfg), path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_files_that_are_no_converted_weights_are_told_apart_from_damaged_ones(converted, tmp_path):
    tensors = read_weights(converted.weights)
    arrays = {key: value.numpy() for key, value in tensors.items()}
    torch.save({"epoch": 1, "state_dict": tensors}, tmp_path / "moco.pth")
    torch.save({"model": {}, **MARKS}, tmp_path / "empty.pth")
    torch.save({"model": arrays, **MARKS}, tmp_path / "arrays.pth")
    (tmp_path / "pickle.pth").write_bytes(pickle.dumps({"model": arrays, **MARKS}))
    (tmp_path / "no_author.pkl").write_bytes(pickle.dumps({"model": arrays}))
    (tmp_path / "half.pth").write_bytes(converted.weights.read_bytes()[:1000])
    (tmp_path / "half.pkl").write_bytes(pickle.dumps({"model": arrays, **MARKS})[:1000])
    (tmp_path / "list.pkl").write_bytes(pickle.dumps([1]))
    for name, reason in (
        ("moco.pth", "not a converted file"),
        ("empty.pth", "not a converted file"),
        ("arrays.pth", "not plain tensors"),
        ("pickle.pth", "cannot be read|not plain tensors"),
        ("no_author.pkl", "not a converted file"),
        ("half.pth", "cannot be read|damaged"),
        ("half.pkl", "not a pickle of plain arrays"),
        ("list.pkl", "holds a list"),
        ("none.pth", "no such file"),
    ):
        with pytest.raises(KsclError, match=reason):
            read_weights(tmp_path / name)


def test_a_pickle_that_would_run_code_is_refused_unread(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "w.pkl").write_bytes(pickle.dumps({"model": {"a": Bomb()}, **MARKS}))
    with pytest.raises(KsclError, match="so it was not read"):
        read_weights(tmp_path / "w.pkl")
    assert not (tmp_path / "ran").exists()


def test_converted_pickles_are_loaded_as_arrays_and_never_by_detectron2(tmp_path, cfg, monkeypatch):
    source = backbone_file(tmp_path, "resnet50", NARROW)
    folder = tmp_path / "pickled"
    converted = convert(source, folder, file_format="pkl")
    monkeypatch.setattr(DetectionCheckpointer, "_load_file", None)
    assert load_weights(build_model(cfg), converted.weights) == 265
