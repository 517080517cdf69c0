"""Recipes are plain lists that a user can edit, and every slip in one is named."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import yaml

from kscl.errors import ConfigError, KsclError
from kscl.keys import load_config
from kscl.views.augment import (
    AUGMENTATIONS,
    Parameter,
    Step,
    augmentation,
    make_views,
    resolve,
    sample_ops,
)
from kscl.views.recipes import RECIPES, check_recipe
from tests.helpers.config_reference import config_page


@pytest.mark.parametrize("name", RECIPES)
def test_a_known_recipe_is_valid_and_survives_yaml(name):
    assert check_recipe(RECIPES[name], "AUGMENT") == []
    assert yaml.safe_load(yaml.safe_dump(RECIPES[name])) == RECIPES[name]


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("moco_v2", ["must be a list"]),
        (["grayscale"], ["AUGMENT[0]", "mapping"]),
        ([{"op": "colour_jitter"}], ["'colour_jitter'", "did you mean 'color_jitter'?"]),
        ([{"op": "rotate"}], ["'rotate'", "choose from random_resized_crop"]),
        ([{"op": ["x"]}], ["there is no op"]),
        ([{"op": "gaussian_blur", "sigmas": [1, 2]}], ["'sigmas'", "did you mean 'sigma'?"]),
        ([{"op": "grayscale", "p": 1.5}], ["p of grayscale", "from 0 to 1", "1.5"]),
        ([{"op": "grayscale", "p": True}], ["from 0 to 1", "True"]),
        ([{"op": "grayscale", "p": float("nan")}], ["from 0 to 1", "nan"]),
        ([{"op": "color_jitter", "hue": 0.6}], ["hue of color_jitter", "from 0 to 0.5"]),
        ([{"op": "random_resized_crop", "scale": [1.0, 0.2]}], ["scale", "low <= high"]),
        ([{"op": "random_resized_crop", "scale": 0.2}], ["scale", "[low, high]"]),
        ([{"op": "random_resized_crop", "scale": [0.2, 2.0]}], ["scale", "<= 1"]),
    ],
)
def test_a_slip_in_a_recipe_is_named(recipe, said):
    problems = check_recipe(recipe, "AUGMENT")
    bare = [{"op": name} for name in AUGMENTATIONS]
    if isinstance(recipe, list):  # valid entries beside it are not in the way
        assert problems[0] in check_recipe([*recipe, *bare], "AUGMENT")
    assert len(problems) == 1
    for words in said:
        assert words in problems[0]


def test_checking_a_recipe_loads_no_torch_and_naming_one_no_opencv():
    code = (
        "import sys; from kscl.views.recipes import RECIPES, check_recipe\n"
        "assert not {'torch', 'cv2', 'numpy'} & set(sys.modules)\n"
        "assert check_recipe(RECIPES['moco_v2'], '') == []\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def painted(picture, column, level):
    picture = picture.copy()
    picture[:, column] = level
    return picture


def paint(view, level):
    """Paint a column."""
    return [Step(painted, (int(view.draw() * view.width), view.between(level)))]


@pytest.fixture
def new_op(monkeypatch):
    """Register `paint`, and forget it after the test."""
    monkeypatch.setattr(AUGMENTATIONS, "data", dict(AUGMENTATIONS.data))
    level = Parameter((0.0, 9.0), 0, 255, "Level to paint with.")
    augmentation(p=0.25, draws=2, level=level)(paint)


def test_a_new_augmentation_is_known_to_configs_checks_and_docs(new_op):
    load_config(None, ["AUGMENT", "[{op: paint, level: [1, 2]}]"])
    with pytest.raises(ConfigError, match="level of paint"):
        load_config(None, ["AUGMENT", "[{op: paint, level: [1, 256]}]"])
    assert "| `paint` | `level` | `[0.0, 9.0]` | two numbers from 0 to 255 |" in config_page()
    with pytest.raises(KsclError, match="paint"):
        augmentation()(paint)


def test_a_worker_that_has_not_registered_an_augmentation_makes_its_views_too(new_op):
    sent = pickle.dumps(resolve([{"op": "paint", "p": 1.0}]))
    del AUGMENTATIONS["paint"]
    views, picture = np.empty((1, 3, 8, 8), np.uint8), np.full((8, 8, 3), 100, np.uint8)
    make_views(picture, pickle.loads(sent), 8, np.array([0.0, 0.5, 1.0]), views)
    assert (views == 9).all(axis=(0, 1, 2)).tolist() == [column == 4 for column in range(8)]


def test_declared_numbers_must_suffice(new_op):
    with pytest.raises(RuntimeError, match="paint"):
        list(sample_ops(resolve([{"op": "paint", "p": 1.0}]), 8, 8, 8, [0.0, 0.5]))
