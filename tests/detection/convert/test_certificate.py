"""A detector starts from certified weights that it really holds, or not at all.

The files here are those that Detectron2 loads wrongly without an error.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.modeling import build_model
from torch import nn

from detection.config import load_detection_config
from detection.convert.certificate import read_certificate
from detection.convert.converter import Converted, convert
from detection.convert.name_map import rename
from detection.convert.verify import verify, verify_start
from detection.convert.weights import check_loaded, check_rest_is_new, load_weights, read_weights
from detection.errors import DetectionError
from kscl.errors import KsclError
from kscl.runtime.files import sha256_of
from tests.helpers.backbones import NARROW, backbone_file, lively_backbone

MARKS = {"matching_heuristics": True, "__author__": "someone"}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Converted:
    folder = tmp_path_factory.mktemp("converted")
    return convert(backbone_file(folder, "resnet50", NARROW), folder / "narrow")


@pytest.fixture
def cfg(converted) -> CfgNode:
    cfg = load_detection_config(converted.folder / "config.yaml")
    cfg.MODEL.DEVICE = "cpu"
    return cfg


def holds(model: nn.Module, tensors: dict) -> int:
    """How many of the network's tensors a model has from a file, counted without our code."""
    state = model.state_dict()
    found = [state.get(f"backbone.{k}", state.get(f"roi_heads.{k}")) for k in tensors]
    pairs = zip(found, tensors.values(), strict=True)
    return sum(ours.shape == theirs.shape and torch.equal(ours, theirs) for ours, theirs in pairs)


def test_after_detectron2s_own_load_every_tensor_is_the_files(converted, cfg):
    model = build_model(cfg)
    assert load_weights(model, converted.weights) == 265
    assert holds(model, read_weights(converted.weights)) == 265
    assert check_loaded(model, converted.weights) == 265
    check_rest_is_new(model)
    model.roi_heads.res5[2].conv3.norm.running_var[5] += 1e-6
    with pytest.raises(DetectionError, match=r"264 of the 265(?s:.)*res5.2.conv3.norm.running_var"):
        check_loaded(model, converted.weights)


@pytest.mark.parametrize("norm", ["FrozenBN", "BN", "SyncBN"])
def test_every_flavour_of_batch_norm_holds_the_weights(norm, converted, cfg):
    cfg.MODEL.RESNETS.NORM = norm
    assert load_weights(build_model(cfg), converted.weights) == 265


def test_a_part_that_is_not_known_to_start_at_random_is_named(cfg):
    model = build_model(cfg)
    model.backbone.extra = nn.Linear(2, 2)
    with pytest.raises(DetectionError, match=r"backbone.extra.weight"):
        check_rest_is_new(model)


def raw_timm(tensors, path):
    torch.save(lively_backbone("resnet50", NARROW).state_dict(), path)


def no_heuristics(tensors, path):
    arrays = {key: value.numpy() for key, value in tensors.items()}
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": "someone"}))


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
    torch.save({"model": rename(state)[0], **MARKS}, path)


def with_one_tensor_too_few(tensors, path):
    torch.save({"model": dict(list(tensors.items())[:-1]), **MARKS}, path)


def with_a_classifier(tensors, path):
    torch.save({"model": tensors | {"stem.fc.weight": torch.zeros(2, 2)}, **MARKS}, path)


