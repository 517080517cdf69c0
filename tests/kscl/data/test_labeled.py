"""Fractions of the labels: nested, covering every class, the same for whoever asks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kscl.data.labeled import draw_labeled
from kscl.errors import KsclError

FRACTIONS = (0.05, 0.1, 0.25, 0.5, 1)


def pictures(count: int, classes: int) -> list[set[int]]:
    """Return images that show several classes each; the last class is in one image only."""
    chance = np.random.default_rng(1)
    shown = [
        set(chance.integers(classes - 1, size=chance.integers(4)).tolist()) for _ in range(count)
    ]
    shown[count // 2].add(classes - 1)
    return shown


@pytest.mark.parametrize("shown", [[{i % 10} for i in range(200)], pictures(200, 10)])
def test_fractions_of_a_draw_are_nested_exact_in_size_and_show_every_class(shown):
    everything = set().union(*shown)
    for draw in range(20):
        subsets = [draw_labeled(shown, fraction, draw, "F") for fraction in FRACTIONS]
        assert [len(it) for it in subsets] == [10, 20, 50, 100, 200]
        assert all(set(small) < set(large) for small, large in itertools.pairwise(subsets))
        assert all(set().union(*(shown[i] for i in it)) == everything for it in subsets)
        assert subsets == [draw_labeled(shown, fraction, draw, "F") for fraction in FRACTIONS]
    one, other = (draw_labeled(shown, 0.1, draw, "F") for draw in (0, 1))
    assert one != other


def test_beyond_the_first_image_of_each_class_all_images_are_drawn_equally_often():
    shown: list[set[int]] = [set() for _ in range(40)]  # none is needed for a class
    counts = np.zeros(40)
    for draw in range(2000):
        counts[draw_labeled(shown, 0.25, draw, "F")] += 1
    assert abs(counts / 2000 - 0.25).max() < 5 * (0.25 * 0.75 / 2000) ** 0.5


@pytest.mark.parametrize("shown", [[{i % 10} for i in range(100)], pictures(100, 10)])
def test_a_fraction_that_cannot_show_every_class_is_refused_in_every_draw(shown):
    for draw in range(5):
        with pytest.raises(KsclError, match=r"F 0\.05 of 100.*all 10 classes.*at least 0\.1"):
            draw_labeled(shown, 0.05, draw, "F")
    assert len(draw_labeled(shown, 0.1, 0, "F")) == 10
