"""Labels of boxes lie beside each other, on the picture, and near what they name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageColor

from detection.predict import Found
from detection.scoring.pictures import COLORS, _spread_labels, draw_found, spread

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


def test_the_labels_of_a_sheet_are_spread_too():
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(layout="constrained")
    axes.imshow(np.zeros((100, 120, 3)))
    for number in range(6):
        box = {"facecolor": "red", "pad": 0.5}
        axes.text(number, 20, f"label {number}", fontsize=5, va="top", bbox=box, in_layout=False)
    figure.draw_without_rendering()

    def extents() -> np.ndarray:
        figure.draw_without_rendering()
        found = [text.get_bbox_patch().get_window_extent().extents for text in axes.texts]
        return np.array(found)

    before = extents()
    _spread_labels(axes)
    after = extents()
    plt.close(figure)
    assert num_overlaps(before) > 0
    assert num_overlaps(after) == 0
    assert np.allclose(before[0], after[0])
