"""Where the other instances live: a queue, the minibatch itself, or a bank with a slot an image.

All three keep subspaces and none knows how they were made. They share three methods:

    negatives(query, instance, basis)   what the loss needs to know of the other instances
    lengths(query)                      projection lengths of queries (M, D) on all entries: (M, N);
                                        the minibatch keeps none, and is given them
    store(subspaces, instance)          take in this step's subspaces, those of all ranks

`instance` tells entries apart: the image's index for the bank, its place in the batch otherwise.
`signed` entries are compared by cosine (MoCo, SimCLR), others by projection length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kscl.errors import KsclError
from kscl.method.kernels import all_lengths, full_precision, log_sum_of_negatives
from kscl.method.subspace import Subspaces, blend_subspaces
from kscl.runtime.distributed import gather, gather_with_gradient


class Negatives(NamedTuple):
    """The other instances as a query sees them; s is its similarity to an entry."""

    log_sum: Tensor  # (M,) log Σ exp(s / τ)
    hardest: Tensor  # (M,) max s, without gradient


class _Stored(nn.Module):
    """Subspaces in buffers, slot-major; an entry of rank 0 is empty."""

    slots: Tensor  # (L, N, D)
    rank: Tensor  # (N,)

    def __init__(self, length: int, max_rank: int, dim: int, signed: bool, name: str) -> None:
        super().__init__()
        if min(length, max_rank, dim) < 1:
            raise KsclError(f"a {name} of {length} entries of {max_rank} x {dim} holds nothing")
        self.signed = signed
        self.name = name
        self.register_buffer("slots", torch.zeros(max_rank, length, dim))
        self.register_buffer("rank", torch.zeros(length, dtype=torch.int16))
        self.register_load_state_dict_pre_hook(_check_shape)

    def __len__(self) -> int:
        return self.slots.shape[1]

    def lengths(self, query: Tensor) -> Tensor:
        slots, rank = self.filled()
        return all_lengths(query, slots, rank)

    def filled(self) -> tuple[Tensor, Tensor]:
        return self.slots, self.rank

    def write(self, places: Tensor, basis: Tensor, rank: Tensor) -> None:
        self.slots[:, places] = basis.transpose(0, 1).to(self.slots.dtype)
        self.rank[places] = rank.to(self.rank.dtype)


class Queue(_Stored):
    """First in, first out (MoCo); entries that were never filled do not count."""

    pointer: Tensor  # () where the next entry goes
    count: Tensor  # () how many are filled

    def __init__(self, length: int, max_rank: int, dim: int, *, signed: bool = False) -> None:
        super().__init__(length, max_rank, dim, signed, "queue")
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def filled(self) -> tuple[Tensor, Tensor]:
        count = int(self.count)
        return self.slots[:, :count], self.rank[:count]

    def negatives(
        self, query: Tensor, instance: Tensor, basis: Tensor, temperature: float
    ) -> Negatives:
        """Every filled entry is another instance."""
        slots, rank = self.filled()
        return Negatives(*log_sum_of_negatives(query, slots, rank, temperature, None, self.signed))

    @torch.no_grad()
    def store(self, subspaces: Subspaces, instance: Tensor) -> None:
        """Append in order; of a batch longer than the queue only the end can stay."""
        basis, rank = gather(subspaces.basis), gather(subspaces.rank)
        skipped = max(0, len(basis) - len(self))
        places = (self.pointer + torch.arange(len(basis), device=basis.device)) % len(self)
        self.write(places[skipped:], basis[skipped:], rank[skipped:])
        self.pointer.copy_((self.pointer + len(basis)) % len(self))
        self.count.copy_((self.count + len(basis)).clamp_max(len(self)))


class MemoryBank(_Stored):
    """One entry an image (NPID); a query's own image is no negative, nor is one not yet seen."""

    def __init__(
        self,
        num_images: int,
        max_rank: int,
        dim: int,
        *,
        momentum: float = 0.0,
        signed: bool = False,
    ) -> None:
        super().__init__(num_images, max_rank, dim, signed, "memory bank")
        if not 0 <= momentum < 1:
            raise KsclError(f"the memory bank's momentum is {momentum}, but it lies in [0, 1)")
        self.momentum = momentum

    def negatives(
        self, query: Tensor, instance: Tensor, basis: Tensor, temperature: float
    ) -> Negatives:
        return Negatives(
            *log_sum_of_negatives(query, *self.filled(), temperature, instance, self.signed)
        )

    @torch.no_grad()
    def store(self, subspaces: Subspaces, instance: Tensor) -> None:
        """Replace the images' entries, or move them towards the new subspaces by 1 − momentum."""
        instance = gather(instance)
        last = _last_of_each(instance)  # an image may come twice, to fill up the last batch
        instance = instance[last]
        new = Subspaces(*(gather(part)[last] for part in subspaces))
        basis = new.basis  # (B, L, D)
        if self.momentum:
            old = self.slots[:, instance].transpose(0, 1)  # (B, L, D)
            if self.signed:
                blend = F.normalize(old * self.momentum + basis * (1 - self.momentum), dim=2)
            else:
                blend = blend_subspaces(old, new, self.momentum).basis
            seen = self.rank[instance] > 0  # (B,)
            basis = torch.where(seen[:, None, None], blend, basis)
        self.write(instance, basis, new.rank)


