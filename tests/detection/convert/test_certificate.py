"""A detector starts from certified weights that it really holds, or not at all.

The files here are those that Detectron2 loads wrongly without an error.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode

from detection.config import load_detection_config
from detection.convert.certificate import read_certificate, verify, verify_start
from detection.convert.converter import Converted
from kscl.errors import KsclError
from kscl.runtime.files import sha256_of


def test_a_run_starts_from_the_converted_folder(converted, cfg, tmp_path):
    assert verify_start(cfg) == converted.certificate
    shutil.copytree(converted.folder, tmp_path / "moved")
    moved = load_detection_config(tmp_path / "moved/config.yaml")
    assert Path(moved.MODEL.WEIGHTS).parent == tmp_path / "moved"
    assert verify_start(moved) == converted.certificate


def test_a_certificate_elsewhere_is_named_in_the_config(converted, cfg, tmp_path):
    cfg.MODEL.WEIGHTS = str(shutil.copy(converted.weights, tmp_path))
    with pytest.raises(KsclError, match="no such certificate"):
        verify_start(cfg)
    cfg.KSCL.CERTIFICATE = str(converted.folder / "certificate.json")
    assert verify_start(cfg) == converted.certificate


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("INPUT.FORMAT", "BGR"),
        ("MODEL.PIXEL_MEAN", [103.53, 116.28, 123.675]),
        ("MODEL.RESNETS.STRIDE_IN_1X1", True),
        ("MODEL.RESNETS.NORM", "GN"),
        ("MODEL.RESNETS.DEFORM_ON_PER_STAGE", [False, False, True, True]),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused_by_key(key, value, cfg):
    cfg.merge_from_list([key, value])
    with pytest.raises(KsclError, match=f"{key} is "):
        verify_start(cfg)


def test_all_keys_that_do_not_fit_are_named_at_once(converted):
    cfg = load_detection_config("detection/voc0712_c4_24k_moco.yaml", ["INPUT.FORMAT", "BGR"])
    with pytest.raises(KsclError) as caught:
        verify(converted.certificate, converted.weights, cfg)
    for key in ("WIDTH_PER_GROUP", "RES2_OUT_CHANNELS", "INPUT.FORMAT", "config.yaml"):
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
    with pytest.raises(KsclError, match=r"weights\.pth must have the SHA-256"):
        verify_start(cfg)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 1}, "not a certificate of version 4"),
        ({"arch": None}, "arch is missing"),
        ({"note": "x"}, "note is not a field"),
        ({"source": {"name": "x"}}, r"source\.file_sha256 is missing"),
        ({"differences": {}}, "does not prove stem"),
        ({"differences": [0.5]}, "differences is .* not an object"),
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
    with pytest.raises(KsclError, match=reason):
        verify_start(cfg)
    path.write_text("{half")
    with pytest.raises(KsclError, match="cannot be read as a certificate"):
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
    with pytest.raises(KsclError, match="res4"):
        verify_start(forged(converted, cfg, tmp_path / "forged", **changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [("MODEL.RESNETS.STRIDE_IN_1X1", True), ("MODEL.RESNETS.RES5_DILATION", 2)],
)
def test_the_keys_of_a_certificate_are_those_of_its_network(key, value, converted, cfg, tmp_path):
    keys = converted.certificate.detectron2_keys
    cfg.merge_from_list([key, value])  # so that config and certificate agree
    for changed in ({**keys, key: value}, {k: v for k, v in keys.items() if k != key}):
        folder = tmp_path / f"forged{len(changed)}"
        with pytest.raises(KsclError, match=key):
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
    with pytest.raises(KsclError, match=r"res3.0.conv1.weight") as caught:
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
    with pytest.raises(KsclError, match=source["path"]):
        verify_start(cfg)


def test_the_input_of_a_certificate_is_compared_with_its_source(converted, cfg, tmp_path):
    mean = [103.53, 116.28, 123.675]
    keys = {**converted.certificate.detectron2_keys, "MODEL.PIXEL_MEAN": mean}
    cfg.MODEL.PIXEL_MEAN = mean
    with pytest.raises(KsclError, match=r"MODEL.PIXEL_MEAN"):
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


def test_training_from_scratch_must_be_asked_for_by_name(cfg):
    cfg.MODEL.WEIGHTS = ""
    with pytest.raises(KsclError, match=r"KSCL.FROM_SCRATCH True"):
        verify_start(cfg)
    cfg.KSCL.FROM_SCRATCH = True
    assert verify_start(cfg) is None
    cfg.MODEL.WEIGHTS = "weights.pth"
    with pytest.raises(KsclError, match=r"MODEL.WEIGHTS 'weights.pth' and KSCL.FROM_SCRATCH True"):
        verify_start(cfg)


@pytest.mark.parametrize("name", ["nowhere.pth", "detectron2://ImageNetPretrained/MSRA/R-50.pkl"])
def test_weights_that_are_not_here_are_an_error_before_anything_runs(name, cfg):
    cfg.MODEL.WEIGHTS = name
    with pytest.raises(KsclError, match="no such file"):
        verify_start(cfg)


def test_what_a_record_takes_from_the_certificate(converted):
    certificate = converted.certificate
    assert certificate.source_sha256 == certificate.source["file_sha256"]
    assert certificate.backbone["method"] == "kscl"
    random = dataclasses.replace(certificate, source={**certificate.source, "file_sha256": None})
    assert random.source_sha256 == certificate.source["tensors_sha256"]
