"""Several queries per image, of two sizes: the loss against one written out query by query."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kscl.methods.encoder import Encoder
from kscl.methods.kscl import KSCL
from tests.helpers.networks import learners
from tests.helpers.networks.learners import run

pytestmark = pytest.mark.portable

BATCH, DIM, TAU, IMAGES, LENGTH = 4, 6, 0.2, 9, 10
QUERIES, SMALL = 2, 3
CASES = [("projection", 3), ("projection", 1), ("cosine", 1), ("mean_cosine", 3)]


def encoder_of(norm: nn.Module) -> Encoder:
    """Takes images of any size."""
    torch.manual_seed(0)
    backbone = nn.Sequential(
        nn.Conv2d(3, 5, 3), norm, nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    return Encoder(backbone, nn.Linear(20, DIM)).double()


def make(dictionary: str, norm: nn.Module | None = None, **settings: Any) -> KSCL:
    settings = {"rho": 0.6, "momentum": 0.8, "num_queries": QUERIES, "num_small": SMALL, **settings}
    encoder = encoder_of(nn.Identity() if norm is None else norm)
    length = IMAGES if dictionary == "bank" else LENGTH
    return learners.make(dictionary, encoder=encoder, dim=DIM, length=length, **settings).double()


def batch_of(step: int, num_views: int) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    views = torch.randn(BATCH, num_views, 3, 8, 8, generator=numbers).double()
    small = torch.randn(BATCH, SMALL, 3, 5, 5, generator=numbers).double()
    return views, torch.randperm(IMAGES, generator=numbers)[:BATCH], small


def directions(keys: Tensor, similarity: str, rho: float = 0.6) -> Tensor:
    """Return what one image's keys (K, D) leave, (L, D), the plainest way."""
    if similarity != "projection":
        mean = keys.mean(0, keepdim=True)
        return mean / mean.norm()
    values, vectors = torch.linalg.eigh(keys.T @ keys)
    kept = 1
    while values.flip(0)[:kept].sum() < rho * len(keys) - 1e-9:
        kept += 1
    return vectors.T.flip(0)[:kept]


def nearness(query: Tensor, kept: Tensor, similarity: str) -> Tensor:
    products = kept @ query
    return products.norm() if similarity == "projection" else products[0]


def minus_log_probability(
    query: Tensor, own: Tensor, others: list[Tensor], similarity: str
) -> Tensor:
    positive = (nearness(query, own, similarity) / TAU).exp()
    negatives = [(nearness(query, other, similarity) / TAU).exp() for other in others]
    return -(positive / (positive + sum(negatives))).log()


@pytest.mark.parametrize(("similarity", "shots"), CASES)
@pytest.mark.parametrize("dictionary", ["queue", "bank", "minibatch"])
def test_the_loss_is_the_mean_over_all_queries_of_an_image(
    dictionary: str, similarity: str, shots: int
) -> None:
    learner = make(dictionary, num_shots=shots, similarity=similarity)
    queue: list[Tensor] = []
    bank: dict[int, Tensor] = {}
    for step in range(3):
        views, indices, small = batch_of(step, QUERIES + shots)
        assert learner.key_encoder is not None
        kept, losses = [], []
        for image in range(BATCH):
            with torch.no_grad():
                keys = torch.cat([learner.key_encoder(v[None]) for v in views[image, QUERIES:]])
            kept.append(directions(keys, similarity))
        for image in range(BATCH):
            for view in [*views[image, :QUERIES], *small[image]]:
                others = {
                    "queue": queue,
                    "bank": [entry for i, entry in bank.items() if i != indices[image]],
                    "minibatch": [kept[i] for i in range(BATCH) if i != image],
                }[dictionary]
                query = learner.encoder(view[None])[0]
                losses.append(minus_log_probability(query, kept[image], others, similarity))
        expected = torch.stack(losses).mean()
        gradients = torch.autograd.grad(expected, list(learner.encoder.parameters()))

        result = run(learner, views, indices, small)
        torch.testing.assert_close(result["loss"], expected)
        result["loss"].backward()
        for weight, gradient in zip(learner.encoder.parameters(), gradients, strict=True):
            torch.testing.assert_close(weight.grad, gradient)
            weight.data -= 0.1 * gradient
            weight.grad = None
        learner.after_step()
        queue = [*queue, *kept][-LENGTH:]
        bank |= dict(zip(indices.tolist(), kept, strict=True))


@pytest.mark.parametrize(("similarity", "shots"), CASES)
def test_a_small_query_of_the_symmetric_loss_is_compared_with_each_subspace_of_its_image(
    similarity: str, shots: int
) -> None:
    shared = {"key_encoder": "shared", "grad_through_keys": True, "symmetric": True}
    learner = make("minibatch", num_shots=shots, similarity=similarity, num_queries=1, **shared)
    views, _, small = batch_of(0, shots + 1)
    every = [torch.cat([learner.encoder(view[None]) for view in image]) for image in views]
    kept = [
        [
            directions(torch.cat([image[:left_out], image[left_out + 1 :]]), similarity)
            for left_out in range(shots + 1)
        ]
        for image in every
    ]
    losses = []
    for image in range(BATCH):
        others = [entry for i in range(BATCH) if i != image for entry in kept[i]]
        for query, own in zip(every[image], kept[image], strict=True):
            losses.append(minus_log_probability(query, own, others, similarity))
        for view in small[image]:
            query = learner.encoder(view[None])[0]
            each = [minus_log_probability(query, own, others, similarity) for own in kept[image]]
            losses.append(torch.stack(each).mean())
    torch.testing.assert_close(run(learner, views, small=small)["loss"], torch.stack(losses).mean())


def test_batch_norm_sees_each_size_as_one_batch_and_keeps_the_statistics_of_the_full_size() -> None:
    learner = make("queue", nn.BatchNorm2d(5), num_shots=1, similarity="cosine")
    reference = encoder_of(nn.BatchNorm2d(5))
    views, _, small = batch_of(0, QUERIES + 1)
    seen: list[tuple[int, ...]] = []
    norm = learner.encoder.backbone[1]  # type: ignore[index]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))
    run(learner, views, small=small)
    assert seen == [(BATCH * QUERIES, 5, 6, 6), (BATCH * SMALL, 5, 3, 3)]
    reference(torch.cat([views[:, 0], views[:, 1]]))
    expected = reference.backbone[1]  # type: ignore[index]
    assert isinstance(expected, nn.BatchNorm2d)
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    torch.testing.assert_close(norm.running_var, expected.running_var)
    assert norm.momentum == expected.momentum
