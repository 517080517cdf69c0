"""How many images per second each stage can do, and which one holds the run back."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import cv2
import numpy as np
import torch

from kscl.data.loader import order_of
from kscl.data.view_dataset import ViewDataset


@dataclass(frozen=True)
class Budget:
    """Images per second: decode and augment on one core, encode on all devices of the process."""

    decode: float
    augment: float
    workers: int
    encode: float | None = None

    @property
    def load(self) -> float:
        """Images per second that the workers deliver together, if each has a core."""
        return max(1, self.workers) / (1 / self.decode + 1 / self.augment)

    @property
    def held_back_by(self) -> str:
        """The slowest stage."""
        if self.encode is not None and self.encode <= self.load:
            return "encode"
        return "decode" if self.decode < self.augment else "augment"

    def with_encode(self, images_per_second: float) -> Budget:
        """Return the same budget with a measured encoder."""
        return replace(self, encode=images_per_second)

    def __str__(self) -> str:
        rates = [f"decode {self.decode:.0f}", f"augment {self.augment:.0f}"]
        if self.encode is not None:
            rates.append(f"encode {self.encode:.0f}")
        return (
            f"images/s: {', '.join(rates)}; {self.workers} workers load {self.load:.0f}; "
            f"{self.held_back_by} holds the run back"
        )


def measure_budget(dataset: ViewDataset, workers: int, num_images: int = 16) -> Budget:
    """Time decoding and augmenting of a few images on one core, as a worker would do it."""
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)  # no threads of its own, as in a worker
    try:
        decode, augment = _time_stages(dataset, min(num_images, len(dataset)))
    finally:
        torch.set_num_threads(threads[0])
        cv2.setNumThreads(threads[1])
    return Budget(1 / decode, 1 / augment, workers)


def _time_stages(dataset: ViewDataset, count: int) -> tuple[float, float]:
    """Return the median seconds per image for reading and decoding, and for its views."""
    views, small = (None if x is None else x[0].numpy() for x in dataset.new_tensors(1))
    assert views is not None
    seconds = []
    for index in order_of(dataset.source, dataset.seed, 0)[:count].tolist():
        start = time.perf_counter()
        image, _, _ = dataset.read_picture(0, index)
        decoded = time.perf_counter()
        dataset.fill(image, (0, index), views, small)
        seconds.append((decoded - start, time.perf_counter() - decoded))
    decode, augment = np.median(seconds, axis=0)
    return float(decode), float(augment)
