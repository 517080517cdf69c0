"""Augmentations on the training device: workers crop and resize, the device does the rest.

A worker draws the steps of every view as usual, applies those up to the last augmentation without
a device form, and sends the others as `Pending`: which views, with which arguments. The device
applies them to all views at once. Pixels differ from the CPU's only by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kscl.views import augment
from kscl.views.augment import LUMA, TRUNCATION, LateStep, Op, blur_kernel, hue_sectors

# uint8 views (n, 3, H, W) and float32 arguments (n, A) → uint8 views (n, 3, H, W)
Form = Callable[[Tensor, Tensor], Tensor]
DEVICE_FORMS: dict[Callable[..., object], tuple[Form, Callable[..., Sequence[float]]]] = {}


class Pending(NamedTuple):
    """A step that some views of a batch still need."""

    apply: Callable[..., object]  # the step's function on one picture, which has a device form
    views: Tensor  # (n,) int64, numbers of views in the batch's order
    arguments: Tensor  # (n, A) float32

    def to(self, device: torch.device) -> Pending:
        """Return it on the device; pinned memory is copied without a host sync."""
        views, arguments = (one.to(device, non_blocking=True) for one in self[1:])
        return Pending(self.apply, views, arguments)


def device_form(
    apply: Callable[..., object],
    prepare: Callable[..., Sequence[float]] = lambda *arguments: arguments,
) -> Callable[[Form], Form]:
    """Register the batched device version of `apply`, which works on one picture.

    `prepare` turns the arguments of one view into a fixed number of floats, in the worker.
    """

    def register(form: Form) -> Form:
        DEVICE_FORMS[apply] = form, prepare
        return form

    return register


def first_on_device(ops: Sequence[Op]) -> int:
    """Return the index of the first op after which all have a device form."""
    return max((i + 1 for i, op in enumerate(ops) if not op.augmentation.on_device), default=0)


def gather(late: Iterable[LateStep]) -> list[Pending]:
    """Group the steps of a batch by their place in the recipe and their function."""
    groups: dict[tuple[tuple[int, int], Callable[..., object]], list[tuple[int, list[float]]]] = {}
    for view, place, step in late:
        values = list(DEVICE_FORMS[step.apply][1](*step.arguments))
        groups.setdefault((place, step.apply), []).append((view, values))
    pending = []
    for (_, apply), rows in sorted(groups.items(), key=lambda group: group[0][0]):
        longest = max(len(values) for _, values in rows)
        arguments = [values + [0.0] * (longest - len(values)) for _, values in rows]
        numbers = torch.tensor([number for number, _ in rows])
        pending.append(Pending(apply, numbers, torch.tensor(arguments)))
    return pending


def apply_pending(views: Tensor, pending: Iterable[Pending]) -> Tensor:
    """Apply the steps to uint8 views (…, 3, H, W) on their device, in place; return the views."""
    for step in pending:
        form, flat = DEVICE_FORMS[step.apply][0], views.view(-1, *views.shape[-3:])
        flat.index_copy_(0, step.views, form(flat.index_select(0, step.views), step.arguments))
    return views


def _rounded(values: Tensor) -> Tensor:
    return values.round_().clamp_(0, 255).to(torch.uint8)


def _luma(views: Tensor) -> Tensor:
    """Return the luma (n, 1, H, W) of float views."""
    red, green, blue = views.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def _column(arguments: Tensor, index: int = 0) -> Tensor:
    return arguments[:, index, None, None, None]


@device_form(augment.adjust_brightness)
def brightness(views: Tensor, arguments: Tensor) -> Tensor:
    """Scale all channels."""
    return _rounded(views.float() * _column(arguments) + TRUNCATION)


@device_form(augment.adjust_contrast)
def contrast(views: Tensor, arguments: Tensor) -> Tensor:
    """Scale the distance of all channels from the mean luma, rounded."""
    pixels, factor = views.float(), _column(arguments)
    mean = (_luma(pixels).mean((1, 2, 3), keepdim=True) + 0.5).floor()
    return _rounded(pixels * factor + ((1 - factor) * mean + TRUNCATION))


@device_form(augment.adjust_saturation)
def saturation(views: Tensor, arguments: Tensor) -> Tensor:
    """Scale the distance of each channel from the luma of its pixel."""
    pixels, factor = views.float(), _column(arguments)
    return _rounded(pixels * factor + ((1 - factor) * _luma(pixels) + TRUNCATION))


def _turn(turn: float) -> tuple[float, ...]:
    """Return |s| of `augment.turn_hue`, the channels to begin with, and those to end with."""
    sectors = hue_sectors(turn)
    thirds = round(sectors / 2)
    rest = sectors - 2 * thirds
    order = (0, 1, 2) if rest >= 0 else (0, 2, 1)
    return (abs(rest), *order, *(order[(index - thirds) % 3] for index in range(3)))


@device_form(augment.adjust_hue, _turn)
def hue(views: Tensor, arguments: Tensor) -> Tensor:
    """Turn the hue; `augment.turn_hue` has the formula."""

    def chosen(pixels: Tensor, channels: Tensor) -> Tensor:
        return pixels.gather(1, channels.long()[:, :, None, None].expand_as(pixels))

    planes = chosen(views, arguments[:, 1:4]).to(torch.int16)
    nexts, seconds = planes.roll(-1, 1), planes.roll(-2, 1)
    high, low = planes.amax(1, keepdim=True), planes.amin(1, keepdim=True)
    moved = ((high - low) * _column(arguments)).round_().to(torch.int16)
    turned = torch.where(seconds > nexts, low + moved, high - moved) + planes - nexts
    return chosen(turned.clamp_(low, high).to(torch.uint8), arguments[:, 4:])


@device_form(augment.to_grayscale)
def grayscale(views: Tensor, arguments: Tensor) -> Tensor:
    """Replace the colors by their luma."""
    return _rounded(_luma(views.float())).expand_as(views)


def _half_kernel(sigma: float) -> list[float]:
    """Return the kernel from its center on."""
    kernel: list[float] = blur_kernel(round(sigma, 3)).tolist()
    return kernel[len(kernel) // 2 :]


@device_form(augment.blur, _half_kernel)
def blur(views: Tensor, arguments: Tensor) -> Tensor:
    """Blur along rows and columns, each view with its own kernel."""
    kernels = torch.cat([arguments.flip(1)[:, :-1], arguments], 1)  # (n, 2R + 1)
    kernels = kernels.repeat_interleave(3, 0)[:, None, None]  # (3n, 1, 1, 2R + 1)
    reach = arguments.shape[1] - 1
    pixels = F.pad(views.float(), [reach] * 4, mode="replicate").flatten(0, 1)[None]
    for kernel in (kernels, kernels.transpose(2, 3)):
        pixels = F.conv2d(pixels, kernel, groups=len(kernels))
    return _rounded(pixels.view(views.shape))


@device_form(augment.hflip)
def horizontal_flip(views: Tensor, arguments: Tensor) -> Tensor:
    """Mirror left and right."""
    return views.flip(-1)


@device_form(augment.invert_above, lambda threshold: [math.ceil(threshold)])
def solarize(views: Tensor, arguments: Tensor) -> Tensor:
    """Invert what is at or above the threshold."""
    return torch.where(views < _column(arguments), views, 255 - views)
