"""Jacobi's rotations against torch.linalg.eigh, and in training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kscl.method.jacobi import LARGEST, jacobi_eigh
from kscl.method.subspace import fit_subspaces
from tests.helpers.networks.learners import make, one_step, views_of

pytestmark = pytest.mark.portable


def unit_keys(shots: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return unit keys (64, K, 16): far apart, close to each other, or some the same."""
    generator = torch.Generator().manual_seed(shots)
    keys = torch.randn(64, shots, 16, generator=generator, dtype=torch.float64)
    if kind == "close":
        keys = keys[:, :1] + 0.1 * keys
    elif kind == "same":
        keys[:, shots // 2 :] = keys[:, :1]
    return F.normalize(keys, dim=2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["apart", "close", "same"])
@pytest.mark.parametrize("shots", range(1, LARGEST + 1))
def test_it_finds_the_eigenvalues_and_orthonormal_vectors(shots, kind, dtype):
    keys = unit_keys(shots, kind, dtype)
    gram = keys @ keys.mT
    eigenvalues, vectors = jacobi_eigh(gram)
    expected = torch.linalg.eigvalsh(gram.double())
    trace = shots  # of every Gram matrix
    assert float((eigenvalues - expected).abs().max()) / trace < 1e-6
    eye = torch.eye(shots, dtype=dtype).expand_as(gram)
    torch.testing.assert_close(vectors.mT @ vectors, eye, atol=3e-6, rtol=0)
    made_again = vectors @ torch.diag_embed(eigenvalues) @ vectors.mT
    torch.testing.assert_close(made_again, gram, atol=3e-6 * trace, rtol=0)


@pytest.mark.parametrize("rho", [0.4, 0.9, 1.0])
def test_subspaces_are_those_of_eigh(rho):
    keys = unit_keys(5, "apart", torch.float64)
    one, other = (fit_subspaces(keys, rho, solver) for solver in ("eigh", "jacobi"))
    assert torch.equal(one.rank, other.rank)
    projectors = [subspaces.basis.mT @ subspaces.basis for subspaces in (one, other)]
    torch.testing.assert_close(*projectors, atol=1e-6, rtol=0)


def test_a_matrix_that_is_zero_or_diagonal_is_left_as_it_is():
    matrices = torch.diag_embed(torch.tensor([[0.0, 0.0, 0.0], [3.0, 1.0, 2.0]]))
    eigenvalues, vectors = jacobi_eigh(matrices)
    assert eigenvalues.tolist() == [[0, 0, 0], [1, 2, 3]]
    assert torch.equal(vectors.abs().sum(1), torch.ones(2, 3))


def test_training_with_it_has_the_losses_of_eigh():
    losses = []
    for solver in ("eigh", "jacobi"):
        learner = make(num_shots=5, rho=0.9, eigensolver=solver)
        optimizer = torch.optim.SGD(learner.encoder.parameters(), lr=0.1)
        steps = [one_step(learner, views_of(6, 5, seed=seed), optimizer) for seed in range(4)]
        losses.append([figures["loss"].item() for figures in steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] > 0
