"""The few collectives that training needs, and what the ranks of a run decide together.

With one process each of them does nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kscl.cli import EXIT_USER_ERROR

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

    None, the group of all collectives, where `runtime.launch` did not start the ranks.
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


LOCAL_SIZE_VARIABLE = "LOCAL_WORLD_SIZE"

Result = TypeVar("Result")


def device() -> torch.device:
    """Return the device of this rank."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def on_first_rank(work: Callable[[], Result]) -> Result:
    """Run `work` on rank 0 and return its result on all ranks; if it fails, every rank ends."""
    if world_size() == 1:
        return work()
    outcome: list[Any] = [None, False]
    failure: Exception | None = None
    if rank() == 0:
        try:
            outcome[0] = work()
        except Exception as error:
            failure, outcome[1] = error, True
    # Not on the GPU: a collective there spins, and gives up after PATIENCE.
    dist.broadcast_object_list(outcome, src=0, group=host_group())
    if failure is not None:
        raise failure
    if outcome[1]:
        raise SystemExit(EXIT_USER_ERROR)  # rank 0 says why
    return outcome[0]


def first_rank_first(work: Callable[[], Result]) -> Result:
    """Run `work` on every rank, on rank 0 before the others, which find what it has cached."""
    results: list[Result] = []
    on_first_rank(lambda: results.append(work()))
    return results[0] if results else work()


def any_rank(flag: bool) -> bool:
    """Return whether the flag is set on any rank."""
    vote = LateVote()
    return vote.hold(flag) or vote.close()


def wait_for_all() -> None:
    """Wait until every rank is here, however long it takes and without using a GPU."""
    if world_size() > 1:
        dist.barrier(group=host_group())


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get(LOCAL_SIZE_VARIABLE, world_size()))


class Shuffle:
    """K views (B, K, ...) on their way to the ranks that encode them.

    All ranks draw the same order of view k from `seed` + k. All views travel in one message, and an
    image goes only to the rank that encodes it. Nobody waits for them until `encode`, so a rank can
    compute in between. One process with one group has nobody to exchange images with.
    """

    def __init__(self, views: Tensor, seed: int, groups: int = 1) -> None:
        self.views = views
        self.dealt = world_size() * groups > 1
        if self.dealt:
            self._deal(seed)
            rows = views.transpose(0, 1).flatten(0, 1)  # (K · B, ...)
            self.arrival = _exchange(rows, self.send, self.sent, self.received, self.place)

    def _deal(self, seed: int) -> None:
        """Draw which of its K · B rows this rank sends to which rank, and where they go there."""
        (batch, count), ranks = self.views.shape[:2], world_size()
        generators = [torch.Generator().manual_seed(seed + k) for k in range(count)]
        orders = torch.stack([torch.randperm(ranks * batch, generator=g) for g in generators])
        dealt = orders.view(count, ranks, batch)  # the images that each rank encodes
        owner, row = dealt // batch, dealt % batch  # (K, world, B)
        row = row + batch * torch.arange(count)[:, None, None]
        mine = (owner == rank()).transpose(0, 1)  # (world, K, B)
        send = row.transpose(0, 1)[mine]  # (K · B,) rows to send, by the rank that gets them
        arrive = owner[:, rank()].flatten().argsort(stable=True)  # where what comes belongs
        self.sent = mine.sum((1, 2)).tolist()  # rows per rank
        self.received = owner[:, rank()].flatten().bincount(minlength=ranks).tolist()
        plan = torch.stack([send, arrive.argsort(), arrive, send.argsort()])
        if self.views.device.type == "cuda":
            plan = plan.pin_memory()  # so that nobody waits for the copy
        plan = plan.to(self.views.device, non_blocking=True)
        self.send, self.place, self.arrive, self.home = plan

    def encode(self, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """Encode each view in a batch shuffled over all ranks; return (B, K, D) in order."""
        if not self.dealt:
            return torch.stack([encode(view) for view in self.views.unbind(1)], 1)
        batch, count = self.views.shape[:2]
        mixed = self.arrival()  # (K · B, ...)
        encoded = torch.cat([encode(part) for part in mixed.chunk(count)])  # (K · B, D)
        back = _exchange(encoded, self.arrive, self.received, self.sent, self.home)
        return back().unflatten(0, (count, batch)).transpose(0, 1)


def _exchange(
    rows: Tensor, first: Tensor, sent: list[int], received: list[int], then: Tensor
) -> Callable[[], Tensor]:
    """Begin to send rows in the order of `first`; return what waits for the rows that come.

    They are put in the order of `then`.
    """
    last = not rows.is_contiguous() and rows.is_contiguous(memory_format=torch.channels_last)
    if last:
        rows = rows.permute(0, 2, 3, 1)  # in memory order
    outgoing = rows.index_select(0, first)  # whole rows: by rows[first] a pixel is copied at a time
    work = None
    if world_size() == 1:
        incoming = outgoing
    else:
        incoming = torch.empty_like(outgoing)
        work = dist.all_to_all_single(incoming, outgoing, received, sent, async_op=True)

    def arrival() -> Tensor:
        if work is not None:
            work.wait()
        moved = incoming.index_select(0, then)
        return moved.permute(0, 3, 1, 2) if last else moved

    return arrival
