"""The few collectives that training needs; with one process each of them does nothing."""

from __future__ import annotations

import contextlib
import datetime
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Newer releases of torch call it all_gather_single, which older ones do not know.
warnings.filterwarnings("ignore", ".*all_gather_into_tensor", FutureWarning)


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

    None, the group of all collectives, where `runtime.processes.launch` did not start the ranks.
    """
    return _host_group


def gather(local: Tensor) -> Tensor:
    """Concatenate the ranks' tensors (B, ...) to (world · B, ...), without gradient."""
    local = local.detach()
    if world_size() == 1:
        return local
    local = local.contiguous()  # a channels-last image would arrive with mixed-up pixels
    everyone = local.new_empty(world_size() * len(local), *local.shape[1:])
    dist.all_gather_into_tensor(everyone, local)
    return everyone


def gather_together(*local: Tensor) -> tuple[Tensor, ...]:
    """Gather several tensors (B, ...) of any types as one: a message costs more than its bytes."""
    if world_size() == 1:
        return tuple(tensor.detach() for tensor in local)
    packed = [tensor.detach().reshape(len(tensor), -1).view(torch.uint8) for tensor in local]
    parts = gather(torch.cat(packed, 1)).split([part.shape[1] for part in packed], 1)
    return tuple(
        part.contiguous().view(tensor.dtype).view(-1, *tensor.shape[1:])
        for part, tensor in zip(parts, local, strict=True)
    )


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


def sum_with_gradient(local: Tensor) -> Tensor:
    """Add up the ranks' tensors; each rank's gradient is the sum of all ranks' gradients."""
    return local if world_size() == 1 else _Sum.apply(local)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        total = local.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _Sum.forward(ctx, grad)


def average_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its mean over ranks."""
    if world_size() == 1 or not tensors:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = (flat / world_size()).split([tensor.numel() for tensor in tensors])
    means = [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), means)


class LateVote:
    """A vote of all ranks whose result is read when the next one is held: nobody waits for it."""

    def __init__(self) -> None:
        self._held: tuple[dist.Work, Tensor] | None = None

    def hold(self, flag: bool) -> bool:
        """Vote, and return whether any rank's flag was set in the vote before."""
        if world_size() == 1:
            return flag
        outcome = self.close()
        votes = torch.tensor(float(flag))
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=host_group(), async_op=True)
        assert work is not None
        self._held = work, votes
        return outcome

    def close(self) -> bool:
        """Return the result of the last vote, False if there was none."""
        if self._held is None:
            return False
        (work, votes), self._held = self._held, None
        work.wait()
        return bool(votes)
