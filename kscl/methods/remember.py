"""Remembered shots: an image's keys of the last R epochs, which cost memory but no encoder pass.

    ring      the V keys of each of an image's last R appearances, in half precision, on every rank
    weights   1 for a key of this step, decay^a for one of a appearances ago, 0 for an empty slot
    target    what the similarity makes of them all: their subspace, or their mean

An image appears once per epoch, and once more wherever it replaces one that cannot be read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kscl.errors import KsclError
from kscl.methods.dictionary import last_of_each
from kscl.runtime.distributed import device, gather_together, local_world_size
from kscl.runtime.machine import available_memory


class Remembered(nn.Module):
    """A ring of R · V keys for each of N images; `store` takes in what `stage` was given."""

    keys: Tensor  # (N, R · V, D)
    seen: Tensor  # (N,) how often an image has appeared

    def __init__(
        self,
        num_images: int,
        epochs: int,
        views: int,
        dim: int,
        *,
        decay: float = 1.0,
        on_host: bool = False,
    ) -> None:
        super().__init__()
        self.epochs, self.views = epochs, views
        self.decay, self.on_host = decay, on_host
        shape = num_images, epochs * views, dim
        check_memory(2 * shape[0] * shape[1] * shape[2], on_host)
        # In three dimensions: those of four would become channels-last with the network.
        self.register_buffer("keys", torch.zeros(shape, dtype=torch.float16))
        self.register_buffer("seen", torch.zeros(num_images, dtype=torch.int32))
        self._staged: list[tuple[Tensor, Tensor]] = []  # of forward passes since the last `store`
        self.register_load_state_dict_post_hook(_begin_anew)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """Stay in host memory, whatever moves the network, if asked to."""
        return self if self.on_host else super()._apply(fn, recurse)

    def recall(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rings of images (B,) as keys (B, R · V, D) and their weights (B, R · V)."""
        images = images.to(self.keys.device, non_blocking=True)
        seen = self.seen[images, None]  # (B, 1)
        slot = torch.arange(self.epochs, device=seen.device)  # (R,)
        age = (seen - 1 - slot) % self.epochs + 1  # (B, R) 1 for the last appearance
        weight = torch.where(slot < seen, self.decay**age, 0.0)  # (B, R)
        return self.keys[images], weight.repeat_interleave(self.views, 1)

    def beside(self, keys: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys (M, K, D) with those remembered of images (B,), and the weights of all.

        They are (M, K + R · V, D) and (M, K + R · V). With M = B · G, each image has G targets.
        """
        targets = len(keys) // len(images)
        old, weight = (
            part.to(keys.device, keys.dtype, non_blocking=True).repeat_interleave(targets, 0)
            for part in self.recall(images)
        )
        return torch.cat([keys, old], 1), torch.cat([weight.new_ones(keys.shape[:2]), weight], 1)

    def stage(self, keys: Tensor, images: Tensor) -> None:
        """Keep the keys (B, V, D) of images (B,) of a forward pass for `store`."""
        images = images.to(keys.device, non_blocking=True)
        self._staged.append((keys.detach().to(self.keys.dtype), images))

    @torch.no_grad()
    def store(self) -> None:
        """Overwrite the oldest keys of the images of this step, those of all ranks."""
        rings = self.keys.unflatten(1, (self.epochs, self.views))  # (N, R, V, D)
        for keys, images in self._staged:
            images, keys = gather_together(images, keys)
            last = last_of_each(images)
            images, keys = (part[last].to(self.keys.device) for part in (images, keys))
            rings[images, self.seen[images] % self.epochs] = keys
            self.seen[images] += 1
        self._staged.clear()


def check_memory(needed: int, on_host: bool) -> None:
    """Raise an error if so many bytes, and their copy while a run warms up, do not fit."""
    here = device()
    if on_host or here.type == "cpu":
        where, processes, free = "this machine", local_world_size(), available_memory()
        fix = ""
    else:
        where, processes, free = "the GPU", 1, torch.cuda.mem_get_info(here)[0]
        fix = ", or set METHOD.REMEMBER_IN host"
    if 2 * needed * processes > free:
        each = f" on each of {processes} processes" if processes > 1 else ""
        raise KsclError(
            f"METHOD.REMEMBER: the remembered keys take {needed / 2**30:.2f} GiB{each}, and as "
            f"much again while a run warms up, but {where} has {free / 2**30:.2f} GiB free. "
            f"Lower METHOD.REMEMBER, METHOD.NUM_SHOTS or PROJECTOR.DIM{fix}."
        )


def _begin_anew(remembered: Remembered, _: object) -> None:
    remembered._staged.clear()
