"""Every file in configs/ is valid, and the paper's recipes say what the paper says."""

from __future__ import annotations

import pytest

from kscl.config.merge import load_config
from kscl.config.shipped import shipped_configs
from kscl.engine.schedule import learning_rate

PRETRAIN = sorted((shipped_configs() / "pretrain").glob("*.yaml"))
FOLDERS = {"pretrain", "linear_eval", "detection", "suites"}

# What the paper and, through it, MoCo v2 fix for all of the ResNet-50 runs.
COMMON = {
    "BACKBONE.NAME": "resnet50",
    "PROJECTOR.TYPE": "mlp",
    "PROJECTOR.DIM": 128,
    "METHOD.TEMPERATURE": 0.2,
    "KEY_ENCODER.MOMENTUM": 0.999,
    "DICTIONARY.QUEUE_LENGTH": 65536,
    "SOLVER.BATCH_SIZE": 256,
    "SOLVER.OPTIMIZER": "sgd",
    "SOLVER.BASE_LR": 0.03,
    "SOLVER.MOMENTUM": 0.9,
    "SOLVER.WEIGHT_DECAY": 1e-4,
    "SOLVER.SCHEDULE": "cosine",
    "SOLVER.LR_UPDATE": "epoch",
    "INPUT.SIZE": 224,
}
RECIPES = {
    "kscl_k5_rho40_r50_200ep": {"METHOD.NUM_SHOTS": 5, "METHOD.RHO": 0.4, "SOLVER.EPOCHS": 200},
    "kscl_k5_rho40_r50_800ep": {"METHOD.NUM_SHOTS": 5, "METHOD.RHO": 0.4, "SOLVER.EPOCHS": 800},
    "kscl_k3_rho40_r50_200ep": {"METHOD.NUM_SHOTS": 3, "METHOD.RHO": 0.4, "SOLVER.EPOCHS": 200},
    "kscl_k5_rho90_r50_200ep": {"METHOD.NUM_SHOTS": 5, "METHOD.RHO": 0.9, "SOLVER.EPOCHS": 200},
    "kscl_k1_r50_200ep": {
        "METHOD.NUM_SHOTS": 1,
        "METHOD.SIMILARITY": "projection",
        "SOLVER.EPOCHS": 200,
    },
    "moco_v2_r50_200ep": {
        "METHOD.NUM_SHOTS": 1,
        "METHOD.SIMILARITY": "cosine",
        "SOLVER.EPOCHS": 200,
    },
    "moco_v2_r50_800ep": {
        "METHOD.NUM_SHOTS": 1,
        "METHOD.SIMILARITY": "cosine",
        "SOLVER.EPOCHS": 800,
    },
    "moco_v1_r50_200ep": {
        "METHOD.NUM_SHOTS": 1,
        "METHOD.SIMILARITY": "cosine",
        "METHOD.TEMPERATURE": 0.07,
        "PROJECTOR.TYPE": "linear",
        "SOLVER.SCHEDULE": "step",
        "SOLVER.MILESTONES": [120, 160],
        "SOLVER.EPOCHS": 200,
    },
    "simclr_r50_200ep": {
        "METHOD.NUM_SHOTS": 1,
        "METHOD.SIMILARITY": "cosine",
        "METHOD.SYMMETRIC": True,
        "METHOD.TEMPERATURE": 0.1,
        "KEY_ENCODER.TYPE": "shared",
        "DICTIONARY.TYPE": "minibatch",
        "SOLVER.OPTIMIZER": "lars",
        "SOLVER.BASE_LR": 0.3,
        "SOLVER.WEIGHT_DECAY": 1e-6,
        "SOLVER.LR_UPDATE": "iter",
        "SOLVER.WARMUP_EPOCHS": 10,
        "SOLVER.EPOCHS": 200,
    },
}


def test_configs_lie_in_the_four_folders_that_are_checked():
    files = [path.relative_to(shipped_configs()) for path in shipped_configs().rglob("*.yaml")]
    assert files
    assert {path.parts[0] for path in files} <= FOLDERS


@pytest.mark.parametrize("path", PRETRAIN, ids=lambda path: path.stem)
def test_every_pretraining_config_is_valid_and_has_an_output_folder_of_its_own(path):
    assert path.stem in load_config(path).OUTPUT_DIR


@pytest.mark.parametrize("name", RECIPES)
def test_the_papers_recipes_say_what_the_paper_says(name):
    cfg = load_config(f"pretrain/{name}.yaml")
    for key, value in (COMMON | RECIPES[name]).items():
        node = cfg
        for part in key.split("."):
            node = node[part]
        assert node == value, key


def test_moco_augmentation_is_moco_s():
    v1 = load_config("pretrain/moco_v1_r50_200ep.yaml").AUGMENT
    assert [op["op"] for op in v1] == [
        "random_resized_crop",
        "grayscale",
        "color_jitter",
        "horizontal_flip",
    ]
    v2 = load_config("pretrain/moco_v2_r50_200ep.yaml").AUGMENT
    assert [op["op"] for op in v2] == [
        "random_resized_crop",
        "color_jitter",
        "grayscale",
        "gaussian_blur",
        "horizontal_flip",
    ]


def test_simclr_at_its_large_batch_has_its_own_learning_rate():
    cfg = load_config("pretrain/simclr_r50_200ep.yaml", ["SOLVER.BATCH_SIZE", "4096"])
    assert learning_rate(cfg) == pytest.approx(4.8)
