"""What a detector on a CPU computes: the same as Detectron2's own, up to rounding."""

from __future__ import annotations

import pytest
import torch
from detectron2.layers import ROIAlign
from detectron2.modeling import build_model
from hypothesis import given, settings
from hypothesis import strategies as st

from detection.config import load_detection_config
from detection.train.model import LARGEST_MAP, SeparableROIAlign, build_detector
from tests.helpers.detection_runs import SMALL

pytestmark = pytest.mark.portable


def pooled(kind: type[ROIAlign], maps: torch.Tensor, boxes: torch.Tensor, aligned: bool):
    maps = maps.clone().requires_grad_()
    found = kind((3, 5), 0.25, 2, aligned)(maps, boxes)
    weights = torch.linspace(-1, 1, found.numel()).view(found.shape)
    (found * weights).sum().backward()
    return found.detach(), maps.grad


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_roi_align_by_rows_and_columns_is_roi_align(seed, aligned):
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(3, 4, 9, 12, generator=generator)
    corners = torch.rand(7, 2, generator=generator) * 90 - 25  # some lie outside
    sizes = torch.rand(7, 2, generator=generator) * 50 - 5 * (not aligned)
    image = torch.tensor([0, 0, 0, 2, 2, 2, 2.0])[:, None]  # and none in the second one
    boxes = torch.cat([image, corners, corners + sizes], 1)
    ours, theirs = (pooled(kind, maps, boxes, aligned) for kind in (SeparableROIAlign, ROIAlign))
    for own, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, reference, rtol=1e-4, atol=1e-4)


def test_a_large_map_and_no_boxes_work_too():
    side = int(LARGEST_MAP**0.5) + 1
    boxes = torch.tensor([[0, 1.0, 2.0, 30.0, 40.0]])
    for maps, some in (
        (torch.randn(1, 2, side, side), boxes),
        (torch.randn(2, 4, 6, 6), boxes[:0]),
    ):
        ours, theirs = (pooled(kind, maps, some, True) for kind in (SeparableROIAlign, ROIAlign))
        assert torch.equal(ours[0], theirs[0])


@pytest.mark.parametrize("config", ["shapes_tiny_c4", "shapes_tiny_fpn", "shapes_tiny_retinanet"])
def test_a_detector_on_a_cpu_scores_as_detectron2s_own(config):
    cfg = load_detection_config(f"detection/{config}.yaml", [*SMALL, "MODEL.DEVICE", "cpu"])
    image = torch.randint(0, 256, (3, 96, 128), generator=torch.Generator().manual_seed(0))
    scores = []
    for build in (build_model, build_detector):
        torch.manual_seed(0)
        model = build(cfg).eval()
        with torch.no_grad():
            (found,) = model([{"image": image.to(torch.uint8), "height": 96, "width": 128}])
        scores.append(found["instances"].scores.sort().values)
    torch.testing.assert_close(*scores, rtol=1e-3, atol=1e-4)
