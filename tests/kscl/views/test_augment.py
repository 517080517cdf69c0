"""Our fast route gives the views that torchvision on PIL gives, and nothing else than views."""

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
from torchvision import transforms as T

from kscl.rng import Stream, uniforms
from kscl.views.augment import carry_out, crop_and_resize, make_views, numbers_needed
from kscl.views.blur import blur, blur_kernel
from kscl.views.hue import turn_hue
from kscl.views.normalize import normalize, normalize_planes
from kscl.views.recipes import MOCO_V2, RECIPES, with_defaults
from kscl.views.sample import Box, draws_per_view, sample_view
from tests.helpers.data.photos import photo
from tests.helpers.torchvision_route import carry_out_on_pil

CLOSE = 1.2  # mean absolute difference of 0 … 255 values
PHOTOS = [photo(seed) for seed in range(3)]


def as_rgb(picture):
    return np.dstack([picture] * 3) if picture.ndim == 2 else picture


def difference(picture, reference):
    return float(np.abs(as_rgb(picture).astype(int) - reference).mean())


def compare(picture, steps, size=224):
    """Mean absolute difference of the two routes on the same steps."""
    reference = carry_out_on_pil(Image.fromarray(picture), steps, size)
    return difference(carry_out(picture, steps, size), reference)


def sharpness(picture):
    """Variance of the Laplacian: aliasing makes too much of it, blurring too little."""
    gray = np.asarray(picture, np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    return cv2.Laplacian(gray, cv2.CV_32F).var()


@pytest.mark.parametrize("recipe", RECIPES)
def test_views_of_a_recipe_are_close_to_torchvisions_with_the_same_choices(recipe):
    ops = with_defaults(RECIPES[recipe])
    differences = []
    for index, picture in enumerate(PHOTOS):
        for draws in uniforms(5, 0, Stream.VIEWS, index, 16 * draws_per_view(ops)).reshape(16, -1):
            steps = sample_view(ops, *picture.shape[:2], 224, draws.tolist())
            differences.append(compare(picture, steps))
    assert np.mean(differences) <= CLOSE / 2
    assert np.mean([d <= CLOSE for d in differences]) >= 0.95


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("brightness", [0.0, 0.6, 1.0, 1.4, 2.0]),
        ("contrast", [0.0, 0.6, 1.0, 1.4, 2.0]),
        ("saturation", [0.0, 0.6, 1.0, 1.4, 2.0]),
        ("hue", [-0.5, -0.4, -0.1, 0.0, 0.03, 0.1, 0.4, 0.5]),
        ("grayscale", [None]),
        ("blur", [0.0, 0.1, 0.3, 0.7, 1.0, 1.5, 2.0, 5.0]),
        ("flip", [None]),
        ("solarize", [0, 1, 128, 255, 256]),
        ("crop", [Box(0, 0, 375, 500), Box(20, 30, 100, 120), Box(1, 2, 300, 100)]),
    ],
)
def test_every_step_alone_is_close_to_torchvisions(name, values):
    for value in values:
        for picture in PHOTOS:
            # PIL rounds after each of a blur's six passes.
            assert compare(picture, [(name, value)]) <= (1 if name == "blur" else 0.5), value


@settings(max_examples=100, deadline=None)
@given(
    order=st.permutations(["crop", "color", "grayscale", "blur", "flip", "solarize"]),
    kept=st.integers(1, 6),
    factors=st.permutations(
        [("brightness", 1.3), ("contrast", 0.8), ("saturation", 1.2), ("hue", 0.07)]
    ),
)
def test_any_order_of_any_ops_keeps_torchvisions_meaning(order, kept, factors):
    meaning = {
        "crop": [("crop", Box(3, 5, 90, 70))],
        "color": factors,
        "grayscale": [("grayscale", None)],
        "blur": [("blur", 0.8)],
        "flip": [("flip", None)],
        "solarize": [
            ("solarize", 128)
        ],  # where it does not jump, so that closeness means something
    }
    steps = [step for op in order[:kept] for step in meaning[op]]
    assert compare(PHOTOS[0][:100, :120], steps, size=64) <= 1.5


@pytest.mark.parametrize("sectors", [-3, -2.6, -1, -0.4, 0, 0.3, 0.5, 1, 1.7, 2, 2.9])
def test_a_turned_hue_is_the_one_of_the_definition(sectors):
    colors = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    colors[0], colors[1, :, 1] = colors[0, :, :1], colors[1, :, 2]  # gray, and two channels equal
    hsv = [colorsys.rgb_to_hsv(*color) for color in (colors / 255).reshape(-1, 3).tolist()]
    exact = [colorsys.hsv_to_rgb((hue + sectors / 6) % 1, *rest) for hue, *rest in hsv]
    turned = turn_hue(colors, sectors).reshape(-1, 3)
    assert np.abs(turned - 255 * np.array(exact)).max() <= 0.501


@pytest.mark.parametrize("order", list(itertools.permutations(["brightness", "contrast", "hue"])))
def test_a_hue_between_other_colors_is_close_to_torchvisions(order):
    factors = {"brightness": 0.7, "contrast": 0.6, "hue": 0.09}
    for picture in PHOTOS:
        assert compare(picture, [(name, factors[name]) for name in order]) <= CLOSE / 2


