"""The momentum encoder: a copy of the encoder that follows it slowly (MoCo, section 3.2)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kscl.methods.batch_norm import statistics
from kscl.methods.encoder import Encoder


def make_momentum_encoder(encoder: Encoder) -> Encoder:
    """Return a copy that no gradient reaches; `MomentumUpdate` lets it follow."""
    return copy.deepcopy(encoder).requires_grad_(False)


class MomentumUpdate:
    """Moves the momentum encoder: θ_k ← m θ_k + (1 − m) θ_q.

    BatchNorm statistics (`buffers`) follow too only where the momentum encoder makes none itself.
    """

    def __init__(self, momentum_encoder: Encoder, encoder: Encoder, buffers: bool) -> None:
        self.momentum_encoder, self.encoder, self.buffers = momentum_encoder, encoder, buffers
        # A walk through all modules takes as long as the update itself: once is enough.
        self.ours = list[Tensor](momentum_encoder.parameters())
        self.theirs = list[Tensor](encoder.parameters())

    @torch.no_grad()
    def __call__(self, momentum: float) -> None:
        """Take one step of size 1 − momentum toward the encoder."""
        torch._foreach_lerp_(self.ours, self.theirs, 1 - momentum)
        if self.buffers:
            torch._foreach_lerp_(
                statistics(self.momentum_encoder), statistics(self.encoder), 1 - momentum
            )
