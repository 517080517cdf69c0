"""Pictures of a small set, kept in memory so that each is decoded once per run, not once per epoch.

Only a set that fits as a whole is kept: images come in a new order in every epoch, so of a large
set nearly every kept picture would wait for most of an epoch.
"""

from __future__ import annotations

from torch.utils.data import get_worker_info

from kscl.data.decode import Decoded


class KeptPictures:
    """Decoded pictures by index, up to a number of bytes that the workers of a loader share."""

    def __init__(self, num_images: int, megabytes: float) -> None:
        self.num_images = num_images
        self.room = megabytes * 2**20
        self.pictures: dict[int, Decoded] = {}
        self._bytes = 0

    def get(self, index: int) -> Decoded | None:
        """Return the picture if it is kept."""
        return self.pictures.get(index)

    def keep(self, index: int, image: Decoded) -> None:
        """Keep the picture if, going by what was seen so far, those of the whole set fit."""
        size = image.picture.nbytes
        mean = (self._bytes + size) / (len(self.pictures) + 1)
        worker = get_worker_info()
        room = self.room / (1 if worker is None else worker.num_workers)
        if mean * self.num_images <= room and self._bytes + size <= room:
            self.pictures[index] = image
            self._bytes += size
