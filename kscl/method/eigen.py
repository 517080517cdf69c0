"""Eigenvalues of many small matrices, by the solver that a config names."""

from __future__ import annotations

import torch
from torch import Tensor

from kscl.method.jacobi import jacobi_eigh

EIGENSOLVERS = {"eigh": torch.linalg.eigh, "jacobi": jacobi_eigh}


def eigenpairs(gram: Tensor, eigensolver: str = "eigh") -> tuple[Tensor, Tensor]:
    """Return eigenvalues (…, K), descending and at least 0, and their vectors as columns."""
    eigenvalues, vectors = EIGENSOLVERS[eigensolver](gram)  # ascending
    return eigenvalues.flip(-1).clamp_min(0), vectors.flip(-1)
