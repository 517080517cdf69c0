"""The kinds of BatchNorm of Detectron2's configs, in a timm network.

timm fuses a norm with its activation in one layer (RegNet, EfficientNet); Detectron2's own
conversions replace such a layer by a norm alone, and the activation is gone.
"""

from __future__ import annotations

from detectron2.layers import NaiveSyncBatchNorm
from timm.layers import BatchNormAct2d, convert_sync_batchnorm, freeze_batch_norm_2d
from torch import Tensor, nn

from detection.errors import DetectionError

SYNCHRONIZED = ("SyncBN", "nnSyncBN")
NAIVE = {"naiveSyncBN": "", "naiveSyncBN_N": "N"}  # Detectron2's name: its mode


class NaiveSyncBatchNormAct2d(NaiveSyncBatchNorm):
    """Detectron2's synchronized BatchNorm with the dropout and activation of timm's layer."""

    def __init__(self, norm: BatchNormAct2d, mode: str) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, stats_mode=mode)
        self.drop, self.act = norm.drop, norm.act

    def forward(self, images: Tensor) -> Tensor:
        """Return the normalized and activated values."""
        return self.act(self.drop(super().forward(images)))


def set_batch_norm(network: nn.Module, kind: str) -> nn.Module:
    """Return the network with its BatchNorms of this kind; other norms stay what they are."""
    if not any(isinstance(module, nn.BatchNorm2d) for module in network.modules()):
        return network
    if kind == "BN":
        return network
    if kind == "FrozenBN":
        return freeze_batch_norm_2d(network)
    if kind in SYNCHRONIZED:
        return convert_sync_batchnorm(network)
    if kind not in NAIVE:
        raise DetectionError(
            f"MODEL.RESNETS.NORM is '{kind}', and the network has BatchNorm, whose weights fit no "
            f"other norm. Use BN, FrozenBN, {', '.join((*SYNCHRONIZED, *NAIVE))}."
        )
    return _with_naive_norms(network, NAIVE[kind])


def _with_naive_norms(module: nn.Module, mode: str) -> nn.Module:
    if isinstance(module, nn.BatchNorm2d):
        return _naive_norm(module, mode)
    for name, child in module.named_children():
        setattr(module, name, _with_naive_norms(child, mode))
    return module


def _naive_norm(norm: nn.BatchNorm2d, mode: str) -> NaiveSyncBatchNorm:
    if not norm.affine or not norm.track_running_stats:
        raise DetectionError(
            "A BatchNorm of the network has no scale or no running statistics, and Detectron2's "
            "naiveSyncBN needs both. Set MODEL.RESNETS.NORM BN."
        )
    if isinstance(norm, BatchNormAct2d):
        new: NaiveSyncBatchNorm = NaiveSyncBatchNormAct2d(norm, mode)
    else:
        new = NaiveSyncBatchNorm(norm.num_features, norm.eps, norm.momentum, stats_mode=mode)
    new.load_state_dict(norm.state_dict())
    return new