class Minibatch(nn.Module):
    """The other instances of this step's batch, over all ranks (SimCLR); keeps nothing.

    Subspaces of the query's own instance are no negatives, whichever view they leave out.
    """

    def __init__(self, *, signed: bool = False) -> None:
        super().__init__()
        self.signed = signed

    def negatives(
        self, query: Tensor, instance: Tensor, basis: Tensor, temperature: float
    ) -> Negatives:
        everyone = gather(instance)  # (N,)
        own = instance[:, None] == everyone  # (M, N)
        if own.all(1).any():
            raise KsclError(
                "a batch of one image has no other instance to tell apart: give two or more"
            )
        similarity = self.similarity(query, gather_with_gradient(basis))  # (M, N)
        similarity = similarity.masked_fill(own, -torch.inf)
        return Negatives((similarity / temperature).logsumexp(1), similarity.detach().amax(1))

    def similarity(self, query: Tensor, basis: Tensor) -> Tensor:
        """Of queries (M, D) to subspaces (N, L, D): (M, N), differentiable in both."""
        if not self.signed:
            return self.lengths(query, basis)
        with full_precision(query, basis) as (query, basis):
            return query @ basis[:, 0].T

    def lengths(self, query: Tensor, basis: Tensor) -> Tensor:
        return all_lengths(query, basis.transpose(0, 1))

    def store(self, subspaces: Subspaces, instance: Tensor) -> None:
        """Nothing outlives its batch."""


Dictionary = Queue | MemoryBank | Minibatch


def _last_of_each(values: Tensor) -> Tensor:
    """Where each value of (B,) occurs last: a write to places that repeat has no defined order."""
    unique, which = values.unique(return_inverse=True)
    position = torch.arange(len(values), device=values.device)
    return position.new_zeros(len(unique)).scatter_reduce_(0, which, position, "amax")


def _check_shape(module: _Stored, state: dict[str, Any], prefix: str, *_: Any) -> None:
    saved = state.get(f"{prefix}slots")
    if saved is not None and saved.shape != module.slots.shape:
        old, new = (" x ".join(map(str, x.shape)) for x in (saved, module.slots))
        raise KsclError(
            f"the saved {module.name} is {old} (basis vectors x entries x dimensions), this run's "
            f"is {new}: resume with the settings it was saved with (DICTIONARY, METHOD.NUM_SHOTS, "
            "METHOD.RHO, PROJECTOR.DIM) and the same images"
        )
