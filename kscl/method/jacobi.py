"""Eigenvalues of many small symmetric matrices by Jacobi's rotations, without asking the device.

`torch.linalg.eigh` looks at a flag on the host after every call, and so waits for a GPU. Here a
fixed number of sweeps does the same with tensor operations only. Each sweep sets every entry beside
the diagonal to 0 once, in rounds of rotations that do not touch each other's rows.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 8  # rows; beyond it the sweeps take too long
SWEEPS = 6  # they converge quadratically: 5 reach float64's rounding in practice


def jacobi_eigh(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues (B, K), ascending, and vectors (B, K, K) as columns of matrices (B, K, K).

    The same as `torch.linalg.eigh`, whose vectors may have other signs.
    """
    vectors = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    vectors = vectors.expand_as(matrices)
    rotated = matrices
    for _ in range(SWEEPS):
        for rows, columns in _rounds(matrices.shape[-1], matrices.device):
            rotation = _rotation(rotated, rows, columns)  # (B, K, K)
            rotated = rotation.mT @ rotated @ rotation
            vectors = vectors @ rotation
    vectors = F.normalize(vectors, dim=-2)
    # From the matrices themselves: the diagonal has gathered the rounding of every rotation.
    eigenvalues, order = (vectors * (matrices @ vectors)).sum(-2).sort(dim=-1)
    return eigenvalues, vectors.gather(-1, order[..., None, :].expand_as(vectors))


def _rotation(matrices: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the rotations that set entries (rows, columns) to 0, as one orthogonal matrix."""
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)  # (B, K)
    beside = matrices[..., rows, columns]  # (B, pairs)
    half_gap = (diagonal[..., columns] - diagonal[..., rows]) / 2
    # tan of the smaller angle; where the entry is 0 already, or too small to matter, it is 0.
    tangent = beside / (half_gap.abs() + torch.hypot(half_gap, beside)).clamp_min(
        torch.finfo(beside.dtype).tiny
    )
    tangent = torch.where(half_gap < 0, -tangent, tangent)
    cosine = (1 + tangent.square()).rsqrt()
    sine = tangent * cosine
    rotation = torch.zeros_like(matrices)
    rotation.diagonal(dim1=-2, dim2=-1).fill_(1)
    rotation[..., rows, rows] = cosine
    rotation[..., columns, columns] = cosine
    rotation[..., rows, columns] = sine
    rotation[..., columns, rows] = -sine
    return rotation


@functools.cache
def _rounds(size: int, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return every pair of rows once, in rounds of pairs that share none, as a tournament does."""
    if size == 1:
        return ()
    players = list(range(size + size % 2))  # with an odd number one of them rests
    rounds = []
    for _ in players[1:]:
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        played = sorted(tuple(sorted(pair)) for pair in pairs if max(pair) < size)
        rows, columns = (torch.tensor(side, device=device) for side in zip(*played, strict=True))
        rounds.append((rows, columns))
        players = [players[0], players[-1], *players[1:-1]]
    return tuple(rounds)
