"""Labels lie beside each other and near what they name; the sheet shows hits and misses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageColor

from detection.commands.visualize_detections import main
from detection.predict import Found
from detection.scoring import pictures
from detection.scoring.boxes import GroundTruth, make_detections, make_ground_truth, write_table
from detection.scoring.pictures import COLORS, draw_boxes, draw_found, spread
from kscl.data.annotated.voc import read_voc
from tests.helpers.data.sets import small_voc

CANVAS = (0, 0, 640, 480)
RED = np.array(ImageColor.getrgb(COLORS[0]), np.uint8)


def num_overlaps(labels: np.ndarray) -> int:
    """Count the pairs of rectangles (N, 4) that share more than an edge."""
    first, second = (labels[index] for index in np.triu_indices(len(labels), 1))
    begin, end = np.maximum(first[:, :2], second[:, :2]), np.minimum(first[:, 2:], second[:, 2:])
    return int((end - begin > 1e-3).all(1).sum())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-50, 700), st.integers(-50, 500)), max_size=40))
def test_no_label_covers_another_and_all_are_on_the_picture(corners):
    labels = np.array([[x, y, x + 60 + x % 7, y + 14] for x, y in corners]).reshape(-1, 4)
    placed = spread(labels, CANVAS)
    assert num_overlaps(placed) == 0
    assert np.array_equal(placed[:, 2:] - placed[:, :2], labels[:, 2:] - labels[:, :2])
    assert (placed[:, :2] >= 0).all()
    assert (placed[:, 2:] <= CANVAS[2:]).all()


def test_a_label_that_covers_nothing_stays_and_another_moves_by_its_height():
    labels = np.array([[10, 10, 70, 24], [200, 10, 260, 24], [12, 12, 72, 26]])
    placed = spread(labels, CANVAS)
    assert np.array_equal(placed[:2], labels[:2])
    assert placed[2].tolist() == [12, 25, 72, 39]


def test_labels_without_room_are_drawn_all_the_same():
    labels = np.array([[0, 0, 30, 10]] * 3)
    placed = spread(labels, (0, 0, 40, 12))
    assert placed.tolist() == [[0, 0, 30, 10]] * 3
    assert spread(labels[:1], (0, 0, 20, 5)).tolist() == [[0, 0, 30, 10]]  # larger than the picture


@pytest.mark.parametrize("size", [(100, 60), (640, 480)])
def test_objects_in_one_place_have_a_label_each(tmp_path, monkeypatch, size):
    monkeypatch.setattr("detection.scoring.pictures.COLORS", (COLORS[0],))
    width, height = size
    picture = np.zeros((height, width, 3), np.uint8)
    box = (10.0, height / 2, 12.0, height / 2 + 2)  # smaller than its label
    areas = {}
    for count in (1, 3):
        found = [Found("cat", 0.9 - number / 10, box) for number in range(count)]
        draw_found(picture, found, tmp_path / "x.png")
        with Image.open(tmp_path / "x.png") as drawn:
            pixels = np.asarray(drawn)
        assert pixels.shape == picture.shape
        areas[count] = int((pixels == RED).all(-1).sum())
    assert areas[3] > 2.5 * areas[1] > 0


def test_a_picture_without_objects_is_the_photo(tmp_path):
    picture = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    draw_found(picture, [], tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as drawn:
        assert np.array_equal(np.asarray(drawn), picture)


def test_a_dashed_box_has_gaps_and_the_same_corners():
    drawn = [
        np.asarray(
            draw_boxes(
                Image.new("RGB", (200, 200)),
                np.array([[20.0, 60.0, 150.0, 180.0]]),
                [""],
                [COLORS[0]],
                np.array([dashed]),
            )
        )
        for dashed in (False, True)
    ]
    solid, dashed = ((pixels == RED).all(-1)[100:] for pixels in drawn)
    assert 0 < dashed.sum() < solid.sum()
    assert not (dashed & ~solid).any()
    assert dashed.any(0).nonzero()[0].min() == 20


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


def test_the_mosaic_has_what_is_annotated_above_what_was_found(run, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "draw_boxes", lambda *it: drawn.append(it[2]) or draw_boxes(*it))
    annotated = read_voc(tmp_path / "voc", "test", ("cat", "dog"))
    pictures.draw_mosaic(run, annotated.images)
    count = min(pictures.MOSAIC_IMAGES, sum(bool(image.objects) for image in annotated.images))
    with Image.open(run / pictures.MOSAIC_FILE) as sheet:
        assert sheet.width == count * (pictures.MOSAIC_CELL + 8) - 8
    assert len(drawn) == 2 * count
    assert set(drawn[0]) <= {"cat", "dog"}
    assert drawn[1] == ["cat 0.90"]


def test_boxes_that_are_right_or_wrong_are_told_apart_and_weak_ones_left_out(run, monkeypatch):
    drawn = []

    def spy(*words):
        drawn.append(words)
        return draw_boxes(*words)

    monkeypatch.setattr(pictures, "draw_boxes", spy)
    truth = GroundTruth.read(run / "ground_truth.npz")
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
    (_, of_truth, *_), (_, _, labels, _, dashed) = drawn
    assert len(of_truth) == (truth.image == truth.image[place]).sum()
    assert [label.split()[1] for label in labels] == ["0.90", "0.80"]
    assert dashed.tolist() == [False, True]


def test_a_run_whose_set_has_moved_needs_its_new_place(run, capsys):
    (run / "config.yaml").unlink()
    assert main([str(run)]) == 2
    assert "--dataset" in capsys.readouterr().err


def test_a_folder_without_a_pass_is_an_error(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "no such file of detections" in capsys.readouterr().err
