"""The shipped detection protocols say what their sources say, key by key, and are read safely."""

from __future__ import annotations

import pytest
import yaml
from detectron2.config import get_cfg
from detectron2.layers import NaiveSyncBatchNorm
from detectron2.modeling import build_model
from torch import nn

from detection.config import (
    OUTPUT_DIR,
    add_kscl_config,
    changed_values,
    check_version,
    detection_defaults,
    detection_schema,
    load_detection_config,
    set_network,
)
from kscl.config import leaves, shipped_configs, value_at
from kscl.errors import ConfigError, KsclError

SHIPPED = sorted((shipped_configs() / "detection").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_file_merges_into_detectron2s_config_as_its_users_do_it(path):
    theirs = get_cfg()
    add_kscl_config(theirs)
    theirs.OUTPUT_DIR = OUTPUT_DIR
    theirs.merge_from_file(str(path), allow_unsafe=False)
    assert load_detection_config(path) == theirs
    assert yaml.safe_load(path.read_text())["VERSION"] == 2


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
    with pytest.raises(KsclError, match=r"MODEL\.RESNETS\.NORM.*naiveSyncBN"):
        build_model(cfg)


def test_a_setting_without_a_default_keeps_the_type_it_was_given():
    words = ["SOLVER.WEIGHT_DECAY_BIAS", "0.5", "SOLVER.WEIGHT_DECAY_BIAS"]
    value = load_detection_config(None, [*words, "1"]).SOLVER.WEIGHT_DECAY_BIAS
    assert (value, type(value)) == (1.0, float)
    with pytest.raises(KsclError, match=r"SOLVER\.WEIGHT_DECAY_BIAS"):
        load_detection_config(None, [*words, "much"])


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
    path.write_text("MODEL:\n  RESNET: {DEPTH: 50}\nSOLVER:\n  STEPS: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_detection_config(path, ["MODEL.RESNETS", "50"])
    for text in (
        f"{path}:2: MODEL.RESNET.DEPTH is not a key; did you mean MODEL.RESNETS.DEPTH",
        f"{path}:4: SOLVER.STEPS takes a list, not 3",
        "command line: MODEL.RESNETS is a section",
    ):
        assert text in str(caught.value)


def test_values_are_read_as_detectron2_reads_them(tmp_path):
    path = tmp_path / "values.yaml"
    path.write_text('SOLVER: {BASE_LR: 1}\nDATASETS:\n  TRAIN: ("a", "b")\n')
    words = ["SOLVER.STEPS", "(1, 2)", "OUTPUT_DIR", "2024", "SOLVER.NESTEROV", "true"]
    words += ["INPUT.CROP.SIZE", "[384, 600]", "DATASETS.TEST", "('voc:a: b:test',)"]
    cfg = load_detection_config(path, [*words, "SOLVER.WEIGHT_DECAY_BIAS", "1e-4"])
    assert cfg.SOLVER.BASE_LR == 1.0
    assert isinstance(cfg.SOLVER.BASE_LR, float)
    assert cfg.DATASETS.TRAIN == ("a", "b")
    assert cfg.SOLVER.STEPS == (1, 2)
    assert cfg.OUTPUT_DIR == "2024"
    assert cfg.SOLVER.NESTEROV is True
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
        ("VERSION: 1\n", r"VERSION is 1 \(.*it\.yaml:1\)"),
        (
            "KSCL: {SCORER: voc12}\n",
            r"KSCL\.SCORER is 'voc12' .*voc07-11pt, voc10-every-point, coco-101pt",
        ),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(text, reason, tmp_path):
    (tmp_path / "it.yaml").write_text(text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_detection_config(tmp_path / "it.yaml")
    assert "it.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("DATALOADER.SAMPLER_TRAIN", "RandomSubsetTrainingSampler"), "set it to TrainingSampler"),
        (("TEST.AUG.ENABLED", "True"), "set it to False"),
        (("TEST.EXPECTED_RESULTS", "[['bbox', 'AP', 38.5, 0.2]]"), r"set it to \[\]"),
        (("MODEL.META_ARCHITECTURE", "PanopticFPN"), "GeneralizedRCNN, RetinaNet"),
        (("MODEL.MASK_ON", "True", "MODEL.META_ARCHITECTURE", "RetinaNet"), "set MASK_ON False"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(words, fix):
    with pytest.raises(ConfigError, match=rf"{words[0]} is .*command line\).*: .*{fix}"):
        load_detection_config("detection/shapes_tiny_fpn.yaml", words)
    # A config of another project, whose weights are taken back to timm, is only read.
    assert load_detection_config(None, words, rules=check_version)


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
    printed.write_text(detection_schema().print(cfg))
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
    (tmp_path / "weights.pth").touch()  # others, of the same name
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
