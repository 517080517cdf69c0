"""Nearest neighbours: scikit-learn's answers, in bounded memory."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from kscl.engine.knn import knn_predict
from kscl.errors import KsclError
from tests.helpers.commands import run


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    data = load_digits()
    return torch.from_numpy(data.data).float(), torch.from_numpy(data.target)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (20, 0.07), (200, 0.1), (20, 0.001)])
def test_predictions_are_scikit_learns_with_the_same_weights(digits, k, temperature):
    features, labels = digits
    theirs = KNeighborsClassifier(
        k,
        algorithm="brute",
        metric="cosine",
        weights=lambda distance: np.exp((distance.min(1, keepdims=True) - distance) / temperature),
    ).fit(features[:1300].double().numpy(), labels[:1300].numpy())
    ours = knn_predict(features[:1300], labels[:1300], features[1300:], k, temperature)
    assert np.array_equal(ours.numpy(), theirs.predict(features[1300:].double().numpy()))


@pytest.mark.parametrize(("chunk", "block"), [(7, 100), (1000, 33), (64, 1299), (1024, 65536)])
def test_chunks_and_blocks_change_nothing(digits, chunk, block):
    features, labels = digits
    whole = knn_predict(features[:1300], labels[:1300], features[1300:])
    parts = knn_predict(features[:1300], labels[:1300], features[1300:], chunk=chunk, block=block)
    assert torch.equal(whole, parts)


def test_more_neighbours_than_images_are_all_images(digits):
    features, labels = digits
    few = knn_predict(features[:30], labels[:30], features[1300:1400], k=1000, block=7)
    all_of_them = knn_predict(features[:30], labels[:30], features[1300:1400], k=30)
    assert torch.equal(few, all_of_them)


def test_what_cannot_be_compared_is_refused(digits):
    features, labels = digits
    with pytest.raises(KsclError, match="features must be"):
        knn_predict(features, labels, features[:, :5])
    with pytest.raises(KsclError, match="as many labels"):
        knn_predict(features, labels[:5], features)
    with pytest.raises(KsclError, match="greater than 0"):
        knn_predict(features, labels, features, temperature=0.0)


MEMORY = """
import resource, sys, numpy as np, torch
from kscl.knn import knn_predict

torch.set_num_threads(1)
n, m, dim, chunk, block = 150_000, 2_000, 128, 256, 16_384
features = np.memmap(sys.argv[1], np.float32, mode="w+", shape=(n, dim))
for start in range(0, n, block):
    part = features[start : start + block]
    part[:] = np.random.default_rng(start).standard_normal(part.shape, np.float32)
features.flush()
features = torch.from_numpy(np.memmap(sys.argv[1], np.float32, mode="c", shape=(n, dim)))
labels = torch.arange(n) % 10
knn_predict(features[:100], labels[:100], features[:10])  # libraries take their buffers
stated = 4 * (block * dim + chunk * block + chunk * dim)
used = [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")][0]
room = used * 1024 + 2 * stated + 12 * m * 20 * 2
resource.setrlimit(resource.RLIMIT_DATA, (room, room))
found = knn_predict(features, labels, features[-m:], chunk=chunk, block=block)
assert torch.equal(found, labels[-m:]), "an image is its own nearest neighbour"
print(stated, 4 * n * m)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
def test_features_mapped_from_disk_are_compared_in_the_memory_that_is_stated(tmp_path):
    """The limit is a fortieth of what all similarities together would take."""
    done = run(sys.executable, "-c", MEMORY, tmp_path / "features.f32")
    assert done.returncode == 0, done.stderr[-2000:]
    stated, all_at_once = map(int, done.stdout.split())
    assert stated * 40 < all_at_once