def test_what_was_clipped_does_not_come_back_in_a_later_step():
    bright = np.full((8, 8, 3), 240, np.uint8)
    bright[:4] = 100
    steps = [("brightness", 1.4), ("contrast", 0.5), ("saturation", 0.9)]
    assert compare(bright, steps) <= 1


def test_folded_color_steps_equal_the_same_steps_one_by_one():
    steps = [("brightness", 0.9), ("saturation", 0.7), ("contrast", 0.8), ("grayscale", None)]
    picture = PHOTOS[1]
    one_by_one = picture
    for step in steps:
        one_by_one = carry_out(one_by_one, [step], 224)
    assert difference(carry_out(picture, steps, 224), as_rgb(one_by_one)) <= 1


BOXES = [Box(0, 0, 375, 500), Box(10, 20, 300, 320), Box(0, 0, 230, 225), Box(30, 40, 150, 160)]
WIDE_AND_TALL = [Box(0, 0, 200, 480), Box(0, 0, 370, 190)]


@pytest.mark.parametrize("box", BOXES + WIDE_AND_TALL)
def test_resizing_does_not_alias(box):
    noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    for picture in (PHOTOS[0], noise):
        reference = carry_out_on_pil(Image.fromarray(picture), [("crop", box)], 224)
        ours = crop_and_resize(picture, box, 224)
        assert difference(ours, reference) <= 0.5
        assert sharpness(ours) / sharpness(reference) == pytest.approx(1, abs=0.03)


def test_plain_bilinear_would_be_caught_aliasing():
    reference = carry_out_on_pil(Image.fromarray(PHOTOS[0]), [("crop", BOXES[0])], 224)
    assert sharpness(cv2.resize(PHOTOS[0], (224, 224))) / sharpness(reference) > 1.3


@pytest.mark.parametrize("sigma", [0.1, 0.14, 0.2, 0.3, 0.5, 0.8, 1.0, 1.3, 1.6, 2.0])
def test_the_blur_has_the_sigma_asked_for(sigma):
    # Bytes in, bytes out: the kernel at work is fitted to a long row of noise.
    row = np.random.default_rng(0).integers(0, 256, (1, 400_000), dtype=np.uint8)
    radius = max(3, int(np.ceil(3.2 * sigma)))
    windows = np.lib.stride_tricks.sliding_window_view(row[0] - 127.5, 2 * radius + 1)
    blurred = blur(row, sigma)[0, radius:-radius] - 127.5
    kernel = np.linalg.solve(windows.T @ windows, windows.T @ blurred)
    offsets = np.arange(-radius, radius + 1)
    effective = np.sqrt((kernel * offsets**2).sum() / kernel.sum())
    assert effective / sigma == pytest.approx(1, abs=0.03)
    assert kernel.sum() == pytest.approx(1, abs=1e-3)


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
        ops = with_defaults(recipe)
        views = np.empty((3, 3, 32, 32), np.uint8)
        make_views(picture, ops, 32, uniforms(0, 0, Stream.VIEWS, 0, numbers_needed(ops, 3)), views)


def test_a_view_does_not_depend_on_how_many_views_there_are():
    ops = with_defaults(MOCO_V2)
    few, many = np.empty((2, 3, 64, 64), np.uint8), np.empty((6, 3, 64, 64), np.uint8)
    for views in (few, many):
        make_views(
            PHOTOS[0],
            ops,
            64,
            uniforms(0, 0, Stream.VIEWS, 0, numbers_needed(ops, len(views))),
            views,
        )
    assert np.array_equal(few, many[:2])


def test_making_views_leaves_the_decoded_image_as_it_was():
    before = PHOTOS[2].copy()
    every_op = [("grayscale", None), ("blur", 1.0), ("flip", None), ("solarize", 9), ("hue", 0.1)]
    for step in [*every_op, ("brightness", 1.2), ("contrast", 0.5)]:
        carry_out(PHOTOS[2], [step], 64)
    assert np.array_equal(PHOTOS[2], before)


def test_a_grey_view_has_three_equal_planes():
    views = np.empty((1, 3, 48, 48), np.uint8)
    make_views(PHOTOS[0], [{"op": "grayscale", "p": 1.0}], 48, np.zeros(1), views)
    assert np.array_equal(views[0, 0], views[0, 1])
    assert np.array_equal(views[0, 0], views[0, 2])
    reference = carry_out_on_pil(
        Image.fromarray(PHOTOS[0]), [("crop", Box(0, 62, 375, 375)), ("grayscale", None)], 48
    )
    assert difference(views[0].transpose(1, 2, 0), reference) <= 0.5


def test_normalizing_equals_torchvisions_on_the_device_and_in_a_worker():
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    view = PHOTOS[0][:64, :64]
    reference = T.Normalize(mean, std)(T.ToTensor()(Image.fromarray(view)))
    planes = view.transpose(2, 0, 1).copy()[None]
    assert torch.allclose(normalize(torch.from_numpy(planes), mean, std)[0], reference, atol=1e-6)
    in_worker = np.empty(planes.shape, np.float32)
    normalize_planes(planes, mean, std, in_worker)
    assert torch.allclose(torch.from_numpy(in_worker)[0], reference, atol=1e-6)