SILENT = [  # Detectron2 ends without an exception and holds `count` tensors of 265
    (raw_timm, "w.pth", 0, "not a converted file"),
    (no_heuristics, "w.pkl", 0, "its matching_heuristics is not True"),
    (all_in_the_backbone, "w.pth", 215, "not a converted file"),
    (without_res5, "w.pth", 215, "not in the file, so left at random: res5"),
    (of_full_width, "w.pth", 0, "of another shape or value"),
    (of_basic_blocks, "w.pth", 0, "not in the file, so left at random: res2"),
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
    with pytest.raises(DetectionError, match=reason):
        check_loaded(model, path)
    with pytest.raises(DetectionError, match=reason):
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
    with pytest.raises(DetectionError, match="so it was not read"):
        read_weights(tmp_path / "w.pkl")
    assert not (tmp_path / "ran").exists()


def test_a_run_starts_from_the_converted_folder(converted, cfg, tmp_path):
    assert verify_start(cfg) == converted.certificate
    shutil.copytree(converted.folder, tmp_path / "moved")
    moved = load_detection_config(tmp_path / "moved/config.yaml")
    assert Path(moved.MODEL.WEIGHTS).parent == tmp_path / "moved"
    assert verify_start(moved) == converted.certificate


def test_a_certificate_elsewhere_is_named_in_the_config(converted, cfg, tmp_path):
    cfg.MODEL.WEIGHTS = str(shutil.copy(converted.weights, tmp_path))
    with pytest.raises(DetectionError, match="no such certificate"):
        verify_start(cfg)
    cfg.KSCL.CERTIFICATE = str(converted.folder / "certificate.json")
    assert verify_start(cfg) == converted.certificate


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("INPUT.FORMAT", "BGR"),
        ("MODEL.PIXEL_MEAN", [103.53, 116.28, 123.675]),
        ("MODEL.PIXEL_STD", [1.0, 1.0, 1.0]),
        ("MODEL.RESNETS.STRIDE_IN_1X1", True),
        ("MODEL.RESNETS.DEPTH", 101),
        ("MODEL.RESNETS.WIDTH_PER_GROUP", 64),
        ("MODEL.RESNETS.RES2_OUT_CHANNELS", 256),
        ("MODEL.RESNETS.STEM_OUT_CHANNELS", 32),
        ("MODEL.RESNETS.NUM_GROUPS", 32),
        ("MODEL.RESNETS.NORM", "GN"),
        ("MODEL.RESNETS.RES5_DILATION", 2),
        ("MODEL.RESNETS.DEFORM_ON_PER_STAGE", [False, False, True, True]),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused_by_key(key, value, cfg):
    cfg.merge_from_list([key, value])
    with pytest.raises(DetectionError, match=f"{key} is ") as caught:
        verify_start(cfg)
    assert "config.yaml" in str(caught.value)


def test_all_keys_that_do_not_fit_are_named_at_once(converted):
    cfg = load_detection_config("detection/voc0712_c4_24k_moco.yaml", ["INPUT.FORMAT", "BGR"])
    with pytest.raises(DetectionError) as caught:
        verify(converted.certificate, converted.weights, cfg)
    for key in ("WIDTH_PER_GROUP", "RES2_OUT_CHANNELS", "INPUT.FORMAT"):
        assert key in str(caught.value)


def test_freezing_and_the_flavour_of_batch_norm_are_the_protocols_affair(cfg):
    cfg.merge_from_list(["MODEL.RESNETS.NORM", "FrozenBN", "MODEL.BACKBONE.FREEZE_AT", 2])
    assert verify_start(cfg) is not None


def test_changed_weights_are_refused(converted, cfg, tmp_path):
    shutil.copytree(converted.folder, tmp_path / "copy")
    weights = tmp_path / "copy/weights.pth"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    cfg.MODEL.WEIGHTS = str(weights)
    with pytest.raises(DetectionError, match="not the file of this certificate"):
        verify_start(cfg)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 1}, "not a certificate of version 4"),
        ({"arch": None}, "missing or unknown fields: arch"),
        ({"note": "x"}, "missing or unknown fields: note"),
        ({"source": {"name": "x"}}, r"source has missing or unknown fields: .*file_sha256, layout"),
        ({"differences": {}}, "proves nothing"),
        ({"differences": {"stem": 0.5}}, "proves nothing"),
        ({"differences": [0.5]}, "differences is not a dict"),
        ({"detectron2_keys": {"MODEL.RESNETS.WIDTH": 3}}, "MODEL.RESNETS.WIDTH"),
        ({"detectron2_keys": {}}, "MODEL.RESNETS.STRIDE_IN_1X1"),
        ({"tensors": 264}, "264"),
        ({"arch": "resnet101"}, "resnet101"),
        ({"arch_kwargs": {"channels": [16, 32, 64, 128]}}, "16, 32, 64, 128"),
    ],
)
def test_a_certificate_that_is_incomplete_or_of_another_time_is_none(
    change, reason, converted, cfg, tmp_path
):
    about = converted.certificate.as_dict() | change
    about = {key: value for key, value in about.items() if value is not None}
    path = tmp_path / "certificate.json"
    path.write_text(json.dumps(about))
    cfg.KSCL.CERTIFICATE = str(path)
    with pytest.raises(DetectionError, match=reason):
        verify_start(cfg)
    path.write_text("{half")
    with pytest.raises(DetectionError, match="cannot be read as a certificate"):
        read_certificate(path)


