"""The instance subspace: sections 3.2 to 3.4 of "K-Shot Contrastive Learning of Visual Features".

An instance x_n is seen K times; its unit embeddings are the columns of V_n (D x K).

    Σ_n = V_n V_nᵀ        uncentred, trace K; its eigenvectors with eigenvalue λ > 0 span V_n
    L_n                   the fewest eigenvectors whose eigenvalues sum to ρ · trace(Σ_n)
    W̃_n                   those L_n eigenvectors: all that is kept of an instance
    ‖Π_n(v)‖ = ‖W̃_nᵀ v‖   length of the projection of a unit query v: the cosine between v and W̃_n
    p(n|v)                softmax over n of ‖Π_n(v)‖ / τ

Vectors are rows here: `keys` (B, K, D) holds V_nᵀ and `basis` (B, L, D) holds W̃_nᵀ. Rows beyond L_n
are zero, so that lengths need no mask. All is computed in float32 or better, also under autocast.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kscl.errors import KsclError
from kscl.method.kernels import all_lengths, full_precision


class Subspaces(NamedTuple):
    """The subspaces of B instances."""

    basis: Tensor  # (B, L, D) unit, orthogonal rows; zero rows beyond the rank
    rank: Tensor  # (B,) L_n
    shares: Tensor  # (B, K) of the mass: of each eigenvalue, descending; (B, 1) of a mean direction

    @property
    def mass(self) -> Tensor:
        """(B,) share of the eigenvalue mass that the basis keeps"""
        return (self.shares * _kept(self.rank, self.shares)).sum(1)


def max_rank(num_shots: int, rho: float) -> int:
    """ceil(ρ·K): no instance keeps more, as the L largest of K eigenvalues hold at least L/K."""
    if num_shots < 1:
        raise KsclError(f"{num_shots} key views cannot span a subspace; use 1 or more")
    if not 0 < rho <= 1:
        raise KsclError(f"rho is {rho}, but a share of the eigenvalue mass lies in (0, 1]")
    return math.ceil(rho * num_shots - 1e-9)  # 0.28 * 25 is 7.000000000000001


def fit_subspaces(keys: Tensor, rho: float) -> Subspaces:
    """W̃_n of every instance from its unit embeddings `keys` (B, K, D).

    The gradient is that of the projector W̃W̃ᵀ: exact for whatever depends on the basis through the
    projector alone, as all lengths do, and finite for every input.
    """
    if keys.ndim != 3 or 0 in keys.shape[1:]:
        raise KsclError(f"keys must be (instances, K >= 1, D >= 1), not {tuple(keys.shape)}")
    if not keys.is_floating_point():
        raise KsclError(f"keys must be floating point embeddings, not {keys.dtype}")
    max_rank(keys.shape[1], rho)
    with full_precision(keys) as (keys,):
        return Subspaces(*_FitSubspaces.apply(keys, rho))


def kept_rank(eigenvalues: Tensor, rho: float) -> Tensor:
    """L_n (B,) from eigenvalues (B, K) in descending order; 0 only where all of them are 0.

    Sums are compared with a tolerance, as rounding would otherwise decide at ρ = 1 and at ties, and
    eigenvalues that are 0 but for rounding are never counted: their vectors are noise.
    """
    num_shots = eigenvalues.shape[1]
    trace = eigenvalues.sum(1, keepdim=True)  # (B, 1)
    rounding = 10 * num_shots * torch.finfo(eigenvalues.dtype).eps * trace  # (B, 1)
    enough = rho * trace - rounding  # (B, 1)
    count = (eigenvalues.cumsum(1)[:, :-1] < enough).sum(1) + 1  # (B,)
    numerical_rank = (eigenvalues > rounding).sum(1)  # (B,)
    return torch.minimum(count, numerical_rank).clamp_max(max_rank(num_shots, rho))


def _kept(rank: Tensor, eigenvalues: Tensor) -> Tensor:
    """(B, K): which of the eigenvalues (B, K), in descending order, are the first L_n (B,)"""
    return torch.arange(eigenvalues.shape[1], device=rank.device) < rank[:, None]


class _FitSubspaces(torch.autograd.Function):
    """The K x K Gram matrix VᵀV has the non-zero eigenvalues of VVᵀ, and w_i = V u_i / √λ_i."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, rho: float) -> tuple[Tensor, Tensor, Tensor]:
        length = max_rank(keys.shape[1], rho)
        eigenvalues, vectors = torch.linalg.eigh(keys @ keys.mT)  # (B, K), (B, K, K), ascending
        eigenvalues = eigenvalues.flip(1).clamp_min(0)  # (B, K) λ
        vectors = vectors.flip(2)  # (B, K, K) columns u
        rank = kept_rank(eigenvalues, rho)  # (B,)
        kept = _kept(rank, eigenvalues)  # (B, K)
        scale = torch.where(kept, eigenvalues.rsqrt(), 0)[:, :length]  # (B, L) 1/√λ, 0 if dropped
        basis = (vectors[:, :, :length] * scale[:, None]).mT @ keys  # (B, L, D)
        if rho > 0.9:  # below, every kept λ is at least 1 − ρ, and rounding stays small
            basis = orthonormalised(basis)
        trace = eigenvalues.sum(1, keepdim=True).clamp_min(torch.finfo(keys.dtype).tiny)  # (B, 1)
        shares = eigenvalues / trace  # (B, K)
        ctx.save_for_backward(keys, eigenvalues, vectors, scale, basis, kept)
        ctx.mark_non_differentiable(rank, shares)
        return basis, rank, shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
        """First-order perturbation of W̃ in the gauge where kept vectors do not mix.

        dw_i = Σ over dropped j of w_j (w_jᵀ dΣ w_i) / (λ_i − λ_j). Mixing of kept vectors leaves
        the projector as it is, so no gap between kept eigenvalues is ever divided by. Dropped
        vectors outside the span have λ_j = 0; 1/(λ_i − λ_j) = 1/λ_i + λ_j / (λ_i (λ_i − λ_j)) takes
        them together with the others and spares the division by a λ_j near 0. At a tie of a kept
        and a dropped eigenvalue the projector has no derivative: that term is left out.
        """
        keys, eigenvalues, vectors, scale, basis, kept = ctx.saved_tensors
        length = basis.shape[1]
        with full_precision(grad) as (grad,):
            grad = grad * kept[:, :length, None]  # (B, L, D) zero rows are constants
            gap = eigenvalues[:, None, :length] - eigenvalues[:, :, None]  # (B, K, L) λ_i − λ_j
            tie = torch.finfo(gap.dtype).eps ** 0.5 * eigenvalues.sum(1)[:, None, None]
            crosses = ~kept[:, :, None] & kept[:, None, :length] & (gap > tie)  # (B, K, L)
            cross = vectors.mT @ keys @ grad.mT / torch.where(crosses, gap, torch.inf)  # (B, K, L)
            cross = vectors @ cross  # (B, K, L)
            outside = grad - grad @ basis.mT @ basis  # (B, L, D) left of the gradient outside W̃
            towards = scale[:, :, None] * (outside + cross.mT @ keys)  # (B, L, D)
            return vectors[:, :, :length] @ towards + cross @ basis, None  # (B, K, D)


