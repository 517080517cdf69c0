"""Images that cannot be read are found before a run, and each file is decoded once per process."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from kscl.data import bad_images
from kscl.data.open import open_source
from kscl.errors import KsclError


@pytest.fixture
def folder(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    return tmp_path


@pytest.fixture
def decoded(monkeypatch):
    """Count the images that are decoded; none is known from before."""
    calls, decode = [], bad_images.decode

    def counting(data, max_pixels):
        calls.append(max_pixels)
        return decode(data, max_pixels)

    monkeypatch.setattr(bad_images, "decode", counting)
    monkeypatch.setattr(bad_images, "_decodable", set())
    return calls


def test_known_files_are_not_decoded_again_but_changed_ones_are(folder, decoded):
    source = open_source(str(folder), "")
    assert bad_images.find_unreadable(source, range(5), most=10) == (5, {}, [])
    assert bad_images.find_unreadable(source, range(5), most=10).reasons == {}
    assert len(decoded) == 5
    broken = folder / "3.png"
    broken.write_bytes(broken.read_bytes()[:100])
    (folder / "4.png").unlink()
    reasons = bad_images.find_unreadable(source, range(5), most=10).reasons
    assert list(reasons) == [3, 4]
    assert "No such file" in reasons[4]
    assert list(bad_images.find_unreadable(source, range(5), most=10).reasons) == [3, 4]


def test_with_fewer_pixels_allowed_a_known_file_is_judged_again(folder, decoded):
    source = open_source(str(folder), "")
    assert not bad_images.find_unreadable(source, range(5), most=10).reasons
    assert len(bad_images.find_unreadable(source, range(5), most=10, max_pixels=100).reasons) == 5


def test_of_many_a_fixed_sample_is_decoded_and_said(folder, decoded):
    source = open_source(str(folder), "")
    num_decoded, _, (note,) = bad_images.find_unreadable(source, range(5), most=3)
    assert (num_decoded, len(decoded)) == (3, 3)
    assert not note.fatal
    assert "a sample of 3 of the 5 images was decoded" in note.what
    bad_images.find_unreadable(source, range(5), most=3)
    assert len(decoded) == 3, "another sample was taken"


def test_what_a_run_met_before_it_was_resumed_is_judged_by_the_rule_of_now(folder):
    source, met = open_source(str(folder), ""), {3: "it is empty", 1: "it is empty"}
    account = bad_images.BadImages(source, "skip", 0.5)
    account.recall(met)
    assert account.names() == [str(folder / "1.png"), str(folder / "3.png")]
    for policy, most, named in (
        ("skip", 0.2, r"2 of the 5 images.*1\.png"),
        ("error", 0.5, r"1\.png cannot be read: it is empty"),
    ):
        with pytest.raises(KsclError, match=named):
            bad_images.BadImages(source, policy, most).recall(met)
