"""Random choices of every op follow torchvision's, and come from addresses, not from history."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision import transforms as T

from kscl.rng import Stream, permutation, uniforms
from kscl.views.recipes import MOCO_V2, RECIPES, with_defaults
from kscl.views.sample import Box, draws_per_view, sample_view

# Written down once; a run could not be resumed on a machine where they came out otherwise.
FIRST_NUMBERS = [0.011546754286331562, 0.24154919656271812]
FIRST_ORDER = [7, 3, 5, 6, 4, 0, 2, 1]

COUNT = 3000
SAME = 1e-3  # a p-value below this says that two samples come from different distributions


def sample_many(ops, height=375, width=500, size=224, count=COUNT):
    ops = with_defaults(ops)
    numbers = uniforms(7, 0, Stream.VIEWS, 0, count * draws_per_view(ops)).reshape(count, -1)
    return [sample_view(ops, height, width, size, row) for row in numbers.tolist()]


def same_distribution(ours, reference):
    return stats.ks_2samp(ours, reference).pvalue > SAME


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.2, 1.0)])
@pytest.mark.parametrize(("height", "width"), [(375, 500), (500, 333), (100, 300)])
def test_crops_are_distributed_as_torchvisions(scale, height, width):
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    reference = np.array(
        [T.RandomResizedCrop.get_params(image, scale, (3 / 4, 4 / 3)) for _ in range(COUNT)]
    )
    steps = sample_many([{"op": "random_resized_crop", "scale": scale}], height, width)
    ours = np.array([box for ((_, box),) in steps])
    for name, of in {
        "top": lambda box: box[:, 0],
        "left": lambda box: box[:, 1],
        "area": lambda box: box[:, 2] * box[:, 3],
        "aspect": lambda box: box[:, 3] / box[:, 2],
    }.items():
        assert same_distribution(of(ours), of(reference)), name


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10)])
def test_where_no_random_crop_fits_the_middle_is_taken_as_torchvision_does(height, width):
    image = torch.empty(1, height, width)
    reference = T.RandomResizedCrop.get_params(image, (1.0, 1.0), (3 / 4, 4 / 3))
    (((_, box),),) = sample_many(
        [{"op": "random_resized_crop", "scale": [1.0, 1.0]}], height, width, count=1
    )
    assert tuple(box) == tuple(reference)


def test_jitter_factors_and_their_order_are_distributed_as_torchvisions():
    torch.manual_seed(0)
    reference = [
        T.ColorJitter.get_params((0.6, 1.4), (0.7, 1.3), (0.2, 1.8), (-0.1, 0.1))[1:]
        for _ in range(COUNT)
    ]
    strengths = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.8, "hue": 0.1}
    ours = sample_many([{"op": "color_jitter", **strengths}])
    for place, name in enumerate(strengths):
        factors = [dict(steps)[name] for steps in ours]
        assert same_distribution(factors, [draw[place] for draw in reference]), name
    orders = [tuple(name for name, _ in steps if name != "crop") for steps in ours]
    counts = [orders.count(order) for order in itertools.permutations(strengths)]
    assert sum(counts) == COUNT
    assert stats.chisquare(counts).pvalue > SAME


def test_a_strong_jitter_never_turns_a_factor_negative():
    factors = [
        dict(steps)["contrast"] for steps in sample_many([{"op": "color_jitter", "contrast": 3}])
    ]
    assert min(factors) >= 0
    torch.manual_seed(0)
    jitter = T.ColorJitter(contrast=3)
    reference = [jitter.get_params(None, jitter.contrast, None, None)[2] for _ in range(COUNT)]
    assert same_distribution(factors, reference)


def test_a_jitter_of_strength_zero_is_no_step():
    assert {
        name for steps in sample_many([{"op": "color_jitter", "hue": 0.1}]) for name, _ in steps
    } == {
        "crop",
        "hue",
    }


def test_sigma_is_distributed_as_in_mocos_blur():
    random.seed(0)
    reference = [random.uniform(0.1, 2.0) for _ in range(COUNT)]
    ours = sample_many([{"op": "gaussian_blur", "sigma": [0.1, 2.0], "p": 1.0}])
    assert same_distribution([dict(steps)["blur"] for steps in ours], reference)


@pytest.mark.parametrize(
    ("op", "step", "chance"),
    [
        ({"op": "grayscale", "p": 0.2}, "grayscale", 0.2),
        ({"op": "gaussian_blur", "p": 0.5}, "blur", 0.5),
        ({"op": "horizontal_flip", "p": 0.5}, "flip", 0.5),
        ({"op": "solarize", "p": 0.1}, "solarize", 0.1),
        ({"op": "color_jitter", "hue": 0.1, "p": 0.8}, "hue", 0.8),
    ],
)
def test_an_op_happens_as_often_as_it_says(op, step, chance):
    happened = sum(step in dict(steps) for steps in sample_many([op]))
    assert stats.binomtest(happened, COUNT, chance).pvalue > SAME


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_an_op_of_chance_zero_or_one_is_certain(chance):
    happened = {"flip" in dict(s) for s in sample_many([{"op": "horizontal_flip", "p": chance}])}
    assert happened == {bool(chance)}


def test_choices_of_one_view_are_independent_of_each_other():
    views = sample_many(MOCO_V2)
    happened = np.array(
        [[step in dict(s) for step in ("hue", "grayscale", "blur", "flip")] for s in views]
    )
    crop_areas = np.array([dict(s)["crop"].height * dict(s)["crop"].width for s in views])
    table = np.corrcoef(np.column_stack([happened, crop_areas]).T)
    assert np.abs(table - np.eye(5)).max() < 4 / np.sqrt(COUNT)


@settings(max_examples=200, deadline=None)
@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    recipe=st.sampled_from(sorted(RECIPES)),
    seed=st.integers(0, 2**63),
)
def test_a_crop_lies_inside_any_image_and_the_numbers_suffice(height, width, recipe, seed):
    ops = with_defaults(RECIPES[recipe])
    name, box = sample_view(
        ops, height, width, 224, uniforms(seed, 1, Stream.VIEWS, 2, draws_per_view(ops))
    )[0]
    assert name == "crop"
    assert box.height > 0
    assert box.width > 0
    assert 0 <= box.top <= height - box.height
    assert 0 <= box.left <= width - box.width


def test_without_a_random_crop_the_middle_square_is_taken():
    steps = sample_many([{"op": "horizontal_flip", "p": 1.0}], height=30, width=50, count=1)[0]
    assert steps == [("crop", Box(0, 10, 30, 30)), ("flip", None)]


def test_a_crop_in_the_middle_of_a_recipe_sees_what_came_before_it():
    ops = [
        {"op": "horizontal_flip", "p": 1.0},
        {"op": "random_resized_crop"},
        {"op": "random_resized_crop"},
    ]
    for steps in sample_many(ops, 300, 400, size=20, count=50):
        assert [name for name, _ in steps] == ["flip", "crop", "crop"]
        assert steps[2][1].height <= 20


def test_numbers_depend_on_every_part_of_their_address_and_on_nothing_else():
    address = (1, 2, Stream.VIEWS, 3)
    numbers = uniforms(*address, 50)
    assert np.array_equal(uniforms(*address, 50), numbers)
    assert np.array_equal(uniforms(*address, 10), numbers[:10])
    for place in range(4):
        other = list(address)
        other[place] += 1
        assert not np.intersect1d(uniforms(*other, 50), numbers).size
    assert stats.kstest(uniforms(0, 0, Stream.VIEWS, 0, 10_000), "uniform").pvalue > SAME


def test_numbers_never_change_between_versions():
    assert uniforms(0, 0, 0, 0, 2).tolist() == FIRST_NUMBERS
    assert permutation(3, 1, 0, 8).tolist() == FIRST_ORDER


def test_a_negative_or_huge_seed_is_as_good_as_any():
    assert len({uniforms(seed, 0, 0, 0, 1).item() for seed in (-1, 0, 2**63, 2**64 - 2)}) == 4
