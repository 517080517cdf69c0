"""Recipes are plain lists that a user can edit, and every slip in one is named."""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from kscl.views.recipes import MOCO_V1, MOCO_V2, OPS, RECIPES, SIMCLR, check_recipe, with_defaults


@pytest.mark.parametrize("name", RECIPES)
def test_a_known_recipe_is_valid_and_survives_yaml(name):
    assert check_recipe(RECIPES[name], "AUGMENT") == []
    assert yaml.safe_load(yaml.safe_dump(RECIPES[name])) == RECIPES[name]


def test_the_recipes_have_the_published_order_and_strengths():
    def short(recipe):
        return [tuple(op.values()) for op in with_defaults(recipe)]

    ratio = (3 / 4, 4 / 3)
    assert short(MOCO_V1) == [
        ("random_resized_crop", [0.2, 1.0], ratio),
        ("grayscale", 0.2),
        ("color_jitter", 0.4, 0.4, 0.4, 0.4, 1.0),
        ("horizontal_flip", 0.5),
    ]
    assert short(MOCO_V2) == [
        ("random_resized_crop", [0.2, 1.0], ratio),
        ("color_jitter", 0.4, 0.4, 0.4, 0.1, 0.8),
        ("grayscale", 0.2),
        ("gaussian_blur", [0.1, 2.0], 0.5),
        ("horizontal_flip", 0.5),
    ]
    assert short(SIMCLR) == [
        ("random_resized_crop", [0.08, 1.0], ratio),
        ("horizontal_flip", 0.5),
        ("color_jitter", 0.8, 0.8, 0.8, 0.2, 0.8),
        ("grayscale", 0.2),
        ("gaussian_blur", [0.1, 2.0], 0.5),
    ]


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("moco_v2", ["must be a list"]),
        ({"op": "grayscale"}, ["must be a list"]),
        (["grayscale"], ["AUGMENT[0]", "mapping"]),
        ([{"p": 0.5}], ["AUGMENT[0]", "mapping"]),
        ([{"op": "colour_jitter"}], ["'colour_jitter'", "did you mean 'color_jitter'?"]),
        ([{"op": "rotate"}], ["'rotate'", "choose from random_resized_crop"]),
        ([{"op": ["x"]}], ["there is no op"]),
        ([{"op": "gaussian_blur", "sigmas": [1, 2]}], ["'sigmas'", "did you mean 'sigma'?"]),
        ([{"op": "grayscale", "p": 1.5}], ["p of grayscale", "from 0 to 1", "1.5"]),
        ([{"op": "grayscale", "p": True}], ["from 0 to 1", "True"]),
        ([{"op": "grayscale", "p": "0.5"}], ["from 0 to 1", "'0.5'"]),
        ([{"op": "grayscale", "p": float("nan")}], ["from 0 to 1", "nan"]),
        ([{"op": "color_jitter", "hue": 0.6}], ["hue of color_jitter", "from 0 to 0.5"]),
        ([{"op": "random_resized_crop", "scale": [1.0, 0.2]}], ["scale", "low <= high"]),
        ([{"op": "random_resized_crop", "scale": 0.2}], ["scale", "[low, high]"]),
        ([{"op": "random_resized_crop", "scale": [0.2, 2.0]}], ["scale", "<= 1"]),
    ],
)
def test_a_slip_in_a_recipe_is_named(recipe, said):
    problems = check_recipe(recipe, "AUGMENT")
    assert len(problems) == 1
    for words in said:
        assert words in problems[0]


def test_all_problems_are_told_at_once():
    recipe = [{"op": "blurr"}, {"op": "solarize", "p": 2, "treshold": 3}, {"op": "grayscale"}]
    assert len(check_recipe(recipe, "AUGMENT")) == 3


def test_an_empty_recipe_and_bare_ops_are_valid():
    assert check_recipe([], "AUGMENT") == []
    assert check_recipe([{"op": name} for name in OPS], "AUGMENT") == []


def test_defaults_are_filled_in_and_the_recipe_itself_is_left_alone():
    recipe = [{"op": "solarize", "p": 0.1}]
    assert with_defaults(recipe) == [{"op": "solarize", "threshold": 128, "p": 0.1}]
    assert recipe == [{"op": "solarize", "p": 0.1}]


def test_checking_a_recipe_loads_neither_torch_nor_opencv():
    heavy = "{'torch', 'cv2', 'numpy'}"
    code = f"import sys, kscl.views.recipes; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
