"""Augmentations: one decoded picture in, K + 1 views out, fast on one core.

An augmentation is one function under `@augmentation(...)`, which declares its parameters. The
function draws what happens to one view and returns deterministic steps: functions on pixels with
their arguments. Any imported module can add one; AUGMENT lists in configs, their checks and
docs/config.md follow from AUGMENTATIONS.

Pictures are uint8 RGB arrays (height, width, 3), or (height, width) once they are gray.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import cv2
import numpy as np

from kscl.registry import Registry

Range = tuple[float, float]
Draw = Callable[[], float]  # returns the next random number from [0, 1)


@dataclass(frozen=True)
class Parameter:
    """A number within bounds or, if the default is a pair, a range [low, high] within them."""

    default: float | Range
    low: float
    high: float
    doc: str

    def problem(self, value: object) -> str | None:
        """Return what is wrong with a value, or None."""
        if isinstance(self.default, tuple):
            if isinstance(value, list | tuple) and len(value) == 2:
                low, high = value
                if self._allows(low) and self._allows(high) and low <= high:
                    return None
            return f"must be [low, high] with {self.low:g} <= low <= high <= {self.high:g}"
        return None if self._allows(value) else f"must be a number {self.bounds}"

    @property
    def bounds(self) -> str:
        """The bounds in words."""
        return f"from {self.low:g} to {self.high:g}"

    def _allows(self, value: object) -> bool:
        # bool is an int to Python, but `p: true` in a file is a mistake.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and self.low <= value <= self.high  # type: ignore[operator]


class Box(NamedTuple):
    """A crop in pixels."""

    top: int
    left: int
    height: int
    width: int


class Step(NamedTuple):
    """One operation on the pixels of a view: `apply(picture, *arguments)`."""

    apply: Callable[..., np.ndarray]
    arguments: tuple[Any, ...] = ()


@dataclass
class View:
    """The state of a view while its augmentations are drawn."""

    draw: Draw
    height: int  # of the picture before the next step
    width: int
    size: int  # height and width of the finished view
    reduced_by: int = 1  # by how much the pixels were reduced while decoding: see `make_views`

    def between(self, ends: Range) -> float:
        """Draw a number uniformly from a range."""
        return ends[0] + (ends[1] - ends[0]) * self.draw()

    def crop(self, box: Box) -> Step:
        """Return the step that resizes a box of the picture to the size of the view."""
        # Rounded to whole pixels: Pillow can crop between them, but takes too long.
        top, left, bottom, right = (
            round(end / self.reduced_by)
            for end in (box.top, box.left, box.top + box.height, box.left + box.width)
        )
        self.height = self.width = self.size
        self.reduced_by = 1
        return Step(resized_crop, (Box(top, left, bottom - top, right - left), self.size))


class LateStep(NamedTuple):
    """A step that the training device will apply."""

    view: int  # its number
    place: tuple[int, int]  # number of the op in the recipe, and of the step within the op
    step: Step


Sampler = Callable[..., list[Step]]


@dataclass(frozen=True)
class Augmentation:
    """A registered function, called as `sample(view, **parameters)`."""

    sample: Sampler
    parameters: Mapping[str, Parameter]  # with `p` if it happens by chance
    draws: int  # numbers reserved for it, so that each view's numbers start at a fixed index
    crops: bool
    on_device: bool  # each of its steps has a device form: see kscl/views/device.py

    @property
    def doc(self) -> str:
        """The first line of its docstring."""
        return (self.sample.__doc__ or "").partition("\n")[0]


AUGMENTATIONS: Registry[Augmentation] = Registry("augmentation")


def augmentation(
    *,
    p: float | None = None,
    draws: int = 0,
    crops: bool = False,
    on_device: bool = False,
    **parameters: Parameter,
) -> Callable[[Sampler], Sampler]:
    """Register a function under its name.

    `p` is the default chance that it happens; without `p` it always does. `draws` is the most
    random numbers that it takes from its view. One that `crops` turns a picture of any size into
    one of the view's size by `View.crop`. One that is `on_device` returns only steps that have a
    device form (`kscl.views.device.device_form`).
    """

    def register(sample: Sampler) -> Sampler:
        chance = {} if p is None else {"p": Parameter(p, 0, 1, "Chance that it happens.")}
        made = Augmentation(sample, {**parameters, **chance}, draws + len(chance), crops, on_device)
        AUGMENTATIONS.register(sample.__name__, made)
        return sample

    return register


class Op(NamedTuple):
    """An entry of a recipe, ready to be sampled."""

    name: str
    augmentation: Augmentation  # not its name alone: a worker may not have imported its module
    values: dict[str, Any]  # of every parameter but p
    p: float | None


def resolve(recipe: Iterable[Mapping[str, Any]]) -> list[Op]:
    """Look up the augmentations of a valid recipe and fill in the defaults."""
    ops = []
    for entry in recipe:
        found = AUGMENTATIONS[entry["op"]]
        values = {name: entry.get(name, each.default) for name, each in found.parameters.items()}
        p = values.pop("p", None)
        ops.append(Op(entry["op"], found, values, p))
    return ops


def draws_per_view(ops: Sequence[Op]) -> int:
    """Return how many random numbers are set aside for one view."""
    return sum(op.augmentation.draws for op in ops)


def sample_ops(
    ops: Sequence[Op],
    height: int,
    width: int,
    size: int,
    numbers: Iterable[float],
    reduced_by: int = 1,
) -> Iterator[list[Step]]:
    """Draw a view from numbers in [0, 1): yield the steps before its first op, then each op's."""
    view = View(iter(numbers).__next__, height, width, size, reduced_by)
    steps: list[Step] = []
    if not any(op.augmentation.crops for op in ops):
        side = min(height, width)  # views must share one size: take the middle square
        steps.append(view.crop(Box((height - side) // 2, (width - side) // 2, side, side)))
    yield steps
    for op in ops:
        try:
            happens = op.p is None or view.draw() < op.p
            yield op.augmentation.sample(view, **op.values) if happens else []
        except StopIteration:  # a loader would take it for the end of the data
            raise RuntimeError(f"{op.name} draws more numbers than it declares") from None


def sample_boxes(
    ops: Sequence[Op], height: int, width: int, size: int, numbers: np.ndarray
) -> list[Box]:
    """Return the first crop of each view that `make_views` makes with the same arguments."""
    rows = numbers.reshape(-1, draws_per_view(ops)).tolist()
    sampled = [chain.from_iterable(sample_ops(ops, height, width, size, row)) for row in rows]
    return [
        next(step.arguments[0] for step in steps if step.apply is resized_crop) for steps in sampled
    ]


def make_views(
    picture: np.ndarray,
    ops: Sequence[Op],
    size: int,
    numbers: np.ndarray,
    views: np.ndarray,
    whole: tuple[int, int] | None = None,
    late_from: int | None = None,
) -> list[LateStep]:
    """Fill `views` (count, 3, size, size), uint8, from one picture.

    `numbers` are `draws_per_view(ops)` numbers from [0, 1) for each view. `whole`: original
    (height, width) if the picture was decoded at reduced size. What is drawn does not depend on
    the reduction. The steps of ops from `late_from` on are not applied but returned.
    """
    height, width = picture.shape[:2] if whole is None else whole
    reduced_by = round(height / picture.shape[0])
    early = len(ops) if late_from is None else late_from
    late: list[LateStep] = []
    rows = numbers.reshape(len(views), -1).tolist()
    for number, (row, view) in enumerate(zip(rows, views, strict=True)):
        made = picture
        for index, steps in enumerate(sample_ops(ops, height, width, size, row, reduced_by)):
            if index <= early:
                made = apply_steps(made, steps)
            else:
                late += [LateStep(number, (index, i), step) for i, step in enumerate(steps)]
        if made.ndim == 2:
            view[:] = made
        else:
            cv2.split(made, list(view))  # 3.4 times as fast as a copy from a transposed view
    return late


def apply_steps(picture: np.ndarray, steps: Iterable[Step]) -> np.ndarray:
    """Apply the steps in order; the given picture is not changed."""
    for step in steps:
        picture = step.apply(picture, *step.arguments)
    return picture


CROP_TRIES = 10
CROP_DRAWS = 2 * CROP_TRIES + 2


@augmentation(
    draws=CROP_DRAWS,
    crops=True,
    scale=Parameter((0.08, 1.0), 1e-4, 1.0, "Area of the crop as a fraction of the picture's."),
    ratio=Parameter((3 / 4, 4 / 3), 0.01, 100.0, "Width over height; its logarithm is uniform."),
)
def random_resized_crop(view: View, scale: Range, ratio: Range) -> list[Step]:
    """Crop a random box and resize it to the view's size."""
    return [view.crop(sample_crop(view.height, view.width, scale, ratio, view.draw))]


def sample_crop(height: int, width: int, scale: Range, ratio: Range, draw: Draw) -> Box:
    """Draw a crop by at most CROP_DRAWS numbers.

    A box that does not fit is drawn again; after ten tries the largest box in the middle with an
    allowed ratio is taken, as torchvision does.
    """
    log_low, log_high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(CROP_TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * draw())
        aspect = math.exp(log_low + (log_high - log_low) * draw())
        box_width = round(math.sqrt(area * aspect))
        box_height = round(math.sqrt(area / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            top = int(draw() * (height - box_height + 1))
            left = int(draw() * (width - box_width + 1))
            return Box(top, left, box_height, box_width)
    aspect = min(max(width / height, ratio[0]), ratio[1])
    box_width = max(1, min(width, round(height * aspect)))
    box_height = max(1, min(height, round(width / aspect)))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def resized_crop(picture: np.ndarray, box: Box, size: int) -> np.ndarray:
    """Resize a crop bilinearly, antialiased when it shrinks, within 0.3 / 255 of PIL.

    2.4 times as fast as torch on a channels-first copy, and 1.4 times where a crop only grows.
    """
    top, left, height, width = box
    crop = picture[top : top + height, left : left + width]
    if height <= size and width <= size:
        return cv2.resize(crop, (size, size))  # nothing to antialias when it only grows
    import torch  # here, so that a recipe is checked without it

    resize = torch.ops.aten._upsample_bilinear2d_aa  # what interpolate(antialias=True) calls
    pixels = torch.from_numpy(np.ascontiguousarray(crop)).view(1, height, width, -1)
    # Channels-last in and out: torch then repacks neither its input nor its output.
    batch = pixels.permute(0, 3, 1, 2)
    if height > size:
        batch = resize(batch, [size, width], False)  # fewer rows for the slower pass along them
    batch = resize(batch, [size, size], False)
    return batch.permute(0, 2, 3, 1).numpy().reshape(size, size, *crop.shape[2:])


@augmentation(
    p=1.0,
    draws=8,
    on_device=True,
    brightness=Parameter(0.0, 0, 10, "Factor from [max(0, 1 - b), 1 + b]."),
    contrast=Parameter(0.0, 0, 10, "Factor, likewise."),
    saturation=Parameter(0.0, 0, 10, "Factor, likewise."),
    hue=Parameter(0.0, 0, 0.5, "Turn from [-h, h], as a fraction of the color circle."),
)
def color_jitter(
    view: View, brightness: float, contrast: float, saturation: float, hue: float
) -> list[Step]:
    """Change brightness, contrast, saturation and hue in random order."""
    strengths: dict[Callable[..., np.ndarray], float] = {
        adjust_brightness: brightness,
        adjust_contrast: contrast,
        adjust_saturation: saturation,
        adjust_hue: hue,
    }
    ranks = [view.draw() for _ in strengths]
    steps = []
    for rank, (adjust, strength) in zip(ranks, strengths.items(), strict=True):
        turn, factor = (-strength, strength), (max(0.0, 1 - strength), 1 + strength)
        step = Step(adjust, (view.between(turn if adjust is adjust_hue else factor),))
        if strength > 0:
            steps.append((rank, step))
    return [step for _, step in sorted(steps, key=lambda ranked: ranked[0])]


LUMA = (0.299, 0.587, 0.114)
TRUNCATION = -0.498  # PIL cuts decimals off; a hair above -0.5 keeps whole numbers whole


def adjust_brightness(picture: np.ndarray, factor: float) -> np.ndarray:
    """Scale all channels."""
    return _mix(picture, factor)


def adjust_contrast(picture: np.ndarray, factor: float) -> np.ndarray:
    """Scale the distance of all channels from the mean luma, which torchvision rounds."""
    first, second, third, _ = cv2.sumElems(picture)  # twice as fast as cv2.mean
    gray = picture.ndim == 2
    total = first if gray else LUMA[0] * first + LUMA[1] * second + LUMA[2] * third
    mean = int(total / (picture.shape[0] * picture.shape[1]) + 0.5)
    return _mix(picture, factor, shift=(1 - factor) * mean)


def adjust_saturation(picture: np.ndarray, factor: float) -> np.ndarray:
    """Scale the distance of each channel from the luma of its pixel."""
    return picture if picture.ndim == 2 else _mix(picture, factor, luma=1 - factor)


def _mix(picture: np.ndarray, own: float, luma: float = 0.0, shift: float = 0.0) -> np.ndarray:
    """Turn every channel x into own * x + luma * (luma of its pixel) + shift."""
    shift += TRUNCATION
    if picture.ndim == 2:
        return cv2.transform(picture, np.array([[own + luma, shift]]))
    red, green, blue = (luma * weight for weight in LUMA)
    matrix = [
        [own + red, green, blue, shift],
        [red, own + green, blue, shift],
        [red, green, own + blue, shift],
    ]
    return cv2.transform(picture, np.array(matrix))


def adjust_hue(picture: np.ndarray, turn: float) -> np.ndarray:
    """Turn the hue by a fraction of the circle, matching PIL's rounding on average.

    torchvision on PIL truncates the turn and every pixel's hue to 1 / 255 of the circle, and wraps
    around at 256: one step more for pixels that pass it.
    """
    return turn_hue(picture, hue_sectors(turn))


def hue_sectors(turn: float) -> float:
    """Return the sixths of the circle that `adjust_hue` turns by."""
    return (int(turn * 255) - 0.5 - turn) * 6 / 255


def turn_hue(picture: np.ndarray, sectors: float) -> np.ndarray:
    """Turn the hue by sixths of the circle with integer operations on the planes, without HSV.

    Let V and m be a pixel's largest and smallest channel, and C = V - m. Around the circle of six
    sectors a channel rises from m to V within one sector, stays there for two, falls within one,
    and stays at m for two. Turned forward by 0 <= s <= 1 sectors, red therefore becomes

        red - green + m + s * C          where blue > green, and
        red - green + m + (1 - s) * C    elsewhere,      both clamped to m ... V;

    green and blue follow by changing places. Backward is forward with green and blue exchanged,
    and two sectors are an exchange of channels. Every operation is one vectorized pass over bytes
    that saturates at 0 and 255: 1.5 times as fast as OpenCV's conversions to HSV and back, within
    0.5 / 255 of the exact result, and the same on every CPU.
    """
    if picture.ndim == 2:
        return picture
    height, width, _ = picture.shape
    thirds = round(sectors / 2)
    rest = sectors - 2 * thirds  # -1 ... 1
    order = [0, 1, 2] if rest >= 0 else [0, 2, 1]
    planes = np.empty((5, height, width), np.uint8)  # two again, so that all have two successors
    cv2.split(picture, [planes[index] for index in order])
    planes[3:] = planes[:2]
    channels, nexts, seconds = (planes[i : i + 3].reshape(3 * height, width) for i in range(3))
    high = np.maximum(planes[0], planes[1])
    np.maximum(high, planes[2], out=high)
    low = np.minimum(planes[0], planes[1])
    np.minimum(low, planes[2], out=low)
    moved = cv2.convertScaleAbs(high - low, None, abs(rest))  # s * C
    falling = high - moved  # m + (1 - s) * C
    rising = low + moved  # m + s * C
    turned = cv2.compare(seconds, nexts, cv2.CMP_GT).reshape(3, height, width)  # 0 or 255
    np.bitwise_and(turned, rising ^ falling, out=turned)
    np.bitwise_xor(turned, falling, out=turned)  # now rising or falling
    flat = turned.reshape(3 * height, width)
    difference = cv2.subtract(channels, nexts)
    cv2.add(flat, difference, dst=flat)
    cv2.subtract(nexts, channels, dst=difference)
    cv2.subtract(flat, difference, dst=flat)
    np.minimum(turned, high, out=turned)
    np.maximum(turned, low, out=turned)
    return cv2.merge([turned[order[(index - thirds) % 3]] for index in range(3)])


@augmentation(p=0.2, on_device=True)
def grayscale(view: View) -> list[Step]:
    """Replace the colors by their luma."""
    return [Step(to_grayscale)]


def to_grayscale(picture: np.ndarray) -> np.ndarray:
    """Return the luma as one plane."""
    return picture if picture.ndim == 2 else cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY)


@augmentation(
    p=0.5,
    draws=1,
    on_device=True,
    sigma=Parameter((0.1, 2.0), 0, 50, "Standard deviation in pixels of the picture it meets."),
)
def gaussian_blur(view: View, sigma: Range) -> list[Step]:
    """Blur with a Gaussian."""
    return [Step(blur, (view.between(sigma) / view.reduced_by,))]


def blur(picture: np.ndarray, sigma: float) -> np.ndarray:
    """Blur with a standard deviation that is right down to a tenth of a pixel.

    A sampled Gaussian has no effect at sigma 0.1 and a quarter of what it should have at 0.3. PIL's
    blur, which MoCo's recipe uses, is three passes of a box with fractional ends. They are one
    kernel here, with exactly the requested variance, and 15 times as fast as PIL's.
    """
    kernel = blur_kernel(round(sigma, 3))  # a few thousand kernels then serve a whole run
    return cv2.sepFilter2D(picture, -1, kernel, kernel, borderType=cv2.BORDER_REPLICATE)


INVISIBLE = 0.5 / 255  # a tap that cannot move a pixel by half a level


@lru_cache(maxsize=4096)
def blur_kernel(sigma: float) -> np.ndarray:
    """Return weights of sum 1 and variance sigma squared, float32."""
    variance = sigma**2 / 3
    radius = int((math.sqrt(12 * variance + 1) - 1) / 2)  # of the widest plain box not above it
    count = 2 * radius + 1
    squares = radius * (radius + 1) * count / 3
    end = (variance * count - squares) / (2 * ((radius + 1) ** 2 - variance))
    box = np.ones(count + 2)
    box[0] = box[-1] = end
    box /= count + 2 * end
    kernel = np.convolve(np.convolve(box, box), box)
    while len(kernel) > 3 and kernel[0] < INVISIBLE:  # a shorter kernel is faster
        radius = len(kernel) // 2
        moved = kernel[0] * radius**2 / (radius - 1) ** 2  # keeps sum and variance
        kernel[radius] -= 2 * (moved - kernel[0])
        kernel = kernel[1:-1]
        kernel[0] += moved
        kernel[-1] += moved
    # OpenCV is three times as fast when both halves are equal to the last bit.
    return ((kernel + kernel[::-1]) / 2).astype(np.float32)


@augmentation(p=0.5, on_device=True)
def horizontal_flip(view: View) -> list[Step]:
    """Mirror left and right."""
    return [Step(hflip)]


def hflip(picture: np.ndarray) -> np.ndarray:
    """Mirror left and right."""
    return cv2.flip(picture, 1)


@augmentation(
    p=0.2,
    on_device=True,
    threshold=Parameter(128, 0, 256, "Levels at or above it are inverted."),
)
def solarize(view: View, threshold: float) -> list[Step]:
    """Invert bright pixels."""
    return [Step(invert_above, (threshold,))]


def invert_above(picture: np.ndarray, threshold: float) -> np.ndarray:
    """Invert what is at or above the threshold."""
    levels = np.arange(256)
    return cv2.LUT(picture, np.where(levels < threshold, levels, 255 - levels).astype(np.uint8))
