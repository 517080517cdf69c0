"""The optimizer of a detector: Detectron2's SGD, or AdamW with layer-wise decay and its clipping.

SGD suits networks with BatchNorm. Transformers and ConvNeXt are trained with AdamW: earlier layers
learn slower by KSCL.LAYER_DECAY, and nothing that is a vector (biases, norms, LayerScale) decays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from detectron2.config import CfgNode
from detectron2.solver import build_optimizer as build_sgd
from detectron2.solver.build import _generate_optimizer_class_with_gradient_clipping as with_clipper
from detectron2.solver.build import maybe_add_gradient_clipping
from timm.models import group_parameters
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from detection.config import ADAMW, FULL_MODEL, of_timm_only
from detection.convert.weights import UNDER_FPN, UNDER_PLAIN_PYRAMID
from kscl.errors import KsclError

STATES = {ADAMW: 2}  # tensors that an optimizer keeps per weight, if not one


def build_optimizer(cfg: CfgNode, model: nn.Module) -> Optimizer:
    """Return the optimizer that the config names, with its gradient clipping."""
    clip = cfg.SOLVER.CLIP_GRADIENTS
    solver = cfg.clone()
    solver.defrost()
    solver.SOLVER.CLIP_GRADIENTS.ENABLED = clip.ENABLED and clip.CLIP_TYPE != FULL_MODEL
    prefix, network = _timm_network(model)
    if network is None and (keys := of_timm_only(cfg)):
        raise KsclError(
            f"{' and '.join(keys)}: these are for networks that run in timm's code, and this "
            "detector's is Detectron2's own ResNet. Leave them out, or convert with --route timm."
        )
    if cfg.KSCL.OPTIMIZER == ADAMW:
        groups = adamw_groups(cfg, model, prefix, network)
        optimizer = AdamW(groups, lr=cfg.SOLVER.BASE_LR, foreach=True)
        maybe_add_gradient_clipping(solver, optimizer)
    else:
        optimizer = build_sgd(solver, model)
    if clip.ENABLED and clip.CLIP_TYPE == FULL_MODEL:

        def clip_all(parameters: Iterable[Tensor]) -> None:
            nn.utils.clip_grad_norm_(list(parameters), clip.CLIP_VALUE, clip.NORM_TYPE)

        optimizer.__class__ = with_clipper(type(optimizer), global_clipper=clip_all)
    return optimizer


def adamw_groups(cfg: CfgNode, model: nn.Module, prefix: str, network: Any) -> list[dict[str, Any]]:
    """Return the trained weights by learning rate and weight decay.

    The learning rate of a layer of the network is LAYER_DECAY times that of the layer after it;
    the last one comes before the detector's new parts, which have BASE_LR.
    """
    layers: dict[str, int] = {}
    if cfg.KSCL.LAYER_DECAY < 1:
        if not hasattr(network, "group_matcher"):
            raise KsclError(
                f"KSCL.LAYER_DECAY must be 1 for {cfg.KSCL.TIMM.NAME}, whose layers timm does not "
                f"number, got {cfg.KSCL.LAYER_DECAY:g}."
            )
        layers = group_parameters(network, network.group_matcher(coarse=False), reverse=True)
    without_decay = set(getattr(network, "no_weight_decay", set)())
    top = max(layers.values(), default=0) + 1
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for name, weights in model.named_parameters():
        if weights.requires_grad:
            inside = name.removeprefix(prefix) if prefix else ""
            rate = cfg.SOLVER.BASE_LR * cfg.KSCL.LAYER_DECAY ** (top - layers.get(inside, top))
            free = weights.ndim <= 1 or inside in without_decay
            decay = 0.0 if free else cfg.SOLVER.WEIGHT_DECAY
            groups.setdefault((rate, decay), []).append(weights)
    return [{"params": found, "lr": r, "weight_decay": d} for (r, d), found in groups.items()]


def _timm_network(model: nn.Module) -> tuple[str, Any]:
    """Return the prefix of a detector's timm network and the network; ("", None) without one."""
    modules = dict(model.named_modules())
    for prefix in (UNDER_FPN, UNDER_PLAIN_PYRAMID):
        if (name := prefix.removesuffix(".")) in modules:
            return prefix, modules[name]
    return "", None
