"""Nearest neighbors against scikit-learn's and against a loop written out, in bounded memory."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from kscl.engine import knn
from kscl.engine.knn import knn_predict
from kscl.runtime.distributed import gather, rank
from tests.helpers.commands import run
from tests.helpers.ranks import joined


@pytest.fixture(scope="module")
def features():
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randn(300, 8, generator=generator), torch.randn(70, 8, generator=generator)
    labels = (train[:, 0] > 0).long() + 2 * (train[:, 1] > 0).long()
    return train, labels, test


@pytest.fixture(scope="module")
def digits():
    data = load_digits()
    pixels, classes = torch.from_numpy(data.data).float(), torch.from_numpy(data.target)
    return pixels[:1300], classes[:1300], pixels[1300:]


@pytest.mark.portable
@pytest.mark.parametrize(
    ("which", "k", "temperature"),
    [
        ("features", 15, 0.1),
        ("digits", 1, 0.07),
        ("digits", 20, 0.07),
        ("digits", 200, 0.1),
        ("digits", 20, 0.001),
    ],
)
def test_predictions_are_scikit_learns_with_the_same_weights(which, k, temperature, request):
    train, labels, test = request.getfixturevalue(which)
    theirs = KNeighborsClassifier(
        k,
        algorithm="brute",
        metric="cosine",
        weights=lambda distance: np.exp((distance.min(1, keepdims=True) - distance) / temperature),
    ).fit(train.double().numpy(), labels.numpy())
    ours = knn_predict(train, labels, test, k, temperature)
    assert np.array_equal(ours.numpy(), theirs.predict(test.double().numpy()))


def vote_on_two_ranks(_: object) -> int:
    """Vote with the training features on two ranks: 3 on the second one, fewer than neighbors."""
    generator = torch.Generator().manual_seed(0)
    train, test = torch.randn(60, 8, generator=generator), torch.randn(40, 8, generator=generator)
    labels = (train[:, 0] > 0).long() + 2 * (train[:, 1] > 0).long()
    own = (slice(57), slice(57, None))[rank()]
    sent = []

    def counted(local: torch.Tensor) -> torch.Tensor:
        sent.append(local.numel())
        return gather(local)

    knn.gather = counted
    ours = knn.predict_over_ranks(train[own], labels[own], test, 5, 0.07, 4)
    assert torch.equal(ours, knn_predict(train, labels, test, 5, 0.07))
    assert sent == [40 * 5, 40 * 5]  # similarities and labels; no features
    return 0


def test_training_features_stay_on_their_rank_and_the_votes_are_those_of_one_process(tmp_path):
    done = joined(vote_on_two_ranks, tmp_path)
    assert [code for code, _ in done] == [0, 0], done


@pytest.mark.portable
def test_neither_lengths_nor_chunks_nor_blocks_change_the_answer(digits):
    train, labels, test = digits
    expected = knn_predict(train, labels, test)
    assert torch.equal(knn_predict(train * 8, labels, test / 4), expected)
    for chunk, block in ((7, 100), (1000, 33), (64, 1299)):
        assert torch.equal(knn_predict(*digits, chunk=chunk, block=block), expected)


def test_a_tiny_temperature_leaves_the_nearest_alone(features):
    nearest_only = knn_predict(*features, k=1)
    assert torch.equal(knn_predict(*features, k=20, temperature=1e-6), nearest_only)


@pytest.mark.portable
def test_more_neighbors_than_images_are_all_images(digits):
    train, labels, test = digits
    few = knn_predict(train[:30], labels[:30], test[:100], k=1000, block=7)
    all_of_them = knn_predict(train[:30], labels[:30], test[:100], k=30)
    assert torch.equal(few, all_of_them)


def test_classes_without_images_get_no_votes():
    train = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0]])
    labels = torch.tensor([0, 1, 1])
    assert knn_predict(train, labels, torch.tensor([[1.0, 0.1]]), num_classes=5).tolist() == [0]


MEMORY = """
import resource, sys, numpy as np, torch
from kscl.engine.knn import knn_predict

n, m, dim, chunk, block = 60_000, 1_000, 128, 128, 4_096
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
room = used * 1024 + 4 * stated
resource.setrlimit(resource.RLIMIT_DATA, (room, room))
found = knn_predict(features, labels, features[-m:], chunk=chunk, block=block)
assert torch.equal(found, labels[-m:]), "an image is its own nearest neighbor"
print(stated, 4 * n * m)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is Linux's")
def test_features_mapped_from_disk_are_compared_in_the_memory_that_is_stated(tmp_path):
    """The limit is a tenth of what all similarities together would take.

    One thread, as the stacks and buffers of further threads would count as well.
    """
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = run(sys.executable, "-c", MEMORY, tmp_path / "features.f32", env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    stated, all_at_once = map(int, done.stdout.split())
    assert stated * 40 < all_at_once
