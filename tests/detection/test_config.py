"""The shipped detection protocols say what their sources say, key by key, and are read safely."""

from __future__ import annotations

import re
from pathlib import Path

import detectron2
import pytest
import yaml
from detectron2.config import get_cfg
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.modeling import ROI_HEADS_REGISTRY, build_model
from torch import nn

from detection import scoring
from detection.config import (
    add_kscl_config,
    changed_values,
    detection_defaults,
    load_detection_config,
    norm_family,
    set_network,
)
from detection.errors import DetectionError
from detection.train.protocol import protocol_of
from kscl.config.comments import comments_of
from kscl.config.shipped import shipped_configs
from kscl.config.tree import config_yaml, leaves, value_at
from kscl.errors import ConfigError
from kscl.records.record import Protocol

SHIPPED = sorted((shipped_configs() / "detection").glob("*.yaml"))
PROTOCOLS = [path for path in SHIPPED if not path.name.startswith("_")]

# The effective config of MoCo's VOC protocol.
MOCO_24K = {
    "DATASETS.TRAIN": ("voc_2007_trainval", "voc_2012_trainval"),
    "DATASETS.TEST": ("voc_2007_test",),
    "DATALOADER.FILTER_EMPTY_ANNOTATIONS": True,
    "DATALOADER.ASPECT_RATIO_GROUPING": True,
    "INPUT.FORMAT": "RGB",
    "INPUT.MIN_SIZE_TRAIN": (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800),
    "INPUT.MIN_SIZE_TRAIN_SAMPLING": "choice",
    "INPUT.MAX_SIZE_TRAIN": 1333,
    "INPUT.MIN_SIZE_TEST": 800,
    "INPUT.MAX_SIZE_TEST": 1333,
    "INPUT.RANDOM_FLIP": "horizontal",
    "MODEL.META_ARCHITECTURE": "GeneralizedRCNN",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    "MODEL.MASK_ON": False,
    "MODEL.BACKBONE.NAME": "build_resnet_backbone",
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.RESNETS.DEPTH": 50,
    "MODEL.RESNETS.OUT_FEATURES": ["res4"],
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
    "MODEL.RESNETS.NORM": "naiveSyncBN",
    "MODEL.ROI_HEADS.NAME": "Res5ROIHeadsExtraNorm",
    "MODEL.ROI_HEADS.NUM_CLASSES": 20,
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE": 512,
    "MODEL.ROI_HEADS.POSITIVE_FRACTION": 0.25,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.05,
    "MODEL.ROI_HEADS.NMS_THRESH_TEST": 0.5,
    "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION": 14,
    "MODEL.ROI_BOX_HEAD.POOLER_TYPE": "ROIAlignV2",
    "MODEL.ROI_BOX_HEAD.POOLER_SAMPLING_RATIO": 0,
    "MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA": 0.0,
    "MODEL.ANCHOR_GENERATOR.SIZES": [[32, 64, 128, 256, 512]],
    "MODEL.ANCHOR_GENERATOR.ASPECT_RATIOS": [[0.5, 1.0, 2.0]],
    "MODEL.RPN.IN_FEATURES": ["res4"],
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN": 12000,
    "MODEL.RPN.PRE_NMS_TOPK_TEST": 6000,
    "MODEL.RPN.POST_NMS_TOPK_TRAIN": 2000,
    "MODEL.RPN.POST_NMS_TOPK_TEST": 1000,
    "MODEL.RPN.BATCH_SIZE_PER_IMAGE": 256,
    "SOLVER.IMS_PER_BATCH": 16,
    "SOLVER.BASE_LR": 0.02,
    "SOLVER.LR_SCHEDULER_NAME": "WarmupMultiStepLR",
    "SOLVER.MAX_ITER": 24000,
    "SOLVER.STEPS": (18000, 22000),
    "SOLVER.GAMMA": 0.1,
    "SOLVER.WARMUP_ITERS": 100,
    "SOLVER.WARMUP_FACTOR": 0.001,
    "SOLVER.WARMUP_METHOD": "linear",
    "SOLVER.MOMENTUM": 0.9,
    "SOLVER.NESTEROV": False,
    "SOLVER.WEIGHT_DECAY": 1e-4,
    "SOLVER.WEIGHT_DECAY_NORM": 0.0,
    "SOLVER.AMP.ENABLED": False,
    "SOLVER.CHECKPOINT_PERIOD": 5000,
    "SOLVER.REFERENCE_WORLD_SIZE": 8,
    "TEST.PRECISE_BN.ENABLED": True,
    "TEST.PRECISE_BN.NUM_ITER": 200,
    "TEST.DETECTIONS_PER_IMAGE": 100,
    "TEST.EVAL_PERIOD": 0,
    "SEED": -1,
}
COCO_2X = {
    **MOCO_24K,
    "DATASETS.TRAIN": ("coco_2017_train",),
    "DATASETS.TEST": ("coco_2017_val",),
    "INPUT.MIN_SIZE_TRAIN": (640, 672, 704, 736, 768, 800),
    "MODEL.MASK_ON": True,
    "MODEL.ROI_HEADS.NUM_CLASSES": 80,
    "SOLVER.MAX_ITER": 180000,
    "SOLVER.STEPS": (120000, 160000),
    "SOLVER.WARMUP_ITERS": 1000,
}


