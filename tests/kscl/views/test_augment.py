"""Views are those that torchvision on PIL gives: the random choices follow the same distributions,
come from addresses and not from history, and the fast route makes the same pixels of them.
"""

from __future__ import annotations

import colorsys
import itertools

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from torchvision import transforms as T

from kscl.rng import Stream, permutation, uniforms
from kscl.views import augment
from kscl.views.augment import (
    AUGMENTATIONS,
    Box,
    Step,
    apply_steps,
    blur_kernel,
    draws_per_view,
    make_views,
    resized_crop,
    resolve,
    sample_ops,
    turn_hue,
)
from kscl.views.normalize import normalize, normalize_planes
from kscl.views.recipes import MOCO_V2, RECIPES
from tests.helpers.data.photos import photo
from tests.helpers.torchvision_route import apply_on_pil

CLOSE = 1.2  # mean absolute difference of 0 … 255 values
PHOTOS = [photo(seed) for seed in range(3)]


def as_rgb(picture):
    return np.dstack([picture] * 3) if picture.ndim == 2 else picture


def difference(picture, reference):
    return float(np.abs(as_rgb(picture).astype(int) - reference).mean())


def sample_view(*arguments):
    return list(itertools.chain.from_iterable(sample_ops(*arguments)))


def step(name, *arguments):
    return Step(getattr(augment, name), arguments)


def compare(picture, steps):
    """Mean absolute difference of the two routes on the same steps."""
    reference = apply_on_pil(Image.fromarray(picture), steps)
    return difference(apply_steps(picture, steps), reference)


def views_of(picture, recipe, count, size):
    ops = resolve(recipe)
    views = np.empty((count, 3, size, size), np.uint8)
    make_views(
        picture, ops, size, uniforms(0, 0, Stream.VIEWS, 0, count * draws_per_view(ops)), views
    )
    return views


def sharpness(picture):
    """Variance of the Laplacian: aliasing makes too much of it, blurring too little."""
    gray = np.asarray(picture, np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    return cv2.Laplacian(gray, cv2.CV_32F).var()


@pytest.mark.parametrize("recipe", RECIPES)
def test_views_of_a_recipe_are_close_to_torchvisions_with_the_same_choices(recipe):
    ops = resolve(RECIPES[recipe])
    differences = []
    for index, picture in enumerate(PHOTOS):
        for draws in uniforms(5, 0, Stream.VIEWS, index, 8 * draws_per_view(ops)).reshape(8, -1):
            steps = sample_view(ops, *picture.shape[:2], 224, draws.tolist())
            differences.append(compare(picture, steps))
    assert np.mean(differences) <= CLOSE / 2
    assert np.mean([d <= CLOSE for d in differences]) >= 0.95


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("adjust_brightness", [0.0, 0.6, 1.0, 2.0]),
        ("adjust_contrast", [0.0, 0.6, 1.0, 2.0]),
        ("adjust_saturation", [0.0, 0.6, 1.0, 2.0]),
        ("adjust_hue", [-0.5, -0.1, 0.0, 0.03, 0.4]),
        ("blur", [0.0, 0.1, 0.7, 2.0, 5.0]),
        ("invert_above", [0, 1, 128, 256]),
    ],
)
def test_every_step_alone_is_close_to_torchvisions(name, values):
    for value in values:
        # PIL rounds after each of a blur's six passes.
        assert compare(PHOTOS[0], [step(name, value)]) <= (1 if name == "blur" else 0.5), value


@settings(max_examples=25, deadline=None)
@given(
    order=st.permutations(["crop", "color", "grayscale", "blur", "flip", "solarize"]),
    kept=st.integers(1, 6),
    factors=st.permutations(
        [("brightness", 1.3), ("contrast", 0.8), ("saturation", 1.2), ("hue", 0.07)]
    ),
)
def test_any_order_of_any_ops_keeps_torchvisions_meaning(order, kept, factors):
    meaning = {
        "crop": [step("resized_crop", Box(3, 5, 90, 70), 64)],
        "color": [step(f"adjust_{name}", factor) for name, factor in factors],
        "grayscale": [step("to_grayscale")],
        "blur": [step("blur", 0.8)],
        "flip": [step("hflip")],
        "solarize": [step("invert_above", 128)],  # where it does not jump
    }
    steps = [each for op in order[:kept] for each in meaning[op]]
    assert compare(PHOTOS[0][:100, :120], steps) <= 1.5


