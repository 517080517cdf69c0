"""The instance subspace: the math of "K-Shot Contrastive Learning of Visual Features".

Section 3.2 (the probability), 4.1 (the basis) and 4.2 (how much of it is kept), in its symbols:

    V_n = [v_n^1 … v_n^K]   the unit embeddings of K views of instance n, as columns: D x K
    Σ_n = V_n V_nᵀ          uncentered, of trace K; its eigenvectors with λ > 0 span V_n
    L_n                     the fewest eigenvectors whose eigenvalues sum to ρ · trace(Σ_n)
    W̃_n                     those L_n eigenvectors: all that is stored of an instance
    ‖Π_n(v)‖ = ‖W̃_nᵀ v‖    the length of the projection of a unit query v: its cosine to W̃_n
    p(n|v)                  the softmax over n of ‖Π_n(v)‖ / τ

Vectors are rows here: `keys` (B, K, D) holds V_nᵀ and `basis` (B, L, D) holds W̃_nᵀ. Rows beyond L_n
are zero, so lengths need no mask. All of it is computed in float32 or better, also under autocast;
`kscl.methods.kernels` has the gradients and the speed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kscl.methods.kernels import (
    all_lengths,
    check_rho,
    full_precision,
    orthonormalized,
    safe_sqrt,
    with_projector_gradient,
)


class Subspaces(NamedTuple):
    """The subspaces of B instances."""

    basis: Tensor  # (B, L, D) orthonormal rows; zero rows beyond the rank
    rank: Tensor  # (B,) L_n
    fractions: Tensor  # (B, K) λ / trace(Σ_n), descending; (B, 1) for a mean direction

    @property
    def mass(self) -> Tensor:
        """Return the fraction (B,) of the eigenvalue mass that the basis keeps."""
        return (self.fractions * is_kept(self.rank, self.fractions)).sum(1)


def max_rank(num_shots: int, rho: float) -> int:
    """Return ceil(ρ·K), which bounds L_n (section 4.2): the L largest of K λ hold at least L/K."""
    check_rho(num_shots, rho)
    return math.ceil(rho * num_shots - 1e-9)  # 0.28 * 25 is 7.000000000000001


def fit_subspaces(keys: Tensor, rho: float) -> Subspaces:
    """Return the W̃_n that minimize equation 4, from unit embeddings `keys` (B, K, D).

    The Gram matrix V_nᵀV_n, K x K, has the nonzero eigenvalues of Σ_n, and w_i = V_n u_i / √λ_i.
    The gradient is that of the projector W̃_nW̃_nᵀ, finite for every input.
    """
    length = max_rank(keys.shape[1], rho)
    with full_precision(keys) as (keys,):
        fixed = keys.detach()
        gram = fixed @ fixed.mT  # (B, K, K)
        eigenvalues, vectors = eigenpairs(gram)  # (B, K) λ, (B, K, K) columns u
        rank = kept_rank(eigenvalues, rho)  # (B,)
        kept = is_kept(rank, eigenvalues)  # (B, K)
        scale = torch.where(kept, eigenvalues.rsqrt(), 0)[:, :length]  # (B, L) 1/√λ, 0 if dropped
        basis = (vectors[:, :, :length] * scale[:, None]).mT @ fixed  # (B, L, D)
        if rho > 0.9:  # below, every kept λ is at least 1 − ρ, and rounding stays small
            basis = orthonormalized(basis)
        basis = with_projector_gradient(basis, keys, eigenvalues, vectors, kept)
        trace = eigenvalues.sum(1, keepdim=True).clamp_min(torch.finfo(keys.dtype).tiny)  # (B, 1)
        return Subspaces(basis, rank, eigenvalues / trace)


def eigenpairs(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (…, K), descending and at least 0, and their vectors as columns."""
    eigenvalues, vectors = torch.linalg.eigh(gram)  # ascending
    return eigenvalues.flip(-1).clamp_min(0), vectors.flip(-1)


def kept_rank(eigenvalues: Tensor, rho: float) -> Tensor:
    """Return L_n (B,) of section 4.2 from descending eigenvalues (B, K); 0 only if all are 0.

    Sums are compared with a tolerance, as rounding would otherwise decide at ρ = 1 and at ties, and
    eigenvalues that are 0 but for rounding never count: their vectors are noise.
    """
    num_shots = eigenvalues.shape[1]
    trace = eigenvalues.sum(1, keepdim=True)  # (B, 1)
    rounding = 10 * num_shots * torch.finfo(eigenvalues.dtype).eps * trace  # (B, 1)
    enough = rho * trace - rounding  # (B, 1)
    count = (eigenvalues.cumsum(1)[:, :-1] < enough).sum(1) + 1  # (B,)
    numerical_rank = (eigenvalues > rounding).sum(1)  # (B,)
    return torch.minimum(count, numerical_rank).clamp_max(max_rank(num_shots, rho))


def is_kept(rank: Tensor, eigenvalues: Tensor) -> Tensor:
    """Return which of the descending eigenvalues (B, K) are the first L_n (B,): (B, K)."""
    return torch.arange(eigenvalues.shape[1], device=rank.device) < rank[:, None]


def projection_length(query: Tensor, basis: Tensor) -> Tensor:
    """Return ‖Π_n(v)‖ = ‖W̃_nᵀ v‖ (section 4.2) of queries (M, D) on all bases (N, L, D): (M, N).

    A length has a kink at 0, like |x|; its gradient is 0 there.
    """
    return all_lengths(query, basis.transpose(0, 1))


def own_projection_length(query: Tensor, basis: Tensor) -> Tensor:
    """Return ‖W̃_nᵀ v_n‖ of query n (B, D) on basis n (B, L, D): (B,); gradient 0 at length 0."""
    with full_precision(query, basis) as (query, basis):
        return safe_sqrt((basis @ query[:, :, None]).square().sum((1, 2)))  # (B,)


def projection_distance(query: Tensor, basis: Tensor) -> Tensor:
    """Return D_n(v) = √(1 − ‖Π_n(v)‖²), equation 2, for unit queries: (M, N)."""
    return (1 - projection_length(query, basis).square()).clamp_min(0).sqrt()


def instance_probability(query: Tensor, basis: Tensor, temperature: float = 0.2) -> Tensor:
    """Return p(n|v), equation 3: how probably query m (M, D) is a view of instance n: (M, N)."""
    return (projection_length(query, basis) / temperature).softmax(1)


def retrieve_instance(query: Tensor, basis: Tensor) -> Tensor:
    """Return the instance (M,) of each query: the nearest subspace has the longest projection."""
    return projection_length(query, basis).argmax(1)
