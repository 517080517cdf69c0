"""A trained detector finds on any photo what it found on it in its own evaluation."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from detection.commands.predict import main
from detection.scoring.boxes import read_detections


def test_predictions_are_those_of_the_evaluation(finished, shop, tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    saved = read_detections(finished / "detections.npz")
    for name in saved.image_ids:
        shutil.copy(shop / "voc/JPEGImages" / f"{name}.jpg", photos)
    out = tmp_path / "found"
    assert main([str(finished), str(photos), "--min-score", "0", "--output-dir", str(out)]) == 0
    content = json.loads((out / "predictions.json").read_text())
    assert len(content["images"]) == len(saved.image_ids)
    for entry in content["images"]:
        name = entry["file"].rpartition("/")[2].removesuffix(".jpg")
        rows = saved.image == list(saved.image_ids).index(name)
        found = sorted((thing["score"], *thing["box"]) for thing in entry["objects"])
        expected = sorted(
            (float(s), *map(float, b))
            for s, b in zip(saved.scores[rows], saved.boxes[rows], strict=True)
        )
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
        with Image.open(out / f"{name}.jpg.png") as picture:
            assert picture.size == (entry["width"], entry["height"])


def test_an_unreadable_photo_is_named_and_the_others_are_done(finished, shop, tmp_path, capsys):
    good = next((shop / "voc/JPEGImages").glob("*.jpg"))
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    words = [
        str(finished),
        str(good),
        str(tmp_path / "bad.jpg"),
        "--output-dir",
        str(tmp_path / "f"),
    ]
    assert main(words) == 2
    assert "bad.jpg" in capsys.readouterr().err
    assert len(json.loads((tmp_path / "f/predictions.json").read_text())["images"]) == 1


@pytest.mark.parametrize("what", ["no run", "no photo"])
def test_what_is_not_there_is_named(finished, tmp_path, capsys, what):
    run, photo = (tmp_path, finished) if what == "no run" else (finished, tmp_path / "gone.jpg")
    (tmp_path / "p.jpg").write_bytes(b"")
    photo = tmp_path / "p.jpg" if what == "no run" else photo
    assert main([str(run), str(photo), "--output-dir", str(tmp_path / "f")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
