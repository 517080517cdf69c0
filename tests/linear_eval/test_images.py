"""Pictures as torchvision makes them, splits that are fair, folders that are checked."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms

from kscl.backbone_file import IMAGENET_MEAN, IMAGENET_STD
from kscl.errors import KsclError
from kscl.views.normalize import normalize_exactly
from linear_eval.images import (
    NUM_DRAWS,
    augmented,
    center,
    few_of_each_class,
    fixed_view,
    hold_out,
    load_views,
    open_data,
    random_crop,
    to_bytes,
)
from linear_eval.probe import load_linear_eval_config
from tests.helpers.data.digits import config, write_digits

MEAN, STD = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))


@pytest.fixture
def picture() -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (30, 41, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((410, 300), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"), train=5, val=2)


def test_the_test_view_is_torchvisions_bit_for_bit(picture):
    theirs = transforms.Compose(
        [
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    ours = to_bytes(center(picture, load_linear_eval_config().INPUT))[None]
    assert torch.equal(normalize_exactly(ours, MEAN, STD)[0], theirs(picture))


def test_the_train_view_is_torchvisions_bit_for_bit_given_its_crop(picture, monkeypatch):
    given = load_linear_eval_config().INPUT
    box = (13, 50, 201, 160)
    monkeypatch.setattr("linear_eval.images.sample_crop", lambda *arguments: box)
    monkeypatch.setattr(transforms.RandomResizedCrop, "get_params", lambda *arguments: box)
    for flips, numbers in ((1.0, np.zeros(NUM_DRAWS)), (0.0, np.full(NUM_DRAWS, 0.99))):
        theirs = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(flips),
                transforms.ToTensor(),
                transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
            ]
        )
        ours = to_bytes(random_crop(picture, given, numbers))[None]
        assert torch.equal(normalize_exactly(ours, MEAN, STD)[0], theirs(picture))


def test_views_depend_on_seed_epoch_and_image_and_on_nothing_else(picture):
    given = load_linear_eval_config().INPUT

    def view(*numbers):
        return to_bytes(augmented(picture, given, *numbers))

    def fixed(name, number):
        return to_bytes(fixed_view(picture, given, name, number))

    first = view(0, 3, 7)
    assert torch.equal(first, view(0, 3, 7))
    for other in ((1, 3, 7), (0, 4, 7), (0, 3, 8)):
        assert not torch.equal(first, view(*other))
    assert torch.equal(fixed("flip", 0), fixed("center", 0).flip(2))
    assert not torch.equal(fixed("crop0", 5), fixed("crop1", 5))


def test_a_split_is_held_out_of_every_class_in_proportion_and_depends_on_the_seed_alone():
    labels = np.repeat(np.arange(5), [40, 20, 10, 2, 1])
    kept, held = hold_out(labels, 0.1, seed=0)
    assert sorted([*kept, *held]) == list(range(len(labels)))
    assert np.bincount(labels[held], minlength=5).tolist() == [4, 2, 1, 1, 0]
    again, other = hold_out(labels, 0.1, seed=0), hold_out(labels, 0.1, seed=1)
    assert np.array_equal(held, again[1])
    assert not np.array_equal(held, other[1])


def test_low_shot_takes_so_many_of_each_class(digits, tmp_path):
    labels = np.repeat(np.arange(3), [10, 4, 2])
    few = few_of_each_class(labels, 3, seed=0)
    assert np.bincount(labels[few]).tolist() == [3, 3, 2]
    train, val = open_data(config(digits, tmp_path, "DATA.IMAGES_PER_CLASS", 2))
    assert (len(train), len(val)) == (20, 20)
    assert np.bincount(train.labels).tolist() == [2] * 10


def test_val_classes_that_differ_are_listed(digits, tmp_path):
    shutil.copytree(digits, tmp_path / "other")
    (tmp_path / "other/val/digit_3").rename(tmp_path / "other/val/digit_three")
    with pytest.raises(KsclError) as error:
        open_data(config(tmp_path / "other", tmp_path))
    assert "train: digit_3\n" in str(error.value)
    assert "val: digit_three" in str(error.value)


@pytest.mark.parametrize(
    ("where", "reason"),
    [("", "DATA.TRAIN"), ("nowhere", "nowhere"), ("flat", "class folder")],
)
def test_a_folder_without_classes_is_refused(digits, tmp_path, where, reason):
    flat = tmp_path / "flat"
    flat.mkdir()
    shutil.copy(digits / "train/digit_1/000.png", flat / "a.png")
    folder = str(tmp_path / where) if where else ""
    with pytest.raises(KsclError, match=reason):
        open_data(config(digits, tmp_path, "DATA.TRAIN", folder))


def test_an_image_that_cannot_be_read_stops_the_evaluation_by_name(digits, tmp_path):
    shutil.copytree(digits, tmp_path / "bad")
    broken = tmp_path / "bad/val/digit_4/000.png"
    broken.write_bytes(broken.read_bytes()[:60])
    val = open_data(config(tmp_path / "bad", tmp_path))[1]
    batches = [[(0, place)] for place in range(len(val))]
    with pytest.raises(KsclError, match=r"digit_4/000\.png.*cannot be read"):
        list(load_views(val, lambda picture, *_: [picture], batches, 0))
