"""The paper's maths against independent references, at awkward input, and under invariances."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kscl.errors import KsclError
from kscl.methods.similarity import blend_subspaces, mean_direction
from kscl.methods.subspace import (
    fit_subspaces,
    kept_rank,
    max_rank,
    own_projection_length,
    projection_length,
)
from tests.helpers.embeddings import AWKWARD, DTYPES, gap_at_the_cut, unit, views_around_a_center

pytestmark = pytest.mark.portable

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-10}


def projector(basis: Tensor) -> Tensor:
    return basis.mT @ basis


def reference_projector(keys: Tensor, rho: float) -> tuple[Tensor, list[int]]:
    """By the D x D matrix of the paper, one instance at a time, in float64 and plain Python."""
    projectors, ranks = [], []
    for views in keys.double():
        covariance = sum(torch.outer(v, v) for v in views)
        values, vectors = torch.linalg.eigh(covariance)
        values, vectors = values.flip(0), vectors.flip(1)
        kept = 1
        while sum(values[:kept]) < rho * values.sum() - 1e-6 and kept < len(views):
            kept += 1
        kept = min(kept, int((values > 3e-5).sum()))
        projectors.append(vectors[:, :kept] @ vectors[:, :kept].T)
        ranks.append(kept)
    return torch.stack(projectors), ranks


class TestFit:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("shots", "rho"), [(1, 0.4), (2, 0.7), (3, 1.0), (5, 0.2), (5, 0.4), (5, 0.9), (8, 0.7)]
    )
    def test_equals_the_eigendecomposition_of_the_d_by_d_matrix(
        self, shots: int, rho: float, dtype: torch.dtype
    ) -> None:
        keys = views_around_a_center(16, shots, 24, 1.0, seed=shots, dtype=dtype)
        fitted = fit_subspaces(keys, rho)
        expected, ranks = reference_projector(keys, rho)
        assert fitted.rank.tolist() == ranks
        torch.testing.assert_close(
            projector(fitted.basis).double(), expected, rtol=0, atol=TOLERANCE[dtype]
        )

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_full_span_equals_projection_by_least_squares(self, dtype: torch.dtype) -> None:
        keys, query = unit(10, 5, 16, dtype=dtype), unit(10, 16, seed=1, dtype=dtype)
        solution = torch.linalg.lstsq(keys.mT, query[:, :, None]).solution
        expected = (keys.mT @ solution).norm(dim=(1, 2))
        length = own_projection_length(query, fit_subspaces(keys, 1.0).basis)
        torch.testing.assert_close(length, expected, rtol=0, atol=TOLERANCE[dtype])

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("rho", [0.4, 0.9, 1.0])
    @pytest.mark.parametrize("kind", AWKWARD)
    def test_awkward_views_give_the_rank_of_the_reference(
        self, kind: str, rho: float, dtype: torch.dtype
    ) -> None:
        keys = AWKWARD[kind](8).to(dtype)
        assert fit_subspaces(keys, rho).rank.tolist() == reference_projector(keys, rho)[1]

    @pytest.mark.parametrize("spread", [0.005, 0.01, 0.05])
    def test_views_that_are_almost_the_same_have_an_orthonormal_basis_too(
        self, spread: float
    ) -> None:
        keys = views_around_a_center(50, 5, 64, spread, dtype=torch.float32)
        fitted = fit_subspaces(keys, 1.0)
        expected = torch.diag_embed((torch.arange(5) < fitted.rank[:, None]).float())
        torch.testing.assert_close(fitted.basis @ fitted.basis.mT, expected, atol=5e-6, rtol=0)

    def test_more_views_than_dimensions_span_the_whole_space(self) -> None:
        fitted = fit_subspaces(unit(6, 9, 4, dtype=torch.float32), 1.0)
        assert fitted.rank.tolist() == [4] * 6
        torch.testing.assert_close(projector(fitted.basis), torch.eye(4).expand(6, 4, 4))

    def test_a_zero_embedding_has_an_empty_subspace(self) -> None:
        fitted = fit_subspaces(torch.zeros(2, 3, 8), 0.4)
        assert fitted.rank.tolist() == [0, 0]
        assert not fitted.basis.any()
        assert fitted.mass.tolist() == [0, 0]

    def test_one_view_spans_itself(self) -> None:
        keys = unit(5, 1, 8)
        fitted = fit_subspaces(keys, 0.4)
        torch.testing.assert_close(fitted.basis.abs(), keys.abs())
        torch.testing.assert_close(fitted.mass, torch.ones(5).double())

    def test_autocast_does_not_lower_the_precision(self) -> None:
        keys = unit(4, 5, 32, dtype=torch.float32)
        expected = fit_subspaces(keys, 0.9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fitted = fit_subspaces(keys, 0.9)
            halved = fit_subspaces(keys.bfloat16(), 0.9)
        assert fitted.basis.dtype == halved.basis.dtype == torch.float32
        torch.testing.assert_close(fitted.basis, expected.basis)

    @pytest.mark.parametrize(
        ("keys", "rho", "named"),
        [
            (torch.zeros(2, 0, 8), 0.4, "0 key views"),
            (torch.zeros(2, 3, 8), 0.0, "rho is 0"),
            (torch.zeros(2, 3, 8), 1.1, "rho is 1.1"),
        ],
    )
    def test_bad_input_is_named(self, keys: Tensor, rho: float, named: str) -> None:
        with pytest.raises(KsclError, match=named):
            fit_subspaces(keys, rho)


class TestRank:
    @pytest.mark.parametrize(
        ("shots", "rho", "expected"),
        [(5, 0.4, 2), (5, 0.9, 5), (5, 1.0, 5), (1, 0.4, 1), (25, 0.28, 7), (10, 0.1, 1)],
    )
    def test_at_most_rho_k_rounded_up(self, shots: int, rho: float, expected: int) -> None:
        assert max_rank(shots, rho) == expected

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_ties_and_full_mass_are_not_decided_by_rounding(self, dtype: torch.dtype) -> None:
        for shots in range(1, 26):
            equal = torch.ones(1, shots, dtype=dtype) * (1 + 1e-7)
            for kept in range(1, shots + 1):
                assert kept_rank(equal, kept / shots).item() == kept

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("groups", "alike"), [(2, 2), (3, 2), (3, 5), (5, 3)])
    def test_groups_of_identical_views_hold_their_exact_share(
        self, groups: int, alike: int, dtype: torch.dtype
    ) -> None:
        """Each group has the same eigenvalue, and rounding must not ask for one group more."""
        directions = torch.linalg.qr(unit(50, 16, groups))[0].mT  # (50, groups, 16)
        keys = directions.repeat(1, alike, 1).to(dtype)
        for kept in range(1, groups + 1):
            assert fit_subspaces(keys, kept / groups).rank.tolist() == [kept] * 50

    @settings(max_examples=200, deadline=None)
    @given(st.integers(1, 12), st.integers(1, 24), st.floats(0.01, 1), st.integers(0, 10**6))
    def test_rank_is_the_smallest_that_holds_the_mass(
        self, shots: int, dim: int, rho: float, seed: int
    ) -> None:
        keys = views_around_a_center(4, shots, dim, 0.8, seed, torch.float32)
        fitted = fit_subspaces(keys, rho)
        basis, rank, mass = fitted.basis, fitted.rank, fitted.mass
        assert basis.shape == (4, max_rank(shots, rho), dim)
        assert max_rank(shots, rho) <= math.ceil(rho * shots)
        values = torch.linalg.eigvalsh(keys.double() @ keys.double().mT).flip(1).clamp_min(0)
        share = values.cumsum(1) / shots
        for n, kept in enumerate(rank.tolist()):
            assert 1 <= kept <= min(shots, dim)
            assert not basis[n, kept:].any()
            torch.testing.assert_close(
                basis[n, :kept] @ basis[n, :kept].T, torch.eye(kept), rtol=0, atol=1e-4
            )
            assert mass[n].item() == pytest.approx(share[n, kept - 1].item(), abs=1e-5)
            assert kept == 1 or share[n, kept - 2] < rho
            assert share[n, kept - 1] > rho - 1e-3


class TestInvariance:
    """Of the projector, wherever the cut is not a tie."""

    @staticmethod
    def same(one: Tensor, two: Tensor, rho: float) -> None:
        first, second = fit_subspaces(one, rho), fit_subspaces(two, rho)
        clear = gap_at_the_cut(one, first.rank) > 1e-3
        assert clear.any()
        assert torch.equal(first.rank[clear], second.rank[clear])
        torch.testing.assert_close(
            projector(first.basis)[clear], projector(second.basis)[clear], rtol=0, atol=1e-8
        )

    @pytest.mark.parametrize("rho", [0.4, 0.9, 1.0])
    def test_order_and_sign_of_the_views_do_not_matter(self, rho: float) -> None:
        keys = views_around_a_center(20, 5, 16, 1.0)
        signs = torch.tensor([1.0, -1, 1, -1, -1]).double()[:, None]
        self.same(keys, (keys * signs)[:, [3, 0, 4, 1, 2]], rho)

    @pytest.mark.parametrize("rho", [0.4, 0.9, 1.0])
    def test_rotation_of_the_embedding_space_rotates_the_subspace(self, rho: float) -> None:
        keys, query = views_around_a_center(20, 5, 16, 1.0), unit(7, 16, seed=9)
        rotation = torch.linalg.qr(torch.randn(16, 16).double())[0]
        before, after = fit_subspaces(keys, rho), fit_subspaces(keys @ rotation, rho)
        clear = gap_at_the_cut(keys, before.rank) > 1e-3
        torch.testing.assert_close(
            projection_length(query, before.basis)[:, clear],
            projection_length(query @ rotation, after.basis)[:, clear],
        )

    def test_duplicate_views_do_not_change_the_full_span(self) -> None:
        keys = unit(8, 3, 16)
        one = projector(fit_subspaces(keys, 1.0).basis)
        two = projector(fit_subspaces(keys[:, [0, 0, 1, 2, 2, 2]], 1.0).basis)
        torch.testing.assert_close(one, two, rtol=0, atol=1e-8)

    def test_another_view_never_shortens_the_projection_on_the_full_span(self) -> None:
        keys, query = unit(8, 6, 16), unit(5, 16, seed=3)
        lengths = [
            projection_length(query, fit_subspaces(keys[:, :k], 1.0).basis) for k in (1, 3, 6)
        ]
        assert (lengths[0] <= lengths[1] + 1e-12).all()
        assert (lengths[1] <= lengths[2] + 1e-12).all()

    @settings(max_examples=50, deadline=None)
    @given(st.floats(0.05, 1), st.floats(0.05, 1), st.integers(0, 10**6))
    def test_a_larger_rho_never_shortens_the_projection(
        self, one: float, two: float, seed: int
    ) -> None:
        keys, query = views_around_a_center(6, 5, 16, 1.0, seed), unit(4, 16, seed=seed + 2)
        less, more = (fit_subspaces(keys, rho).basis for rho in sorted((one, two)))
        assert (projection_length(query, less) <= projection_length(query, more) + 1e-9).all()


class TestOtherSubspaces:
    def test_mean_direction_is_the_normalized_mean(self) -> None:
        keys = views_around_a_center(6, 5, 16, 0.5)
        fitted = mean_direction(keys)
        torch.testing.assert_close(fitted.basis[:, 0], F.normalize(keys.mean(1), dim=1))
        assert fitted.rank.tolist() == [1] * 6
        assert (fitted.mass <= fit_subspaces(keys, 0.01).mass + 1e-9).all()

    def test_a_blend_of_equal_subspaces_is_that_subspace(self) -> None:
        new = fit_subspaces(views_around_a_center(6, 5, 16, 1.0), 0.7)
        turned = new.basis.flip(1).roll(1, 1) * -1
        blend = blend_subspaces(turned, new, 0.5)
        torch.testing.assert_close(projector(blend), projector(new.basis), rtol=0, atol=1e-7)

    def test_a_blend_lies_nearer_to_the_heavier_one(self) -> None:
        old, new = (fit_subspaces(unit(6, 1, 16, seed=s), 1.0) for s in (0, 1))
        for momentum in (0.1, 0.9):
            basis = blend_subspaces(old.basis, new, momentum)
            to_old = own_projection_length(basis[:, 0], old.basis)
            to_new = own_projection_length(basis[:, 0], new.basis)
            assert ((to_old > to_new) == (momentum > 0.5)).all()