SHORT = {"SOLVER.MAX_ITER": 12000, "SOLVER.STEPS": (9000, 11000)}
ONE = {"SOLVER.MAX_ITER": 90000, "SOLVER.STEPS": (60000, 80000)}
SWAV_24K = {
    **MOCO_24K,
    "MODEL.RESNETS.NORM": "SyncBN",
    "SOLVER.BASE_LR": 0.1,
    "SOLVER.WARMUP_ITERS": 1000,
    "SOLVER.WARMUP_FACTOR": 0.333,
}
VOC07 = {
    **MOCO_24K,
    "DATASETS.TRAIN": ("voc_2007_trainval",),
    "MODEL.RESNETS.NORM": "SyncBN",
    "SOLVER.MAX_ITER": 12500,
    "SOLVER.STEPS": (9500,),
}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("voc0712_c4_24k_moco", MOCO_24K),
        ("voc0712_c4_24k_swav", SWAV_24K),
        ("voc07_c4_12k5", VOC07),
        ("coco_c4_2x", COCO_2X),
        ("coco_c4_1x", {**COCO_2X, **ONE}),
        ("coco_c4_12k", {**COCO_2X, **SHORT}),
    ],
)
def test_the_effective_c4_protocol_is_its_sources_key_by_key(name, expected):
    cfg = load_detection_config(f"detection/{name}.yaml")
    assert {key: value_at(cfg, key) for key in expected} == expected
    changed = dict(leaves(changed_values(cfg)))
    changed = {key for key in changed if not key.startswith("KSCL.") and key != "VERSION"}
    assert changed <= set(expected)  # and there is nothing beyond


OURS = {  # what every FPN and RetinaNet protocol of this project has in place of Detectron2's
    "INPUT.FORMAT": "RGB",
    "MODEL.PIXEL_MEAN": [123.675, 116.28, 103.53],
    "MODEL.PIXEL_STD": [58.395, 57.12, 57.375],
    "MODEL.RESNETS.STRIDE_IN_1X1": False,
    "MODEL.RESNETS.NORM": "SyncBN",
    "MODEL.FPN.NORM": "SyncBN",
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.WEIGHTS": "",
    "SOLVER.REFERENCE_WORLD_SIZE": 8,
    "TEST.PRECISE_BN.ENABLED": True,
}
INFOMIN = {
    "MODEL.ROI_BOX_HEAD.NUM_CONV": 4,
    "MODEL.ROI_BOX_HEAD.NUM_FC": 1,
    "MODEL.ROI_BOX_HEAD.NORM": "SyncBN",
    "MODEL.ROI_MASK_HEAD.NORM": "SyncBN",
}
CITYSCAPES = {"TEST.EVAL_PERIOD": 0, "DATASETS.TRAIN": None, "DATASETS.TEST": None}
MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x"
RETINANET = "COCO-Detection/retinanet_R_50_FPN_1x"


