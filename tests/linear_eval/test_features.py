"""Stored features: taken again when nothing changed, made anew when anything did."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

import linear_eval.features as features_module
from kscl.backbone_file import Description, load_backbone, save_backbone
from kscl.data.formats import decode_image
from kscl.errors import KsclError
from kscl.records.fingerprint import fingerprint
from kscl.run.engine import Run, Stopped
from linear_eval.backbone import freeze
from linear_eval.features import cached_features
from linear_eval.images import fixed_view, open_data, to_bytes
from tests.helpers.data.digits import NEVER, config, write_digits


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_digits(tmp_path_factory.mktemp("digits"), train=8, val=2)


@pytest.fixture
def digits(original, tmp_path, monkeypatch):
    """A copy that may be changed; small pieces, so that there are several."""
    monkeypatch.setattr(features_module, "BATCH", 16)
    monkeypatch.setattr(features_module, "BATCHES", 2)
    return shutil.copytree(original, tmp_path / "digits")


@pytest.fixture
def extracted(monkeypatch):
    """Counts the batches that go through the backbone."""
    counts = [0]
    extract = features_module._extract

    def counting(*arguments):
        for piece, rows in extract(*arguments):
            counts[0] += 1
            yield piece, rows

    monkeypatch.setattr(features_module, "_extract", counting)
    return counts


def features_of(cfg, views=("center", "flip"), stop=NEVER):
    train, _ = open_data(cfg)
    frozen = freeze(cfg, train)
    return cached_features(cfg, frozen, train, list(views), Run(None, stop)), frozen, train


def test_features_are_the_backbones_own_and_are_mapped_from_disk(digits, tmp_path):
    cfg = config(digits, tmp_path / "run")
    found, frozen, train = features_of(cfg)
    (file,) = (digits / "cache/features").glob("*/features.f32")
    assert str(file) in Path("/proc/self/maps").read_text()
    for place in (0, 17, 79):
        picture = Image.fromarray(decode_image(train.source.read(place)))
        for view in ("center", "flip"):
            pixels = to_bytes(fixed_view(picture, cfg.INPUT, view, place))
            alone = frozen.features(pixels[None])[0]
            torch.testing.assert_close(found.of_view(view)[place], alone, rtol=1e-4, atol=1e-5)


def test_the_same_request_is_answered_from_disk(digits, tmp_path, extracted):
    first = features_of(config(digits, tmp_path / "a"))[0]
    assert extracted == [3]
    again = features_of(config(digits, tmp_path / "b"))[0]
    assert extracted == [3]
    assert torch.equal(first.rows, again.rows)


def test_one_more_view_costs_that_view_alone(digits, tmp_path, extracted):
    cfg = config(digits, tmp_path / "a")
    center = features_of(cfg, ["center"])[0].of_view("center").clone()
    both = features_of(cfg, ["center", "flip", "crop0"])[0]
    assert torch.equal(both.of_view("center"), center)
    assert not torch.equal(both.of_view("flip"), center)
    assert not torch.equal(both.of_view("crop0"), both.of_view("flip"))
    assert extracted == [6]


@pytest.mark.parametrize(
    "more",
    [
        ("SEED", 1),
        ("BACKBONE.BATCH_NORM", "keep"),
        ("INPUT.RESIZE", 28),
        ("INPUT.MEAN", "[0.5, 0.5, 0.5]", "INPUT.STD", "[0.5, 0.5, 0.5]"),
        ("DATA.IMAGES_PER_CLASS", 7),
    ],
    ids=lambda more: more[0],
)
def test_a_setting_that_changes_features_makes_them_anew(digits, tmp_path, extracted, more):
    features_of(config(digits, tmp_path / "a"))
    features_of(config(digits, tmp_path / "b", *more))
    assert extracted == [6]


@pytest.mark.parametrize("change", ["another picture", "one picture less"])
def test_other_images_make_features_anew(digits, tmp_path, extracted, change):
    features_of(config(digits, tmp_path / "a"))
    file = digits / "train/digit_3/005.png"
    file.unlink()
    if change == "another picture":
        shutil.copy(digits / "train/digit_3/004.png", file)
    features_of(config(digits, tmp_path / "b"))
    assert extracted == [6]


def test_a_changed_file_is_noticed_also_where_the_fingerprints_sample_misses_it(
    digits, tmp_path, extracted, monkeypatch
):
    always = fingerprint(digits / "train")
    monkeypatch.setattr("linear_eval.images.fingerprint", lambda where, cache_dir: always)
    keep = ("BACKBONE.BATCH_NORM", "keep")  # statistics of the images would give it away
    features_of(config(digits, tmp_path / "a", *keep))
    shutil.copy(digits / "train/digit_3/004.png", digits / "train/digit_3/005.png")
    features_of(config(digits, tmp_path / "b", *keep))
    assert extracted == [6]


def test_damaged_features_are_noticed_and_made_anew(digits, tmp_path, extracted):
    first = features_of(config(digits, tmp_path / "a"))[0].rows.clone()
    (file,) = (digits / "cache/features").glob("*/features.f32")
    content = bytearray(file.read_bytes())
    content[100] ^= 255
    file.write_bytes(content)
    again = features_of(config(digits, tmp_path / "b"))[0]
    assert extracted == [6]  # the flip's are whole
    assert torch.equal(again.rows, first)


def test_an_interrupted_extraction_goes_on_where_it_was(digits, tmp_path, extracted):
    undisturbed = features_of(config(digits, tmp_path / "a"))[0].rows.clone()
    shutil.rmtree(digits / "cache/features")

    class AfterOnePiece:
        exit_code = 143

        def __bool__(self):
            return extracted[0] == 4

    with pytest.raises(Stopped):
        features_of(config(digits, tmp_path / "b"), stop=AfterOnePiece())
    found = features_of(config(digits, tmp_path / "c"))[0]
    assert extracted == [3 + 1 + 2]
    assert torch.equal(found.rows, undisturbed)


def test_features_that_are_not_finite_are_an_error(digits, tmp_path):
    cfg = config(digits, tmp_path / "a")
    backbone = load_backbone("random", "resnet18", dict(cfg.BACKBONE.KWARGS)).backbone
    tensors = backbone.state_dict()
    tensors["layer4.0.bn2.weight"][0] = torch.nan
    save_backbone(
        tmp_path / "b.safetensors", tensors, Description("resnet18", dict(cfg.BACKBONE.KWARGS))
    )
    words = ("BACKBONE.WEIGHTS", tmp_path / "b.safetensors")
    with pytest.raises(KsclError, match="not finite"):
        features_of(config(digits, tmp_path / "b", *words))


def test_a_full_disk_is_told_before_the_work(digits, tmp_path, monkeypatch, extracted):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(KsclError, match="no room"):
        features_of(config(digits, tmp_path / "a"))
    assert extracted == [0]
