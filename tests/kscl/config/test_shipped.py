"""Every file in configs/ is valid, and the paper's recipes say what the paper says."""

from __future__ import annotations

import pytest

from kscl.config import config_values, shipped_configs, value_at
from kscl.engine.schedule import learning_rate
from kscl.keys import load_config
from kscl.run.engine import changed_keys
from kscl.views.augment import resolve

PRETRAIN = sorted((shipped_configs() / "pretrain").glob("[!_]*.yaml"))
FOLDERS = {"pretrain", "linear_eval", "detection", "suites", "slurm"}

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
    "SOLVER.CUDNN_BENCHMARK": True,  # as main_moco.py
    "INPUT.SIZE": 224,
}
MOCO = {"METHOD.NUM_SHOTS": 1, "METHOD.SIMILARITY": "cosine", "SOLVER.EPOCHS": 200}
RECIPES = {
    "kscl_k5_rho40_r50_200ep": {"METHOD.NUM_SHOTS": 5, "METHOD.RHO": 0.4, "SOLVER.EPOCHS": 200},
    "kscl_k5_rho40_r50_800ep": {"METHOD.NUM_SHOTS": 5, "METHOD.RHO": 0.4, "SOLVER.EPOCHS": 800},
    "kscl_k3_rho40_r50_200ep": {"METHOD.NUM_SHOTS": 3, "METHOD.RHO": 0.4, "SOLVER.EPOCHS": 200},
    "kscl_k5_rho90_r50_200ep": {"METHOD.NUM_SHOTS": 5, "METHOD.RHO": 0.9, "SOLVER.EPOCHS": 200},
    "kscl_k1_r50_200ep": MOCO | {"METHOD.SIMILARITY": "projection"},
    "kscl_fast_r50_200ep": MOCO | {"METHOD.SIMILARITY": "projection", "METHOD.REMEMBER": 4},
    "moco_v2_r50_200ep": MOCO,
    "moco_v2_r50_800ep": MOCO | {"SOLVER.EPOCHS": 800},
    "moco_v1_r50_200ep": MOCO
    | {
        "METHOD.TEMPERATURE": 0.07,
        "PROJECTOR.TYPE": "linear",
        "SOLVER.SCHEDULE": "step",
        "SOLVER.MILESTONES": [120, 160],
    },
    "simclr_r50_200ep": MOCO
    | {
        "METHOD.SYMMETRIC": True,
        "METHOD.REDUCTION": "sum",
        "PROJECTOR.TYPE": "simclr",
        "BACKBONE.KWARGS.zero_init_last": True,
        "SOLVER.SYNC_BATCH_NORM": True,
        "METHOD.TEMPERATURE": 0.1,
        "KEY_ENCODER.TYPE": "shared",
        "DICTIONARY.TYPE": "minibatch",
        "SOLVER.OPTIMIZER": "lars",
        "SOLVER.BASE_LR": 0.3,
        "SOLVER.WEIGHT_DECAY": 1e-6,
        "SOLVER.LR_UPDATE": "iter",
        "SOLVER.WARMUP_EPOCHS": 10,
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
        assert value_at(cfg, key) == value, key


# google-deepmind/deepmind-research@4822a45 and facebookresearch/vicreg@4e12602.
OF_OTHERS = {
    "byol_r50_1000ep": {
        "METHOD.MOMENTUM": 0.996,
        "METHOD.PREDICTOR_DIM": 4096,
        "PROJECTOR.HIDDEN_DIM": 4096,
        "PROJECTOR.DIM": 256,
        "SOLVER.BATCH_SIZE": 4096,
        "SOLVER.BASE_LR": 0.2,
        "SOLVER.WEIGHT_DECAY": 1.5e-6,
    },
    "vicreg_r50_1000ep": {
        "METHOD.INVARIANCE": 25,
        "METHOD.VARIANCE": 25,
        "METHOD.COVARIANCE": 1,
        "PROJECTOR.HIDDEN_DIM": 8192,
        "PROJECTOR.DIM": 8192,
        "SOLVER.BATCH_SIZE": 2048,
        "SOLVER.BASE_LR": 0.2,
        "SOLVER.WEIGHT_DECAY": 1e-6,
    },
}


@pytest.mark.parametrize("name", OF_OTHERS)
def test_the_recipes_of_other_methods_say_what_their_code_says(name):
    cfg = load_config(f"pretrain/{name}.yaml")
    common = {"EPOCHS": 1000, "WARMUP_EPOCHS": 10, "OPTIMIZER": "lars", "SYNC_BATCH_NORM": True}
    expected = OF_OTHERS[name] | {f"SOLVER.{key}": value for key, value in common.items()}
    for key, value in expected.items():
        assert value_at(cfg, key) == value, key
    recipes = [{op["op"]: op for op in recipe} for recipe in (cfg.AUGMENT, cfg.AUGMENT_KEYS)]
    assert [recipe["gaussian_blur"]["p"] for recipe in recipes] == [1.0, 0.1]
    assert ["solarize" in recipe for recipe in recipes] == [False, True]


@pytest.mark.parametrize("path", sorted(shipped_configs().glob("pretrain/*_gpu8.yaml")), ids=str)
def test_the_settings_for_gpus_change_how_a_recipe_is_computed_and_nothing_else(path):
    ours = load_config(path)
    recipe = load_config(f"pretrain/{path.stem.removesuffix('_gpu8')}.yaml")
    changed = changed_keys(config_values(recipe), config_values(ours), ())
    how = {"AMP": "bf16", "CHANNELS_LAST": True, "TF32": True}
    expected = {"OUTPUT_DIR", "DATA.NUM_WORKERS", *(f"SOLVER.{key}" for key in how)}
    assert {key for key, _, _ in changed} == expected
    assert {key: ours.SOLVER[key] for key in how} == how


def test_the_fast_variant_in_the_papers_suite_is_made_of_what_the_gpu_recipes_set():
    text = (shipped_configs() / "suites/paper.yaml").read_text()
    fast = load_config("pretrain/kscl_k5_rho40_r50_200ep_gpu8.yaml")
    recipe = load_config("pretrain/kscl_k5_rho40_r50_200ep.yaml")
    for key, _, value in changed_keys(config_values(recipe), config_values(fast), ("OUTPUT_DIR",)):
        assert f"{key}: {str(value).lower() if isinstance(value, bool) else value}" in text
    assert "pretrain/kscl_k5_rho40_r50_200ep_gpu8.yaml" in text


def jitter(strength: float, hue: float, p: float) -> dict:
    numbers = {"brightness": strength, "contrast": strength, "saturation": strength}
    return {"op": "color_jitter", **numbers, "hue": hue, "p": p}


# Every number of the sources: main_moco.py with and without --aug-plus, and the SimCLR paper's
# appendix A with color strength 1.
CROP = {"op": "random_resized_crop", "ratio": (3 / 4, 4 / 3)}
GRAY = {"op": "grayscale", "p": 0.2}
FLIP = {"op": "horizontal_flip", "p": 0.5}
BLUR = {"op": "gaussian_blur", "sigma": (0.1, 2.0), "p": 0.5}
AUGMENT = {
    "moco_v1_r50_200ep": [CROP | {"scale": (0.2, 1.0)}, GRAY, jitter(0.4, hue=0.4, p=1.0), FLIP],
    "moco_v2_r50_200ep": [
        CROP | {"scale": (0.2, 1.0)},
        jitter(0.4, hue=0.1, p=0.8),
        GRAY,
        BLUR,
        FLIP,
    ],
    "simclr_r50_200ep": [
        CROP | {"scale": (0.08, 1.0)},
        FLIP,
        jitter(0.8, hue=0.2, p=0.8),
        GRAY,
        BLUR,
    ],
}


def augmentation_of(name: str) -> list[dict]:
    """The recipe with every number written out, ranges as tuples."""
    recipe = []
    for op in resolve(load_config(f"pretrain/{name}.yaml").AUGMENT):
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in op.values.items()}
        chance = {} if op.p is None else {"p": op.p}
        recipe.append({"op": op.name, **values, **chance})
    return recipe


@pytest.mark.parametrize("name", AUGMENT)
def test_the_augmentation_is_the_sources_in_every_number(name):
    assert augmentation_of(name) == AUGMENT[name]


@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(AUGMENT)))
def test_every_other_recipe_augments_as_moco_v2(name):
    assert augmentation_of(name) == AUGMENT["moco_v2_r50_200ep"]


def test_simclr_at_its_large_batch_has_its_own_learning_rate():
    cfg = load_config("pretrain/simclr_r50_200ep.yaml", ["SOLVER.BATCH_SIZE", "4096"])
    assert learning_rate(cfg) == pytest.approx(4.8)
