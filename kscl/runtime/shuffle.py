"""Shuffled BatchNorm (MoCo, section 3.3): batches of views, dealt anew among the ranks.

BatchNorm sees other images in a key's batch than in its query's, so the two cannot recognize each
other by them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from kscl.runtime.distributed import rank, world_size


def shuffled(encode: Callable[[Tensor], Tensor], views: Tensor, seed: int) -> Tensor:
    """Encode each of K views (B, K, ...) in a batch shuffled over all ranks: (B, K, D), in order.

    All ranks draw the same order of view k from `seed` + k. All views travel in one message, and an
    image goes only to the rank that encodes it.
    """
    batch, count = views.shape[:2]
    if world_size() == 1:
        return torch.stack([encode(view) for view in views.unbind(1)], 1)
    deal = _Deal(batch, [seed + k for k in range(count)], views.device)
    mixed = deal.out(views.transpose(0, 1).flatten(0, 1))  # (K · B, ...)
    embeddings = torch.cat([encode(part) for part in mixed.chunk(count)])  # (K · B, D)
    return deal.back(embeddings).unflatten(0, (count, batch)).transpose(0, 1)


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

    def out(self, rows: Tensor) -> Tensor:
        """Return the rows (K · B, ...) that this rank encodes, view after view."""
        return _exchange(rows, self.send, self.sent, self.received, self.place)

    def back(self, rows: Tensor) -> Tensor:
        """Return what became of this rank's own rows."""
        return _exchange(rows, self.arrive, self.received, self.sent, self.home)


def _order(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def _exchange(
    rows: Tensor, first: Tensor, sent: list[int], received: list[int], then: Tensor
) -> Tensor:
    """Send rows in the order of `first`, and return what comes in the order of `then`."""
    if not rows.is_contiguous() and rows.is_contiguous(memory_format=torch.channels_last):
        # Sent as it lies in memory.
        moved = _exchange(rows.permute(0, 2, 3, 1), first, sent, received, then)
        return moved.permute(0, 3, 1, 2)
    outgoing = rows[first].contiguous()
    incoming = torch.empty_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, received, sent)
    return incoming[then]
