"""The gradients of subspaces, by finite differences and at the inputs where they are awkward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kscl.methods.subspace import (
    fit_subspaces,
    projection_length,
)
from tests.helpers.embeddings import AWKWARD, DTYPES, gap_at_the_cut, unit, views_around_a_center

pytestmark = pytest.mark.portable

WITH_A_GAP = [
    (kind, rho)
    for kind, views in AWKWARD.items()
    for rho in (0.4, 0.9, 1.0)
    if (gap_at_the_cut(views(7), fit_subspaces(views(7), rho).rank) > 1e-3).all()
]

# Steps so small that views which coincide still count as one: another rank is another projector.
STEP = 1e-8


class TestGradientThroughTheKeys:
    """The gradient of the projector, at every kind of degenerate input."""

    @staticmethod
    def squared_lengths(keys: Tensor, rho: float) -> Tensor:
        query = unit(6, keys.shape[2], seed=5, dtype=keys.dtype)
        return projection_length(query, fit_subspaces(keys, rho).basis).square()

    @pytest.mark.parametrize(("kind", "rho"), WITH_A_GAP)
    def test_is_exact_where_there_is_a_gap_at_the_cut(self, kind: str, rho: float) -> None:
        keys = AWKWARD[kind](7)[:2].clone().requires_grad_()
        check = torch.autograd.gradcheck
        assert check(lambda x: self.squared_lengths(x, rho), (keys,), eps=STEP, atol=1e-6)

    def test_is_checked_on_every_kind_of_awkward_views(self) -> None:
        assert {kind for kind, _ in WITH_A_GAP} == set(AWKWARD)
        assert len(WITH_A_GAP) == 3 * len(AWKWARD) - 2  # a tie: orthonormal, equiangular at 0.4

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rho", [0.4, 0.9, 1.0])
    @pytest.mark.parametrize("kind", AWKWARD)
    def test_is_finite_for_every_input(self, kind: str, rho: float, dtype: torch.dtype) -> None:
        keys = AWKWARD[kind](8).to(dtype).requires_grad_()
        (grad,) = torch.autograd.grad(self.squared_lengths(keys, rho).sum(), keys)
        assert torch.isfinite(grad).all()
        assert grad.norm() < 1e3

    def test_is_zero_along_a_dropped_direction_that_ties_with_the_kept_one(self) -> None:
        keys = torch.eye(2, 5).double()[None].requires_grad_()  # orthonormal: both λ are 1
        (kept,) = fit_subspaces(keys, 0.4).basis[0]  # (5,)
        dropped = F.pad(torch.stack([-kept[1], kept[0]]).detach(), (0, 3))  # (5,)
        outside = torch.eye(5).double()[2]
        for direction, expected in ((dropped, 0), (outside, 1)):
            (grad,) = torch.autograd.grad(kept @ direction, keys, retain_graph=True)
            assert grad.norm().item() == pytest.approx(expected, abs=1e-12)

    def test_equals_autograd_through_eigh_where_eigenvalues_are_apart(self) -> None:
        keys = unit(5, 4, 9).requires_grad_()
        query = unit(6, 9, seed=5)
        values, vectors = torch.linalg.eigh(keys @ keys.mT)
        basis = (vectors / values.sqrt()[:, None]).mT.flip(1) @ keys  # (5, 4, 9), descending
        kept = torch.arange(4) < fit_subspaces(keys, 0.6).rank[:, None]
        reference = ((basis * kept[:, :, None]) @ query.T).square().sum()
        (expected,) = torch.autograd.grad(reference, keys)
        (grad,) = torch.autograd.grad(self.squared_lengths(keys, 0.6).sum(), keys)
        torch.testing.assert_close(grad, expected)

    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, 6), st.integers(2, 9), st.floats(0.1, 1), st.integers(0, 10**6))
    def test_passes_gradcheck_for_any_shape_and_rho(
        self, shots: int, dim: int, rho: float, seed: int
    ) -> None:
        keys = views_around_a_center(2, shots, dim, 1.0, seed)
        assume((gap_at_the_cut(keys, fit_subspaces(keys, rho).rank) > 1e-2).all())
        lengths = projection_length(unit(6, dim, seed=5), fit_subspaces(keys, rho).basis)
        assume(lengths.min() > 1e-3)
        keys.requires_grad_()
        check = torch.autograd.gradcheck
        assert check(lambda x: self.squared_lengths(x, rho), (keys,), eps=STEP, atol=1e-5)

    def test_training_on_duplicate_views_stays_finite(self) -> None:
        keys = unit(8, 3, 16, dtype=torch.float32).repeat(1, 2, 1).requires_grad_()
        for _ in range(40):
            (grad,) = torch.autograd.grad(
                self.squared_lengths(F.normalize(keys, dim=2), 0.9).sum(), keys
            )
            assert torch.isfinite(grad).all()
            keys = (keys.detach() - 0.1 * grad).requires_grad_()
