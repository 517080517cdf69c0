"""VICReg (Bardes, Ponce and LeCun, 2022, arXiv:2105.04906): variance, invariance, covariance.

    invariance   the two views of an image have near embeddings
    variance     every dimension of the embeddings keeps a deviation of at least 1: no collapse
    covariance   no two dimensions say the same

The expander is PROJECTOR. Variance and covariance are those of the batch of all processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from fvcore.common.config import CfgNode
from torch import Tensor

from kscl.config import Broken, key
from kscl.methods.base import Method, method
from kscl.methods.kernels import full_precision
from kscl.methods.keys import Extras
from kscl.runtime.distributed import gather_with_gradient
from kscl.views.batch import Batch

EPSILON = 1e-4  # added to variances before the root
COLLAPSED = 0.01 + EPSILON**0.5  # deviation of the embeddings; a constant one has EPSILON's root


@method("vicreg")
class VICReg(Method):
    """Views are (B, 2, 3, H, W)."""

    INVARIANCE = key(25.0, "Weight of the squared distance between the views.", at_least=0)
    VARIANCE = key(25.0, "Weight of the variance term.", at_least=0)
    COVARIANCE = key(1.0, "Weight of the covariance term.", at_least=0)
    unit_length = False
    figures = ("std",)

    @classmethod
    def check(cls, cfg: CfgNode) -> Iterator[Broken]:
        """Yield batches that have no variance, or several."""
        if cfg.SOLVER.GRAD_ACCUM_STEPS > 1:
            yield (
                ("SOLVER.GRAD_ACCUM_STEPS",),
                "each part would have its own variance and covariance, which is another loss: set "
                "GRAD_ACCUM_STEPS 1 and a smaller BATCH_SIZE",
            )
        if cfg.SOLVER.BATCH_SIZE < 2:
            yield ("SOLVER.BATCH_SIZE",), "one image has no variance: make the batch larger"

    @classmethod
    def extras(cls, cfg: CfgNode) -> Extras:
        """Return the cost of the two covariance matrices, whose gradient is two products more."""
        return Extras(flops=2 * 3 * 2 * cfg.PROJECTOR.DIM**2)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted sum of the three terms, and the mean deviation of a dimension."""
        near, far = self.embed(batch.views).unbind(1)  # (B, D) each
        invariance = F.mse_loss(near, far)
        every = [gather_with_gradient(one) for one in (near, far)]  # (world · B, D) each
        stds, covariances = zip(*(spread(one) for one in every), strict=True)
        variance = sum(F.relu(1 - std).mean() / 2 for std in stds)
        covariance = sum(off_diagonal(one).square().sum() / len(one) for one in covariances)
        loss = (
            self.INVARIANCE * invariance + self.VARIANCE * variance + self.COVARIANCE * covariance
        )
        return {"loss": loss, "std": torch.stack(stds).detach().mean()}

    def report_warnings(self, figures: Mapping[str, float]) -> Iterator[str]:
        """Yield a collapse, which the variance term is there to prevent."""
        if figures["std"] < COLLAPSED:
            yield (
                "The embeddings have collapsed: all images look alike to the encoder (deviation "
                f"{figures['std']:.4f}). Raise METHOD.VARIANCE, or lower METHOD.INVARIANCE or the "
                "learning rate (SOLVER.BASE_LR)."
            )


def spread(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return deviations (D,) and covariance (D, D) of embeddings (N, D)."""
    with full_precision(embeddings) as (embeddings,):
        centered = embeddings - embeddings.mean(0)
        covariance = centered.T @ centered / (len(centered) - 1)
        return (covariance.diagonal() + EPSILON).sqrt(), covariance


def off_diagonal(matrix: Tensor) -> Tensor:
    """Return a matrix (D, D) with zeros on its diagonal."""
    return matrix - matrix.diag().diag()
