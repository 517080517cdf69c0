"""The fingerprint of what a pretraining sees: of the images themselves, wherever they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from kscl.data.open import open_source
from kscl.engine.training_images import data_fingerprint


def draw(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    for name in ("a.png", "b.png"):
        pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def hash_of(where: str) -> str:
    return data_fingerprint(where, open_source(where))["hash"]


def test_lists_of_equal_names_but_other_photos_have_other_hashes(tmp_path):
    for number in range(2):
        draw(tmp_path / str(number), number)
        (tmp_path / str(number) / "list.txt").write_text("a.png\nb.png\n")
    shutil.copytree(tmp_path / "0", tmp_path / "copy")
    hashes = [hash_of(f"{tmp_path}/{name}/list.txt") for name in ("0", "1", "copy")]
    assert hashes[0] == hashes[2] != hashes[1]


def test_a_split_that_was_moved_has_the_same_hash_and_a_changed_one_another(tmp_path):
    draw(tmp_path / "voc" / "JPEGImages", 0)
    (tmp_path / "voc/ImageSets/Main").mkdir(parents=True)
    (tmp_path / "voc/ImageSets/Main/train.txt").write_text("a\nb\n")
    for name in ("a", "b"):
        (tmp_path / f"voc/JPEGImages/{name}.png").rename(tmp_path / f"voc/JPEGImages/{name}.jpg")
    shutil.copytree(tmp_path / "voc", tmp_path / "elsewhere" / "moved")
    before = hash_of(f"voc:{tmp_path}/voc:train")
    assert hash_of(f"voc:{tmp_path}/elsewhere/moved:train") == before
    shutil.copy(tmp_path / "voc/JPEGImages/a.jpg", tmp_path / "voc/JPEGImages/b.jpg")
    draw(tmp_path / "other", 5)
    shutil.copy(tmp_path / "other/a.png", tmp_path / "voc/JPEGImages/b.jpg")
    assert hash_of(f"voc:{tmp_path}/voc:train") != before
