"""Figures of the views: how true to torchvision on PIL, how many times as fast; and the index."""

from __future__ import annotations

import io
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import cv2
import numpy as np
import torch
from PIL import Image, ImageFilter
from torchvision import transforms as T
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from kscl.data.formats import decode_image
from kscl.data.loader import ViewDataset
from kscl.data.open import open_source
from kscl.rng import Stream, uniforms
from kscl.views.augment import (
    Step,
    apply_steps,
    blur,
    draws_per_view,
    resized_crop,
    resolve,
    sample_crop,
    sample_ops,
)
from kscl.views.recipes import MOCO_V2
from tests.benchmarks.harness import SkippedError, figure, seconds, time_ratio
from tests.helpers.data.photos import jpeg, photo
from tests.helpers.torchvision_route import apply_on_pil

NUM_VIEWS, SIZE = 6, 224
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class InMemory:
    """Encoded photos of 500 x 375, so that no disk is measured."""

    where = "memory"
    labels = None

    def __init__(self, count: int = 8) -> None:
        self.files = [jpeg(photo(seed), quality=90) for seed in range(count)]

    def __len__(self) -> int:
        return len(self.files)

    def name(self, index: int) -> str:
        return str(index)

    def read(self, index: int) -> bytes:
        return self.files[index]


@cache
def photos() -> InMemory:
    return InMemory()


class LargePhotos(InMemory):
    """Encoded photos of 12 megapixels, from phones as it were."""

    def __init__(self, count: int = 3) -> None:
        self.files = []
        for seed in range(count):
            grain = np.random.default_rng(seed).normal(0, 3, (3000, 4000, 1))
            large = cv2.resize(photo(seed), (4000, 3000), interpolation=cv2.INTER_CUBIC)
            self.files.append(jpeg((large + grain).clip(0, 255).astype(np.uint8), quality=90))


@cache
def large_photos() -> InMemory:
    return LargePhotos()


@contextmanager
def one_core() -> Iterator[None]:
    threads = torch.get_num_threads(), cv2.getNumThreads()
    torch.set_num_threads(1)
    cv2.setNumThreads(0)
    try:
        yield
    finally:
        torch.set_num_threads(threads[0])
        cv2.setNumThreads(threads[1])


def blur_on_pil(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(radius=random.uniform(0.1, 2.0)))


