"""Scores against independent formulas."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import top_k_accuracy_score

from kscl.errors import KsclError
from kscl.records import hits
from linear_eval.score import beyond_noise, ranked_classes, score, wilson_interval

NAMES = [f"class {number}" for number in range(8)]


def test_top_1_top_5_and_the_classes_are_scikit_learns():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(400, 8, generator=generator)
    labels = torch.randint(0, 8, (400,), generator=generator)
    found = score(ranked_classes(outputs), labels, NAMES)
    for k in (1, 5):
        expected = 100 * top_k_accuracy_score(labels, outputs, k=k, labels=range(8))
        assert found.metrics[f"top{k}"] == pytest.approx(expected)
    for number, name in enumerate(NAMES):
        of_class = labels == number
        expected = (outputs.argmax(1)[of_class] == number).double().mean() * 100
        assert found.per_class[name] == pytest.approx(float(expected))
    assert found.n == 400
    right = hits.from_text(found.right, 400)
    assert right is not None
    assert right.tolist() == (outputs.argmax(1) == labels).tolist()


def test_top_5_of_five_classes_is_not_reported():
    outputs = torch.eye(5)
    found = score(ranked_classes(outputs), torch.arange(5), NAMES[:5])
    assert found.metrics == {"top1": 100.0}


@pytest.mark.parametrize(
    ("successes", "n"), [(0, 10), (10, 10), (1, 3), (733, 2000), (49_999, 50_000)]
)
def test_the_interval_is_wilsons(successes, n):
    # Where the score test of a proportion p gives the normal quantile: the roots of its quadratic.
    z, fraction = scipy.stats.norm.ppf(0.975), successes / n
    expected = np.roots([1 + z**2 / n, -2 * fraction - z**2 / n, fraction**2])
    assert wilson_interval(successes, n) == pytest.approx(sorted(100 * expected), abs=1e-9)


def test_outputs_that_are_not_finite_are_an_error_and_no_score():
    with pytest.raises(KsclError, match="diverged"):
        ranked_classes(torch.tensor([[0.0, torch.nan]]))


def test_noise_is_that_of_the_images_on_which_two_settings_differ():
    difference = np.zeros(1000)
    difference[:5] = 1  # 5 right, none wrong: 0.5% with an error of 0.22%
    assert beyond_noise(difference)
    difference[5:105], difference[105:205] = 1, -1  # the same difference, an error of 0.45%
    assert not beyond_noise(difference)
    assert not beyond_noise(np.zeros(1000))
    assert not beyond_noise(np.ones(1))  # nothing tells how sure one image is
