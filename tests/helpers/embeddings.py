"""Unit embeddings to span subspaces with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = [torch.float32, torch.float64]


def unit(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)


def views_around_a_center(
    batch: int,
    shots: int,
    dim: int,
    spread: float,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Unit views that resemble each other, as those of one image do."""
    center, noise = unit(batch, 1, dim, seed=seed), unit(batch, shots, dim, seed=seed + 1)
    return F.normalize(center + spread * noise, dim=-1).to(dtype)


def gap_at_the_cut(keys: Tensor, rank: Tensor) -> Tensor:
    """λ_L − λ_{L+1}, counting the zeros outside the span."""
    values = torch.linalg.eigvalsh(keys.double() @ keys.double().mT).flip(1).clamp_min(0)
    values = F.pad(values, (0, 1))
    at = rank[:, None]
    return (values.gather(1, at - 1) - values.gather(1, at)).squeeze(1)


AWKWARD = {
    "identical": lambda d: unit(1, 1, d).expand(3, 4, d).clone(),
    "two and two alike": lambda d: unit(3, 2, d).repeat_interleave(2, 1),
    "opposite signs": lambda d: unit(3, 1, d) * torch.tensor([1.0, -1, 1, -1]).double()[:, None],
    "orthonormal": lambda d: torch.eye(4, d).double().expand(3, 4, d).clone(),
    "equiangular": lambda d: F.normalize(torch.eye(4, d).double() + 0.5 / d, dim=-1).expand(
        3, 4, d
    ),
    "random": lambda d: unit(3, 4, d),
    "similar": lambda d: views_around_a_center(3, 4, d, 0.5),
}
