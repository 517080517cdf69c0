"""Shuffled BatchNorm (MoCo, section 3.3): batches of views, dealt anew among ranks and groups.

BatchNorm sees other images in a key's batch than in its query's, so the two cannot recognize each
other by them. R ranks whose BatchNorm has G groups each deal as R · G ranks do: only the order of
all ranks' images counts, of which each group encodes an equal part.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from kscl.runtime.processes.distributed import rank, world_size

Arrival = Callable[[], Tensor]  # waits for rows that are on their way, and returns them


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
            batch, count = views.shape[:2]
            self.deal = _Deal(batch, [seed + k for k in range(count)], views.device)
            self.arrival = self.deal.out(views.transpose(0, 1).flatten(0, 1))

    def encode(self, encode: Callable[[Tensor], Tensor]) -> Tensor:
        """Encode each view in a batch shuffled over all ranks; return (B, K, D) in order."""
        if not self.dealt:
            return torch.stack([encode(view) for view in self.views.unbind(1)], 1)
        batch, count = self.views.shape[:2]
        mixed = self.arrival()  # (K · B, ...)
        embeddings = torch.cat([encode(part) for part in mixed.chunk(count)])  # (K · B, D)
        return self.deal.back(embeddings)().unflatten(0, (count, batch)).transpose(0, 1)


class _Deal:
    """Which rows of K · B, view after view, a rank sends to which, and where they go there."""

    def __init__(self, batch: int, seeds: list[int], device: torch.device) -> None:
        ranks = world_size()
        orders = torch.stack([_order(ranks * batch, seed) for seed in seeds])  # (K, world · B)
        dealt = orders.view(len(seeds), ranks, batch)  # the images that each rank encodes
        owner, row = dealt // batch, dealt % batch  # (K, world, B)
        row = row + batch * torch.arange(len(seeds))[:, None, None]
        mine = (owner == rank()).transpose(0, 1)  # (world, K, B)
        send = row.transpose(0, 1)[mine]  # (K · B,) rows to send, by the rank that gets them
        arrive = owner[:, rank()].flatten().argsort(stable=True)  # where what comes belongs
        self.sent = mine.sum((1, 2)).tolist()  # rows per rank
        self.received = owner[:, rank()].flatten().bincount(minlength=ranks).tolist()
        plan = torch.stack([send, arrive.argsort(), arrive, send.argsort()])
        if device.type == "cuda":
            plan = plan.pin_memory()  # so that nobody waits for the copy
        self.send, self.place, self.arrive, self.home = plan.to(device, non_blocking=True)

    def out(self, rows: Tensor) -> Arrival:
        """Send the rows (K · B, ...) of all; get those that this rank encodes, view after view."""
        return _exchange(rows, self.send, self.sent, self.received, self.place)

    def back(self, rows: Tensor) -> Arrival:
        """Send back what became of the rows of others; get what became of this rank's own."""
        return _exchange(rows, self.arrive, self.received, self.sent, self.home)


def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _exchange(
    rows: Tensor, first: Tensor, sent: list[int], received: list[int], then: Tensor
) -> Arrival:
    """Begin to send rows in the order of `first`; what comes is put in the order of `then`."""
    last = not rows.is_contiguous() and rows.is_contiguous(memory_format=torch.channels_last)
    if last:
        rows = rows.permute(0, 2, 3, 1)  # sent as it lies in memory
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