@pytest.mark.parametrize(
    ("name", "entry", "changes"),
    [
        ("coco_fpn_1x", MASK_RCNN, {}),
        ("coco_fpn_2x", MASK_RCNN, {"SOLVER.MAX_ITER": 180000, "SOLVER.STEPS": (120000, 160000)}),
        ("coco_fpn_12k", MASK_RCNN, SHORT),
        ("coco_fpn_1x_infomin", MASK_RCNN, INFOMIN),
        ("coco_retinanet_1x", RETINANET, {}),
        ("coco_retinanet_12k", RETINANET, SHORT),
        ("cityscapes_fpn_24k", "Cityscapes/mask_rcnn_R_50_FPN", CITYSCAPES),
    ],
)
def test_a_pyramid_protocol_is_detectron2s_entry_but_for_what_its_source_changes(
    name, entry, changes
):
    theirs = get_cfg()
    folder = Path(detectron2.__file__).parent / "model_zoo" / "configs"
    theirs.merge_from_file(str(folder / f"{entry}.yaml"), allow_unsafe=True)
    ours = load_detection_config(f"detection/{name}.yaml")
    ours.pop("KSCL")
    theirs, ours = dict(leaves(theirs)), dict(leaves(ours))
    different = {key: ours[key] for key in theirs if theirs[key] != ours[key]}
    expected = {**OURS, **changes}
    assert set(different) == set(expected) - {k for k in expected if theirs[k] == expected[k]}
    assert {k: v for k, v in expected.items() if v is not None and ours[k] != v} == {}


def test_the_18k_protocol_is_detectron2s_own_but_for_what_our_backbones_need():
    theirs = get_cfg()
    folder = Path(detectron2.__file__).parent / "model_zoo/configs/PascalVOC-Detection"
    theirs.merge_from_file(str(folder / "faster_rcnn_R_50_C4.yaml"), allow_unsafe=False)
    ours = load_detection_config("detection/voc0712_c4_18k_d2.yaml")
    assert ours.pop("KSCL").PROTOCOL == "voc0712-c4-18k-d2"
    theirs, ours = dict(leaves(theirs)), dict(leaves(ours))
    assert {key for key in theirs if theirs[key] != ours.pop(key)} == {
        *("MODEL.WEIGHTS", "MODEL.RESNETS.STRIDE_IN_1X1"),
        *("INPUT.FORMAT", "MODEL.PIXEL_MEAN", "MODEL.PIXEL_STD"),
        "SOLVER.REFERENCE_WORLD_SIZE",  # Detectron2's users scale by hand
    }
    assert not ours


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_file_merges_into_detectron2s_config_as_its_users_do_it(path):
    theirs = get_cfg()
    add_kscl_config(theirs)
    theirs.merge_from_file(str(path), allow_unsafe=False)
    assert load_detection_config(path) == theirs
    assert yaml.safe_load(path.read_text())["VERSION"] == 2


@pytest.mark.parametrize("path", PROTOCOLS, ids=lambda path: path.stem)
def test_every_protocol_has_a_name_a_scorer_and_a_known_head(path):
    cfg = load_detection_config(path)
    name = cfg.KSCL.PROTOCOL
    assert name == path.stem.replace("_", "-")
    assert cfg.KSCL.SCORER in scoring.BOX_SCORERS
    assert cfg.MODEL.ROI_HEADS.NAME in ROI_HEADS_REGISTRY
    assert (cfg.KSCL.SCORER == "coco-101pt") == cfg.DATASETS.TEST[0].startswith("coco")
    assert cfg.MODEL.WEIGHTS == ""
    assert not cfg.KSCL.FROM_SCRATCH


@pytest.mark.parametrize("path", PROTOCOLS, ids=lambda path: path.stem)
def test_every_protocol_is_listed_and_cites_the_commit_of_its_source(path):
    listed = (shipped_configs().parent / "docs" / "protocols.md").read_text()
    base, _, variant = path.stem.rpartition("_")
    assert f"`{path.stem}`" in listed or (f"`{base}_" in listed and f"`_{variant}`" in listed)
    if "_tiny_" not in path.stem:
        assert re.search(r"# Source: (.*\n# )*?.*@[0-9a-f]{7}", path.read_text())