def forged(converted: Converted, cfg: CfgNode, folder: Path, **changes) -> CfgNode:
    """A config that starts from a copy of the conversion with another certificate."""
    shutil.copytree(converted.folder, folder)
    about = converted.certificate.as_dict() | changes
    (folder / "certificate.json").write_text(json.dumps(about))
    cfg.MODEL.WEIGHTS = str(folder / "weights.pth")
    return cfg


@pytest.mark.parametrize("difference", [0.5, -0.5, True, None, "0", 1e-3])
def test_a_certificate_does_not_set_its_own_tolerance(difference, converted, cfg, tmp_path):
    differences = {**converted.certificate.differences, "res4": difference}
    changes = {"differences": differences, "tolerance": 1e9}
    with pytest.raises(DetectionError, match="proves nothing for res4"):
        verify_start(forged(converted, cfg, tmp_path / "forged", **changes))


def test_a_certificate_that_leaves_a_stage_out_proves_nothing(converted, cfg, tmp_path):
    differences = {**converted.certificate.differences}
    del differences["roi_heads.res5"]
    with pytest.raises(DetectionError, match=r"proves nothing for roi_heads.res5"):
        verify_start(forged(converted, cfg, tmp_path / "forged", differences=differences))


@pytest.mark.parametrize(
    ("key", "value"),
    [("MODEL.RESNETS.STRIDE_IN_1X1", True), ("MODEL.RESNETS.RES5_DILATION", 2)],
)
def test_the_keys_of_a_certificate_are_those_of_its_network(key, value, converted, cfg, tmp_path):
    keys = converted.certificate.detectron2_keys
    cfg.merge_from_list([key, value])  # so that config and certificate agree
    for changed in ({**keys, key: value}, {k: v for k, v in keys.items() if k != key}):
        folder = tmp_path / f"forged{len(changed)}"
        with pytest.raises(DetectionError, match=key):
            verify_start(forged(converted, cfg, folder, detectron2_keys=changed))


def test_changed_weights_with_a_changed_hash_are_told_from_their_source(converted, cfg, tmp_path):
    cfg = forged(converted, cfg, tmp_path / "forged")
    content = torch.load(cfg.MODEL.WEIGHTS)
    content["model"]["res3.0.conv1.weight"] += 1e-6
    torch.save(content, cfg.MODEL.WEIGHTS)
    path = tmp_path / "forged" / "certificate.json"
    about = json.loads(path.read_text())
    about["weights_sha256"] = sha256_of(Path(cfg.MODEL.WEIGHTS))
    path.write_text(json.dumps(about))
    with pytest.raises(DetectionError, match=r"res3.0.conv1.weight") as caught:
        verify_start(cfg)
    assert about["source"]["path"] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("file_sha256", "0" * 64),
        ("tensors_sha256", "0" * 64),
        ("run", {"method": "better", "epochs": 800, "seed": 0}),
    ],
)
def test_what_a_certificate_says_of_its_source_is_compared_with_it(
    name, value, converted, cfg, tmp_path
):
    source = {**converted.certificate.source, name: value}
    cfg = forged(converted, cfg, tmp_path / "forged", source=source)
    with pytest.raises(DetectionError, match=source["path"]):
        verify_start(cfg)


