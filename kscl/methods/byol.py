"""BYOL (Grill et al., 2020, arXiv:2006.07733): predict the other view's target, without negatives.

online   encoder f and predictor q, trained
target   ξ ← τ ξ + (1 − τ) θ, a moving average of f; τ rises from METHOD.MOMENTUM to 1
loss     ‖q(f(v)) − f_ξ(v')‖² of unit vectors, equation 2, added up over both directions
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from kscl.config import key
from kscl.methods.base import Method, method
from kscl.methods.kernels import full_precision
from kscl.methods.keys import FLOAT_BYTES, Extras, Passes, view_pixels
from kscl.views.batch import Batch

COLLAPSED = 0.01  # spread of the projections: their mean is then nearly a unit vector
TRAINED_VALUES = 3  # a weight, its gradient and its momentum


@method("byol")
class BYOL(Method):
    """Views are (B, 2, 3, H, W); PROJECTOR is the projector of both networks."""

    MOMENTUM = key(
        0.996,
        """Fraction of the old weights that the target network keeps in the first step; it rises to
        1 along a cosine.""",
        at_least=0,
        at_most=1,
    )
    PREDICTOR_DIM = key(4096, "Width of the predictor's hidden layer.", at_least=1)
    unit_length = False  # the predictor takes projections as they are
    figures = ("spread",)

    def __init__(self, cfg: CfgNode, num_images: int | None = None) -> None:
        super().__init__(cfg, num_images)
        dim = cfg.PROJECTOR.DIM
        self.predictor = nn.Sequential(
            nn.Linear(dim, self.PREDICTOR_DIM, bias=False),
            nn.BatchNorm1d(self.PREDICTOR_DIM),
            nn.ReLU(inplace=True),
            nn.Linear(self.PREDICTOR_DIM, dim, bias=False),
        )
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)

    @classmethod
    def passes(cls, cfg: CfgNode, size: float = 1.0) -> Passes:
        """Return the passes: both networks encode both views."""
        pixels = view_pixels(cfg, cls.views(cfg), size)
        return Passes(trained=pixels, untrained=pixels)

    @classmethod
    def extras(cls, cfg: CfgNode) -> Extras:
        """Return the costs of the target network and of the predictor."""
        weights = 2 * cfg.PROJECTOR.DIM * cfg.METHOD.PREDICTOR_DIM
        products = cls.views(cfg).count * 3 * weights  # forward and backward, per image
        return Extras(copies=1, flops=2 * products, stored=TRAINED_VALUES * weights * FLOAT_BYTES)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the loss, and how far the projections are spread over the sphere."""
        projections = self.embed(batch.views)  # (B, 2, D)
        with torch.no_grad():
            targets = self.embed(batch.views, self.target)  # (B, 2, D)
        predictions = torch.stack([self.predictor(one) for one in projections.unbind(1)], 1)
        loss = byol_loss(predictions, targets)
        unit = F.normalize(projections.detach()[:, 0], dim=1)  # (B, D)
        return {"loss": loss, "spread": 1 - unit.mean(0).square().sum()}  # 0 when collapsed

    @torch.no_grad()
    def after_step(self, progress: float = 0.0) -> None:
        """Let the target network follow the online one."""
        super().after_step(progress)
        rate = (1 - self.MOMENTUM) * (math.cos(math.pi * progress) + 1) / 2  # 1 − τ
        ours, theirs = self.target.parameters(), self.encoder.parameters()
        torch._foreach_lerp_(list[Tensor](ours), list[Tensor](theirs), rate)

    def report_warnings(self, figures: Mapping[str, float]) -> Iterator[str]:
        """Yield a collapse."""
        if figures["spread"] < COLLAPSED:
            yield (
                "The projections have collapsed: all images look alike to the encoder (spread "
                f"{figures['spread']:.4f}). Lower the learning rate (SOLVER.BASE_LR), warm up "
                "longer (SOLVER.WARMUP_EPOCHS), or let the target follow more slowly "
                "(METHOD.MOMENTUM)."
            )


def byol_loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of predictions (B, 2, D) of each view's target (B, 2, D) by the other view.

    The squared distance of unit vectors is 2 − 2 cos; it is added up over both directions.
    """
    with full_precision(predictions, targets) as (predictions, targets):
        cosines = F.cosine_similarity(predictions, targets.flip(1), dim=2)  # (B, 2)
        return (2 - 2 * cosines).sum(1).mean()
