"""Gradients and speed of the math in `kscl.methods.subspace`.

Projector gradient: exact where views coincide, where that of `torch.linalg.eigh` is NaN or garbage.

Lengths of many queries on many stored subspaces, without ever keeping what is large: stored bases
are slot-major, `slots` (L, N, D) holds the first vector of every entry, then the second vector of
every entry, and so on. A length is built from L matrix products, one after another, and a slot that
few entries fill is computed for those few only, but not on a GPU, which would first have to say
which those are. Work goes over the entries in pieces whose temporaries stay in the cache. Against
one einsum over K padded vectors, with the gradient of the queries, that takes 1/4 of the time at
rank 2, 1/7 where 99% of the entries have rank 1, and a third of the memory (`learner-lengths-*` of
tools/benchmark.py, on 65,536 entries).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kscl.errors import KsclError

# Numbers in one temporary (queries x entries): a CPU's cache, or enough to fill a GPU.
PIECE = {"cpu": 2**19}
PIECE_ELSEWHERE = 2**25


def check_rho(num_shots: int, rho: float) -> None:
    """Raise an error unless so many keys span a subspace and rho is a fraction of its mass."""
    if num_shots < 1:
        raise KsclError(f"{num_shots} key views cannot span a subspace: use 1 or more.")
    if not 0 < rho <= 1:
        raise KsclError(f"rho is {rho}, but a fraction of the eigenvalue mass lies in (0, 1].")


@contextmanager
def full_precision(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Switch autocast and TF32 off and yield the tensors in float32; float64 stays."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, False
    try:
        with torch.autocast(tensors[0].device.type, enabled=False):
            yield tuple(x if x.dtype == torch.float64 else x.float() for x in tensors)
    finally:
        matmul.allow_tf32 = before


def safe_sqrt(squares: Tensor) -> Tensor:
    """Return √x whose gradient is 0 at 0, instead of infinite."""
    positive = squares > 0  # double where: no 0 · ∞ in the gradient
    return torch.where(positive, torch.where(positive, squares, 1).sqrt(), 0)


def orthonormalized(basis: Tensor) -> Tensor:
    """Apply Gram-Schmidt to rows (B, L, D) that are orthonormal but for rounding.

    A kept λ may be tiny, and V u / √λ then magnifies the rounding of u along larger vectors. Zero
    rows stay zero.
    """
    rows = [F.normalize(basis[:, 0], dim=1)]
    for slot in range(1, basis.shape[1]):
        before, row = torch.stack(rows, 1), basis[:, slot, :, None]  # (B, slot, D), (B, D, 1)
        rows.append(F.normalize((row - before.mT @ (before @ row)).squeeze(2), dim=1))
    return torch.stack(rows, 1)


def with_projector_gradient(
    basis: Tensor, keys: Tensor, eigenvalues: Tensor, vectors: Tensor, kept: Tensor
) -> Tensor:
    """Return the basis (B, L, D) of the keys (B, K, D), differentiable in the keys.

    The gradient is exact for whatever depends on the basis through the projector W̃W̃ᵀ alone, as all
    lengths do, and finite for every input.
    """
    return _ProjectorGradient.apply(basis, keys, eigenvalues, vectors, kept)


class _ProjectorGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, basis: Tensor, keys: Tensor, eigenvalues: Tensor, vectors: Tensor, kept: Tensor
    ) -> Tensor:
        ctx.save_for_backward(basis, keys, eigenvalues, vectors, kept)
        return basis.view_as(basis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Perturb W̃ to first order in the gauge where kept vectors do not mix.

        dw_i = Σ over dropped j of w_j (w_jᵀ dΣ w_i) / (λ_i − λ_j). Mixing of kept vectors leaves
        the projector as it is, so no gap between kept eigenvalues is ever divided by. Dropped
        vectors outside the span have λ_j = 0; 1/(λ_i − λ_j) = 1/λ_i + λ_j / (λ_i (λ_i − λ_j)) takes
        them together with the others and spares the division by a λ_j near 0. At a tie of a kept
        and a dropped eigenvalue the projector has no derivative: that term is left out. A
        division by −λ_j in the place of the gap takes its 1/λ_i back.
        """
        basis, keys, eigenvalues, vectors, kept = ctx.saved_tensors
        length = basis.shape[1]
        scale = torch.where(kept, eigenvalues.rsqrt(), 0)[:, :length]  # (B, L) 1/√λ, 0 if dropped
        with full_precision(grad) as (grad,):
            grad = grad * kept[:, :length, None]  # (B, L, D) zero rows are constants
            gap = eigenvalues[:, None, :length] - eigenvalues[:, :, None]  # (B, K, L) λ_i − λ_j
            tie = torch.finfo(gap.dtype).eps ** 0.5 * eigenvalues.sum(1)[:, None, None]
            pairs = ~kept[:, :, None] & kept[:, None, :length]  # (B, K, L) λ_j dropped, λ_i kept
            divisor = torch.where(pairs & (gap > tie), gap, torch.inf)  # (B, K, L)
            ties = pairs & (gap <= tie) & (gap <= eigenvalues[:, :, None])  # a λ_j near 0 is none
            dots = vectors.mT @ keys @ grad.mT  # (B, K, L) √λ_j w_jᵀ times the gradient of w_i
            cross = vectors @ (dots / divisor)  # (B, K, L)
            inside = vectors @ (dots / divisor.where(~ties, -eigenvalues[:, :, None]))  # (B, K, L)
            outside = grad - grad @ basis.mT @ basis  # (B, L, D) left of the gradient outside W̃
            toward = scale[:, :, None] * (outside + inside.mT @ keys)  # (B, L, D)
            keys_grad = vectors[:, :, :length] @ toward + cross @ basis  # (B, K, D)
        return None, keys_grad, None, None, None