MOCO_ON_PIL = T.Compose(
    [
        T.RandomResizedCrop(SIZE, scale=(0.2, 1.0)),
        T.RandomApply([T.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        T.RandomGrayscale(p=0.2),
        T.RandomApply([T.Lambda(blur_on_pil)], p=0.5),
        T.RandomHorizontalFlip(),
        T.ToTensor(),
        T.Normalize(MEAN, STD),
    ]
)


def of_moco() -> None:
    for data in photos().files:
        image = Image.open(io.BytesIO(data)).convert("RGB")
        torch.stack([MOCO_ON_PIL(image) for _ in range(NUM_VIEWS)])


MOCO_ON_TENSORS = v2.Compose(
    [
        v2.RandomResizedCrop(SIZE, scale=(0.2, 1.0)),
        v2.RandomApply([v2.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
        v2.RandomGrayscale(p=0.2),
        v2.RandomApply([v2.GaussianBlur(23, (0.1, 2.0))], p=0.5),
        v2.RandomHorizontalFlip(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)


def of_torchvision_v2() -> None:
    for data in photos().files:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        image = decode_jpeg(encoded, ImageReadMode.RGB)
        torch.stack([MOCO_ON_TENSORS(image) for _ in range(NUM_VIEWS)])


def times_as_fast(
    peer: Callable[[], None], mean_std: tuple[tuple[float, ...], tuple[float, ...]] | None
) -> float:
    dataset = ViewDataset(photos(), MOCO_V2, NUM_VIEWS, SIZE, 0, mean_std)
    epoch = iter(range(1000))  # other views in every round, as there

    def ours() -> None:
        now = next(epoch)
        for index in range(len(dataset)):
            dataset[now, index]

    random.seed(0)
    torch.manual_seed(0)
    with one_core():
        return time_ratio(peer, ours, rounds=15)


@figure("views_torchvision_v2", "views/s over torchvision v2 on tensors, one core, float out")
def views_torchvision_v2() -> float:
    return times_as_fast(of_torchvision_v2, (MEAN, STD))


@figure("views_lightly", "views/s over lightly's MoCoV2Transform, one core, float out")
def views_lightly() -> float:
    try:
        from lightly.transforms import MoCoV2Transform
    except ImportError as error:
        raise SkippedError(f"pip install lightly ({error})") from error
    transform = MoCoV2Transform(SIZE)  # two views at a time

    def of_lightly() -> None:
        for data in photos().files:
            image = Image.open(io.BytesIO(data)).convert("RGB")
            torch.stack([view for _ in range(NUM_VIEWS // 2) for view in transform(image)])

    return times_as_fast(of_lightly, (MEAN, STD))


@figure("views_float", "views/s over MoCo's recipe on PIL, one core, float out", at_least=5)
def views_float() -> float:
    return times_as_fast(of_moco, (MEAN, STD))


# What each step takes, and what was tried to make it faster, is in docs/gpu.md. The ratio depends
# on the CPU: 6.9 to 7.5 on an AMD EPYC 7003 (6.0 to 6.7 before hue was 1.5 times as fast), where an
# Intel Xeon had 5.2 to 5.9 before.
@figure("views_uint8", "views/s over MoCo's recipe on PIL, one core, bytes out", at_least=5.5)
def views_uint8() -> float:
    return times_as_fast(of_moco, None)


@figure(
    "views_on_device",
    "CPU time of a view in a worker with VIEWS.DEVICE, over without",
    at_most=0.65,
)
def views_on_device() -> float:
    whole, part = (
        ViewDataset(photos(), MOCO_V2, NUM_VIEWS, SIZE, 0, keep_megabytes=512, on_device=on)
        for on in (False, True)
    )
    epoch = iter(range(1, 1000))

    def made(dataset: ViewDataset) -> None:
        now = next(epoch)
        dataset.__getitems__([(now, index) for index in range(len(dataset))])

    with one_core():
        return 1 / time_ratio(lambda: made(whole), lambda: made(part), rounds=15)


def of_large_photos(reduced: bool, source: InMemory | None = None) -> ViewDataset:
    source = large_photos() if source is None else source
    return ViewDataset(source, MOCO_V2, NUM_VIEWS, SIZE, 0, reduced_decode=reduced)


@figure(
    "views_reduced_decode",
    "views/s of 12-megapixel JPEGs, reduced decode over full decode, one core",
    at_least=3,
)
def views_reduced_decode() -> float:
    whole, reduced = of_large_photos(False), of_large_photos(True)
    with one_core():
        return time_ratio(
            lambda: [whole[0, index] for index in range(len(whole))],
            lambda: [reduced[0, index] for index in range(len(reduced))],
            rounds=5,
        )


def reduced_difference(source: InMemory) -> float:
    whole, reduced = of_large_photos(False, source), of_large_photos(True, source)
    differences = [
        (whole[0, index].views.float() - reduced[0, index].views.float()).abs().mean()
        for index in range(len(source))
    ]
    return float(sum(differences) / len(differences))


@figure(
    "views_reduced_difference",
    "mean |difference| of views of 12-megapixel JPEGs, reduced to full decode",
    at_most=2,
    unit="/255",
)
def views_reduced_difference() -> float:
    return reduced_difference(large_photos())


@figure(
    "views_reduced_small",
    "mean |difference| of views of small JPEGs, reduced to full decode",
    at_most=0,
    unit="/255",
)
def views_reduced_small() -> float:
    return reduced_difference(photos())


@figure(
    "views_difference",
    "mean |difference| of MoCo v2 views to torchvision on PIL, same choices",
    at_most=1.2,
    unit="/255",
)
def views_difference() -> float:
    ops = resolve(MOCO_V2)
    differences = []
    for index, data in enumerate(photos().files):
        picture, image = decode_image(data), Image.open(io.BytesIO(data)).convert("RGB")
        numbers = uniforms(0, 0, Stream.VIEWS, index, NUM_VIEWS * draws_per_view(ops))
        for draws in numbers.reshape(NUM_VIEWS, -1).tolist():
            steps = [it for op in sample_ops(ops, *picture.shape[:2], SIZE, draws) for it in op]
            view = apply_steps(picture, steps)
            view = np.dstack([view] * 3) if view.ndim == 2 else view
            differences.append(np.abs(view.astype(int) - apply_on_pil(image, steps)).mean())
    return float(np.mean(differences))


def sharpness(picture: np.ndarray) -> float:
    gray = cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)
    return float(cv2.Laplacian(gray, cv2.CV_32F).var())


@figure(
    "views_sharpness",
    "worst deviation of a crop's Laplacian variance from PIL's (aliasing)",
    at_most=3,
    unit=" %",
)
def views_sharpness() -> float:
    worst = 0.0
    for index, data in enumerate(photos().files):
        picture = decode_image(data)
        draw = iter(uniforms(1, 0, Stream.VIEWS, index, 200).tolist()).__next__
        for _ in range(4):
            box = sample_crop(*picture.shape[:2], (0.2, 1.0), (3 / 4, 4 / 3), draw)
            crop = Step(resized_crop, (box, SIZE))
            reference = apply_on_pil(Image.fromarray(picture), [crop])
            ratio = sharpness(apply_steps(picture, [crop])) / sharpness(reference)
            worst = max(worst, 100 * abs(ratio - 1))
    return worst


@figure(
    "views_blur_sigma",
    "worst deviation of the blur's effective sigma, 0.1 to 2.0",
    at_most=3,
    unit=" %",
)
def views_blur_sigma() -> float:
    row = np.random.default_rng(0).integers(0, 256, (1, 400_000), dtype=np.uint8)
    radius = 6
    windows = np.lib.stride_tricks.sliding_window_view(row[0] - 127.5, 2 * radius + 1)
    gram, squares = windows.T @ windows, np.arange(-radius, radius + 1) ** 2

    def effective(sigma: float) -> float:
        blurred = blur(row, sigma)[0, radius:-radius] - 127.5
        kernel = np.linalg.solve(gram, windows.T @ blurred)
        return float(np.sqrt((kernel * squares).sum() / kernel.sum()))

    return max(100 * abs(effective(sigma) / sigma - 1) for sigma in np.linspace(0.1, 2.0, 20))


@figure(
    "index_100k", "start-up on a folder of 100,000 files, nothing cached", at_most=10, unit=" s"
)
def index_100k() -> float:
    with tempfile.TemporaryDirectory() as root:
        for folder in range(100):
            os.makedirs(f"{root}/images/{folder:03d}")
            for number in range(1000):
                os.mknod(f"{root}/images/{folder:03d}/{number:05d}.jpg")
        return seconds(lambda: open_source(f"{root}/images", cache_dir=f"{root}/cache"))
