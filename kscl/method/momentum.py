"""The momentum encoder: a copy of the encoder that follows it slowly."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kscl.method.batch_norm import _statistics
from kscl.method.encoder import Encoder
from kscl.runtime.distributed import average_


def momentum_twin(encoder: Encoder) -> Encoder:
    """A copy that no gradient reaches; `TwinUpdate` lets it follow."""
    return copy.deepcopy(encoder).requires_grad_(False)


class TwinUpdate:
    """θ_k ← m θ_k + (1 − m) θ_q. BatchNorm statistics follow too only where the twin makes none."""

    def __init__(self, twin: Encoder, encoder: Encoder, buffers: bool) -> None:
        self.twin, self.encoder, self.buffers = twin, encoder, buffers
        # Walking through all modules takes as long as the update itself: once is enough.
        self.ours = list[Tensor](twin.parameters())
        self.theirs = list[Tensor](encoder.parameters())

    @torch.no_grad()
    def __call__(self, momentum: float) -> None:
        torch._foreach_lerp_(self.ours, self.theirs, 1 - momentum)
        if self.buffers:
            statistics = [buffer.clone() for buffer in _statistics(self.encoder)]
            average_(statistics)  # each rank has seen other images; twins must stay the same
            torch._foreach_lerp_(_statistics(self.twin), statistics, 1 - momentum)