def all_lengths(query: Tensor, slots: Tensor, rank: Tensor | None = None) -> Tensor:
    """Return ‖W̃_nᵀ v‖ of queries (M, D) on slot-major bases (L, N, D): (M, N).

    It is differentiable in both, and the gradient at length 0 is 0. `rank` (N,), if known, spares
    the work on vectors that are zero. Only the operands are kept for the backward pass.
    """
    with full_precision(query, slots) as (query, slots):
        return _AllLengths.apply(query, slots, rank)


def log_sum_of_negatives(
    query: Tensor,
    slots: Tensor,
    rank: Tensor,
    temperature: float,
    own: Tensor | None = None,
    signed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log Σ_n exp(s_n / τ) over stored entries, and the largest s_n; both (M,).

    s_n is the projection length, or with `signed` the cosine to the first vector. Entries of rank 0
    are empty and do not count, nor does entry own[m] for query m. Without any negative the results
    are −∞ and −1. The gradient reaches the query only; it is computed here, at two matrix products
    per slot, so the entries may change before the backward pass.
    """
    with full_precision(query, slots) as (query, slots):
        return _LogSum.apply(query, slots, rank, temperature, own, signed)


def _pieces(num_queries: int, slots: Tensor) -> Iterator[slice]:
    """Yield slices of the entries, each small enough for the cache."""
    size = max(1, PIECE.get(slots.device.type, PIECE_ELSEWHERE) // max(1, num_queries))
    return (slice(start, start + size) for start in range(0, slots.shape[1], size))


def _filled(slots: Tensor, rank: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    """Return, per slot that is not empty, vectors (n', D) and their entries (n',); None is all."""
    if rank is None or rank.device.type != "cpu":
        return [(vectors, None) for vectors in slots]
    filled: list[tuple[Tensor, Tensor | None]] = [(slots[0], None)]
    for slot in range(1, slots.shape[0]):
        entries = (rank > slot).nonzero().squeeze(1)  # (n',)
        if 2 * len(entries) > slots.shape[1]:
            filled.append((slots[slot], None))
        elif len(entries):
            filled.append((slots[slot, entries], entries))
    return filled


def _measure(
    query: Tensor, filled: list[tuple[Tensor, Tensor | None]]
) -> tuple[list[Tensor], Tensor]:
    """Return the inner products with each slot, (M, n') each, and the lengths (M, n)."""
    dots = [query @ vectors.T for vectors, _ in filled]
    if len(dots) == 1:
        return dots, dots[0].abs()
    squares = dots[0].square()
    for dot, (_, entries) in zip(dots[1:], filled[1:], strict=True):
        if entries is None:
            squares.addcmul_(dot, dot)
        else:
            squares.index_add_(1, entries, dot.square())
    return dots, squares.sqrt_()


def _slot_gradients(
    grad: Tensor, dots: list[Tensor], lengths: Tensor, filled: list[tuple[Tensor, Tensor | None]]
) -> list[Tensor]:
    """Return the gradients of the inner products from those of the lengths; overwrite `dots`."""
    if len(dots) == 1:
        return [dots[0].sign().mul_(grad)]
    # Below √tiny a length may have underflowed to 0; the quotient stays bounded, and 0 at dot 0.
    grad = grad / lengths.clamp_min(torch.finfo(lengths.dtype).tiny ** 0.5)
    return [
        dot.mul_(grad if entries is None else grad[:, entries])
        for dot, (_, entries) in zip(dots, filled, strict=True)
    ]


class _AllLengths(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, slots: Tensor, rank: Tensor | None) -> Tensor:
        ctx.save_for_backward(query, slots, rank)
        lengths = query.new_empty(query.shape[0], slots.shape[1])  # (M, N)
        for piece in _pieces(query.shape[0], slots):
            filled = _filled(slots[:, piece], None if rank is None else rank[piece])
            lengths[:, piece] = _measure(query, filled)[1]
        return lengths

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        query, slots, rank = ctx.saved_tensors
        query_grad = torch.zeros_like(query) if ctx.needs_input_grad[0] else None  # (M, D)
        slots_grad = torch.zeros_like(slots) if ctx.needs_input_grad[1] else None  # (L, N, D)
        with full_precision(grad) as (grad,):
            for piece in _pieces(query.shape[0], slots):
                filled = _filled(slots[:, piece], None if rank is None else rank[piece])
                dots, lengths = _measure(query, filled)
                dot_grads = _slot_gradients(grad[:, piece], dots, lengths, filled)
                for slot, (dot_grad, (vectors, entries)) in enumerate(
                    zip(dot_grads, filled, strict=True)
                ):
                    if query_grad is not None:
                        query_grad.addmm_(dot_grad, vectors)
                    if slots_grad is not None:
                        where = slice(None) if entries is None else entries
                        slots_grad[slot, piece][where] = dot_grad.T @ query
        return query_grad, slots_grad, None


class _LogSum(torch.autograd.Function):
    """Pass once over the entries with a running maximum, sum and gradient (online softmax)."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        slots: Tensor,
        rank: Tensor,
        temperature: float,
        own: Tensor | None,
        signed: bool,
    ) -> tuple[Tensor, Tensor]:
        top = query.new_full((query.shape[0], 1), -1)  # (M, 1) no similarity is below -1
        total = torch.zeros_like(top)  # (M, 1) Σ exp((s − top) / τ)
        ascent = torch.zeros_like(query)  # (M, D) Σ exp((s − top) / τ) ∂s/∂v
        for piece in _pieces(query.shape[0], slots):
            filled = _filled(slots[:1, piece] if signed else slots[:, piece], rank[piece])
            dots, similarity = _measure(query, filled)  # (M, n)
            if signed:
                similarity = dots[0]
            weight = _without(similarity, piece.start, rank[piece] == 0, own)  # (M, n)
            higher = torch.maximum(top, weight.amax(1, keepdim=True))  # (M, 1)
            weight = weight.sub_(higher).div_(temperature).exp_()  # (M, n)
            rescale = ((top - higher) / temperature).exp()  # (M, 1)
            total = total * rescale + weight.sum(1, keepdim=True)
            top = higher
            if ctx.needs_input_grad[0]:
                ascent *= rescale
                grads = [weight] if signed else _slot_gradients(weight, dots, similarity, filled)
                for dot_grad, (vectors, _) in zip(grads, filled, strict=True):
                    ascent.addmm_(dot_grad, vectors)
        ctx.save_for_backward(ascent / (total * temperature).clamp_min(torch.finfo(top.dtype).tiny))
        hardest = top.squeeze(1)
        ctx.mark_non_differentiable(hardest)
        return (top / temperature + total.log()).squeeze(1), hardest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (query_grad,) = ctx.saved_tensors  # (M, D)
        return grad[:, None] * query_grad, None, None, None, None, None


def _without(similarity: Tensor, start: int, empty: Tensor, own: Tensor | None) -> Tensor:
    """Copy similarities (M, n) with −∞ at empty entries and at the queries' own."""
    similarity = similarity + torch.where(empty, -torch.inf, 0)  # faster than masked_fill
    if own is None:
        return similarity
    here = own[:, None] - start  # (M, 1)
    outside = (here < 0) | (here >= similarity.shape[1])
    here = here.clamp(0, similarity.shape[1] - 1)
    there = similarity.gather(1, here).where(outside, -torch.inf)
    return similarity.scatter_(1, here, there)