@pytest.mark.parametrize("sectors", [-3, -2.6, -1, -0.4, 0, 0.3, 0.5, 1, 1.7, 2, 2.9])
def test_a_turned_hue_is_the_one_of_the_definition(sectors):
    colors = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    colors[0], colors[1, :, 1] = colors[0, :, :1], colors[1, :, 2]  # gray, and two channels equal
    hsv = [colorsys.rgb_to_hsv(*color) for color in (colors / 255).reshape(-1, 3).tolist()]
    exact = [colorsys.hsv_to_rgb((hue + sectors / 6) % 1, *rest) for hue, *rest in hsv]
    turned = turn_hue(colors, sectors).reshape(-1, 3)
    assert np.abs(turned - 255 * np.array(exact)).max() <= 0.501


BOXES = [Box(0, 0, 375, 500), Box(10, 20, 300, 320), Box(0, 0, 230, 225), Box(30, 40, 150, 160)]
WIDE_AND_TALL = [Box(0, 0, 200, 480), Box(0, 0, 370, 190)]


@pytest.mark.parametrize("box", BOXES + WIDE_AND_TALL)
def test_resizing_does_not_alias(box):
    noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    for picture in (PHOTOS[0], noise):
        reference = apply_on_pil(Image.fromarray(picture), [step("resized_crop", box, 224)])
        ours = resized_crop(picture, box, 224)
        assert difference(ours, reference) <= 0.5
        assert sharpness(ours) / sharpness(reference) == pytest.approx(1, abs=0.03)


@given(sigma=st.floats(0, 50))
def test_a_blur_kernel_is_symmetric_positive_and_of_the_right_spread(sigma):
    kernel = blur_kernel(sigma).astype(np.float64)
    offsets = np.arange(len(kernel)) - len(kernel) // 2
    assert np.array_equal(kernel, kernel[::-1])
    assert kernel.min() >= 0
    assert kernel.sum() == pytest.approx(1, abs=1e-5)
    assert (kernel * offsets**2).sum() == pytest.approx(sigma**2, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (37, 1), (5, 7), (32, 32), (900, 40)])
def test_an_image_of_any_size_gives_views_of_the_size_asked_for(shape):
    picture = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    for recipe in RECIPES.values():
        views_of(picture, recipe, 3, 32)


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_every_augmentation_changes_views_but_not_the_decoded_image(name):
    recipe = [{"op": "random_resized_crop"}, {"op": name}]
    if "p" in AUGMENTATIONS[name].parameters:
        recipe[1]["p"] = 1.0
    if name == "color_jitter":
        recipe[1]["contrast"] = 0.5
    before = PHOTOS[2].copy()
    views = views_of(PHOTOS[2], recipe, 4, 64)
    assert np.array_equal(PHOTOS[2], before)
    assert not np.array_equal(views, views_of(PHOTOS[2], recipe[:1], 4, 64))


def test_a_gray_view_has_three_equal_planes():
    (view,) = views_of(PHOTOS[0], [{"op": "grayscale", "p": 1.0}], 1, 48)
    assert np.array_equal(view[0], view[1])
    assert np.array_equal(view[0], view[2])
    steps = [step("resized_crop", Box(0, 62, 375, 375), 48), step("to_grayscale")]
    reference = apply_on_pil(Image.fromarray(PHOTOS[0]), steps)
    assert difference(view.transpose(1, 2, 0), reference) <= 0.5


def test_normalizing_equals_torchvisions_on_the_device_and_in_a_worker():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    view = PHOTOS[0][:64, :64]
    reference = T.Normalize(mean, std)(T.ToTensor()(Image.fromarray(view)))
    planes = view.transpose(2, 0, 1).copy()[None]
    assert torch.allclose(normalize(torch.from_numpy(planes), mean, std)[0], reference, atol=1e-6)
    in_worker = np.empty(planes.shape, np.float32)
    normalize_planes(planes, mean, std, in_worker)
    assert torch.allclose(torch.from_numpy(in_worker)[0], reference, atol=1e-6)


# Written down once; a run could not be resumed on a machine where they came out otherwise.
FIRST_NUMBERS = [0.011546754286331562, 0.24154919656271812]
FIRST_ORDER = [7, 3, 5, 6, 4, 0, 2, 1]

COUNT = 3000
SAME = 1e-3  # a p-value below this says that two samples come from different distributions


def sample_many(recipe, height=375, width=500, size=224, count=COUNT):
    """The arguments of every step of each view, by the name of the step."""
    ops = resolve(recipe)
    numbers = uniforms(7, 0, Stream.VIEWS, 0, count * draws_per_view(ops)).reshape(count, -1)
    views = [sample_view(ops, height, width, size, row) for row in numbers.tolist()]
    return [{step.apply.__name__: step.arguments for step in steps} for steps in views]


def same_distribution(ours, reference):
    return stats.ks_2samp(ours, reference).pvalue > SAME


