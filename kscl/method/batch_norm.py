"""BatchNorm statistics: calibrate, copy, and the mode they are used in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from kscl.method.encoder import Encoder
from kscl.runtime.distributed import average_


@torch.no_grad()
def calibrate_batch_norm(encoder: Encoder, views: Tensor) -> None:
    """Take BatchNorm statistics from views (B, K, 3, H, W), each its own batch, averaged.

    At mean 0 and variance 1, where statistics start, a deep network in eval mode tells nothing
    apart.
    """
    norms = [m for m in encoder.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    with in_mode(encoder, training=True):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all forward passes
        for view in views.unbind(1):
            encoder(view)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    average_(_statistics(encoder))


@torch.no_grad()
def copy_statistics(source: Encoder, target: Encoder) -> None:
    for theirs, ours in zip(_statistics(source), _statistics(target), strict=True):
        ours.copy_(theirs)


@contextmanager
def in_mode(encoder: nn.Module, training: bool) -> Iterator[None]:
    before = encoder.training
    encoder.train(training)
    try:
        yield
    finally:
        encoder.train(before)


def _statistics(encoder: Encoder) -> list[Tensor]:
    return [buffer for buffer in encoder.buffers() if buffer.is_floating_point()]
