"""Small KSCL learners, in PyTorch's default precision, and views to feed them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kscl.keys import load_config
from kscl.methods.encoder import Encoder
from kscl.methods.kscl import KSCL
from kscl.views.batch import Batch

DIM = 10
SIZE = 4
TAU = 0.2
KEYS = {
    "key_encoder": "KEY_ENCODER.TYPE",
    "momentum": "KEY_ENCODER.MOMENTUM",
    "key_batch_norm": "KEY_ENCODER.BATCH_NORM",
    "batch_norm_groups": "KEY_ENCODER.BATCH_NORM_GROUPS",
    "num_small": "VIEWS.SMALL.COUNT",
}
TYPES = {"queue": "queue", "bank": "memory_bank", "minibatch": "minibatch"}


def small_encoder(seed: int = 0) -> Encoder:
    """No BatchNorm: what is compared is the method and nothing else."""
    torch.manual_seed(seed)
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 16), nn.Tanh())
    return Encoder(backbone, nn.Linear(16, DIM))


def learner_with_batch_norm() -> KSCL:
    """K = 3 on a queue, for views of 6 pixels: ranks must deal them anew."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten())
    encoder = Encoder(backbone, nn.Linear(128, DIM))
    return make(encoder=encoder, length=10, num_shots=3, rho=0.9).double()


def views_of(batch: int, shots: int, seed: int = 0, spread: float = 0.5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(batch, 1, 3, SIZE, SIZE, generator=generator)
    noise = torch.randn(batch, shots + 1, 3, SIZE, SIZE, generator=generator)
    return image + spread * noise


def make(
    dictionary: str = "queue",
    *,
    encoder: Encoder | None = None,
    dim: int = DIM,
    length: int = 12,
    bank: float = 0.0,
    **settings: Any,
) -> KSCL:
    """Return a learner on a dictionary of this length; settings are keys of METHOD, or `KEYS`."""
    settings = {"num_shots": 1, "temperature": TAU, **settings}
    words = [
        *("SOLVER.BATCH_SIZE", 2 * settings.get("batch_norm_groups", 1), "PROJECTOR.DIM", dim),
        *("DICTIONARY.TYPE", TYPES[dictionary], "DICTIONARY.QUEUE_LENGTH", length),
        *("DICTIONARY.BANK_MOMENTUM", bank),
    ]
    for name, value in settings.items():
        words += [KEYS.get(name, f"METHOD.{name.upper()}"), value]
    encoder = small_encoder() if encoder is None else encoder
    return KSCL(load_config(None, [str(word) for word in words]), length, encoder)


SHARED = {"key_encoder": "shared"}
END_TO_END = {**SHARED, "grad_through_keys": True}


def run(
    learner: nn.Module, views: Tensor, indices: Tensor | None = None, small: Tensor | None = None
) -> dict[str, Tensor]:
    """Return what a forward pass of these views does."""
    indices = torch.arange(len(views)) if indices is None else indices
    result: dict[str, Tensor] = learner(Batch(views, indices, [], small))
    return result


def one_step(
    learner: KSCL, views: Tensor, optimizer: torch.optim.Optimizer, **more: Any
) -> dict[str, Tensor]:
    optimizer.zero_grad()
    figures = run(learner, views, **more)
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
