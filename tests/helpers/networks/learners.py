"""Small learners, in PyTorch's default precision, and views to feed them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kscl.methods.dictionary import Dictionary, MemoryBank, Minibatch, Queue
from kscl.methods.encoder import Encoder
from kscl.methods.learner import Learner
from kscl.registry import SIMILARITIES

DIM = 10
SIZE = 4
TAU = 0.2


def small_encoder(seed: int = 0) -> Encoder:
    """No BatchNorm: what is compared is the method and nothing else."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 16), nn.Tanh())
    return Encoder(backbone, nn.Linear(16, DIM))


def learner_with_batch_norm() -> Learner:
    """K = 3 on a queue, for views of 6 pixels: ranks must deal them anew."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
    encoder = Encoder(backbone, nn.Linear(128, DIM))
    return Learner(encoder, Queue(10, 3, DIM), num_shots=3, rho=0.9).double()


def views_of(batch: int, shots: int, seed: int = 0, spread: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 1, 3, SIZE, SIZE, generator=generator)
    noise = torch.randn(batch, shots + 1, 3, SIZE, SIZE, generator=generator)
    return image + spread * noise


def make(
    dictionary: str = "queue", *, length: int = 12, bank: float = 0.0, **settings: Any
) -> Learner:
    settings = {"num_shots": 1, "similarity": "projection", "rho": 0.4, **settings}
    similarity = settings["similarity"]
    rank = SIMILARITIES[similarity].max_rank(settings["num_shots"], settings["rho"])
    store: Dictionary
    if dictionary == "queue":
        store = Queue(length, rank, DIM, similarity=similarity)
    elif dictionary == "bank":
        store = MemoryBank(length, rank, DIM, momentum=bank, similarity=similarity)
    else:
        store = Minibatch(similarity=similarity)
    return Learner(small_encoder(), store, temperature=TAU, **settings)


SHARED = {"key_encoder": "shared"}
END_TO_END = {**SHARED, "grad_through_keys": True}


def one_step(
    learner: Learner, views: Tensor, optimizer: torch.optim.Optimizer, **more: Any
) -> dict[str, Tensor]:
    optimizer.zero_grad()
    figures = learner(views, **more)
    figures["loss"].backward()
    optimizer.step()
    learner.after_step()
    return figures


def without_gauge(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a learner's state with projectors (N, D, D) in place of stored bases (L, N, D).

    Eigenvectors have no sign of their own, and equal eigenvalues no vectors of their own: what an
    eigensolver returns depends on rounding, and only the subspace means something.
    """
    stored = "dictionary.slots"
    if stored not in state:
        return dict(state)
    slots = state[stored]
    return {**state, stored: torch.einsum("lnd,lne->nde", slots, slots)}