def test_the_input_of_a_certificate_is_compared_with_its_source(converted, cfg, tmp_path):
    mean = [103.53, 116.28, 123.675]
    keys = {**converted.certificate.detectron2_keys, "MODEL.PIXEL_MEAN": mean}
    cfg.MODEL.PIXEL_MEAN = mean
    with pytest.raises(DetectionError, match=r"MODEL.PIXEL_MEAN"):
        verify_start(forged(converted, cfg, tmp_path / "forged", detectron2_keys=keys))


def test_a_conversion_whose_source_is_gone_is_still_used(converted, cfg, tmp_path):
    source = {**converted.certificate.source, "path": str(tmp_path / "moved.safetensors")}
    assert verify_start(forged(converted, cfg, tmp_path / "forged", source=source)) is not None


ODD = (None, True, -1, 1.5, float("nan"), 10**400, "\0", "n" * 5000, [], [None], {"path": "/"})
NOT_COMPARED = ("weights_file", "name", "layout", "path", "made_with", "tolerance", "left_behind")


@pytest.mark.parametrize("inside", ["", "source", "differences", "left_behind"])
def test_any_value_of_a_certificate_may_be_wrong(inside, converted, cfg, tmp_path):
    cfg = forged(converted, cfg, tmp_path / "forged")
    path = tmp_path / "forged" / "certificate.json"
    about = json.loads(path.read_text())
    node = about[inside] if inside else about
    for key in list(node) if isinstance(node, dict) else [0]:
        right = node[key]
        for wrong in (odd for odd in ODD if odd != right or type(odd) is not type(right)):
            node[key] = wrong
            path.write_text(json.dumps(about))
            try:
                verify_start(cfg)
            except KsclError:
                continue
            assert {inside, key} & set(NOT_COMPARED), (key, wrong)
        node[key] = right


def test_converted_pickles_are_loaded_as_arrays_and_never_by_detectron2(tmp_path, cfg, monkeypatch):
    source = backbone_file(tmp_path, "resnet50", NARROW)
    folder = tmp_path / "pickled"
    converted = convert(source, folder, file_format="pkl")
    monkeypatch.setattr(DetectionCheckpointer, "_load_file", None)
    assert load_weights(build_model(cfg), converted.weights) == 265


def test_training_from_scratch_must_be_asked_for_by_name(cfg):
    cfg.MODEL.WEIGHTS = ""
    with pytest.raises(DetectionError, match=r"KSCL.FROM_SCRATCH True"):
        verify_start(cfg)
    cfg.KSCL.FROM_SCRATCH = True
    assert verify_start(cfg) is None
    cfg.MODEL.WEIGHTS = "weights.pth"
    with pytest.raises(DetectionError, match="Choose one"):
        verify_start(cfg)


@pytest.mark.parametrize("name", ["nowhere.pth", "detectron2://ImageNetPretrained/MSRA/R-50.pkl"])
def test_weights_that_are_not_here_are_an_error_before_anything_runs(name, cfg):
    cfg.MODEL.WEIGHTS = name
    with pytest.raises(DetectionError, match="no such file"):
        verify_start(cfg)


def test_what_a_record_takes_from_the_certificate(converted):
    certificate = converted.certificate
    assert certificate.source_sha256 == certificate.source["file_sha256"]
    assert certificate.backbone["method"] == "kscl"
    random = dataclasses.replace(certificate, source={**certificate.source, "file_sha256": None})
    assert random.source_sha256 == certificate.source["tensors_sha256"]
