"""Conversions are proven, complete and delivered whole, or there is nothing."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

import pytest
import torch
import yaml

from detection.commands import convert as convert_cli
from detection.config import load_detection_config, of_timm_only
from detection.convert import converter, proof, routes
from detection.convert.certificate import read_certificate, verify_start
from detection.convert.converter import convert
from detection.convert.weights import read_weights
from kscl.backbone_file import Description, save_backbone
from kscl.config import shipped_configs
from kscl.errors import KsclError
from kscl.methods.encoder import build_backbone
from tests.helpers.commands import run, tool
from tests.helpers.networks.backbones import NARROW, backbone_file, lively_backbone
from tests.helpers.networks.small import NETWORKS

QUARTER = {"channels": [16, 32, 64, 128]}
FAMILIES = [
    ("resnet50", NARROW, 265),
    ("resnet50", QUARTER, 260),  # stem and res2 are of one width: no first shortcut in either
    ("resnext50_32x4d", QUARTER, 260),
    ("resnet50", {**NARROW, "cardinality": 2, "base_width": 32}, 265),
    ("resnet50_gn", {"channels": [32, 64, 128, 256]}, 159),
]
FULL_WIDTH = [
    ("resnet50", {}, 265),
    ("resnet101", {}, 520),
    ("resnet152", {}, 775),
    ("resnext101_32x8d", {}, 520),
    ("wide_resnet50_2", {}, 265),
    ("resnet50_gn", {}, 159),
]
QUICK = ("voc0712_c4_18k_d2", "coco_fpn_1x", "coco_retinanet_1x", "cityscapes_fpn_24k")
SLOW = [
    pytest.param(path.stem, marks=pytest.mark.slow)
    for path in sorted((shipped_configs() / "detection").glob("[!_]*.yaml"))
    if path.stem not in QUICK and not of_timm_only(load_detection_config(path))
]
# What a user of Detectron2 writes, with a data set of two images in memory.
TRAIN = """
import json, sys
import numpy as np
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import DefaultTrainer
from detectron2.structures import BoxMode
from PIL import Image

