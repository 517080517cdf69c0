"""The few collectives that training needs; with one process each of them does nothing."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """Return the number of this process, 0 if there is one only."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# Groups cannot wait without a limit; no run is this long.
NO_LIMIT = datetime.timedelta(days=365)
_host_group: dist.ProcessGroup | None = None


@contextlib.contextmanager
def waiting_on_hosts() -> Iterator[None]:
    """Make the group in which ranks wait for each other on the CPU; all ranks enter together."""
    global _host_group
    group = dist.new_group(backend="gloo", timeout=NO_LIMIT)
    assert not isinstance(group, int)  # which it is on a rank outside the group
    _host_group = group
    try:
        yield
    finally:
        _host_group = None


def host_group() -> dist.ProcessGroup | None:
    """Return the group in which ranks wait without a GPU and without a limit of time.

    None, the group of all collectives, where the ranks were not started by `kscl.runtime.launch`.
    """
    return _host_group


def gather(local: Tensor) -> Tensor:
    """Concatenate the ranks' tensors (B, ...) to (world · B, ...), without gradient."""
    if world_size() == 1:
        return local.detach()
    local = local.detach().contiguous()  # a channels-last image would arrive with mixed-up pixels
    parts = [torch.empty_like(local) for _ in range(world_size())]
    dist.all_gather(parts, local)
    return torch.cat(parts)


def gather_with_gradient(local: Tensor) -> Tensor:
    """Gather with gradient: each rank gets the sum of all ranks' gradients of its own part.

    DistributedDataParallel then averages over ranks: the gradient of the mean loss of all ranks.
    """
    return local if world_size() == 1 else _Gather.apply(local)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return gather(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(world_size())[rank()]


def average_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over ranks."""
    if world_size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = (flat / world_size()).split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


def shuffled(encode: Callable[[Tensor], Tensor], images: Tensor, seed: int) -> Tensor:
    """Encode this rank's images (B, ...) in batches shuffled over all ranks: (B, D), in order.

    BatchNorm sees other images in a key's batch than in its query's, so the two cannot recognize
    each other by them (MoCo, section 3.3). All ranks draw the same order from `seed`.
    """
    ranks, batch = world_size(), len(images)
    if ranks == 1:
        return encode(images)
    order = torch.randperm(ranks * batch, generator=torch.Generator().manual_seed(seed))
    order = order.to(images.device)  # (world · B,)
    mixed = gather(images)[order.chunk(ranks)[rank()]]  # (B, ...)
    if images.ndim == 4 and images.is_contiguous(memory_format=torch.channels_last):
        mixed = mixed.contiguous(memory_format=torch.channels_last)
    embeddings = gather(encode(mixed))  # (world · B, D)
    return embeddings[order.argsort().chunk(ranks)[rank()]]  # (B, D)
