"""Basis images, the paper's "cat" figure: what each eigenvector of an instance's views looks like.

For eigenvector w_i of Σ_n and key views x^k with embeddings v^k the weights are w_iᵀ v^k, and the
basis image is Σ_k (w_iᵀ v^k) x^k: the combination of views in pixels that w_i is in the embedding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kscl.methods.kernels import full_precision
from kscl.methods.subspace import eigenpairs, kept_rank, max_rank


class BasisImages(NamedTuple):
    """The eigenvectors of one instance, by descending eigenvalue."""

    weights: Tensor  # (K, K) row i: w_iᵀ v^k for k = 1..K
    images: Tensor  # (K, 3, H, W) Σ_k weights[i, k] x^k
    fractions: Tensor  # (K,) of the eigenvalue mass
    kept: int  # L_n, the number of them that the subspace keeps


def basis_images(views: Tensor, keys: Tensor, rho: float) -> BasisImages:
    """Return the basis images of K views (K, 3, H, W) with unit embeddings (K, D)."""
    max_rank(len(keys), rho)
    with full_precision(keys.detach(), views) as (keys, views):
        eigenvalues, vectors = eigenpairs(keys @ keys.T)  # (K,), (K, K)
    weights = (vectors * eigenvalues.sqrt()).T  # (K, K): w_iᵀ v^k = √λ_i u_i[k]
    # The sign of an eigenvector means nothing; this one makes a mean of views look like them.
    weights = weights * torch.where(weights.sum(1, keepdim=True) < 0, -1, 1)
    images = torch.einsum("ik,kchw->ichw", weights, views)
    fractions = eigenvalues / eigenvalues.sum().clamp_min(torch.finfo(eigenvalues.dtype).tiny)
    return BasisImages(weights, images, fractions, int(kept_rank(eigenvalues[None], rho)))