def test_protocols_of_other_heads_or_norms_have_other_names_and_hashes():
    def protocol(name: str, *overrides: str) -> Protocol:
        return protocol_of(load_detection_config(f"detection/{name}.yaml", overrides))

    shipped = [protocol(path.stem) for path in PROTOCOLS]
    assert len({found.id for found in shipped}) == len({found.hash for found in shipped})
    assert len({found.hash for found in shipped}) == len(PROTOCOLS)
    plain = protocol("coco_fpn_1x")
    for key, value in (
        ("MODEL.FPN.NORM", "BN"),
        ("MODEL.RESNETS.NORM", "FrozenBN"),
        ("MODEL.ROI_BOX_HEAD.NUM_CONV", "4"),
        ("MODEL.MASK_ON", "False"),
    ):
        changed = protocol("coco_fpn_1x", key, value)
        assert changed.hash != plain.hash
        assert changed.id == f"coco-fpn-1x+{key}={value.lower() if value == 'False' else value}"
    # One FPN stands on either network; the pyramid of a plain transformer is another neck.
    timm = protocol("coco_fpn_1x", "MODEL.BACKBONE.NAME", "build_timm_fpn_backbone")
    assert timm == plain
    pyramid = protocol("coco_fpn_1x", "MODEL.BACKBONE.NAME", "build_timm_plain_backbone")
    assert pyramid.id == "coco-fpn-1x-simple-pyramid"
    assert pyramid.hash != plain.hash


def test_the_head_ends_in_one_norm_of_the_backbones_kind():
    cfg = load_detection_config("detection/shapes_tiny_c4.yaml", ["MODEL.DEVICE", "cpu"])
    cfg.MODEL.RESNETS.NORM = "naiveSyncBN"
    res5 = build_model(cfg).roi_heads.res5
    assert list(dict(res5.named_children())) == ["0", "1", "2", "norm"]
    assert type(res5.norm) is NaiveSyncBatchNorm
    assert res5.norm.num_features == 256
    cfg.MODEL.RESNETS.NORM = "GN"
    cfg.MODEL.RESNETS.WIDTH_PER_GROUP, cfg.MODEL.RESNETS.RES2_OUT_CHANNELS = 32, 128
    assert type(build_model(cfg).roi_heads.res5.norm) is nn.GroupNorm
    cfg.MODEL.RESNETS.NORM = ""
    with pytest.raises(DetectionError, match=r"MODEL\.RESNETS\.NORM.*naiveSyncBN"):
        build_model(cfg)


def test_nothing_imports_the_model_zoo():
    for path in (shipped_configs().parent / "detection").rglob("*.py"):
        assert "model_zoo" not in path.read_text(), path


