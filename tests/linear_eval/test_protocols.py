"""The protocols say what MoCo's code says, setting by setting, and names mean what they say."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from kscl.config import shipped_configs
from kscl.errors import ConfigError
from kscl.records.record import read_record
from linear_eval.commands.linear_eval import main
from linear_eval.probe import load_linear_eval_config
from linear_eval.probe import probe_of as bare_probe_of
from linear_eval.probes.online import IMAGENET
from tests.helpers.data.digits import overrides

CONFIGS = sorted((shipped_configs() / "linear_eval").glob("*.yaml"))
SMALL = {"classes": 10, "train images": 18_000, "val images": 2_000}


def probe_of(cfg, sizes=IMAGENET):
    """A probe of data of these sizes; nothing is opened."""
    probe = bare_probe_of(cfg)
    probe.sizes = lambda: sizes
    return probe


# MoCo's main_lincls.py as its users run it on ImageNet.
MOCO_LINCLS = {
    "features": "pooled, frozen, evaluation mode",
    "batch_norm": {
        "statistics": "as stored; of random weights, statistics of train images",
        "images": 1024,
    },
    "precision": "float32",
    "train_images_per_class": "all",
    "head": {"layer": "linear", "weight_std": 0.01, "bias": 0},
    "train_view": {
        "random_resized_crop": 224,
        "scale": [0.08, 1.0],
        "ratio": [3 / 4, 4 / 3],
        "horizontal_flip": 0.5,
        "interpolation": "bilinear",
    },
    "test_view": {"resize": 256, "centre_crop": 224, "crops": 1, "interpolation": "bilinear"},
    "optimizer": {
        "name": "sgd",
        "lr": 30.0,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "lr_scaling": "none",
    },
    "batch_size": 256,
    "epochs": 100,
    "schedule": {
        "name": "step",
        "milestones": [60, 80],
        "gamma": 0.1,
        "by": "epoch",
        "warmup": 0,
    },
    "reported": "last epoch",
}


def test_the_papers_probe_is_mocos_key_by_key():
    cfg = load_linear_eval_config("linear_eval/imagenet_linear_moco.yaml")
    assert probe_of(cfg).definition() == MOCO_LINCLS
    assert probe_of(cfg).protocol().id == "imagenet-linear-moco"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("SOLVER.BASE_LR", "3.0"),
        ("SOLVER.MILESTONES", "[30, 60]"),
        ("INPUT.SCALE", "[0.2, 1.0]"),
        ("INPUT.AUGMENT", "center"),
        ("SOLVER.AMP", "bf16"),
        ("DATA.IMAGES_PER_CLASS", "13"),
        ("BACKBONE.BATCH_NORM", "calibrate"),
    ],
)
def test_any_other_setting_or_data_loses_the_name_and_says_why(key, value):
    reference = load_linear_eval_config("linear_eval/imagenet_linear_moco.yaml")
    cfg = load_linear_eval_config("linear_eval/imagenet_linear_moco.yaml", [key, value])
    protocol = probe_of(cfg).protocol()
    assert protocol.id == probe_of(reference, SMALL).protocol().id == "linear-online"
    assert probe_of(cfg).deviations()
    assert "10 classes, not 1,000" in probe_of(reference, SMALL).deviations()
    assert protocol.hash != probe_of(reference).protocol().hash


def test_seed_backbone_and_paths_are_no_part_of_a_protocol():
    words = ["SEED", "3", "BACKBONE.WEIGHTS", "random", "DATA.TRAIN", "x", "LABEL", "mine"]
    for path in CONFIGS:
        changed, plain = load_linear_eval_config(path, words), load_linear_eval_config(path)
        assert probe_of(changed).definition() == probe_of(plain).definition()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_config_has_its_own_folder_and_ranks_no_two_precisions_together(path):
    assert f"output/linear_eval/{path.stem}" == load_linear_eval_config(path).OUTPUT_DIR
    chosen = [("false", "off"), ("true", "off"), ("false", "bf16"), ("true", "bf16")]
    found = [
        load_linear_eval_config(path, ["SOLVER.TF32", tf32, "SOLVER.AMP", amp])
        for tf32, amp in chosen
    ]
    told = [probe_of(cfg).definition()["precision"] for cfg in found]
    assert told == ["float32", "tf32", "bf16", "bf16 and tf32"]
    assert len({probe_of(cfg, SMALL).protocol().hash for cfg in found}) == len(chosen)


def test_a_wrong_config_is_told_whole():
    words = ["PROBE", "offline", "INPUT.RESIZE", "100", "CACHED.LRS", "[0.1, 0.1]"]
    words += ["CACHED.HOLD_OUT", "1.0", "INPUT.MEAN", "[0.5, 0.5]", "SOLVER.BASE_RL", "1"]
    with pytest.raises(ConfigError) as error:
        load_linear_eval_config(None, words)
    text = str(error.value)
    for key in ("PROBE", "INPUT.RESIZE", "CACHED.LRS", "CACHED.HOLD_OUT", "INPUT.MEAN"):
        assert key in text
    assert "SOLVER.BASE_RL is not a key; did you mean SOLVER.BASE_LR" in text


# Hashes of the first records; results are compared only with results of the same hash. That of
# shapes has its present grid of weight decays, which reaches 0.1; that of cifar10 is of L-BFGS.
FIRST_HASHES = {
    "cifar10": "9817d3456e9062ca",
    "imagenet_linear_moco": "da4ee16068a2802b",
    "knn": "7e225138ce063514",
    "linear_cached": "701863f1348447d0",
    "linear_cached_lbfgs": "db48e07dc4c625de",
    "shapes": "e32a2c39ca114e66",
    "shapes_knn": "144b733ded4af616",
}


@pytest.mark.parametrize("name", FIRST_HASHES)
def test_a_protocol_keeps_the_hash_that_its_first_records_have(name):
    protocol = probe_of(load_linear_eval_config(f"linear_eval/{name}.yaml")).protocol()
    assert protocol.hash == FIRST_HASHES[name]
    if "cached" in name:  # its two solvers are two protocols
        assert protocol.id == name.replace("_", "-")


def test_the_words_of_a_center_crop_are_those_of_the_first_records():
    online = load_linear_eval_config(None, ["INPUT.AUGMENT", "center"])
    assert probe_of(online).definition()["train_view"] == "centre"
    cached = load_linear_eval_config(None, ["PROBE", "cached"])
    assert probe_of(cached).definition()["train_views"] == ["centre", "flip"]


@pytest.mark.parametrize("probe", ["cached", "online"])
def test_a_longer_training_has_the_same_protocol_and_is_that_of_more_epochs(
    tmp_path, digits, probe
):
    def run(name: str, *words: object):
        folder = tmp_path / name
        assert main(overrides(digits, folder, "PROBE", probe, *words)) == 0
        weights = safetensors.torch.load_file(folder / "classifier.safetensors")
        return read_record(folder / "record.json"), weights

    longer, its_weights = run("longer", "SOLVER.LONGER", 2.5)
    more, same_weights = run("more", "SOLVER.EPOCHS", 10, "SOLVER.MILESTONES", "[5, 8]")
    assert all(torch.equal(its_weights[key], same_weights[key]) for key in same_weights)
    assert longer.details["longer"] == 2.5
    assert longer.details["epochs"] == more.details["epochs"] == 10
    assert longer.protocol.definition["epochs"] == 4
    assert longer.protocol.hash != more.protocol.hash


@pytest.mark.parametrize("words", [["PROBE", "knn"], ["CACHED.METHOD", "lbfgs"]])
def test_what_trains_for_no_number_of_epochs_has_no_longer_training(words):
    words = ["PROBE", "cached", *words, "SOLVER.LONGER", "2"]
    with pytest.raises(ConfigError, match=r"SOLVER\.LONGER"):
        load_linear_eval_config(None, words)
