"""BatchNorm: over all processes, over groups of a batch; and its running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kscl.errors import KsclError
from kscl.runtime.distributed import sum_with_gradient, world_size


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over the batches of all processes, which may differ in size and may be empty.

    Not a subclass of nn.SyncBatchNorm, which works on GPUs only: DistributedDataParallel refuses
    one on a CPU.
    """

    process_group = None
    _check_input_dim = nn.SyncBatchNorm._check_input_dim
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels

    def forward(self, input: Tensor) -> Tensor:
        """Normalize (B, C, ...); then drop and activate, as timm's BatchNormAct2d does."""
        if not self.training or world_size() == 1:
            output = super().forward(input)
        elif input.device.type != "cpu":
            # torch sends the statistics of an empty batch in its type, others' in float32.
            given = input if len(input) else input.float()
            output = nn.SyncBatchNorm.forward(self, given)  # type: ignore[arg-type]
        else:
            output = self._on_cpu(input)
        for layer in (self._modules.get("drop"), self._modules.get("act")):
            output = output if layer is None else layer(output)
        return output

    def _on_cpu(self, input: Tensor) -> Tensor:
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        axes, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        count = sum_with_gradient(x.new_tensor([x.numel() / x.shape[1]]))
        if count < 2:
            raise ValueError("BatchNorm needs more than one value per channel over all processes.")
        mean = sum_with_gradient(x.sum(axes)) / count  # (C,)
        centered = x - mean.view(shape)
        variance = sum_with_gradient(centered.square().sum(axes)) / count
        if self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            rate = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            with torch.no_grad():
                self.running_mean.lerp_(mean, rate)
                self.running_var.lerp_(variance * count / (count - 1).clamp_min(1), rate)
        scale = (variance + self.eps).rsqrt()
        if self.weight is not None:
            scale = scale * self.weight
        output = centered * scale.view(shape)
        if self.bias is not None:
            output = output + self.bias.view(shape)
        return output.to(input.dtype)


def synchronize_batch_norm(module: nn.Module) -> None:
    """Let every BatchNorm layer below a module normalize the batches of all processes together."""
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm) and not isinstance(child, SyncBatchNorm):
            given = child.eps, child.momentum, child.affine, child.track_running_stats
            layer = SyncBatchNorm(child.num_features, *given)
            layer._parameters, layer._buffers = child._parameters, child._buffers
            layer._modules = child._modules
            setattr(module, name, layer.train(child.training))
        else:
            synchronize_batch_norm(child)


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return every BatchNorm layer of a network."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm)]


def group_batch_norms(module: nn.Module, groups: int) -> None:
    """Let every BatchNorm layer normalize `groups` equal parts of a batch on their own.

    In training mode one process then computes what that many ranks do, each on its part, when they
    average their running statistics. State dict and eval mode stay the same.
    """
    if groups == 1:
        return
    norms = batch_norms(module)
    grouped = {kind: _in_groups(kind, groups) for kind in {type(norm) for norm in norms}}
    for norm in norms:
        norm.__class__ = grouped[type(norm)]


def _in_groups(kind: type[_BatchNorm], groups: int) -> type[_BatchNorm]:
    """Return the subclass of a BatchNorm layer that normalizes in groups."""
    if kind.forward not in (_BatchNorm.forward, BatchNormAct2d.forward):
        raise KsclError(
            f"KEY_ENCODER.BATCH_NORM_GROUPS is {groups}, but layers of type {kind.__name__} cannot "
            "be applied in groups: set it to 1."
        )

    def forward(self: _BatchNorm, batch: Tensor) -> Tensor:
        if not self.training:
            return kind.forward(self, batch)
        batch = _normalize_parts(self, batch, groups)
        return self.act(self.drop(batch)) if isinstance(self, BatchNormAct2d) else batch

    return type(f"Grouped{kind.__name__}", (kind,), {"forward": forward})


def _normalize_parts(norm: _BatchNorm, batch: Tensor, groups: int) -> Tensor:
    """Normalize equal parts of a batch (B, C, ...) on their own, and update the statistics.

    A loop, because parts are dense in both memory layouts. One BatchNorm over G · C channels would
    have to copy channels-last images twice, which takes a CPU longer.
    """
    mean, var, count = norm.running_mean, norm.running_var, norm.num_batches_tracked
    assert mean is not None
    assert count is not None
    count.add_(1)
    rate = 1 / int(count) if norm.momentum is None else norm.momentum
    # At the end, old statistics weigh 1 − rate and those of each part rate / groups.
    rates = [rate / (groups - rate * left) for left in reversed(range(groups))]
    weight, bias, eps, parts = norm.weight, norm.bias, norm.eps, batch.chunk(groups)
    if torch.is_grad_enabled():
        cudnn = torch.backends.cudnn.enabled
        normalized = [
            torch.batch_norm(part, weight, bias, mean, var, True, rate, eps, cudnn)
            for part, rate in zip(parts, rates, strict=True)
        ]
        return torch.cat(normalized)
    result = torch.empty_like(batch)  # spares the copy that joins the parts
    unused = torch.empty_like(mean), torch.empty_like(mean)  # mean and deviation of a part
    for part, rate, place in zip(parts, rates, result.chunk(groups), strict=True):
        out = place, *unused
        torch.native_batch_norm(part, weight, bias, mean, var, True, rate, eps, out=out)
    return result


@torch.no_grad()
def calibrate_batch_norm(module: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set BatchNorm's statistics to their mean over batches of images; change nothing else.

    At mean 0 and variance 1, where statistics start, a deep network in eval mode tells nothing
    apart. `fvcore.nn.precise_bn.update_bn_stats` is not used: it takes the variance of all batches
    pooled, without Bessel's correction, and not the mean of their variances as BatchNorm's own
    running average does. Its means agree to 1e-6, but its variances differ: on four batches of 16
    random images by up to 2%, and by up to 18% where the batches differ in contrast.
    """
    norms = batch_norms(module)
    before = [(norm.momentum, norm.training) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all forward passes
        norm.train()  # the norms alone: dropout and the like stay as they are
    try:
        for batch in batches:
            module(batch)
    finally:
        for norm, (momentum, training) in zip(norms, before, strict=True):
            norm.momentum = momentum
            norm.train(training)


@contextmanager
def fixed_statistics(norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """Leave running statistics as they are in training mode too; batches are still normalized."""
    before = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


@contextmanager
def in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Switch to training or eval mode, and back at the end."""
    before = module.training
    module.train(training)
    try:
        yield
    finally:
        module.train(before)


def statistics(module: nn.Module) -> list[Tensor]:
    """Return all floating point buffers: running means and variances."""
    return [buffer for buffer in module.buffers() if buffer.is_floating_point()]
