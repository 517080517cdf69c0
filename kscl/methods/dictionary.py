"""Where the other instances live: a queue, the minibatch itself, or a bank with a slot per image.

A dictionary is a registered class (`DICTIONARY.TYPE`). It holds subspaces without knowing how they
were made, and scores them by the similarity's own formula.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.errors import KsclError
from kscl.methods.keys import stored_vectors
from kscl.methods.subspace import Subspaces
from kscl.registry import DICTIONARIES, SIMILARITIES
from kscl.runtime.distributed import gather, gather_together, gather_with_gradient


class Negatives(NamedTuple):
    """The other instances as a query sees them; s is its similarity to an entry."""

    log_sum: Tensor  # (M,) log Σ exp(s / τ)
    hardest: Tensor  # (M,) max s, without gradient


class Dictionary(nn.Module):
    """The other instances; a number tells each: the image's index, or its place in the batch.

    in_batch    its entries are those of this step
    by_index    its instances are the images' indices
    """

    in_batch: ClassVar[bool] = False
    by_index: ClassVar[bool] = False

    def __init__(self, similarity: str = "projection") -> None:
        super().__init__()
        self.similarity = SIMILARITIES[similarity]

    @classmethod
    def from_config(cls, cfg: CfgNode, num_images: int | None) -> Dictionary:
        """Return the empty dictionary of a config, for a set of so many images if known."""
        raise NotImplementedError

    def negatives(
        self, query: Tensor, instance: Tensor, basis: Tensor, owners: Tensor, temperature: float
    ) -> Negatives:
        """Compare queries (M, D) of instances (M,) with all other instances.

        `basis` (N, L, D) and `owners` (N,) are this step's subspaces and their instances.
        """
        raise NotImplementedError

    def store(self, subspaces: Subspaces, instance: Tensor) -> None:
        """Take in this step's subspaces, those of all ranks."""
        raise NotImplementedError


class _Stored(Dictionary):
    """Subspaces in buffers, slot-major; an entry of rank 0 is empty."""

    name: ClassVar[str]  # in messages
    slots: Tensor  # (L, N, D)
    rank: Tensor  # (N,)

    def __init__(
        self, length: int, max_rank: int, dim: int, similarity: str = "projection"
    ) -> None:
        super().__init__(similarity)
        self.register_buffer("slots", torch.zeros(max_rank, length, dim))
        self.register_buffer("rank", torch.zeros(length, dtype=torch.int16))
        self.register_load_state_dict_pre_hook(_check_shape)

    def __len__(self) -> int:
        """Return the number of entries, empty ones included."""
        return self.slots.shape[1]

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return slots (L, N, D) and ranks (N,) of the entries to compare with."""
        return self.slots, self.rank

    def negatives(
        self, query: Tensor, instance: Tensor, basis: Tensor, owners: Tensor, temperature: float
    ) -> Negatives:
        """Compare queries (M, D) with every filled entry but their own."""
        slots, rank = self.filled()
        own = instance if self.by_index else None  # entry n of a bank is image n
        return Negatives(*self.similarity.log_sum(query, slots, rank, temperature, own))

    def write(self, entries: Tensor, basis: Tensor, rank: Tensor) -> None:
        """Overwrite entries (B,) by bases (B, L, D) and ranks (B,)."""
        self.slots[:, entries] = basis.transpose(0, 1).to(self.slots.dtype)
        self.rank[entries] = rank.to(self.rank.dtype)


class Queue(_Stored):
    """A first-in-first-out queue (MoCo); entries that were never filled do not count.

    It starts empty. MoCo's starts with random vectors, which count as negatives until replaced.
    """

    name = "queue"
    stored: Tensor  # () entries so far, replaced ones included

    def __init__(
        self, length: int, max_rank: int, dim: int, similarity: str = "projection"
    ) -> None:
        super().__init__(length, max_rank, dim, similarity)
        self.register_buffer("stored", torch.zeros((), dtype=torch.long))
        self._stored = 0  # host-side copy; avoids a device sync
        self.register_load_state_dict_post_hook(_read_counter)

    @classmethod
    def from_config(cls, cfg: CfgNode, num_images: int | None) -> Queue:
        """Return an empty queue."""
        length, similarity = cfg.DICTIONARY.QUEUE_LENGTH, cfg.METHOD.SIMILARITY
        return cls(length, stored_vectors(cfg), cfg.PROJECTOR.DIM, similarity)

    def filled(self) -> tuple[Tensor, Tensor]:
        """Return slots and ranks of the entries that were filled so far."""
        return self.slots[:, : self._stored], self.rank[: self._stored]

    @torch.no_grad()
    def store(self, subspaces: Subspaces, instance: Tensor) -> None:
        """Append in order; of a batch longer than the queue only the end can stay."""
        basis, rank = gather_together(subspaces.basis, subspaces.rank)
        skipped = max(0, len(basis) - len(self))
        entries = (self._stored + torch.arange(len(basis), device=basis.device)) % len(self)
        self.write(entries[skipped:], basis[skipped:], rank[skipped:])
        self._stored += len(basis)
        self.stored.fill_(self._stored)


class MemoryBank(_Stored):
    """One entry per image (NPID); neither a query's own image nor an unseen one is a negative."""

    name = "memory bank"
    by_index = True

    def __init__(
        self,
        num_images: int,
        max_rank: int,
        dim: int,
        similarity: str = "projection",
        momentum: float = 0.0,
    ) -> None:
        super().__init__(num_images, max_rank, dim, similarity)
        self.momentum = momentum

    @classmethod
    def from_config(cls, cfg: CfgNode, num_images: int | None) -> MemoryBank:
        """Return an empty bank with a slot per image."""
        assert num_images is not None
        dim, similarity = cfg.PROJECTOR.DIM, cfg.METHOD.SIMILARITY
        momentum = cfg.DICTIONARY.BANK_MOMENTUM
        return cls(num_images, stored_vectors(cfg), dim, similarity, momentum)

    @torch.no_grad()
    def store(self, subspaces: Subspaces, instance: Tensor) -> None:
        """Replace the images' entries, or move them toward the new subspaces by 1 − momentum."""
        instance, *parts = gather_together(instance, *subspaces)
        last = last_of_each(instance)  # an image may come twice, to fill up the last batch
        instance = instance[last]
        new = Subspaces(*(part[last] for part in parts))
        basis = new.basis  # (B, L, D)
        if self.momentum:
            old = self.slots[:, instance].transpose(0, 1)  # (B, L, D)
            blend = self.similarity.blend(old, new, self.momentum)  # (B, L, D)
            seen = self.rank[instance] > 0  # (B,)
            basis = torch.where(seen[:, None, None], blend, basis)
        self.write(instance, basis, new.rank)