cfg = get_cfg()
cfg.merge_from_file("config_plain.yaml")
Image.fromarray(np.full((96, 96, 3), 90, np.uint8)).save("image.png")
thing = {"bbox": [9, 9, 60, 60], "bbox_mode": BoxMode.XYXY_ABS, "category_id": 0}
image = {"file_name": "image.png", "height": 96, "width": 96, "image_id": 0, "annotations": [thing]}
DatasetCatalog.register("mine", lambda: [image, image])
MetadataCatalog.get("mine").thing_classes = ["thing"]
cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("mine",), ()
cfg.MODEL.DEVICE, cfg.DATALOADER.NUM_WORKERS, cfg.OUTPUT_DIR = "cpu", 0, "out"
cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS = 1, 1, ()
cfg.SOLVER.REFERENCE_WORLD_SIZE, cfg.TEST.PRECISE_BN.ENABLED = 0, False
cfg.INPUT.MIN_SIZE_TRAIN = (96,)
trainer = DefaultTrainer(cfg)
trainer.resume_or_load(resume=False)
names = [name for name, _ in trainer.model.named_parameters()]
first = {name: value.sum().item() for name, value in trainer.model.state_dict().items()}
trainer.train()
ours = [name for name in sys.modules if name.split(".")[0] in ("kscl", "detection")]
json.dump({"first": first, "ours": ours, "iter": trainer.iter}, open("told.json", "w"))
"""


@pytest.mark.parametrize(
    ("name", "kwargs", "tensors"),
    [*FAMILIES, *(pytest.param(*family, marks=pytest.mark.slow) for family in FULL_WIDTH)],
)
def test_every_supported_family_computes_the_same_in_both(name, kwargs, tensors, tmp_path):
    converted = convert(backbone_file(tmp_path, name, kwargs), tmp_path / "out")
    assert tuple(converted.certificate.differences) == proof.STAGES
    assert max(converted.certificate.differences.values()) < proof.TOLERANCE / 3
    assert converted.certificate.tensors == tensors == len(read_weights(converted.weights))
    # the protocol's flavour of BatchNorm stays; a network without BatchNorm brings its norm
    norm = converted.cfg.MODEL.RESNETS.NORM
    assert norm == ("GN" if name.endswith("_gn") else "naiveSyncBN")


@pytest.mark.parametrize("protocol", [*QUICK, *SLOW])
def test_a_backbone_fits_every_shipped_protocol(protocol, narrow_file, converted, tmp_path):
    fitted = convert(narrow_file, tmp_path / "out", protocol=f"detection/{protocol}.yaml")
    assert fitted.certificate.weights_sha256 == converted.certificate.weights_sha256
    assert verify_start(load_detection_config(fitted.folder / "config.yaml")) is not None


@pytest.mark.parametrize(
    ("arch", "protocol", "better"),
    [
        ("vit_tiny_patch16_224", "shapes_tiny_fpn", "shapes_tiny_vit"),
        ("swin_tiny_patch4_window7_224", "coco_fpn_1x", "coco_fpn_1x_swin"),
        ("convnext_atto", "coco_retinanet_1x", "coco_fpn_1x_convnext"),
        ("regnetx_002", "shapes_tiny_swin", "shapes_tiny_fpn"),
        ("resnet18", "coco_fpn_1x", None),
        ("convnext_atto", "shapes_tiny_convnext", None),
    ],
)
def test_an_optimizer_that_does_not_suit_the_network_is_a_warning(arch, protocol, better):
    cfg = load_detection_config(f"detection/{protocol}.yaml")
    found = converter.optimizer_warning(cfg, build_backbone(arch, NETWORKS[arch]), arch)
    assert (f"--protocol configs/detection/{better}.yaml" in found) if better else found == ""


def test_the_three_files_say_what_they_are(converted):
    content = torch.load(converted.weights, weights_only=True)
    assert content["matching_heuristics"] is True
    assert content["__author__"] == "kscl"
    assert all(isinstance(value, torch.Tensor) for value in content["model"].values())

    text = (converted.folder / "config.yaml").read_text()
    assert yaml.safe_load(text)["MODEL"]["RESNETS"]["DEPTH"] == 50
    cfg = load_detection_config(converted.folder / "config.yaml")
    assert Path(cfg.MODEL.WEIGHTS) == converted.weights
    assert cfg.MODEL.RESNETS.WIDTH_PER_GROUP == 8
    assert cfg.MODEL.RESNETS.NORM == "naiveSyncBN"  # the protocol's flavour
    assert cfg.SOLVER.MAX_ITER == 24000
    cfg.MODEL.WEIGHTS = converted.cfg.MODEL.WEIGHTS
    assert cfg == converted.cfg

    certificate = read_certificate(converted.folder / "certificate.json")
    assert certificate == converted.certificate
    assert certificate.source["run"] == {"method": "kscl", "epochs": 2, "seed": 0}
    assert certificate.backbone["arch"] == "resnet50"
    assert all(name.endswith("num_batches_tracked") for name in certificate.left_behind)


def test_converting_twice_gives_the_same_bytes(converted, narrow_file, tmp_path):
    again = convert(narrow_file, tmp_path / "again")
    for name in ("weights.pth", "config.yaml", "certificate.json"):
        assert (again.folder / name).read_bytes() == (converted.folder / name).read_bytes()


def test_a_pickle_holds_the_same_arrays(converted, narrow_file, tmp_path):
    pickled = convert(narrow_file, tmp_path / "out", file_format="pkl")
    assert pickled.weights.name == "weights.pkl"
    content = pickle.loads(pickled.weights.read_bytes())
    assert {"model", "matching_heuristics", "__author__"} == set(content)
    theirs, ours = read_weights(pickled.weights), read_weights(converted.weights)
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)


def test_the_input_of_pretraining_travels_with_the_weights(tmp_path):
    path, half = tmp_path / "backbone.safetensors", (0.5, 0.5, 0.5)
    backbone = lively_backbone("resnet50", NARROW)
    save_backbone(path, backbone.state_dict(), Description("resnet50", NARROW, half, half))
    converted = convert(path, tmp_path / "out")
    assert list(converted.cfg.MODEL.PIXEL_MEAN) == [127.5] * 3
    with pytest.raises(KsclError, match="says that its mean"):
        convert(path, tmp_path / "out2", mean=(0.4, 0.4, 0.4))
    torch.save(backbone.state_dict(), tmp_path / "plain.pth")
    foreign = {"arch": "resnet50", "kwargs": NARROW}
    stated = convert(tmp_path / "plain.pth", tmp_path / "out3", mean=half, std=half, **foreign)
    assert stated.certificate.detectron2_keys == converted.certificate.detectron2_keys
    with pytest.raises(KsclError, match="from 0 to 1"):
        convert(
            tmp_path / "plain.pth", tmp_path / "out4", mean=(123.675, 116.28, 103.53), **foreign
        )


def test_a_wrong_conversion_writes_nothing(narrow_file, tmp_path, monkeypatch):
    right = routes.resnet_keys
    wrong = {"MODEL.RESNETS.STRIDE_IN_1X1": True}
    monkeypatch.setattr(routes, "resnet_keys", lambda backbone: (right(backbone)[0] | wrong, ""))
    with pytest.raises(KsclError, match="differs first at res3") as caught:
        convert(narrow_file, tmp_path / "out")
    assert "STRIDE_IN_1X1" in str(caught.value)
    assert "Nothing was written" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_conversion_leaves_what_was_there_before(narrow_file, tmp_path, monkeypatch):
    before = convert(narrow_file, tmp_path / "out")
    files = {path.name: path.read_bytes() for path in before.folder.iterdir()}

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(converter, "write_certificate", interrupted)
    other = backbone_file(tmp_path, "resnet50", NARROW, seed=1)
    with pytest.raises(KeyboardInterrupt):
        convert(other, tmp_path / "out", force=True)
    assert {path.name: path.read_bytes() for path in before.folder.iterdir()} == files
    assert {path.name for path in tmp_path.iterdir()} == {"out", other.name}


def test_other_weights_are_written_over_only_by_force(narrow_file, tmp_path):
    other = backbone_file(tmp_path, "resnet50", NARROW, seed=1)
    convert(other, tmp_path / "out")
    with pytest.raises(KsclError, match=f"other weights .{other.name}.*--force"):
        convert(narrow_file, tmp_path / "out")
    convert(other, tmp_path / "out", file_format="pkl")  # the same ones: made anew
    weights = [path.name for path in (tmp_path / "out").glob("weights.*")]
    assert weights == ["weights.pkl"]
    forced = convert(narrow_file, tmp_path / "out", force=True)
    assert read_certificate(tmp_path / "out/certificate.json") == forced.certificate
    assert not (tmp_path / "out/weights.pkl").exists()


def test_a_folder_with_other_things_in_it_is_never_taken(narrow_file, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KsclError, match=r"has other files \(notes.txt\)"):
        convert(narrow_file, tmp_path, force=True)
    with pytest.raises(KsclError, match="is a file"):
        convert(narrow_file, tmp_path / "notes.txt")
    with pytest.raises(KsclError, match=r"notes\.txt/out cannot be written"):
        convert(narrow_file, tmp_path / "notes.txt/out")


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path):
    backbone = lively_backbone("resnet50", NARROW)
    backbone.layer2[0].bn1.running_var[3] = float("nan")
    save_backbone(
        tmp_path / "b.safetensors", backbone.state_dict(), Description("resnet50", NARROW)
    )
    with pytest.raises(KsclError, match=r"res3.0.conv1.norm.running_var .* NaN"):
        convert(tmp_path / "b.safetensors", tmp_path / "out")


def test_a_protocol_without_the_c4_head_is_refused(narrow_file, tmp_path):
    (tmp_path / "fpn.yaml").write_text("MODEL: {ROI_HEADS: {NAME: StandardROIHeads}}\nVERSION: 2\n")
    with pytest.raises(KsclError, match=r"MODEL\.ROI_HEADS\.NAME is StandardROIHeads"):
        convert(narrow_file, tmp_path / "out", protocol=tmp_path / "fpn.yaml")


@pytest.mark.smoke
def test_the_tool_converts_and_shows_the_proof(narrow_file, tmp_path):
    done = tool("convert", narrow_file, "--output-dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    for stage in proof.STAGES:
        assert f"\n  {stage} " in done.stdout
    assert "265 tensors were converted; left out: num_batches_tracked (53)" in done.stdout
    assert f"--config-file {tmp_path / 'out' / 'config.yaml'}" in done.stdout
    assert json.loads((tmp_path / "out/certificate.json").read_text())["version"] == 4
    assert done.stderr == ""


def test_what_is_left_behind_is_told_by_kind():
    names = [
        "module.encoder_k.conv1.weight",
        "module.encoder_k.fc.bias",
        "module.encoder_q.fc.bias",
    ]
    told = convert_cli.in_kinds([*names, "module.queue", "layer1.0.bn1.num_batches_tracked"])
    assert told == (
        "module.encoder_k (2), module.encoder_q (1), module.queue (1), num_batches_tracked (1)"
    )
    assert convert_cli.in_kinds([]) == "nothing"


def test_the_tools_errors_are_for_people(narrow_file, tmp_path, capsys):
    cases = [
        (["random", "--output-dir", "x"], "--arch resnet50"),
        (["random", "--arch", "resnet18", "--output-dir", "x"], "FPN"),
        (
            ["random", "--arch", "resnet50", "--arch-kwargs", "[8]", "--output-dir", "x"],
            "a mapping",
        ),
        ([str(tmp_path / "no.pth"), "--output-dir", "x"], "no such file"),
        (
            [str(narrow_file), "--protocol", "detection/voc0712_c4_24k.yaml", "--output-dir", "x"],
            "moco",
        ),
    ]
    for words, text in cases:
        assert convert_cli.main(words) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("protocol", "prefix"),
    [
        pytest.param("shapes_tiny_c4", "backbone.", marks=pytest.mark.full),
        pytest.param("shapes_tiny_fpn", "backbone.bottom_up.", marks=pytest.mark.slow),
        pytest.param("shapes_tiny_retinanet", "backbone.bottom_up.", marks=pytest.mark.slow),
    ],
)
def test_detectron2_alone_trains_a_step_from_the_folder(protocol, prefix, tmp_path):
    source = backbone_file(tmp_path, "resnet50", NARROW)
    folder = convert(source, tmp_path / "out", protocol=f"detection/{protocol}.yaml").folder
    # Not the project's folder on the path: its packages are not to be found.
    done = run(sys.executable, "-W", "ignore", "-c", TRAIN, cwd=folder, env={"PYTHONPATH": ""})
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "told.json").read_text())
    assert told["ours"] == []
    assert told["iter"] == 1
    weights = torch.load(folder / "weights.pth")["model"]
    for name in ("stem.conv1.weight", "res2.0.conv1.weight", "res4.5.conv3.norm.running_var"):
        assert told["first"][prefix + name] == pytest.approx(weights[name].sum().item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:pkg_resources")
def test_the_model_zoo_of_detectron2_can_be_imported():
    from detectron2 import model_zoo

    name = "COCO-Detection/retinanet_R_50_FPN_1x.yaml"
    assert Path(model_zoo.get_config_file(name)).is_file()
