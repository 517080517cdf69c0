"""A trained detector finds on any photo what it found on it in its own evaluation."""

from __future__ import annotations

import json
import os
import re
import shutil

import numpy as np
import pytest
from PIL import Image

from detection.commands.predict import _photos, main
from detection.predict import load_predictor, read_photo, weakness
from detection.scoring.boxes import Detections
from detection.train.detector import DETECTOR_FILE
from kscl.records.record import record_id
from tests.helpers.commands import ROOT


def test_predictions_are_those_of_the_evaluation(finished, shop, tmp_path, capsys):
    photos = tmp_path / "photos"
    photos.mkdir()
    saved = Detections.read(finished / "detections.npz")
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
        with Image.open(out / f"{name}.png") as picture:
            assert picture.size == (entry["width"], entry["height"])


def test_the_tool_and_python_leave_out_the_same_low_scores(finished, shop, tmp_path):
    photo = next((shop / "voc/JPEGImages").glob("*.jpg"))
    every = load_predictor(finished, min_score=0)(read_photo(photo))
    middle = float(np.median([found.score for found in every]))
    for given, least in (((), 0.5), ((middle,), middle)):
        words = [word for score in given for word in ("--min-score", str(score))]
        assert main([str(finished), str(photo), *words, "--output-dir", str(tmp_path)]) == 0
        (entry,) = json.loads((tmp_path / "predictions.json").read_text())["images"]
        expected = [found for found in every if found.score >= least]
        assert [thing["score"] for thing in entry["objects"]] == [it.score for it in expected]
        assert load_predictor(finished, *given)(read_photo(photo)) == expected
    assert 0 < len(expected) < len(every)


def test_the_python_and_command_of_the_docs_find_the_same(
    finished, shop, tmp_path, monkeypatch, capsys
):
    """As docs/own_data.md has them, on the folder around a run and with every score."""
    page = (ROOT / "docs" / "own_data.md").read_text()
    (code,) = re.findall(r"```py\n(.*?)```", page, re.S)
    (command,) = re.findall(r"^\$ kscl predict (.*)$", page, re.M)
    run = tmp_path / "output/mine/kscl/seed0"
    shutil.copytree(finished, run / "detection-mine")
    (tmp_path / "new_photos").mkdir()
    photo = next((shop / "voc/JPEGImages").glob("*.jpg"))
    for path in ("photo.jpg", "new_photos/photo.jpg"):
        shutil.copy(photo, tmp_path / path)
    monkeypatch.chdir(tmp_path)
    assert main([*command.split(), "--min-score", "0.05"]) == 0
    capsys.readouterr()
    (entry,) = json.loads((tmp_path / "found/predictions.json").read_text())["images"]
    exec(code.replace('seed0")  # or with min_score=0.05', 'seed0", min_score=0.05)'), {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [thing["name"] for thing in entry["objects"]]
    assert lines
    exec(code, {})  # as it stands, too


def test_a_detector_that_does_not_work_is_said_to_be_the_start_of_a_training(
    finished, shop, tmp_path, capsys
):
    photo = next((shop / "voc/JPEGImages").glob("*.jpg"))
    assert main([str(finished), str(photo), "--output-dir", str(tmp_path / "found")]) == 0
    assert f"Warning: {weakness(finished)}" in capsys.readouterr().out
    content = json.loads((finished / "record.json").read_text())
    for name in ("config.yaml", DETECTOR_FILE):
        (tmp_path / name).touch()
    for ap50 in (17.3, 25.0):
        content["metrics"]["AP50"] = ap50
        content["id"] = record_id(content)
        (tmp_path / "record.json").write_text(json.dumps(content))
        said = weakness(tmp_path)
        assert ("AP50 on its test images is 17.3" in (said or "")) is (ap50 < 25)


def test_photos_of_one_name_in_several_folders_are_all_done(finished, shop, tmp_path, capsys):
    photos = sorted((shop / "voc/JPEGImages").glob("*.jpg"))[:2]
    for folder, photo in zip("ab", photos, strict=True):
        (tmp_path / folder).mkdir()
        shutil.copy(photo, tmp_path / folder / "1.jpg")
    shutil.copy(photos[0], tmp_path / "b/2.jpg")
    given = [str(tmp_path / name) for name in ("a", "b", "b/../a/1.jpg")]  # one image twice
    out = tmp_path / "found"
    assert main([str(finished), *given, "--output-dir", str(out)]) == 0
    images = json.loads((out / "predictions.json").read_text())["images"]
    files = [str(tmp_path / name) for name in ("a/1.jpg", "b/1.jpg", "b/2.jpg")]
    assert [os.path.normpath(image["file"]) for image in images] == files
    drawn = sorted(str(path.relative_to(out)) for path in out.rglob("*.png"))
    assert drawn == ["a/1.png", "b/1.png", "b/2.png"]


@pytest.mark.parametrize(
    ("names", "drawn"),
    [
        (["1.jpg", "2.jpeg", "3.x.png"], ["1.png", "2.png", "3.x.png"]),
        (["1.jpg", "1.bmp", "2.jpg"], ["1.bmp.png", "1.jpg.png", "2.jpg.png"]),
        (["1.jpg", "1.bmp", "1.jpg.png"], ["1.bmp.png", "1.jpg.png", "1.jpg.png.png"]),
    ],
)
def test_every_photo_has_a_picture_of_its_own(tmp_path, names, drawn):
    for name in names:
        (tmp_path / name).touch()
    for given in ([tmp_path], [tmp_path / name for name in names]):
        photos = _photos(given)
        assert sorted(photos) == drawn
        assert sorted(path.name for path in photos.values()) == sorted(names)


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


def test_a_picture_never_replaces_a_photo(tmp_path, capsys):
    photo = tmp_path / "a.png"
    Image.new("RGB", (8, 8)).save(photo)
    assert main([str(tmp_path), str(photo), "--output-dir", str(tmp_path)]) == 2
    assert str(photo) in capsys.readouterr().err
    assert Image.open(photo).size == (8, 8)