class Minibatch(Dictionary):
    """The other instances of this step's batch, over all ranks (SimCLR); it keeps nothing.

    Subspaces of the query's own instance are not negatives, whichever view they leave out.
    """

    in_batch = True

    @classmethod
    def from_config(cls, cfg: CfgNode, num_images: int | None) -> Minibatch:
        """Return it; there is nothing to hold."""
        return cls(cfg.METHOD.SIMILARITY)

    def negatives(
        self, query: Tensor, instance: Tensor, basis: Tensor, owners: Tensor, temperature: float
    ) -> Negatives:
        """Compare queries (M, D) with the bases (N, L, D) of all other instances of the batch."""
        own = instance[:, None] == gather(owners)  # (M, N)
        similarity = self.similarity.every(query, gather_with_gradient(basis))  # (M, N)
        similarity = similarity.masked_fill(own, -torch.inf)
        return Negatives((similarity / temperature).logsumexp(1), similarity.detach().amax(1))

    def store(self, subspaces: Subspaces, instance: Tensor) -> None:
        """Store nothing: no entry outlives its batch."""


DICTIONARIES.register("queue", Queue)
DICTIONARIES.register("minibatch", Minibatch)
DICTIONARIES.register("memory_bank", MemoryBank)


def last_of_each(values: Tensor) -> Tensor:
    """Return where each value of (B,) occurs last: repeated entries have no defined order."""
    unique, which = values.unique(return_inverse=True)
    position = torch.arange(len(values), device=values.device)
    return position.new_zeros(len(unique)).scatter_reduce_(0, which, position, "amax")


def _read_counter(queue: Queue, _: object) -> None:
    queue._stored = int(queue.stored)


def _check_shape(module: _Stored, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise an error with both shapes before torch raises one that does not name the settings."""
    saved = state.get(f"{prefix}slots")
    if saved is not None and saved.shape != module.slots.shape:
        old, new = (" x ".join(map(str, x.shape)) for x in (saved, module.slots))
        raise KsclError(
            f"The saved {module.name} is {old} (basis vectors x entries x dimensions), this run's "
            f"is {new}: resume with the settings it was saved with (DICTIONARY, METHOD.NUM_SHOTS, "
            "METHOD.RHO, PROJECTOR.DIM) and the same images."
        )
