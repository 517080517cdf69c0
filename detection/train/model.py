"""Build a detector; on a CPU, with channels last and RoIAlign as two matrix products."""

from __future__ import annotations

import torch
from detectron2.config import CfgNode
from detectron2.layers import ROIAlign
from detectron2.modeling import build_model
from torch import Tensor, nn

LARGEST_MAP = 1200  # pixels; on larger maps torchvision's RoIAlign is faster


def build_detector(cfg: CfgNode) -> nn.Module:
    """Return Detectron2's model of a config, made faster if it runs on a CPU."""
    model = build_model(cfg)
    if cfg.MODEL.DEVICE != "cpu":
        return model
    model = model.to(memory_format=torch.channels_last)
    model.backbone.register_forward_pre_hook(
        lambda _, images: (images[0].contiguous(memory_format=torch.channels_last),)
    )
    for module in model.modules():
        if type(module) is ROIAlign and module.sampling_ratio > 0:
            module.__class__ = SeparableROIAlign
    return model


class SeparableROIAlign(ROIAlign):
    """RoIAlign on a small map: bilinear weights are a product of weights per row and per column.

    The gradient is then a matrix product as well, where torchvision's CPU kernel adds one by one.
    """

    def forward(self, input: Tensor, rois: Tensor) -> Tensor:
        """Pool boxes (R, 5), sorted by image as the pooler has them, from maps (N, C, H, W)."""
        height, width = input.shape[-2:]
        if height * width > LARGEST_MAP:
            return super().forward(input, rois)
        left, top, right, bottom = (rois[:, 1:] * self.spatial_scale - 0.5 * self.aligned).unbind(1)
        wide, high = right - left, bottom - top
        if not self.aligned:
            wide, high = wide.clamp(min=1), high.clamp(min=1)
        rows, columns = self.output_size
        by_row = bin_weights(top, high, height, rows, self.sampling_ratio)  # (R, P, H)
        by_column = bin_weights(left, wide, width, columns, self.sampling_ratio)  # (R, Q, W)
        counts = torch.bincount(rois[:, 0].long(), minlength=len(input)).tolist()
        pooled = []
        maps = input.permute(0, 2, 3, 1)  # (N, H, W, C)
        for one, y, x in zip(maps, by_row.split(counts), by_column.split(counts), strict=True):
            lines = y.flatten(0, 1) @ one.flatten(1)  # (R · P, W · C)
            pooled.append(x[:, None] @ lines.view(len(y), rows, *one.shape[1:]))  # (R, P, Q, C)
        return torch.cat(pooled).permute(0, 3, 1, 2)


def bin_weights(start: Tensor, size: Tensor, length: int, bins: int, samples: int) -> Tensor:
    """Return how much each of `length` pixels counts in each bin of a box side, (R, bins, length).

    A bin is the mean of `samples` linear interpolations; one farther than a pixel outside is 0.
    """
    steps = torch.arange(bins * samples, device=start.device) + 0.5
    points = start[:, None] + steps * (size / (bins * samples))[:, None]  # (R, bins · samples)
    is_inside = (points >= -1) & (points <= length)
    distance = points.clamp(0, length - 1)[..., None] - torch.arange(length, device=start.device)
    weights = (1 - distance.abs()).clamp(min=0) * is_inside[..., None]
    return weights.unflatten(1, (bins, samples)).mean(2)
