"""The nearest-neighbour classifier against scikit-learn's and against a loop written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from kscl.engine.knn import knn_predict
from kscl.errors import KsclError

pytestmark = pytest.mark.portable


@pytest.fixture(scope="module")
def features():
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randn(300, 8, generator=generator), torch.randn(70, 8, generator=generator)
    labels = (train[:, 0] > 0).long() + 2 * (train[:, 1] > 0).long()
    return train, labels, test


def test_it_agrees_with_scikit_learn(features):
    train, labels, test = features
    reference = KNeighborsClassifier(
        15,
        metric="cosine",
        algorithm="brute",
        weights=lambda distance: np.exp((1 - distance) / 0.1),
    )
    expected = reference.fit(train.numpy(), labels.numpy()).predict(test.numpy())
    found = knn_predict(train, labels, test, k=15, temperature=0.1)
    assert found.tolist() == expected.tolist()


def test_it_agrees_with_the_definition_written_out(features):
    train, labels, test = features
    for query, predicted in zip(test[:10], knn_predict(train, labels, test[:10]), strict=True):
        cosines = [float(query @ t / (query.norm() * t.norm())) for t in train]
        nearest = sorted(range(len(train)), key=lambda i: -cosines[i])[:20]
        votes = [0.0] * 4
        for i in nearest:
            votes[int(labels[i])] += math.exp(cosines[i] / 0.07)
        assert int(predicted) == votes.index(max(votes))


def test_neither_the_chunks_nor_lengths_nor_a_tiny_temperature_change_the_answer(features):
    train, labels, test = features
    expected = knn_predict(train, labels, test, k=5)
    assert torch.equal(knn_predict(train * 7, labels, test / 3, k=5, chunk=9), expected)
    nearest_only = knn_predict(train, labels, test, k=1)
    assert torch.equal(knn_predict(train, labels, test, k=20, temperature=1e-6), nearest_only)


def test_more_neighbours_than_images_are_all_of_them():
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    labels = torch.tensor([0, 1, 1])
    assert knn_predict(train, labels, torch.tensor([[1.0, 0.1]]), num_classes=5).tolist() == [0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"test_features": torch.ones(2, 3)}, "features must be"),
        ({"test_features": torch.ones(0, 8)}, "empty"),
        ({"train_labels": torch.zeros(5).long()}, "300 features need as many labels"),
        ({"k": 0}, "greater than 0"),
        ({"temperature": 0.0}, "greater than 0"),
    ],
)
def test_what_cannot_be_compared_is_refused(features, change, words):
    train, labels, test = features
    given = {"train_features": train, "train_labels": labels, "test_features": test, **change}
    with pytest.raises(KsclError, match=words):
        knn_predict(**given)