def orthonormalised(basis: Tensor) -> Tensor:
    """Gram-Schmidt over rows (B, L, D) that are orthonormal but for rounding; zero rows stay zero.

    A kept λ may be tiny, and V u / √λ then magnifies the rounding of u along larger vectors.
    """
    rows = [F.normalize(basis[:, 0], dim=1)]
    for slot in range(1, basis.shape[1]):
        before, row = torch.stack(rows, 1), basis[:, slot, :, None]  # (B, slot, D), (B, D, 1)
        rows.append(F.normalize((row - before.mT @ (before @ row)).squeeze(2), dim=1))
    return torch.stack(rows, 1)


def mean_direction(keys: Tensor) -> Subspaces:
    """The normalised mean of the keys (B, K, D), as a subspace of one signed vector.

    With K = 1 it is the key itself, as in MoCo and SimCLR; with more, a control the paper lacks.
    """
    with full_precision(keys) as (keys,):
        basis = F.normalize(keys.mean(1, keepdim=True), dim=2)  # (B, 1, D)
        share = (keys.detach() @ basis.detach().mT).square().mean(1)  # (B, 1) of that direction
        return Subspaces(basis, torch.ones_like(share[:, 0], dtype=torch.long), share)


def blend_subspaces(old: Tensor, new: Subspaces, momentum: float) -> Subspaces:
    """Leading directions of m·P_old + (1 − m)·P_new, as many as `new` keeps; `old` is (B, L, D).

    Projectors P = W̃W̃ᵀ are averaged and not basis vectors, whose signs and order mean nothing.
    """
    weighted = torch.cat([old * momentum**0.5, new.basis * (1 - momentum) ** 0.5], 1)  # (B, 2L, D)
    eigenvalues, vectors = torch.linalg.eigh(weighted @ weighted.mT)  # (B, 2L), (B, 2L, 2L)
    length = new.basis.shape[1]
    eigenvalues, vectors = eigenvalues.flip(1)[:, :length], vectors.flip(2)[:, :, :length]
    kept = _kept(new.rank, eigenvalues)  # (B, L)
    scale = torch.where(kept, eigenvalues.clamp_min(1e-6).rsqrt(), 0)  # (B, L)
    basis = orthonormalised((vectors * scale[:, None]).mT @ weighted)  # (B, L, D)
    return Subspaces(basis, new.rank, new.shares)


def projection_length(query: Tensor, basis: Tensor) -> Tensor:
    """‖W̃_nᵀ v‖ of every query (M, D) on every subspace (N, L, D): (M, N), in [0, 1].

    A length has no derivative at 0, where it has a kink like |x|; its gradient is 0 there.
    """
    return all_lengths(query, basis.transpose(0, 1))


def own_projection_length(query: Tensor, basis: Tensor) -> Tensor:
    """‖W̃_nᵀ v_n‖ of query n (B, D) on subspace n (B, L, D): (B,); gradient 0 at length 0."""
    with full_precision(query, basis) as (query, basis):
        squares = (basis @ query[:, :, None]).square().sum((1, 2))  # (B,)
        positive = squares > 0  # double where: no 0 · ∞ in the gradient
        return torch.where(positive, torch.where(positive, squares, 1).sqrt(), 0)  # (B,)


def projection_distance(query: Tensor, basis: Tensor) -> Tensor:
    """D_n(v) = √(1 − ‖Π_n(v)‖²) (M, N): the nearest subspace has the longest projection."""
    return (1 - projection_length(query, basis).square()).clamp_min(0).sqrt()


def instance_probability(query: Tensor, basis: Tensor, temperature: float = 0.2) -> Tensor:
    """p(n|v) (M, N): how probable it is that query m (M, D) is a view of instance n (N, L, D)."""
    return (projection_length(query, basis) / temperature).softmax(1)


def retrieve_instance(query: Tensor, basis: Tensor) -> Tensor:
    """Which of N instances (N, L, D) each query (M, D) belongs to: (M,), nearest subspace."""
    return projection_length(query, basis).argmax(1)
