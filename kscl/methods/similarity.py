"""The ways to compare a query with an instance, in one table.

projection     KSCL: the length of the query's projection on the subspace of the K keys
cosine         MoCo and SimCLR (section 4.3): the cosine to the one key, K = 1
mean_cosine    a control that the paper lacks: the cosine to the normalized mean of the K keys
main_cosine    a projection with a sign: the cosine to the keys' main direction, on the mean's side
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kscl.methods.kernels import full_precision, log_sum_of_negatives, orthonormalized
from kscl.methods.subspace import (
    Subspaces,
    eigenpairs,
    fit_subspaces,
    is_kept,
    max_rank,
    own_projection_length,
    projection_length,
)
from kscl.registry import SIMILARITIES

TIE = 0.01  # of the keys' weight: a mean below it along their main direction gives no sign


def mean_direction(keys: Tensor, rho: float = 1.0) -> Subspaces:
    """Return the normalized mean of the keys (B, K, D) as a subspace of one signed vector.

    With K = 1 it is the key itself. There is nothing to cut, so `rho` has no effect.
    """
    with full_precision(keys) as (keys,):
        basis = F.normalize(keys.mean(1, keepdim=True), dim=2)  # (B, 1, D)
        fixed = keys.detach()
        along = (fixed @ basis.detach().mT).square().sum(1)  # (B, 1)
        fraction = along / fixed.square().sum((1, 2))[:, None]  # (B, 1) of that direction
        return Subspaces(basis, torch.ones_like(fraction[:, 0], dtype=torch.long), fraction)


def main_direction(keys: Tensor, rho: float = 1.0) -> Subspaces:
    """Return the main direction of the keys (B, K, D), signed so that their mean is on its side.

    It is the first eigenvector of Σ_n. With K = 1 it is the key itself; `rho` has no effect.
    """
    with full_precision(keys) as (keys,):
        main = fit_subspaces(keys, 1 / keys.shape[1])  # L_n = 1
        # A key of weight w has length √w, and counts with w in the mean.
        weighted = keys.detach() * keys.detach().norm(dim=2, keepdim=True)  # (B, K, D)
        mean = weighted.sum(1, keepdim=True)  # (B, 1, D)
        direction = main.basis.detach()
        toward = (direction * mean).sum(2, keepdim=True)  # (B, 1, 1)
        # The mean of two opposite keys has no part along it: then the first key decides.
        first = (direction * weighted[:, :1]).sum(2, keepdim=True)
        is_tie = toward.abs() < TIE * keys.detach().square().sum((1, 2), keepdim=True)
        toward = torch.where(is_tie, first, toward)
        return main._replace(basis=torch.where(toward < 0, -main.basis, main.basis))


def own_cosine(query: Tensor, basis: Tensor) -> Tensor:
    """Return the cosine of query n (B, D) to the vector of entry n (B, 1, D): (B,)."""
    return (query * basis[:, 0]).sum(1)


def cosine(query: Tensor, basis: Tensor) -> Tensor:
    """Return the cosines of queries (M, D) to the vectors of all entries (N, 1, D): (M, N)."""
    with full_precision(query, basis) as (query, basis):
        return query @ basis[:, 0].T


def blend_subspaces(old: Tensor, new: Subspaces, momentum: float) -> Tensor:
    """Return the leading directions of m·P_old + (1 − m)·P_new, as many as `new` keeps: (B, L, D).

    Projectors P = W̃W̃ᵀ are averaged and not basis vectors, whose signs and order mean nothing.
    """
    with full_precision(old, new.basis) as (old, basis):
        weighted = torch.cat([old * momentum**0.5, basis * (1 - momentum) ** 0.5], 1)  # (B, 2L, D)
        eigenvalues, vectors = eigenpairs(weighted @ weighted.mT)  # (B, 2L), (B, 2L, 2L)
        length = basis.shape[1]
        eigenvalues, vectors = eigenvalues[:, :length], vectors[:, :, :length]
        kept = is_kept(new.rank, eigenvalues)  # (B, L)
        scale = torch.where(kept, eigenvalues.clamp_min(1e-6).rsqrt(), 0)  # (B, L)
        return orthonormalized((vectors * scale[:, None]).mT @ weighted)  # (B, L, D)


def blend_directions(old: Tensor, new: Subspaces, momentum: float) -> Tensor:
    """Return the normalized m·old + (1 − m)·new of signed vectors (B, 1, D)."""
    return F.normalize(old * momentum + new.basis * (1 - momentum), dim=2)


def weigh_in_gram(keys: Tensor, weight: Tensor) -> Tensor:
    """Return keys (B, K, D) that count in Σ_n by their weights (B, K): Σ_k w_k v_k v_kᵀ."""
    return keys * weight.sqrt()[:, :, None]


def weigh_in_mean(keys: Tensor, weight: Tensor) -> Tensor:
    """Return keys (B, K, D) that count in their mean by their weights (B, K)."""
    return keys * weight[:, :, None]


def one_vector(num_shots: int, rho: float) -> int:
    """Return the rank of a similarity that keeps one direction."""
    return 1


# Queries (M, D), slots (L, N, D), ranks (N,), τ and the queries' own entries (M,) to two (M,).
LogSum = Callable[[Tensor, Tensor, Tensor, float, Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Similarity:
    """What is kept of an instance's keys, and how near a query is to it.

    `fused`, if given, replaces the formula of `log_sum` on stored entries, for speed; it must agree
    with `every`. METHOD.REMEMBER needs `weigh`; keys of weight 0 must leave no trace in `fit`.
    """

    fit: Callable[[Tensor, float], Subspaces]  # keys (B, K, D), ρ
    own: Callable[[Tensor, Tensor], Tensor]  # query n (B, D) to basis n (B, L, D): (B,)
    every: Callable[[Tensor, Tensor], Tensor]  # queries (M, D) to bases (N, L, D): (M, N)
    blend: Callable[[Tensor, Subspaces, float], Tensor]  # a memory bank's entry and a newer one
    max_rank: Callable[[int, float], int]  # vectors per instance, from K and ρ
    signed: bool  # opposite vectors are far apart, and not the same line
    fused: LogSum | None = None
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None  # keys (B, K, D) by weights (B, K)

    def log_sum(
        self, query: Tensor, slots: Tensor, rank: Tensor, temperature: float, own: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return log Σ_n exp(s_n / τ) over stored entries (L, N, D), and the largest s_n: (M,).

        Entries of rank 0 are empty and do not count, nor does entry own[m] for query m. Without any
        negative the results are −∞ and −1. The formula below makes all M x N similarities at once.
        """
        if self.fused is not None:
            return self.fused(query, slots, rank, temperature, own)
        if slots.shape[1] == 0:
            return query.new_full((len(query),), -torch.inf), query.new_full((len(query),), -1)
        ignored = (rank == 0).expand(len(query), -1)  # (M, N)
        if own is not None:
            ignored = ignored | (own[:, None] == torch.arange(len(rank), device=own.device))
        none = ignored.all(1)  # (M,)
        similarity = self.every(query, slots.transpose(0, 1))  # (M, N)
        similarity = similarity.masked_fill(ignored & ~none[:, None], -torch.inf)
        log_sum = (similarity / temperature).logsumexp(1).masked_fill(none, -torch.inf)
        return log_sum, similarity.detach().amax(1).masked_fill(none, -1)


MEAN_COSINE = Similarity(
    fit=mean_direction,
    own=own_cosine,
    every=cosine,
    blend=blend_directions,
    max_rank=one_vector,
    signed=True,
    fused=partial(log_sum_of_negatives, signed=True),
    weigh=weigh_in_mean,
)
SIMILARITIES.register(
    "projection",
    Similarity(
        fit=fit_subspaces,
        own=own_projection_length,
        every=projection_length,
        blend=blend_subspaces,
        max_rank=max_rank,
        signed=False,
        fused=log_sum_of_negatives,
        weigh=weigh_in_gram,
    ),
)
SIMILARITIES.register("cosine", MEAN_COSINE)  # of the one key of K = 1
SIMILARITIES.register("mean_cosine", MEAN_COSINE)
SIMILARITIES.register("main_cosine", replace(MEAN_COSINE, fit=main_direction, weigh=weigh_in_gram))