def test_a_config_file_is_data(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text(f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{tmp_path}/ran']\n")
    with pytest.raises(ConfigError, match=f"{path}:1: OUTPUT_DIR: .*os.mkdir"):
        load_detection_config(path)
    (tmp_path / "child.yaml").write_text("_BASE_: evil.yaml\n")
    with pytest.raises(ConfigError, match=f"{path}:1: OUTPUT_DIR: .*os.mkdir"):
        load_detection_config(tmp_path / "child.yaml")
    assert not (tmp_path / "ran").exists()


def test_all_mistakes_are_told_at_once_with_the_nearest_key(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(
        "MODEL:\n  RESNET: {DEPTH: 50}\n  WEIGHT: x\nSOLVER:\n  MAX_ITER: many\n  STEPS: 3\n"
    )
    words = ["SOLVER.BASE_LRR", "0.1", "MODEL.RESNETS", "50", "TEST.EVAL_PERIOD", "0.5", "SEED"]
    with pytest.raises(ConfigError) as caught:
        load_detection_config(path, words)
    message = str(caught.value)
    for text in (
        "8 problems",
        f"{path}:2: MODEL.RESNET.DEPTH is not a key; did you mean MODEL.RESNETS.DEPTH",
        f"{path}:3: MODEL.WEIGHT is not a key; did you mean MODEL.WEIGHTS",
        f"{path}:5: SOLVER.MAX_ITER takes a whole number, not 'many'",
        f"{path}:6: SOLVER.STEPS takes a list, not 3",
        "command line: SOLVER.BASE_LRR is not a key",
        "command line: MODEL.RESNETS is a section",
        "command line: TEST.EVAL_PERIOD takes a whole number, not 0.5",
        "'SEED' is left over",
    ):
        assert text in message


def test_values_are_read_as_detectron2_reads_them(tmp_path):
    path = tmp_path / "values.yaml"
    path.write_text('SOLVER: {BASE_LR: 1}\nDATASETS:\n  TRAIN: ("a", "b")\n')
    words = ["SOLVER.STEPS", "(1, 2)", "OUTPUT_DIR", "2024", "TEST.AUG.ENABLED", "true"]
    words += ["INPUT.CROP.SIZE", "[384, 600]", "DATASETS.TEST", "('voc:a: b:test',)"]
    cfg = load_detection_config(path, [*words, "SOLVER.WEIGHT_DECAY_BIAS", "1e-4"])
    assert cfg.SOLVER.BASE_LR == 1.0
    assert isinstance(cfg.SOLVER.BASE_LR, float)
    assert cfg.DATASETS.TRAIN == ("a", "b")
    assert cfg.SOLVER.STEPS == (1, 2)
    assert cfg.OUTPUT_DIR == "2024"
    assert cfg.TEST.AUG.ENABLED is True
    assert cfg.SOLVER.WEIGHT_DECAY_BIAS == 1e-4
    assert [type(side) for side in cfg.INPUT.CROP.SIZE] == [int, int]  # pixels, not fractions
    assert cfg.DATASETS.TEST == ("voc:a: b:test",)
    theirs = get_cfg()
    literal = ["SOLVER.STEPS", "INPUT.CROP.SIZE", "DATASETS.TEST"]
    by_key = dict(zip(words[::2], words[1::2], strict=True))
    theirs.merge_from_list([word for key in literal for word in (key, by_key[key])])
    assert [value_at(cfg, key) for key in literal] == [value_at(theirs, key) for key in literal]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("SEED: 1\nSEED: 2\n", r"it\.yaml:2: SEED"),
        ("VERSION: 1\n", r"VERSION is 1 \(.*it\.yaml:1\)"),
        (
            "KSCL: {SCORER: voc12}\n",
            r"KSCL\.SCORER is 'voc12' .*voc07-11pt, voc10-every-point, coco-101pt",
        ),
        ("_BASE_: nowhere.yaml\n", r"it\.yaml:1: _BASE_ nowhere\.yaml"),
        ("_BASE_: it.yaml\n", "circle"),
        ("- 1\n", "mapping"),
        ("A: [\n", "YAML"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(text, reason, tmp_path):
    (tmp_path / "it.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_detection_config(tmp_path / "it.yaml")
    assert "it.yaml" in str(caught.value)


def test_a_missing_file_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="voc0712_c4_24k_moco"):
        load_detection_config("detection/voc0712_c4_24k_mocco.yaml")


def test_a_written_config_gives_itself_again(tmp_path):
    cfg = load_detection_config("detection/coco_c4_2x.yaml", ["SOLVER.GAMMA", "0.5"])
    path = tmp_path / "again.yaml"
    path.write_text(yaml.safe_dump(changed_values(cfg, always=["SEED"])))
    assert load_detection_config(path) == cfg
    assert "SEED: -1" in path.read_text()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_printed_config_gives_itself_again_with_the_same_types(path, tmp_path):
    cfg = load_detection_config(path)
    printed = tmp_path / "printed.yaml"
    printed.write_text(config_yaml(cfg, comments_of(add_kscl_config)))
    again = load_detection_config(printed)
    assert again == cfg
    assert {k: type(v) for k, v in leaves(again)} == {k: type(v) for k, v in leaves(cfg)}
    assert "  # Settings of this project." in printed.read_text()


def test_weights_are_found_beside_the_config_that_names_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "converted"
    folder.mkdir()
    (folder / "weights.pth").touch()
    (folder / "config.yaml").write_text("MODEL: {WEIGHTS: weights.pth}\n")
    path = "converted/config.yaml"
    assert load_detection_config(path).MODEL.WEIGHTS == "converted/weights.pth"
    words = ["MODEL.WEIGHTS", "weights.pth"]  # what the command line names is where it says
    assert load_detection_config(path, words).MODEL.WEIGHTS == "weights.pth"


def test_a_network_is_set_in_the_types_of_the_protocol():
    cfg = detection_defaults()
    cfg.MODEL.RESNETS.NORM = "naiveSyncBN"
    set_network(cfg, {"MODEL.RESNETS.NORM": "BN", "SOLVER.STEPS": [1, 2], "MODEL.PIXEL_STD": [1]})
    assert cfg.MODEL.RESNETS.NORM == "naiveSyncBN"
    assert cfg.SOLVER.STEPS == (1, 2)
    assert cfg.MODEL.PIXEL_STD == [1]


def test_norms_are_families():
    assert {norm_family(n) for n in ("BN", "SyncBN", "naiveSyncBN", "FrozenBN")} == {"BN"}
    assert norm_family("GN") == "GN"
