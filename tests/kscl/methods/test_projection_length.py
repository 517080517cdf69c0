"""Projection lengths, probabilities and retrieval against their definitions."""

from __future__ import annotations

import pytest
import torch

from kscl.methods.subspace import (
    fit_subspaces,
    instance_probability,
    own_projection_length,
    projection_distance,
    projection_length,
    retrieve_instance,
)
from tests.helpers.embeddings import DTYPES, unit, views_around_a_center
from tests.kscl.methods.test_subspace import TOLERANCE

pytestmark = pytest.mark.portable


class TestLengths:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equal_the_norm_of_the_projected_query(self, dtype: torch.dtype) -> None:
        basis, query = (
            fit_subspaces(unit(9, 5, 16, dtype=dtype), 0.9).basis,
            unit(7, 16, dtype=dtype),
        )
        projected = torch.einsum("nld,nle,me->mnd", basis, basis, query)
        lengths = projection_length(query, basis)
        torch.testing.assert_close(lengths, projected.norm(dim=2), atol=TOLERANCE[dtype], rtol=0)
        distance = (query[:, None] - projected).norm(dim=2)
        torch.testing.assert_close(
            projection_distance(query, basis),
            distance,
            atol=1e-3 if dtype == DTYPES[0] else 1e-7,
            rtol=0,
        )
        torch.testing.assert_close(
            own_projection_length(query, basis[:7]), lengths.diagonal(), atol=1e-6, rtol=0
        )

    def test_one_shot_length_is_the_absolute_cosine(self) -> None:
        keys, query = unit(9, 1, 16), unit(7, 16, seed=1)
        lengths = projection_length(query, fit_subspaces(keys, 0.4).basis)
        torch.testing.assert_close(lengths, (query @ keys[:, 0].T).abs())

    def test_probabilities_are_a_softmax_and_the_nearest_subspace_is_retrieved(self) -> None:
        keys = views_around_a_center(9, 5, 32, 0.3)
        basis, query = fit_subspaces(keys, 0.4).basis, keys[:, 2]
        probability = instance_probability(query, basis, temperature=0.2)
        by_hand = (projection_length(query, basis) / 0.2).exp()
        torch.testing.assert_close(probability, by_hand / by_hand.sum(1, keepdim=True))
        assert retrieve_instance(query, basis).tolist() == list(range(9))
        assert torch.equal(projection_distance(query, basis).argmin(1), probability.argmax(1))

    def test_length_zero_has_gradient_zero(self) -> None:
        basis = torch.eye(4)[None, :2].repeat(2, 1, 1).requires_grad_()
        query = torch.eye(4)[2:].clone().requires_grad_()
        for length in (projection_length(query, basis), own_projection_length(query, basis)):
            assert not length.any()
            for grad in torch.autograd.grad(length.sum(), (query, basis)):
                assert not grad.any()

    def test_distance_zero_has_gradient_zero(self) -> None:
        query = torch.eye(4)[:2].clone().requires_grad_()
        distance = projection_distance(query, torch.eye(4)[None, :3])
        assert not distance.any()
        assert not torch.autograd.grad(distance.sum(), query)[0].any()

    def test_lengths_stay_within_zero_and_one(self) -> None:
        keys = views_around_a_center(50, 6, 64, 0.01, dtype=torch.float32)
        lengths = projection_length(keys.flatten(0, 1), fit_subspaces(keys, 1.0).basis)
        assert lengths.min() >= 0
        assert lengths.max() <= 1 + 1e-5

    def test_lengths_are_differentiable_in_queries_and_bases(self) -> None:
        query = unit(3, 6).requires_grad_()
        basis = unit(4, 2, 6, seed=1).requires_grad_()
        assert torch.autograd.gradcheck(projection_length, (query, basis))