@pytest.mark.parametrize(
    ("scale", "height", "width"),
    [((0.08, 1.0), 375, 500), ((0.2, 1.0), 500, 333), ((0.2, 1.0), 100, 300)],
)
def test_crops_are_distributed_as_torchvisions(scale, height, width):
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    reference = np.array(
        [T.RandomResizedCrop.get_params(image, scale, (3 / 4, 4 / 3)) for _ in range(COUNT)]
    )
    steps = sample_many([{"op": "random_resized_crop", "scale": scale}], height, width)
    ours = np.array([step["resized_crop"][0] for step in steps])
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
    recipe = [{"op": "random_resized_crop", "scale": [1.0, 1.0]}]
    (steps,) = sample_many(recipe, height, width, count=1)
    assert tuple(steps["resized_crop"][0]) == tuple(reference)


def test_jitter_factors_and_their_order_are_distributed_as_torchvisions():
    torch.manual_seed(0)
    reference = [
        T.ColorJitter.get_params((0.6, 1.4), (0.7, 1.3), (0.2, 1.8), (-0.1, 0.1))[1:]
        for _ in range(COUNT)
    ]
    strengths = {"brightness": 0.4, "contrast": 0.3, "saturation": 0.8, "hue": 0.1}
    ours = sample_many([{"op": "color_jitter", **strengths}])
    for place, name in enumerate(strengths):
        factors = [steps[f"adjust_{name}"][0] for steps in ours]
        assert same_distribution(factors, [draw[place] for draw in reference]), name
    orders = [tuple(steps)[1:] for steps in ours]
    counts = [orders.count(order) for order in itertools.permutations(sorted(orders[0]))]
    assert sum(counts) == COUNT
    assert stats.chisquare(counts).pvalue > SAME


def test_a_strong_jitter_never_turns_a_factor_negative():
    sampled = sample_many([{"op": "color_jitter", "contrast": 3}])
    factors = [steps["adjust_contrast"][0] for steps in sampled]
    assert min(factors) >= 0
    torch.manual_seed(0)
    jitter = T.ColorJitter(contrast=3)
    reference = [jitter.get_params(None, jitter.contrast, None, None)[2] for _ in range(COUNT)]
    assert same_distribution(factors, reference)


@pytest.mark.parametrize(
    ("op", "step", "chance"),
    [
        ({"op": "grayscale", "p": 0.2}, "to_grayscale", 0.2),
        ({"op": "gaussian_blur", "p": 0.5}, "blur", 0.5),
        ({"op": "horizontal_flip", "p": 0.5}, "hflip", 0.5),
        ({"op": "solarize", "p": 0.1}, "invert_above", 0.1),
        ({"op": "color_jitter", "hue": 0.1, "p": 0.8}, "adjust_hue", 0.8),
        ({"op": "horizontal_flip", "p": 0.0}, "hflip", 0.0),
        ({"op": "horizontal_flip", "p": 1.0}, "hflip", 1.0),
        ({"op": "color_jitter", "hue": 0.1}, "adjust_contrast", 0.0),  # of strength zero
    ],
)
def test_an_op_happens_as_often_as_it_says(op, step, chance):
    happened = sum(step in steps for steps in sample_many([op]))
    assert stats.binomtest(happened, COUNT, chance).pvalue > SAME


def test_choices_of_one_view_are_independent_of_each_other():
    views = sample_many(MOCO_V2)
    names = ("adjust_hue", "to_grayscale", "blur", "hflip")
    happened = np.array([[name in steps for name in names] for steps in views])
    boxes = [steps["resized_crop"][0] for steps in views]
    crop_areas = np.array([box.height * box.width for box in boxes])
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
    ops = resolve(RECIPES[recipe])
    numbers = uniforms(seed, 1, Stream.VIEWS, 2, draws_per_view(ops))
    box, size = sample_view(ops, height, width, 224, numbers)[0].arguments
    assert size == 224
    assert box.height > 0
    assert box.width > 0
    assert 0 <= box.top <= height - box.height
    assert 0 <= box.left <= width - box.width


def test_without_a_random_crop_the_middle_square_is_taken():
    (steps,) = sample_many([{"op": "horizontal_flip", "p": 1.0}], height=30, width=50, count=1)
    assert steps == {"resized_crop": (Box(0, 10, 30, 30), 224), "hflip": ()}


def test_a_crop_in_the_middle_of_a_recipe_sees_what_came_before_it():
    crop = {"op": "random_resized_crop"}
    ops = resolve([{"op": "horizontal_flip", "p": 1.0}, crop, crop])
    for index in range(50):
        numbers = uniforms(7, 0, Stream.VIEWS, index, draws_per_view(ops))
        flip, first, second = sample_view(ops, 300, 400, 20, numbers)
        assert flip.apply.__name__ == "hflip"
        assert max(first.arguments[0]) > 20
        assert max(second.arguments[0]) <= 20


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
