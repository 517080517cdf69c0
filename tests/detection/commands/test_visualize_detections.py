"""The sheet of detections: drawn from a saved pass, the same each time."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from detection.commands.visualize_detections import main
from detection.scoring.boxes import (
    make_detections,
    make_ground_truth,
    read_ground_truth,
    write_table,
)
from kscl.data.annotated.voc import read_voc
from tests.helpers.data.sets import small_voc


@pytest.fixture
def run(tmp_path):
    voc = small_voc(tmp_path / "voc")
    truth = make_ground_truth(read_voc(voc, "test", ("cat", "dog")))
    found = {
        name: (np.array([[0, 0, 20, 20]], np.float32), np.array([0.9], np.float32), np.array([0]))
        for name in truth.image_ids
    }
    folder = tmp_path / "run"
    write_table(truth, folder / "ground_truth.npz")
    write_table(make_detections("test", truth.class_names, found), folder / "detections.npz")
    (folder / "config.yaml").write_text(f"DATASETS: {{TEST: ['voc:{voc}:test']}}")
    return folder


def test_a_run_is_drawn_beside_its_annotations(run, tmp_path, capsys):
    assert main([str(run), "--images", "2"]) == 0
    assert "Drawn:" in capsys.readouterr().out
    with Image.open(run / "detections.png") as sheet:
        assert min(sheet.size) > 500
        colors = np.unique(np.asarray(sheet.convert("RGB")).reshape(-1, 3), axis=0)
    assert len(colors) > 100


def test_boxes_that_are_right_wrong_and_too_weak_are_told_apart(run, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        "detection.scoring.pictures._draw_boxes", lambda *words: drawn.append(words)
    )
    truth = read_ground_truth(run / "ground_truth.npz")
    place = int(np.flatnonzero(~truth.difficult)[0])
    here, weak = truth.boxes[place].astype(np.float32), np.array([0, 0, 2, 2], np.float32)
    found = {name: (np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, int))
             for name in truth.image_ids}  # fmt: skip
    category = truth.category[place]
    found[truth.image_ids[truth.image[place]]] = (
        np.stack([here, weak, weak]),
        np.array([0.9, 0.8, 0.1], np.float32),
        np.array([category] * 3),
    )
    write_table(make_detections("test", truth.class_names, found), run / "detections.npz")
    assert main([str(run), "--images", "1"]) == 0
    (_, _, _, all_of_them, _, _), (_, _, _, shown, wrong, _) = drawn
    assert all_of_them is None
    assert shown.tolist() == [True, True, False]
    assert wrong.tolist() == [False, True, True]


def test_a_run_whose_set_has_moved_needs_its_new_place(run, capsys):
    (run / "config.yaml").unlink()
    assert main([str(run)]) == 2
    assert "--dataset" in capsys.readouterr().err


def test_a_folder_without_a_pass_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no such file of detections" in capsys.readouterr().err
