"""RankMe against its formula, written another way, and where its value is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kscl.records.rankme import MOST_IMAGES, rankme


def by_eigenvalues(features: np.ndarray) -> float:
    """Return the same from the eigenvalues of the second moments, term by term."""
    moments = features.astype(np.float64).T @ features.astype(np.float64)
    values = np.sqrt(np.clip(np.linalg.eigvalsh(moments), 0, None))
    total, entropy = math.fsum(values), 0.0
    for value in values:
        share = value / total + 1e-7
        entropy -= share * math.log(share)
    return math.exp(entropy)


def test_rankme_is_the_papers_formula():
    chance = np.random.default_rng(0)
    features = chance.normal(size=(300, 20)) * np.geomspace(1, 1e-3, 20)
    assert rankme(features.astype(np.float32)) == pytest.approx(by_eigenvalues(features), rel=1e-4)


@pytest.mark.parametrize("rank", [1, 3, 16])
def test_equal_directions_count_once_each(rank):
    features = np.tile(np.eye(16, dtype=np.float32)[:rank], (10, 1))  # (10 · rank, 16)
    assert rankme(features) == pytest.approx(rank, rel=1e-3)


def test_constant_features_and_no_features_at_all_have_a_finite_rank():
    assert rankme(np.ones((50, 8), np.float32)) == pytest.approx(1, rel=1e-3)
    assert rankme(np.zeros((50, 8), np.float32)) == pytest.approx(1, rel=1e-3)


def test_of_many_images_an_even_sample_counts():
    features = np.tile(np.eye(4, dtype=np.float32), (MOST_IMAGES // 4 + 1, 1))  # a few too many
    assert rankme(features) == pytest.approx(rankme(features[::2]))
